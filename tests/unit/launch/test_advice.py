from __future__ import annotations

from pathlib import Path

import pytest

from kvops.launch.advice import KNOWN_FAILURES, explain, explain_log

LOGS = Path(__file__).parents[2] / "fixtures" / "engine_logs"


@pytest.mark.parametrize(
    ("log", "sentence"),
    [
        ("block-size-on-cpu", "args: [--block-size=32]"),
        ("missing-model-folder", "there is no model at /nonexistent/model"),
        ("model-not-downloaded", "neither in the local hub cache nor downloadable"),
        ("missing-nixl", "pip install nixl"),
        ("unmatched-torchvision", "pip uninstall -y torchvision torchaudio torchcodec"),
        ("unsupported-backend", "NIXL cannot load its LIBFABRIC plugin"),
        ("cpu-memory", "wants 900.0 GiB but 13.73/15.09 GiB is free"),
        ("cuda-out-of-memory", "lower --gpu-memory-utilization"),
        ("http-port-in-use", "its port was taken by another process"),
        ("side-channel-port-in-use", "side-channel port 127.0.0.1:5600 is taken"),
        ("side-channel-address", "203.0.113.9:5690, which is no address of this machine"),
        ("vllm-script-of-cpu-build", "python -m vllm.entrypoints.openai.api_server"),
        ("handshake-timeout", "did not answer the NIXL handshake within vLLM's 5 s"),
        ("handshake-mismatch", "prefill and decode refuse each other's KV"),
    ],
)
def test_a_known_failure_is_explained(log: str, sentence: str) -> None:
    assert sentence in explain_log(LOGS / f"{log}.log")


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (
            "WARNING [scheduler.py:88] Got kv_transfer_params, but no KVConnector found. Disabling KVTransfer for this "
            "request.",
            "runs without a KV connector",
        ),
        ("ERROR Remote NIXL agent engine ID mismatch. Expected a_dp0, received b_dp0.", "dialled the wrong peer"),
        ("ERROR NIXL transfer failure: transfer_failed | Context: {}", "could not move the KV (transfer_failed)"),
        ("ERROR NIXL transfer failure: handshake_failed | Context: {}", "the NIXL handshake failed (handshake_failed)"),
        (
            "WARNING Got invalid KVTransferParams: {}. This request will not utilize KVTransfer",
            "a handle that it cannot",
        ),
        ("ModuleNotFoundError: No module named 'vllm'", "pip install 'kvops[cpu]'"),
    ],
)
def test_a_known_line_is_explained(line: str, sentence: str) -> None:
    assert sentence in explain(line)


def test_a_healthy_start_needs_no_advice() -> None:
    assert explain("INFO NIXL compatibility check passed (hash: 1f0c)\nINFO: Application startup complete.") == ""


def test_only_failures_that_hang_are_looked_for_in_a_living_engine() -> None:
    assert explain_log(LOGS / "side-channel-address.log", only_hanging=True)
    assert not explain_log(LOGS / "cpu-memory.log", only_hanging=True)


def test_a_missing_log_gives_no_advice(tmp_path: Path) -> None:
    assert explain_log(tmp_path / "nothing.log") == ""


def test_every_sentence_can_be_filled_from_its_pattern() -> None:
    for advice in KNOWN_FAILURES:
        advice.sentence.format(**dict.fromkeys(advice.pattern.groupindex, "x"))
