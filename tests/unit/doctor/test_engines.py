"""What the command line and the environment of an engine say."""

from __future__ import annotations

import pytest

from kvops.doctor.engines import Engine, is_engine, is_worker


def engine(*argv: str, **env: str) -> Engine:
    return Engine("e", argv, env)


@pytest.mark.parametrize(
    "words",
    [
        ("--tensor-parallel-size", "4"),
        ("--tensor-parallel-size=4",),
        ("--tensor_parallel_size", "4"),
        ("-tp", "4"),
        ("-tp=4",),
    ],
)
def test_an_option_is_found_in_every_spelling(words: tuple[str, ...]) -> None:
    assert engine("vllm", "serve", "m", *words).tensor_parallel == 4


def test_the_last_of_several_values_counts_as_for_vllm() -> None:
    assert engine("vllm", "serve", "m", "--block-size=32", "--block-size", "64").option("--block-size") == "64"


def test_an_option_without_a_value_is_true() -> None:
    assert engine("vllm", "serve", "m", "--enforce-eager", "--port", "1").option("--enforce-eager") == "true"


def test_an_option_that_is_not_given_has_its_default() -> None:
    assert engine("vllm", "serve", "m").option("--kv-cache-dtype", "auto") == "auto"


@pytest.mark.parametrize(
    "argv", [("vllm", "serve", "Qwen/Qwen3-32B"), ("python", "-m", "x", "--model", "Qwen/Qwen3-32B")]
)
def test_the_model_is_a_word_or_an_option(argv: tuple[str, ...]) -> None:
    assert engine(*argv).model == "Qwen/Qwen3-32B"


def test_the_default_backend_is_ucx() -> None:
    assert engine("--kv-transfer-config", '{"kv_connector": "NixlConnector"}').backends == ("UCX",)


def test_a_configuration_that_is_not_json_is_empty_and_not_absent() -> None:
    assert engine("--kv-transfer-config", "{").kv_config == {}
    assert engine("vllm", "serve", "m").kv_config is None


def test_the_side_channel_has_vllms_defaults() -> None:
    assert engine().side_channel_host == "localhost"
    assert engine().side_channel_port == 5600


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (("/opt/venv/bin/python", "-m", "vllm.entrypoints.openai.api_server"), True),
        (("/opt/venv/bin/python3", "/opt/venv/bin/vllm", "serve", "m"), True),
        (("vllm", "serve", "m"), True),
        (("vllm", "bench", "serve"), False),
        (("grep", "vllm"), False),
        (("VLLM::EngineCore",), False),
        ((), False),
    ],
)
def test_a_server_is_known_by_its_command_line(argv: tuple[str, ...], expected: bool) -> None:
    assert is_engine(argv) is expected


def test_an_engine_core_is_known_by_its_title() -> None:
    assert is_worker(("VLLM::EngineCore_DP0",))
    assert not is_worker(("python",))
