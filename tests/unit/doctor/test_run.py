"""Running, folding, selecting, and what the launcher and the docs take from the doctor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from doctor_cases import BY_ID, Scene, colocated, set_config
from doctor_hosts import p5en

from kvops.doctor import run as running
from kvops.doctor.catalogue import markdown
from kvops.doctor.check import Check, Finding, State, in_group, passed, skipped, unknown
from kvops.doctor.checks import CHECKS
from kvops.doctor.engines import Engine
from kvops.doctor.facts import Facts
from kvops.doctor.instances import instances
from kvops.doctor.report import Row, as_junit, rows
from kvops.doctor.run import Report, Result, evaluate, explain, run, run_quick
from kvops.doctor.snapshot import SnapshotHost
from kvops.doctor.sources import url


def stub(check_id: str, *explained_by: str) -> Check:
    attach = in_group("host")(check_id, "t", evidence="e", rule="r", explained_by=explained_by)
    return attach(lambda facts: passed(""))


def folded(*steps: tuple[str, State, tuple[str, ...]]) -> dict[str, str]:
    results = [Result(stub(name, *causes), Finding(state, "")) for name, state, causes in steps]
    explain(results)
    return {result.check.id: result.explained_by for result in results}


class TestFolding:
    def test_a_chain_hangs_under_its_root(self) -> None:
        chain = [("A", State.FAIL, ()), ("B", State.FAIL, ("A",)), ("C", State.WARN, ("B",))]
        assert folded(*chain) == {"A": "", "B": "A", "C": "A"}

    def test_a_warning_explains_no_failure(self) -> None:
        assert folded(("A", State.WARN, ()), ("B", State.FAIL, ("A",)))["B"] == ""

    def test_what_could_not_be_looked_at_is_nobodys_consequence(self) -> None:
        assert folded(("A", State.FAIL, ()), ("B", State.UNKNOWN, ("A",)))["B"] == ""

    def test_a_circle_ends(self) -> None:
        assert folded(("A", State.FAIL, ("B",)), ("B", State.FAIL, ("A",))) == {"A": "B", "B": "A"}


class TestEvaluation:
    def test_a_check_that_crashes_is_unknown_and_says_so(self) -> None:
        def crash(facts: Facts) -> Finding:
            raise ZeroDivisionError("boom")

        check = in_group("host")("HOST-99", "t", evidence="e", rule="r")(crash)
        found = evaluate(check, Facts(SnapshotHost({})))
        assert found.state is State.UNKNOWN
        assert "HOST-99 has a defect: ZeroDivisionError: boom" in found.message

    @pytest.mark.parametrize(
        ("findings", "status"),
        [
            ([skipped(""), passed("")], 0),
            ([unknown("")], 2),
            ([unknown(""), skipped("")], 0),
            ([unknown(""), Finding(State.FAIL, "")], 1),
        ],
    )
    def test_the_exit_status(self, findings: list[Finding], status: int) -> None:
        assert Report("h", "t", [Result(stub("A"), finding) for finding in findings]).exit_status == status


KV_CONFIG = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"backends": ["UCX"]}}


class TestQuick:
    def plan(self, name: str, port: int, **env: str) -> Engine:
        argv = ("python", "-m", "vllm.entrypoints.openai.api_server", "--kv-transfer-config", json.dumps(KV_CONFIG))
        return Engine(name, argv, {"VLLM_NIXL_SIDE_CHANNEL_PORT": f"{port}", **env})

    def test_the_quick_set_is_the_documented_one(self) -> None:
        wanted = {
            "EFA-01",
            "EFA-03",
            "EFA-07",
            "EFA-17",
            "LF-01",
            "LF-05",
            "LF-07",
            "GDR-02",
            "GDR-07",
            "NEU-08",
            "NEU-09",
            "HOST-03",
            "NX-02",
            "NX-03",
            "NX-05",
            "NX-06",
            "NX-10",
            "VL-01",
            "NW-01",
            "NW-02",
        }
        assert wanted <= {check.id for check in CHECKS if check.quick}

    def test_planned_engines_are_judged_before_they_start(self) -> None:
        report = run_quick([self.plan("prefill-0", 5600), self.plan("decode-0", 5600)])
        assert report.exit_status == 1
        assert [cause.check.id for cause in report.causes] == ["VL-02"]
        assert "prefill-0" in report.causes[0].finding.message

    def test_a_plan_without_fault_passes_here(self) -> None:
        assert run_quick([self.plan("prefill-0", 5600), self.plan("decode-0", 5700)]).count(State.FAIL) == 0

    def test_variables_of_a_planned_engine_are_looked_at(self) -> None:
        engine = self.plan("decode-0", 5600, FI_PROVIDER="tcp")
        report = run(Facts(p5en().host(), planned=[engine]), [BY_ID["LF-07"]])
        assert report.results[0].state is State.FAIL
        assert "decode-0" in report.results[0].finding.message


class TestPairs:
    def test_two_fleets_of_one_host_are_not_compared(self) -> None:
        scene = colocated()
        path = "/proc/4243/cmdline"
        scene.host.file(path, scene.host.files[path].replace("Qwen/Qwen3-32B", "zai/GLM-5"))
        assert scene.facts().engine_pairs == []

    def test_prefill_comes_first_whatever_its_pid(self) -> None:
        scene = colocated()
        set_config(scene.host, top={"kv_role": "kv_consumer"})
        prefill, decode = scene.facts().engine_pairs[0]
        assert (prefill.pid, decode.pid) == (4243, 4242)


class TestCatalogue:
    def test_the_reference_page_is_current(self) -> None:
        page = Path(__file__).parents[3] / "docs" / "checks.md"
        assert page.read_text("utf-8") == markdown(), "run: kvops doctor --list --markdown > docs/checks.md"

    def test_there_are_146_checks_with_ids_of_their_own(self) -> None:
        assert len(CHECKS) == len(BY_ID) == 146

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.id)
    def test_a_check_says_everything(self, check: Check) -> None:
        assert all((check.title, check.why, check.evidence, check.rule, check.sources))
        assert all(url(key) for key in check.sources)
        assert set(check.explained_by) <= set(BY_ID)
        assert check.id not in check.explained_by

    def test_every_rule_for_a_failure_names_a_fix(self) -> None:
        assert [check.id for check in CHECKS if not check.fix] == ["GDR-09"]


class TestInstances:
    @pytest.mark.parametrize("instance", instances().values(), ids=lambda instance: instance.name)
    def test_rates_of_all_efas_add_up(self, instance) -> None:
        if instance.efa_gbps is not None:
            assert instance.efas * instance.efa_gbps == instance.total_gbps

    @pytest.mark.parametrize("instance", instances().values(), ids=lambda instance: instance.name)
    def test_groups_share_devices_evenly(self, instance) -> None:
        if instance.gpus_per_group is not None:
            assert instance.gpus / instance.gpus_per_group == instance.efas / instance.efas_per_group


class TestWriters:
    def broken(self) -> Report:
        scene = Scene(p5en())
        scene.host.file("/sys/module/efa/version", "1.0\x00\x1b[31m<&>\n")
        return run(Facts(scene.host.host()))

    def test_junit_holds_any_evidence(self) -> None:
        assert b"EFA-05" in as_junit(self.broken())

    def test_the_first_lines_are_the_cause(self) -> None:
        lines = list(rows(self.broken()))
        assert lines[0].label == "host"
        assert lines[2] == Row("FAIL", lines[2].text, "bold red")
        assert lines[2].text.startswith("EFA-05")

    def test_verbose_has_a_line_for_every_check(self) -> None:
        texts = [row.text for row in rows(self.broken(), verbose=True)]
        assert all(any(text.startswith(check.id) for text in texts) for check in CHECKS)


def test_pair_checks_compare_two_hosts() -> None:
    assert {"VL-03", "VL-11", "NW-03", "NW-09", "NEU-05", "VL-01"} <= {check.id for check in running.PAIR_CHECKS}
