from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest

from kvops.errors import KvopsError
from kvops.journal.prometheus import advise

# What a query must contain, and the vector that answers it.
ANSWERS = {
    "kvops_holds_ended_total": [({"ended_by": "read"}, 90), ({"ended_by": "expired"}, 10)],
    'kvops_config_seconds{param="kv_lease_duration"}': [({}, 30)],
    "kvops_transfer_post_seconds_sum": [({}, 3)],
    "kvops_transfer_duration_seconds_sum": [({}, 10)],
    "kvops_held_block_seconds_total": [({"ended_by": "read"}, 100), ({"ended_by": "expired"}, 300)],
    "kvops_readback_age_seconds_count": [({}, 50)],
    "kvops_readback_age_seconds_bucket": [({}, 42)],
}


class Server(BaseHTTPRequestHandler):
    body: bytes | None = None

    def do_GET(self) -> None:
        query = parse_qs(urlsplit(self.path).query)["query"][0]
        vector = next((vector for part, vector in ANSWERS.items() if part in query), [])
        result = [{"metric": labels, "value": [0, str(value)]} for labels, value in vector]
        body = self.body or json.dumps({"status": "success", "data": {"result": result}}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_averages_give_the_lease_and_the_post_share(url: str) -> None:
    found = {one.topic: one for one in advise(url)}

    assert found["kv_lease_duration"].value == 60
    assert found["block size and descriptors"].measured["post_share"] == pytest.approx(0.3)
    assert found["decoder_kv_blocks_ttl"].measured["unread_block_seconds_share"] == pytest.approx(0.75)
    assert "journals" in found["mode"].missing


def test_another_server_is_one_sentence(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Server, "body", b"<html>")

    with pytest.raises(KvopsError, match="does not answer as Prometheus does"):
        advise(url)


def test_a_file_url_is_refused() -> None:
    with pytest.raises(KvopsError, match="no http or https URL"):
        advise("file:///etc/passwd")
