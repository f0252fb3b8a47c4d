"""Running, folding, selecting, and what the launcher and the docs take from the doctor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from doctor_cases import BY_ID, Scene, colocated, set_config
from doctor_hosts import SITE, p5en

from kvops.doctor import run as running
from kvops.doctor.catalogue import markdown
from kvops.doctor.check import Check, Finding, State, in_group, passed, skipped, unknown
from kvops.doctor.checks import CHECKS
from kvops.doctor.engines import Engine
from kvops.doctor.facts import Facts
from kvops.doctor.fleet import pids_of
from kvops.doctor.instances import instances
from kvops.doctor.report import Row, as_junit, rows
from kvops.doctor.run import Report, Result, evaluate, explain, run, run_quick
from kvops.doctor.snapshot import SnapshotHost
from kvops.doctor.sources import url
from kvops.errors import KvopsError


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
    def plan(self, name: str, port: int, *options: str, **env: str) -> Engine:
        argv = ("python", "-m", "vllm.entrypoints.openai.api_server", "--kv-transfer-config", json.dumps(KV_CONFIG))
        return Engine(name, (*argv, *options), {"VLLM_NIXL_SIDE_CHANNEL_PORT": f"{port}", **env})

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

    @pytest.mark.parametrize(
        ("prefill", "decode", "wanted"),
        [
            (("--dtype", "bfloat16"), ("--dtype", "float16"), "VL-06"),
            (("--kv-cache-dtype", "fp8"), (), "VL-08"),
            (("--block-size", "64"), ("--block-size", "32"), "VL-10"),
            (("--tensor-parallel-size", "3"), ("--tensor-parallel-size", "2"), "VL-11"),
        ],
    )
    def test_planned_engines_that_refuse_each_other_are_told_before_they_start(
        self, prefill: tuple[str, ...], decode: tuple[str, ...], wanted: str
    ) -> None:
        planned = [self.plan("prefill-0", 5600, *prefill), self.plan("decode-0", 5700, *decode)]
        assert [cause.check.id for cause in run_quick(planned).causes if cause.state is State.FAIL] == [wanted]

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


class TestPairsByName:
    def named(self, scene: Scene) -> Facts:
        return Facts(scene.host.host(), named={4243: "decode-0", 4242: "prefill-0"})

    def test_two_engines_are_compared_in_the_order_they_are_named(self) -> None:
        scene = colocated()
        scene.host.replace("/proc/4243/cmdline", "Qwen/Qwen3-32B", "zai/GLM-5")
        report = run(self.named(scene), [BY_ID["VL-06"]])
        assert report.results[0].finding.evidence == "decode-0: zai/GLM-5; prefill-0: Qwen/Qwen3-32B"

    def test_other_engines_of_the_host_are_not_looked_at(self) -> None:
        facts = Facts(colocated().host.host(), named={4243: "decode-0"})
        assert [engine.name for engine in facts.engines] == ["decode-0"]

    def test_a_name_that_nothing_runs_under_is_refused(self, monkeypatch, tmp_path: Path) -> None:
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
        with pytest.raises(KvopsError, match="'prefill-0' is neither a snapshot nor an engine"):
            pids_of(["prefill-0", "decode-0"])


class TestEnginesThatCannotBeSeen:
    def in_a_container(self) -> Scene:
        scene = Scene(p5en())
        scene.host.link("/proc/self/ns/pid", "pid:[4026531836]").link("/proc/4242/ns/pid", "pid:[4026532999]")
        scene.host.listing(SITE).listing("/usr/lib64/libibverbs").command("fi_info -p efa", "", "-61", 61)
        return scene

    def test_the_hosts_files_say_nothing_about_an_engine_in_a_container(self) -> None:
        report = run(self.in_a_container().facts())
        assert [result.check.id for result in report.results if result.state is State.FAIL] == []
        by_id = {result.check.id: result.finding for result in report.results}
        for check_id in ("NX-01", "NX-02", "LF-01", "LF-04", "EFA-17"):
            assert by_id[check_id].state is State.UNKNOWN
            assert "run kvops doctor inside it" in by_id[check_id].message

    def test_an_environment_that_a_process_title_overwrote_is_no_evidence(self) -> None:
        scene = colocated()
        for pid in (4242, 4243):
            scene.host.file(f"/proc/{pid}/environ", "\0\0\0")
        assert scene.find("VL-02").state is State.UNKNOWN
        assert scene.find("VL-01").state is State.UNKNOWN


class TestLateEfas:
    def look(self, missing: int, uptime: str = "42.10 300.00") -> Facts:
        host = p5en()
        addresses = host.listings["/sys/bus/pci/devices"]
        del addresses[:missing]
        return Facts(host.file("/proc/uptime", uptime).host())

    def wait(self, *missing: int, uptime: str = "42.10 300.00") -> tuple[Facts, list[float]]:
        looks = iter([self.look(count, uptime) for count in missing])
        waits: list[float] = []
        return running.wait_for_efas(next(looks), lambda: next(looks), waits.append), waits

    def test_efas_that_appear_while_we_wait_are_counted(self) -> None:
        facts, waits = self.wait(4, 2, 0)
        assert waits == [5.0, 5.0]
        assert evaluate(BY_ID["EFA-01"], facts).state is State.PASS
        late = evaluate(BY_ID["EFA-20"], facts)
        assert (late.state, late.message) == (State.WARN, "the number of EFA devices went from 12 to 16")

    def test_efas_that_never_appear_are_given_three_looks(self) -> None:
        facts, waits = self.wait(4, 4, 4, 4)
        assert waits == [5.0] * 3
        assert evaluate(BY_ID["EFA-01"], facts).state is State.FAIL

    @pytest.mark.parametrize("uptime", ["301.00 9.00", "garbage"])
    def test_nobody_waits_on_a_machine_that_booted_long_ago(self, uptime: str) -> None:
        assert self.wait(4, uptime=uptime)[1] == []


class TestCatalogue:
    def test_the_reference_page_is_current(self) -> None:
        page = Path(__file__).parents[3] / "docs" / "checks.md"
        assert page.read_text("utf-8") == markdown(), "run: kvops doctor --list --markdown > docs/checks.md"

    def test_there_are_151_checks_with_ids_of_their_own(self) -> None:
        assert len(CHECKS) == len(BY_ID) == 151

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
