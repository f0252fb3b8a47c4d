"""Stand-ins for what is around a connector in vLLM: configuration, requests, a worker without hardware."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
import vllm.distributed.kv_transfer.kv_connector.v1.nixl as stock
from vllm.config.kv_transfer import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import RequestStatus

BLOCK = 16
# A CUDA build on a host without a GPU is no CPU platform to vLLM, which would then stage KV in host memory.
BUFFER = "cpu" if current_platform.device_type == "cpu" else "cuda"


def transfer_config(name: str, extra: dict[str, Any] | None = None, role: str = "kv_both") -> KVTransferConfig:
    return KVTransferConfig(
        kv_connector=name,
        kv_connector_module_path="kvops_connectors",
        kv_role=role,
        kv_buffer_device=BUFFER,
        kv_connector_extra_config=extra or {},
    )


def vllm_config(name: str, extra: dict[str, Any], role: str = "kv_both") -> Any:
    config = MagicMock()
    config.kv_transfer_config = transfer_config(name, extra, role)
    config.kv_transfer_config.engine_id = "engine-1"
    config.cache_config.block_size = BLOCK
    parallel = config.parallel_config
    parallel.tensor_parallel_size = parallel.pipeline_parallel_size = 1
    parallel.decode_context_parallel_size = parallel.prefill_context_parallel_size = 1
    parallel.data_parallel_index = parallel.data_parallel_rank = parallel.rank = 0
    config.scheduler_config.disable_hybrid_kv_cache_manager = True
    config.num_prefill_lookahead_tokens = 0
    config.speculative_config = None
    config.model_config.use_mla = config.model_config.is_hybrid = False
    return config


def kv_cache_config() -> Any:
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float16)
    group = SimpleNamespace(kv_cache_spec=spec, layer_names=["l0"])
    config = MagicMock()
    config.kv_cache_groups = config.transfer_groups = [group]
    config.has_mamba_layers = False
    config.num_blocks = 10
    config.select_transfer_block_ids = lambda blocks: blocks
    config.transfer_group_ids = (0,)
    return config


class Block:
    block_hash = None
    is_null = False
    block_id = 1


def blocks(count: int) -> Any:
    ids = (list(range(1, count + 1)),)
    return SimpleNamespace(
        get_unhashed_block_ids_all_groups=lambda: ids, blocks=([Block() for _ in ids[0]],), get_block_ids=lambda: ids
    )


def request(name: str, params: dict[str, Any] | None, prompt: int = 64, output: int = 1) -> Any:
    tokens = list(range(prompt))
    return SimpleNamespace(
        request_id=name,
        kv_transfer_params=params,
        prompt_token_ids=tokens,
        _all_token_ids=[*tokens, *range(900, 900 + output)],
        all_token_ids=[*tokens, *range(900, 900 + output)],
        num_prompt_tokens=prompt,
        num_tokens=prompt + output,
        num_computed_tokens=0,
        num_output_tokens=output,
        prefill_stats=None,
        status=RequestStatus.FINISHED_STOPPED,
        num_preemptions=0,
        get_skip_reading_prefix_cache=lambda: False,
        is_finished=lambda: False,
        prompt_embeds=None,
        max_tokens=4,
        lora_request=None,
        cache_salt=None,
        mm_features=[],
    )


class Agent:
    def __init__(self) -> None:
        self.notices: dict[str, list[bytes]] = {}

    def make_prepped_xfer(self, *args: Any, **kwargs: Any) -> Any:
        return object()

    def transfer(self, handle: Any) -> str:
        return "PROC"

    def check_xfer_state(self, handle: Any) -> str:
        return "DONE"

    def get_xfer_telemetry(self, handle: Any) -> Any:
        return SimpleNamespace(startTime=1, postDuration=2000, xferDuration=3000, totalBytes=4096, descCount=5)

    def release_xfer_handle(self, handle: Any) -> None:
        pass

    def release_dlist_handle(self, handle: Any) -> None:
        pass

    def send_notif(self, agent: str, notif_msg: bytes = b"") -> None:
        pass

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        notices, self.notices = self.notices, {}
        return notices


def bare(worker_class: type) -> Any:
    worker = object.__new__(worker_class)
    worker.nixl_wrapper = Agent()
    worker.xfer_stats = NixlKVConnectorStats()
    worker.transfer_topo = MagicMock()
    worker.transfer_topo.tp_ratio = lambda size: 1
    worker.world_size = 1
    worker._is_hma_required = False
    worker._reqs_to_send, worker._reqs_to_process, worker._recving_metadata = {}, set(), {}
    worker._remote_agents, worker._handshake_futures = {}, {}
    worker.consumer_notification_counts_by_req = defaultdict(int)
    worker.expected_consumer_notifications_by_req = {}
    worker._failed_recv_reqs, worker._reg_send_inbox = queue.Queue(), queue.Queue()
    worker._push_writer_wake = threading.Event()
    if worker_class is stock.NixlPushConnectorWorker:
        worker._push_finished_blocks, worker._pending_d_registrations = {}, {}
        worker._push_writer_thread = None
        worker._push_writer_stop = threading.Event()
    return worker
