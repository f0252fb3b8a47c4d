"""Prometheus and Grafana in the plan, and their files."""

from __future__ import annotations

import pytest
import yaml

from kvops.launch import observers
from kvops.launch.plan import make_plan
from kvops.topology import load_topology


def plan_of(tmp_path, monkeypatch, programs, **settings):
    monkeypatch.setattr(observers, "installed", lambda: programs)
    topology = load_topology(None, {"observability": {"enabled": True} | settings}, "cpu-demo")
    return make_plan(topology, name="f", folder=tmp_path)


def test_a_fleet_has_no_observers_unless_asked(tmp_path):
    plan = make_plan(load_topology(None, {}, "cpu-demo"), name="f", folder=tmp_path)
    assert {process.role for process in plan.processes} == {"prefill", "decode", "router"}


def test_prometheus_listens_on_loopback_and_keeps_its_data_in_the_fleet_s_folder(tmp_path, monkeypatch):
    (prometheus,) = plan_of(tmp_path, monkeypatch, ["prometheus"], retention_hours=3).role("prometheus")
    assert f"--web.listen-address=127.0.0.1:{prometheus.port}" in prometheus.argv
    assert f"--storage.tsdb.path={tmp_path}/observe/data" in prometheus.argv
    assert "--storage.tsdb.retention.time=3h" in prometheus.argv
    assert "--enable-feature=exemplar-storage" in prometheus.argv


def test_grafana_reads_the_fleet_s_provisioning_and_serves_this_machine_alone(tmp_path, monkeypatch):
    (grafana,) = plan_of(tmp_path, monkeypatch, ["grafana"]).role("grafana")
    assert grafana.env["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"
    assert grafana.env["GF_PATHS_PROVISIONING"] == f"{tmp_path}/observe/grafana/provisioning"
    assert grafana.env["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"


def test_observers_are_no_engines(tmp_path, monkeypatch):
    plan = plan_of(tmp_path, monkeypatch, ["prometheus", "grafana"])
    assert [engine.role for engine in plan.engines] == ["prefill", "decode"]


def test_the_files_name_every_process_of_the_fleet(tmp_path, monkeypatch):
    plan = plan_of(tmp_path, monkeypatch, ["prometheus"])
    observers.write_files(plan, tmp_path)
    config = yaml.safe_load((tmp_path / "observe/prometheus/prometheus.yml").read_text())
    engines, router = config["scrape_configs"]
    assert [each["labels"]["process"] for each in engines["static_configs"]] == ["prefill-0", "decode-0"]
    assert router["static_configs"][0]["targets"] == [f"127.0.0.1:{plan.router.port}"]
    source = yaml.safe_load((tmp_path / "observe/grafana/provisioning/datasources/kvops.yaml").read_text())
    assert source["datasources"][0]["url"] == plan.role("prometheus")[0].url


@pytest.mark.parametrize(("there", "said"), [([], 2), (["prometheus"], 1), (["prometheus", "grafana"], 0)])
def test_what_is_missing_is_said_with_how_to_get_it(tmp_path, monkeypatch, there, said):
    monkeypatch.setattr(observers, "installed", lambda: there)
    advice = observers.missing_advice(tmp_path)
    assert len(advice) == said
    assert all("install" in sentence and str(tmp_path) in sentence for sentence in advice)
