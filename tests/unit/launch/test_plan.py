from __future__ import annotations

import json
import os
import socket
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kvops.errors import KvopsError
from kvops.launch.plan import Plan, make_plan, without_secrets
from kvops.topology import load_topology


def plan_of(preset: str = "cpu-demo", *, stock: bool = False, **overrides: Any) -> Plan:
    return make_plan(load_topology(None, overrides, preset), name="f", folder=Path("/fleet"), stock_connectors=stock)


def kv_config(plan: Plan, name: str) -> dict[str, Any]:
    argv = next(process.argv for process in plan.processes if process.name == name)
    config: dict[str, Any] = json.loads(argv[argv.index("--kv-transfer-config") + 1])
    return config


def test_processes_come_in_the_order_prefill_decode_router() -> None:
    plan = plan_of(prefill={"replicas": 2}, decode={"replicas": 1})
    assert [process.name for process in plan.processes] == ["prefill-0", "prefill-1", "decode-0", "router"]


def test_no_two_processes_share_a_port() -> None:
    plan = plan_of(prefill={"replicas": 3, "data_parallel": 2}, decode={"replicas": 3})
    ports = [port for process in plan.processes for port in (process.port, *process.side_channel_ports)]
    assert len(set(ports)) == len(ports) == 7 + 3 * 2 + 3


def test_each_data_parallel_rank_has_the_side_channel_port_after_the_last() -> None:
    first, *rest = plan_of(prefill={"data_parallel": 3}).processes[0].side_channel_ports
    assert rest == [first + 1, first + 2]


def test_fixed_ports_are_used_and_count_up() -> None:
    plan = plan_of(prefill={"replicas": 2, "port": 18100, "side_channel_port": 15600})
    assert [(engine.port, engine.side_channel_ports) for engine in plan.role("prefill")] == [
        (18100, (15600,)),
        (18101, (15601,)),
    ]


def test_a_free_port_search_steps_over_fixed_ports_of_the_other_role() -> None:
    plan = plan_of(prefill={"replicas": 2}, decode={"port": 8101})
    assert 8101 not in [engine.port for engine in plan.role("prefill")]


def test_a_fixed_port_in_use_is_an_error_that_names_its_holder() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(KvopsError, match=rf"port {port} for the router is in use by .* \(pid {os.getpid()}\)"):
            plan_of(router={"port": port})


def test_a_free_port_search_steps_over_a_port_in_use() -> None:
    taken = plan_of().router.port
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", taken))
        holder.listen()
        assert plan_of().router.port != taken


def test_a_free_port_search_steps_over_ports_of_fleets_that_are_still_loading() -> None:
    other = plan_of()
    plan = make_plan(load_topology(preset="cpu-demo"), name="g", folder=Path("/fleet"), reserved=other.ports())
    assert not plan.ports() & other.ports()


def test_engine_ids_are_stable() -> None:
    assert [engine.engine_id for engine in plan_of().engines] == ["f-prefill-0", "f-decode-0"]


def test_the_cpu_build_is_started_as_a_module() -> None:
    assert plan_of().processes[0].argv[1:3] == ("-m", "vllm.entrypoints.openai.api_server")


def test_the_environment_stays_readable_so_that_processes_can_be_recognised() -> None:
    assert all(process.env["SPT_NOENV"] == "1" for process in plan_of().processes)


@pytest.mark.parametrize(
    ("mode", "connector", "prefill_role"),
    [
        ("pull", "NixlConnector", "kv_producer"),
        ("bidirectional", "NixlConnector", "kv_both"),
        ("push", "NixlPushConnector", "kv_producer"),
    ],
)
def test_the_connector_follows_the_mode(mode: str, connector: str, prefill_role: str) -> None:
    plan = plan_of(mode=mode)
    assert (kv_config(plan, "prefill-0")["kv_connector"], kv_config(plan, "prefill-0")["kv_role"]) == (
        connector,
        prefill_role,
    )
    assert kv_config(plan, "decode-0")["kv_role"] == "kv_consumer"


def test_bidirectional_settings_reach_both_sides() -> None:
    plan = plan_of(mode="bidirectional", kv={"decoder_ttl": 60, "recompute_threshold": 128, "lease": 12})
    for name in ("prefill-0", "decode-0"):
        extra = kv_config(plan, name)["kv_connector_extra_config"]
        del extra["kvops"]
        assert extra == {
            "backends": ["UCX"],
            "kv_lease_duration": 12,
            "bidirectional_kv_xfer": True,
            "kv_recompute_threshold": 128,
            "decoder_kv_blocks_ttl": 60,
        }


def test_instrumented_connectors_are_the_default() -> None:
    assert kv_config(plan_of(), "decode-0")["kv_connector_module_path"] == "kvops_connectors"


def test_each_instrumented_engine_keeps_a_journal_under_its_own_name() -> None:
    settings = kv_config(plan_of(), "decode-0")["kv_connector_extra_config"]["kvops"]
    assert settings == {"journal_dir": "/fleet/journal", "engine_name": "decode-0", "role": "decode"}


def test_decode_streams_its_handles_in_bidirectional_mode() -> None:
    middleware = {
        (mode, engine.role): "--middleware" in engine.argv
        for mode in ("pull", "bidirectional", "push")
        for engine in plan_of(mode=mode).engines
    }
    assert [key for key, there in middleware.items() if there] == [("bidirectional", "decode")]


def test_stock_connectors_name_no_module() -> None:
    plan = plan_of(stock=True, mode="bidirectional")
    assert "kv_connector_module_path" not in kv_config(plan, "decode-0")
    assert "kvops" not in kv_config(plan, "decode-0")["kv_connector_extra_config"]
    assert "--middleware" not in plan.role("decode")[0].argv


def test_devices_are_dealt_out_in_order() -> None:
    plan = plan_of("p5en", prefill={"replicas": 2, "tensor_parallel": 2}, decode={"tensor_parallel": 1})
    assert [engine.devices for engine in plan.engines] == [(0, 1), (2, 3), (4,)]
    assert [engine.env["CUDA_VISIBLE_DEVICES"] for engine in plan.engines] == ["0,1", "2,3", "4"]


def test_neuron_devices_go_by_their_own_variable() -> None:
    assert plan_of("trn2").processes[0].env["NEURON_VISIBLE_DEVICES"] == "0,1,2,3,4,5,6,7"


def test_each_host_deals_out_its_devices_anew() -> None:
    hosts = {"replicas": 2, "tensor_parallel": 4, "hosts": ["10.0.0.1", "10.0.0.2"]}
    plan = plan_of("p5en", prefill=hosts, decode={"hosts": ["10.0.0.3"]})
    assert [(engine.host, engine.devices) for engine in plan.role("prefill")] == [
        ("10.0.0.1", (0, 1, 2, 3)),
        ("10.0.0.2", (0, 1, 2, 3)),
    ]


def test_a_fleet_of_one_machine_listens_on_loopback_whatever_it_advertises() -> None:
    engine = plan_of("p5en").processes[0]
    assert engine.host == "127.0.0.1"
    assert "own" not in engine.env["VLLM_NIXL_SIDE_CHANNEL_HOST"]


def test_engines_of_other_machines_are_not_local() -> None:
    plan = plan_of("p5en", prefill={"hosts": ["10.255.0.1"]}, decode={"hosts": ["10.255.0.2"]})
    assert not any(engine.is_local() for engine in plan.engines)


def test_the_router_is_told_every_engine() -> None:
    plan = plan_of(decode={"replicas": 2})
    urls = [value for flag, value in zip(plan.router.argv, plan.router.argv[1:], strict=False) if flag == "--decode"]
    assert urls == [engine.url for engine in plan.role("decode")]


def test_a_models_folder_is_served_by_its_own_name() -> None:
    plan = plan_of(model="/models/Qwen3-32B")
    assert (plan.model, plan.served_model_name) == ("/models/Qwen3-32B", "Qwen3-32B")


def test_a_hub_model_is_served_by_its_id() -> None:
    assert plan_of(model="Qwen/Qwen3-8B").served_model_name == "Qwen/Qwen3-8B"


def test_users_arguments_come_last_so_that_they_win() -> None:
    assert plan_of(decode={"args": ["--max-num-seqs=1"]}).role("decode")[0].argv[-1] == "--max-num-seqs=1"


def test_secrets_are_hidden_for_printing() -> None:
    plan = plan_of(decode={"env": {"HF_TOKEN": "hf_abc", "UCX_TLS": "tcp"}})
    shown = without_secrets(plan).role("decode")[0].env
    assert (shown["HF_TOKEN"], shown["UCX_TLS"]) == ("***", "tcp")
    assert plan.role("decode")[0].env["HF_TOKEN"] == "hf_abc"


def test_workers_and_admin_port_of_the_router_are_passed_on() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        admin_port = probe.getsockname()[1]
    argv = plan_of(router={"workers": 2, "admin_port": admin_port}).router.argv
    assert argv[argv.index("--workers") + 1] == "2"
    assert argv[argv.index("--admin-port") + 1] == str(admin_port)


def identities(plan: Plan) -> list[str]:
    return [value for flag, value in pairwise(plan.router.argv) if flag == "--identity"]


def test_a_router_in_push_mode_is_told_who_each_prefill_rank_is() -> None:
    plan = plan_of(mode="push", prefill={"replicas": 1, "data_parallel": 2})
    prefill = plan.role("prefill")[0]
    first, second = prefill.side_channel_ports
    assert identities(plan) == [
        f"{prefill.url}#0,engine_id={prefill.engine_id}_dp0,host=127.0.0.1,port={first},tp_size=1",
        f"{prefill.url}#1,engine_id={prefill.engine_id}_dp1,host=127.0.0.1,port={second},tp_size=1",
    ]


@pytest.mark.parametrize(
    "overrides", [{"mode": "pull"}, {"mode": "push", "prefill": {"args": ["--pipeline-parallel-size", "2"]}}]
)
def test_a_router_is_not_told_what_it_need_not_or_cannot_know(overrides: dict[str, Any]) -> None:
    assert identities(plan_of(**overrides)) == []
