"""What must be noticed about the configuration of prefill and decode engines."""

from __future__ import annotations

from doctor_cases import FAIL, PASS, UNKNOWN, WARN, Case, Scene, add_options, colocated, pair, set_config
from doctor_hosts import SITE

METRICS = "curl -sS --max-time 3 http://127.0.0.1:8100/metrics"
ENVIRON = ("/proc/4242/environ",)
CMDLINE = ("/proc/4242/cmdline",)


def decode_has(*words: str):
    return lambda scene: add_options(scene.peer, *words)


def install(scene: Scene, *names: str) -> None:
    scene.host.listings[SITE] = [*names, *(n for n in scene.host.listings[SITE] if not n.startswith(("vllm", "nixl-")))]


def be_known_bad(scene: Scene) -> None:
    install(scene, "vllm-0.11.0.dist-info", "nixl-0.6.1.dist-info")


def unequal_and_nhd(scene: Scene) -> None:
    scene.host.env(VLLM_KV_CACHE_LAYOUT="NHD")
    scene.peer.env(VLLM_KV_CACHE_LAYOUT="NHD")
    add_options(scene.peer, "-tp", "4")


def use_blocks(prefill: str, decode: str):
    def edit(scene: Scene) -> None:
        add_options(scene.host, "--block-size", prefill)
        add_options(scene.peer, "--block-size", decode)

    return edit


def share_port(scene: Scene) -> None:
    scene.host.file("/proc/4243/environ", "VLLM_NIXL_SIDE_CHANNEL_HOST=10.0.1.17")


def share_port_in_two_pods(scene: Scene) -> None:
    share_port(scene)
    scene.host.link("/proc/4242/ns/net", "net:[4026532001]").link("/proc/4243/ns/net", "net:[4026532002]")


def hide_environment(scene: Scene) -> None:
    """Another user's engine: its command line can be read, its environment cannot."""
    del scene.host.files["/proc/4243/environ"]
    scene.host.not_captured.append({"path": "/proc/4243/environ", "why": "denied"})


def both_have(option: str, prefill: str, decode: str):
    return lambda scene: (add_options(scene.host, option, prefill), add_options(scene.peer, option, decode))


def overlap_ranks(scene: Scene) -> None:
    scene.host.file("/proc/4243/environ", "VLLM_NIXL_SIDE_CHANNEL_HOST=10.0.1.17\0VLLM_NIXL_SIDE_CHANNEL_PORT=5603")
    add_options(scene.host, "--data-parallel-size", "4")


def count(requests: int, transfers: int, failed: int, generated: int = 5000):
    return lambda scene: scene.host.command(
        METRICS,
        f'# TYPE vllm:request_success counter\nvllm:request_success_total{{engine="0"}} {requests}.0\n'
        f'vllm:generation_tokens_total{{engine="0"}} {generated}.0\n'
        f'vllm:nixl_xfer_time_seconds_count{{engine="0"}} {transfers}.0\n'
        f'vllm:nixl_num_failed_transfers_total{{engine="0"}} {failed}.0\n',
    )


def misplace_policy(scene: Scene) -> None:
    set_config(scene.host, kv_load_failure_policy="fail")


CASES = (
    Case("VL-01", WARN, "'localhost'", lambda s: s.host.file(ENVIRON[0], "VLLM_NIXL_SIDE_CHANNEL_PORT=5600")),
    Case("VL-01", FAIL, "another machine", lambda s: s.peer.env(VLLM_NIXL_SIDE_CHANNEL_HOST="0.0.0.0"), pair),
    Case("VL-01", PASS, "loopback", lambda s: s.host.env(VLLM_NIXL_SIDE_CHANNEL_HOST="127.0.0.1"), colocated),
    Case("VL-02", FAIL, "share side-channel port 5600", share_port, colocated),
    Case("VL-02", FAIL, "share side-channel port 5603", overlap_ranks, colocated),
    Case("VL-02", PASS, "no side-channel port is shared", share_port_in_two_pods, colocated),
    Case("VL-02", UNKNOWN, "denied", hide_environment, colocated),
    Case("VL-02", FAIL, "no valid", lambda s: s.host.env(VLLM_NIXL_SIDE_CHANNEL_PORT="abc")),
    Case("VL-03", FAIL, "LIBFABRIC", lambda s: set_config(s.peer, backends=None)),
    Case("VL-03", WARN, "one in common", lambda s: set_config(s.peer, backends=["LIBFABRIC", "UCX"])),
    Case("VL-06", WARN, "--quantization", decode_has("--quantization", "fp8")),
    Case("VL-04", FAIL, "0.31.0", lambda s: s.peer.listings[SITE].__setitem__(0, "vllm-0.31.0.dist-info")),
    Case("VL-05", WARN, "1.4.0", lambda s: s.peer.listings[SITE].__setitem__(1, "nixl-1.4.0.dist-info")),
    Case("VL-06", WARN, "--dtype", decode_has("--dtype", "float16")),
    Case("VL-06", FAIL, "--dtype", both_have("--dtype", "bfloat16", "float16")),
    Case("VL-06", FAIL, "model", lambda s: s.peer.replace(CMDLINE[0], "Qwen/Qwen3-32B", "Qwen/Qwen3-8B")),
    Case("VL-07", WARN, "FLASHINFER", lambda s: s.peer.env(VLLM_ATTENTION_BACKEND="FLASHINFER")),
    Case("VL-07", FAIL, "FLASHINFER", both_have("--attention-backend", "FLASH_ATTN", "FLASHINFER")),
    Case("VL-10", WARN, "16", decode_has("--block-size", "16")),
    Case(
        "VL-12", PASS, "", both_have("--speculative-config", '{"method": "ngram", "k": 2}', '{"k":2,"method":"ngram"}')
    ),
    Case("VL-08", FAIL, "fp8", decode_has("--kv-cache-dtype=fp8")),
    Case("VL-09", FAIL, "NHD", lambda s: s.peer.env(VLLM_KV_CACHE_LAYOUT="NHD")),
    Case("VL-09", FAIL, "cannot be split", unequal_and_nhd),
    Case("VL-10", FAIL, "block size", use_blocks("64", "16")),
    Case("VL-10", WARN, "smaller", use_blocks("16", "64")),
    Case("VL-11", WARN, "more ranks", decode_has("-tp", "4")),
    Case("VL-11", FAIL, "neither", decode_has("--tensor-parallel-size=3")),
    Case("VL-11", PASS, "fit", decode_has("-tp", "16")),
    Case("VL-12", FAIL, "transfer mode", lambda s: set_config(s.peer, top={"kv_connector": "NixlPushConnector"})),
    Case("VL-12", FAIL, "speculation", decode_has("--speculative-config", '{"method": "mtp"}')),
    Case(
        "VL-12",
        PASS,
        "agree",
        both_have(
            "--speculative-config",
            '{"method": "eagle3", "model": "draft", "num_speculative_tokens": 1}',
            '{"method": "eagle3", "model": "draft", "num_speculative_tokens": 3}',
        ),
    ),
    Case("VL-12", PASS, "agree", decode_has("--speculative-config", '{"method": "ngram"}')),
    Case("VL-12", WARN, "bidirectional_kv_xfer", lambda s: set_config(s.peer, bidirectional_kv_xfer=True)),
    Case("VL-13", WARN, "does not check", lambda s: set_config(s.host, enforce_handshake_compat=False)),
    Case("VL-14", WARN, "recomputes", lambda s: set_config(s.host, top={"kv_load_failure_policy": "recompute"})),
    Case("VL-14", WARN, "does not read it", misplace_policy),
    Case("VL-15", FAIL, "no KV was moved", count(12, 0, 0)),
    Case("VL-15", UNKNOWN, "prefill only", count(12, 0, 0, generated=12)),
    Case("VL-15", WARN, "3 failed", count(12, 9, 3)),
    Case("VL-15", UNKNOWN, "no request", count(0, 0, 0)),
    Case("VL-15", UNKNOWN, "does not answer", lambda s: s.host.command(METRICS, "", "curl: (7) refused", 7)),
    Case("VL-16", WARN, "vllm 0.11.0, nixl 0.6.1", be_known_bad),
    Case("VL-17", WARN, "host memory", lambda s: set_config(s.host, top={"kv_buffer_device": "cpu"})),
    Case("VL-18", WARN, "over EFA only", lambda s: set_config(s.host, backends=["LIBFABRIC"])),
)

GONE = {
    "VL-01": CMDLINE,
    "VL-02": CMDLINE,
    "VL-03": CMDLINE,
    "VL-04": (SITE,),
    "VL-05": (SITE,),
    **{f"VL-{number:02}": CMDLINE for number in range(6, 15)},
    "VL-15": ("curl",),
    "VL-16": (SITE,),
    "VL-17": CMDLINE,
    "VL-18": CMDLINE,
}
