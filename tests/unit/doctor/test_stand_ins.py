"""On a machine without nc and curl the doctor still learns whether a port answers and what a page says."""

from __future__ import annotations

import http.server
import socket
import threading
from typing import TYPE_CHECKING

import pytest

from kvops.doctor import manifest
from kvops.doctor.host import Gap, LiveHost, Output, Why

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE = b"vllm:request_success_total 3.0\n"


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> LiveHost:
    """A machine on which no program is found."""
    monkeypatch.setattr("shutil.which", lambda *_args, **_named: None)
    return LiveHost()


class Metrics(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(PAGE)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def port() -> Iterator[int]:
    with http.server.HTTPServer(("127.0.0.1", 0), Metrics) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


@pytest.fixture
def closed_port() -> int:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        return int(holder.getsockname()[1])


def test_a_port_that_accepts_is_told_from_one_that_refuses(host: LiveHost, port: int, closed_port: int) -> None:
    assert host.run(manifest.reachable_command("127.0.0.1", port)) == Output(0, "", "")
    refused = host.run(manifest.reachable_command("127.0.0.1", closed_port))
    assert isinstance(refused, Output)
    assert (refused.exit, "refused" in refused.stderr) == (1, True)


@pytest.mark.parametrize(("name", "number"), [("a host that is none", 80), ("127.0.0.1", 99999), ("x" * 300, 80)])
def test_an_address_that_is_none_is_a_refusal(host: LiveHost, name: str, number: int) -> None:
    refused = host.run(manifest.reachable_command(name, number))
    assert isinstance(refused, Output)
    assert refused.exit == 1


def test_a_page_is_fetched(host: LiveHost, port: int) -> None:
    assert host.run(manifest.metrics_command(f":{port}/metrics")) == Output(0, PAGE.decode(), "")


def test_a_server_that_is_gone_is_a_failure_as_of_curl(host: LiveHost, closed_port: int) -> None:
    failed = host.run(manifest.metrics_command(f":{closed_port}/metrics"))
    assert isinstance(failed, Output)
    assert failed.exit == 7


@pytest.mark.parametrize(
    "argv", [("nc", "-l", "80"), ("curl", "-sS", "http://example.com/"), ("fi_info", "--version"), ("dmesg",)]
)
def test_nothing_else_is_stood_in_for(host: LiveHost, argv: tuple[str, ...]) -> None:
    assert host.run(argv) == Gap(" ".join(argv), Why.ABSENT)
