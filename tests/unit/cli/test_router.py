from __future__ import annotations

import socket
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvops.cli.main import main

ENGINES = ["--prefill", "http://127.0.0.1:8100", "--decode", "http://127.0.0.1:8200"]


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (
            ["--prefill", "localhost:8100", "--decode", "http://127.0.0.1:8200"],
            "'localhost:8100' is not an engine's URL",
        ),
        ([*ENGINES, "--api-key-file", "/nonexistent"], "cannot read /nonexistent: No such file"),
        (ENGINES[:2], "there is no decode engine"),
        ([*ENGINES, "--identity", "http://127.0.0.1:8100,engine_id=x"], "missing required field `host`"),
        ([*ENGINES, "--identity", "http://127.0.0.1:8100"], "write it as http://HOST:PORT,engine_id=ID"),
        ([*ENGINES, "--identity", "http://a:1,engine_id=x,host=a,port=b,tp_size=1"], "Expected `int`"),
    ],
)
def test_what_cannot_be_served_is_explained(args: list[str], sentence: str) -> None:
    result = CliRunner().invoke(main, ["router", *args])
    assert (result.exit_code, sentence in result.output) == (2, True)


def test_an_empty_key_file_locks_nobody_in(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("\n")
    result = CliRunner().invoke(main, ["router", *ENGINES, "--api-key-file", str(file)])
    assert (result.exit_code, "holds no API key" in result.output) == (2, True)


def test_a_port_in_use_is_explained() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        result = CliRunner().invoke(main, ["router", *ENGINES, "--port", str(port)])
    assert (result.exit_code, f"cannot listen on 127.0.0.1:{port}" in result.output) == (2, True)


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ([*ENGINES, "--tls-cert", "/nonexistent"], "only one of --tls-cert and --tls-key"),
        ([*ENGINES, "--tls-cert", "/nonexistent", "--tls-key", "/nonexistent"], "cannot use /nonexistent"),
        ([*ENGINES, "--endpoints", "/nonexistent"], "--endpoints and --prefill or --decode are both given"),
        (["--endpoints", "/nonexistent"], "cannot read /nonexistent"),
        (["--prefill", "http://p:1#x", *ENGINES[2:]], "names no data-parallel ranks"),
        ([*ENGINES, "--mode", "sideways"], "'sideways' is not one of"),
    ],
)
def test_a_wrong_option_is_explained(args: list[str], sentence: str) -> None:
    result = CliRunner().invoke(main, ["router", *args])
    assert (result.exit_code, sentence in result.output) == (2, True), result.output
