"""vLLM's NIXL connectors with instruments.

Thin subclasses of the stock facades under the stock names, which vLLM compares with in several places. Only facade
methods are overridden; the stock scheduler and worker objects behind them stay what they are. Every call to an
instrument goes through a guard, and the stock call happens whatever the instrument does.
"""

from __future__ import annotations

import logging
import os
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import nixl as stock
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole, KVConnectorWorkerMetadata
from vllm.distributed.nixl_utils import NixlWrapper

from kvops_connectors import settings as settings_module
from kvops_connectors.affinity import kept_affinity
from kvops_connectors.journal import Engine, Writer
from kvops_connectors.progress import progress_delay
from kvops_connectors.scheduler import SchedulerInstrument
from kvops_connectors.stats import KvopsPromMetrics, KvopsStats, engine_role, lifetimes, with_samples
from kvops_connectors.worker import WorkerInstrument

__all__ = ["NixlConnector", "NixlPullConnector", "NixlPushConnector"]

logger = logging.getLogger("vllm.kvops")


@dataclass
class WorkerEvents(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """The events of one step; vLLM joins those of all ranks."""

    events: list[Any] = field(default_factory=list)

    def aggregate(self, other: Any) -> WorkerEvents:
        """Return the events of both."""
        return WorkerEvents(self.events + other.events)


class Instrumented:
    """The overrides, mixed in before a stock facade."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        settings = settings_module.load(vllm_config.kv_transfer_config.kv_connector_extra_config or {})
        delay = settings.nixl_progress_delay_microseconds
        with progress_delay(NixlWrapper, delay), kept_affinity(settings.cpu_affinity):
            super().__init__(vllm_config, role, kv_cache_config)  # type: ignore[call-arg]
        self._kvops_scheduler: SchedulerInstrument | None = None
        self._kvops_worker: WorkerInstrument | None = None
        self._kvops_cache_manager: Any = None
        try:
            if role == KVConnectorRole.SCHEDULER:
                self._kvops_scheduler = _scheduler_instrument(self, vllm_config, kv_cache_config)
            else:
                self._kvops_worker = _worker_instrument(self, vllm_config)
        except Exception:
            logger.exception("kvops: the connector runs without instruments")

    # Scheduler side.

    def on_new_request(self, request: Any) -> None:
        """See the base class."""
        if (ours := self._kvops_scheduler) is not None:
            ours.guard(ours.arrived, request)
        super().on_new_request(request)  # type: ignore[misc]

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """See the base class; (0, False) for a request that has had its one load."""
        ours = self._kvops_scheduler
        if ours is not None and ours.guard(ours.spent, request):
            answer: tuple[int | None, bool] = (0, False)
        else:
            answer = super().get_num_new_matched_tokens(request, num_computed_tokens)  # type: ignore[misc]
        if ours is not None:
            ours.guard(ours.matched, request, num_computed_tokens, answer[0])
        return answer

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """See the base class."""
        super().update_state_after_alloc(request, blocks, num_external_tokens)  # type: ignore[misc]
        if (ours := self._kvops_scheduler) is not None:
            ours.guard(ours.allocated, request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """See the base class."""
        metadata = super().build_connector_meta(scheduler_output)  # type: ignore[misc]
        if (ours := self._kvops_scheduler) is not None:
            ours.guard(ours.metadata, metadata, self._kvops_cache_manager is not None)
        return metadata

    def update_connector_output(self, connector_output: Any) -> None:
        """See the base class."""
        if (ours := self._kvops_scheduler) is not None:
            meta = connector_output.kv_connector_worker_meta
            ours.guard(ours.output, meta.events if isinstance(meta, WorkerEvents) else (), connector_output)
            if ours.lost:
                self._kvops_recompute(ours, connector_output.finished_recving or ())
        super().update_connector_output(connector_output)  # type: ignore[misc]

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """See the base class."""
        held, params = super().request_finished(request, block_ids)  # type: ignore[misc]
        if (ours := self._kvops_scheduler) is not None:
            ours.guard(ours.finished, request, (block_ids,), held, params)
        return held, params

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """See the base class."""
        held, params = super().request_finished_all_groups(request, block_ids)  # type: ignore[misc]
        if (ours := self._kvops_scheduler) is not None:
            ours.guard(ours.finished, request, block_ids, held, params)
        return held, params

    # Worker side.

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """See the base class."""
        if (ours := self._kvops_worker) is not None:
            ours.guard(ours.loads_asked, self._connector_metadata)  # type: ignore[attr-defined]
        super().start_load_kv(forward_context, **kwargs)  # type: ignore[misc]

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """See the base class."""
        sent, received = super().get_finished(finished_req_ids)  # type: ignore[misc]
        if (ours := self._kvops_worker) is not None:
            ours.guard(ours.results, sent, received)
        return sent, received

    def get_block_ids_with_load_errors(self) -> set[int]:
        """See the base class; without the blocks of lost readbacks."""
        blocks: set[int] = super().get_block_ids_with_load_errors()  # type: ignore[misc]
        if (ours := self._kvops_worker) is not None and ours.forgiven_blocks:
            blocks, ours.forgiven_blocks = blocks - ours.forgiven_blocks, set()
        return blocks

    def build_connector_worker_meta(self) -> Any:
        """See the base class."""
        if (ours := self._kvops_worker) is not None:
            events = ours.guard(ours.take_events)
            return WorkerEvents(events) if events else None
        return super().build_connector_worker_meta()  # type: ignore[misc]

    # Both sides, and the API server.

    def get_kv_connector_stats(self) -> Any:
        """See the base class; the scheduler's side adds the samples of this step."""
        stats = super().get_kv_connector_stats()  # type: ignore[misc]
        if (ours := self._kvops_scheduler) is not None:
            ours.guard(ours.step_over)
            if ours.samples:
                return with_samples(stats, ours.samples.drain())
        return stats if stats is None else with_samples(stats, [])

    def shutdown(self) -> None:
        """See the base class."""
        super().shutdown()  # type: ignore[misc]
        if (ours := self._kvops_scheduler) is not None:
            ours.guard(ours.close)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvopsStats:
        """See the base class."""
        return KvopsStats(data=data) if data is not None else KvopsStats()

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
    ) -> Any:
        """See the base class."""
        return KvopsPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # A readback is a shortcut: when it fails, its request must be computed whatever kv_load_failure_policy says. vLLM
    # decides about failed loads before it asks the connector, so the rank reports the load as finished and the
    # scheduler's side does here, before vLLM takes the request up again, what vLLM does with the policy "recompute".

    if hasattr(stock.NixlPullConnector, "get_transfer_results"):

        def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
            """See the base class; lost readbacks are taken out of the failed loads."""
            results = super().get_transfer_results(finished_req_ids)  # type: ignore[misc]
            if (ours := self._kvops_worker) is not None:
                if results.failed_recving:
                    results.failed_recving -= ours.guard(ours.forgive, results.failed_recving) or set()
                ours.guard(ours.results, results.finished_sending, results.finished_recving)
            return results

    if hasattr(stock.NixlPullConnector, "bind_kv_cache_manager"):

        def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
            """See the base class."""
            super().bind_kv_cache_manager(kv_cache_manager)  # type: ignore[misc]
            self._kvops_cache_manager = kv_cache_manager

    def _kvops_recompute(self, ours: SchedulerInstrument, finished: Any) -> None:
        for request_id in ours.lost.intersection(finished):
            ours.lost.discard(request_id)
            request = ours.readback(request_id)
            # One that was aborted meanwhile is freed by vLLM in this very step.
            if request is not None and not request.is_finished():
                request.num_computed_tokens = 0
                self._kvops_cache_manager.free(request)


def _scheduler_instrument(facade: Any, vllm_config: Any, kv_cache_config: Any) -> SchedulerInstrument:
    transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
    extra = transfer.kv_connector_extra_config or {}
    settings = settings_module.load(extra)
    scheduler = facade.connector_scheduler
    dp_rank = int(getattr(parallel, "data_parallel_index", 0) or 0)
    address = f"{scheduler.side_channel_host}:{scheduler.side_channel_port}"
    if scheduler.side_channel_host in ("localhost", "127.0.0.1"):
        address = f"{socket.gethostname()}:{scheduler.side_channel_port}"
    name = settings.engine_name or address
    engine = Engine(name, engine_role(transfer.kv_role, settings), dp_rank, str(facade.engine_id))
    bidirectional = getattr(scheduler, "is_bidirectional_kv_xfer_enabled", False)
    mode = "push" if isinstance(facade, stock.NixlPushConnector) else "bidirectional" if bidirectional else "pull"
    block_tokens = scheduler.block_size * int(getattr(parallel, "decode_context_parallel_size", 1) or 1)
    backend = ",".join(extra.get("backends") or ("UCX",))
    writer = _writer(settings, name, dp_rank)
    return SchedulerInstrument(
        scheduler,
        engine=engine,
        mode=mode,
        settings=settings,
        block_tokens=block_tokens,
        total_blocks=int(kv_cache_config.num_blocks),
        backend=backend,
        writer=writer,
    )


def _writer(settings: settings_module.Settings, name: str, dp_rank: int) -> Writer | None:
    if not settings.journal_dir:
        return None
    safe = "".join(character if character.isalnum() or character in "-_." else "-" for character in name)
    path = Path(settings.journal_dir) / f"{safe}.dp{dp_rank}.jsonl"
    return Writer(path, settings.journal_max_bytes, settings.journal_files, settings.journal_queue)


def _worker_instrument(facade: Any, vllm_config: Any) -> WorkerInstrument:
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config or {}
    settings = settings_module.load(extra, os.environ)
    rank = int(getattr(vllm_config.parallel_config, "rank", 0) or 0)
    timeout = lifetimes(extra)["push_registration_timeout"]
    return WorkerInstrument(facade.connector_worker, rank, settings, timeout)


class NixlPullConnector(Instrumented, stock.NixlPullConnector):  # type: ignore[misc]
    """The pull connector, bidirectional or not."""


class NixlPushConnector(Instrumented, stock.NixlPushConnector):  # type: ignore[misc]
    """The push connector."""


# As in vLLM: the same class under its older name.
NixlConnector = NixlPullConnector
