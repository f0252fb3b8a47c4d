from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from kvops.launch.drain import drain, needed

# As vLLM with the instrumented connectors writes it.
METRICS = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="kvops-tiny"}} {running}
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{{engine="0",model_name="kvops-tiny"}} 0.0
# TYPE kvops_held_requests gauge
kvops_held_requests{{engine="0",holder="prefill"}} {held}
"""


class Engine:
    def __init__(self, answers: list[str]) -> None:
        self.asked = 0
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = answers[min(engine.asked, len(answers) - 1)].encode()
                engine.asked += 1
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    engine = Engine([METRICS.format(running=running, held=held) for running, held in request.param])
    thread = threading.Thread(target=engine.server.serve_forever, args=(0.01,))
    thread.start()
    yield engine
    engine.server.shutdown()
    engine.server.server_close()
    thread.join()


@pytest.mark.parametrize("engine", [[(2, 0), (0, 1), (0, 0)]], indirect=True)
def test_an_engine_is_drained_once_nothing_runs_and_nothing_is_held(engine: Engine) -> None:
    assert drain(engine.url, 60, settle_seconds=0, look_seconds=0)
    assert engine.asked == 3


@pytest.mark.parametrize("engine", [[(0, 4)]], indirect=True)
def test_draining_ends_with_its_time_although_kv_is_held(engine: Engine) -> None:
    assert not drain(engine.url, 0.2, settle_seconds=0, look_seconds=0)
    assert engine.asked > 1


def test_an_engine_that_is_gone_needs_no_draining() -> None:
    assert drain("http://127.0.0.1:9", 60, settle_seconds=0)


def test_other_metrics_do_not_count() -> None:
    assert needed('# TYPE vllm:kv_cache_usage_perc gauge\nvllm:kv_cache_usage_perc{engine="0"} 0.5\n') == 0
