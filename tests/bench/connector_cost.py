"""What the instruments cost: microseconds per engine step, transfer, request and handle, instrumented against stock.

Run with vLLM installed: ``python tests/bench/connector_cost.py``. The agent and the requests are stand-ins, so that
vLLM's own work in the same calls is subtracted and nothing else is in the figures.
"""

from __future__ import annotations

import copy
import pickle
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import MagicMock

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "connectors"), str(ROOT / "tests" / "integration" / "connectors")]

import vllm.distributed.kv_transfer.kv_connector.v1.nixl as stock  # noqa: E402
from stand_ins import bare, kv_cache_config, request, vllm_config  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole  # noqa: E402
from vllm.v1.outputs import KVConnectorOutput  # noqa: E402

import kvops_connectors  # noqa: E402
from kvops_connectors import prefix  # noqa: E402
from kvops_connectors.nixl import WorkerEvents  # noqa: E402
from kvops_connectors.settings import Settings  # noqa: E402
from kvops_connectors.worker import WorkerInstrument  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

RUNNING = 256
REPEATS = 9


def best_microseconds(work: Callable[[], Any], times: int) -> float:
    """Return the CPU time of one call, the best of several runs; it includes the threads of the process."""
    runs = []
    for _ in range(REPEATS):
        start = time.process_time()
        for _ in range(times):
            work()
        runs.append((time.process_time() - start) / times * 1e6)
    return min(runs)


def main() -> None:
    scheduled = MagicMock()
    scheduled.scheduled_cached_reqs = SimpleNamespace(req_ids=[], new_block_ids=[], resumed_req_ids=set())
    extra = {"kvops": {"journal_dir": tempfile.mkdtemp()}}

    def side(module: Any) -> Any:
        return module.NixlConnector(vllm_config("NixlConnector", extra), KVConnectorRole.SCHEDULER, kv_cache_config())

    def busy(made: Any) -> Callable[[], None]:
        for number in range(RUNNING):
            made.on_new_request(request(f"cmpl-{number}-0-0000000a", None))
        output = KVConnectorOutput(finished_sending={"nobody"})

        def step() -> None:
            made.build_connector_meta(scheduled)
            made.update_connector_output(output)
            made.get_kv_connector_stats()

        return step

    def whole_request(made: Any) -> Callable[[], None]:
        params = {"do_remote_decode": True, "do_remote_prefill": False, "kvops": {"router_id": "r", "turn": 1}}
        model = request("cmpl-0-0-0000000a", params)
        given = SimpleNamespace(get_unhashed_block_ids_all_groups=lambda: ([],), blocks=([],))

        def run() -> None:
            one = copy.copy(model)
            one.kv_transfer_params = dict(params)
            one.num_computed_tokens = 64
            made.on_new_request(one)
            made.get_num_new_matched_tokens(one, 0)
            made.update_state_after_alloc(one, given, 0)
            made.request_finished_all_groups(one, ([1, 2, 3, 4],))
            made.build_connector_meta(scheduled)
            made.update_connector_output(KVConnectorOutput(finished_sending={one.request_id}))
            made.get_kv_connector_stats()

        return run

    rows = {}
    for name, work, times in (("scheduler, per step", busy, 20_000), ("scheduler, per request", whole_request, 4_000)):
        rows[name] = [best_microseconds(work(side(module)), times) for module in (stock, kvops_connectors)]
    rows["worker, per step"] = worker_step()
    rows["worker, per transfer and rank"] = worker_transfer()
    history = list(range(32_768))
    rows["handle of 32k tokens, once a turn"] = [0.0, best_microseconds(lambda: prefix.of_tokens(history, 32), 20)]
    print(f"{'microseconds':36}{'stock':>9}{'kvops':>9}{'added':>9}")
    for name, (theirs, ours) in rows.items():
        print(f"{name:36}{theirs:9.2f}{ours:9.2f}{ours - theirs:9.2f}")


def worker_step() -> list[float]:

    metadata = SimpleNamespace(reqs_to_recv={}, push_registrations={}, push_finished_blocks={})
    worker = bare(stock.NixlPullConnectorWorker)
    ours = WorkerInstrument(worker, 0, Settings(), 480.0)

    def step() -> None:
        ours.guard(ours.loads_asked, metadata)
        worker.nixl_wrapper.get_new_notifs()
        ours.guard(ours.results, set(), set())
        ours.guard(ours.take_events)

    plain = bare(stock.NixlPullConnectorWorker)
    return [best_microseconds(plain.nixl_wrapper.get_new_notifs, 20_000), best_microseconds(step, 20_000)]


def worker_transfer() -> list[float]:

    def transfer(agent: Any) -> None:
        handle = agent.make_prepped_xfer("READ", 1, [1], 2, [2], notif_msg=b"a:1")
        agent.transfer(handle)
        agent.get_xfer_telemetry(handle)
        agent.release_xfer_handle(handle)

    worker = bare(stock.NixlPullConnectorWorker)
    ours = WorkerInstrument(worker, 0, Settings(), 480.0)

    def instrumented() -> None:
        transfer(worker.nixl_wrapper)
        # The way to the engine's process is part of the cost.
        pickle.loads(pickle.dumps(WorkerEvents(ours.take_events())))

    plain = bare(stock.NixlPullConnectorWorker).nixl_wrapper
    return [best_microseconds(lambda: transfer(plain), 10_000), best_microseconds(instrumented, 10_000)]


if __name__ == "__main__":
    main()
