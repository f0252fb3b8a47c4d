"""``status --kubernetes``, ``doctor --kubernetes`` and ``collect`` against a kubectl that answers from files."""

from __future__ import annotations

import io
import json
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kvops.cli.main import main

KUBECTL = """#!/bin/sh
# get KIND ...: KIND.json; exec -n NS POD ...: POD.tar
echo "$@" >> {folder}/asked
case "$1" in
get) file={folder}/$2.json ;;
exec) file={folder}/$4.tar ;;
esac
[ -f "$file" ] && exec cat "$file"
echo 'Error from server (NotFound): pods "decode-0" not found' >&2
exit 1
"""


def pod(name: str, role: str, **status: Any) -> dict[str, Any]:
    containers = [{"name": "router" if role == "router" else "vllm", "image": "x"}]
    labels = {"app.kubernetes.io/part-of": "kvops", "app.kubernetes.io/component": role}
    return {
        "metadata": {"name": name, "namespace": "kvops", "labels": labels},
        "spec": {"nodeName": "ip-10-0-1-7.ec2.internal", "containers": containers},
        "status": {"podIP": "10.0.1.9", "phase": "Running", **status},
    }


READY = {"conditions": [{"type": "Ready", "status": "True"}]}


class Cluster:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.give("nodes", [])

    def give(self, kind: str, items: list[dict[str, Any]]) -> None:
        (self.folder / f"{kind}.json").write_text(json.dumps({"kind": "List", "items": items}))

    def give_journal(self, pod_name: str, name: str, content: bytes) -> None:
        with tarfile.open(self.folder / f"{pod_name}.tar", "w") as archive:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))

    def asked(self) -> list[str]:
        return (self.folder / "asked").read_text().splitlines()


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    folder = tmp_path / "cluster"
    folder.mkdir()
    script = folder / "kubectl"
    script.write_text(KUBECTL.format(folder=folder))
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return Cluster(folder)


def kvops(*args: str) -> Result:
    return CliRunner().invoke(main, args)


def test_status_of_a_ready_fleet(cluster: Cluster) -> None:
    cluster.give("pods", [pod("prefill-0", "prefill", **READY), pod("router-7d9f", "router", **READY)])
    result = kvops("status", "--kubernetes")
    assert result.exit_code == 0
    assert "prefill-0" in result.output


@pytest.mark.parametrize(
    ("status", "why"),
    [
        (
            {
                "phase": "Pending",
                "conditions": [
                    {
                        "type": "PodScheduled",
                        "status": "False",
                        "message": "0/4 nodes are available: 4 Insufficient vpc.amazonaws.com/efa.",
                    }
                ],
            },
            "4 Insufficient vpc.amazonaws.com/efa",
        ),
        (
            {
                "initContainerStatuses": [
                    {
                        "name": "doctor",
                        "restartCount": 3,
                        "state": {"waiting": {"reason": "CrashLoopBackOff"}},
                        "lastState": {"terminated": {"exitCode": 1, "message": "verdict\nEFA-01: no EFA device\n"}},
                    }
                ]
            },
            "doctor ended with 1: EFA-01: no EFA device",
        ),
        ({"containerStatuses": [{"name": "vllm", "restartCount": 0, "state": {"running": {}}}]}, "starting"),
    ],
)
def test_status_says_what_keeps_a_pod_from_being_ready(cluster: Cluster, status: dict[str, Any], why: str) -> None:
    cluster.give("pods", [pod("decode-0", "decode", **status)])
    result = kvops("status", "--kubernetes", "--json")
    assert (result.exit_code, json.loads(result.output)[0]["why"].find(why) >= 0) == (1, True), result.output


def test_an_empty_namespace_is_said(cluster: Cluster) -> None:
    cluster.give("pods", [])
    result = kvops("status", "--kubernetes", "--namespace", "elsewhere")
    assert (result.exit_code, "namespace elsewhere has no pod" in result.output) == (2, True)


def test_doctor_fails_a_node_that_offers_no_efa(cluster: Cluster) -> None:
    labels = {"node.kubernetes.io/instance-type": "p5en.48xlarge"}
    node = {"metadata": {"name": "node-a", "labels": labels}, "status": {"allocatable": {"nvidia.com/gpu": "8"}}}
    cluster.give("nodes", [node])
    cluster.give("pods", [])
    cluster.give("daemonsets", [])
    result = kvops("doctor", "--kubernetes", "--json")
    states = {row["id"]: row["state"] for row in json.loads(result.output)["findings"]}
    assert (result.exit_code, states["K8S-01"]) == (1, "fail")


def test_doctor_turns_the_schedulers_complaint_into_what_to_do(cluster: Cluster) -> None:
    waiting = pod("decode-0", "decode", phase="Pending")
    del waiting["spec"]["nodeName"]
    limits = {"vpc.amazonaws.com/efa": "16", "hugepages-2Mi": "5120Mi", "nvidia.com/gpu": "8"}
    waiting["spec"]["containers"][0] |= {"image": "vllm", "resources": {"limits": limits}}
    message = (
        "0/2 nodes are available: 1 Insufficient vpc.amazonaws.com/efa, 1 node(s) had untolerated taint {spot: true}."
    )
    about = {"kind": "Pod", "name": "decode-0", "namespace": "kvops"}
    seen = "2026-11-30T08:12:41Z"
    event = {"type": "Warning", "reason": "FailedScheduling", "message": message, "involvedObject": about}
    old = event | {"message": "0/0 nodes are available.", "lastTimestamp": "2026-11-30T07:00:00Z"}
    cluster.give("pods", [waiting])
    cluster.give("daemonsets", [])
    cluster.give("events", [event | {"lastTimestamp": seen}, old])
    rows = {row["id"]: row for row in json.loads(kvops("doctor", "--kubernetes", "--json").output)["findings"]}
    found = rows["K8S-14"]
    assert (found["state"], found["evidence"]) == ("fail", message)
    assert "Run the EFA device plugin there" in found["fix"]
    assert "Tolerate the taint" in found["fix"]


def test_doctor_says_that_a_cluster_does_not_answer(cluster: Cluster) -> None:
    (cluster.folder / "nodes.json").unlink()
    result = kvops("doctor", "--kubernetes")
    assert (result.exit_code, "kubectl get nodes: Error from server" in result.output) == (2, True)


def test_nothing_but_reading_is_asked_of_the_cluster(cluster: Cluster, tmp_path: Path) -> None:
    cluster.give("pods", [pod("prefill-0", "prefill", **READY)])
    cluster.give_journal("prefill-0", "./prefill-0.dp0.jsonl", b"{}\n")
    kvops("status", "--kubernetes")
    kvops("doctor", "--kubernetes")
    kvops("collect", "--kubernetes", "-o", str(tmp_path / "out"))
    assert {line.split()[0] for line in cluster.asked()} <= {"get", "exec", "version", "logs"}
    assert all(" -- tar cf - " in line for line in cluster.asked() if line.startswith("exec"))


def test_journals_come_redacted_and_keep_the_ids_by_which_they_join(cluster: Cluster, tmp_path: Path) -> None:
    line = {
        "request": {"id": "cmpl-6f1d3c0c-9a3e-4a51-b0a5-b7a5a2f0c9de-0"},
        "transfer": {"peer": "10.0.1.9:5600"},
        "ts": 1764480000.123,
        "error": "cannot reach 10.0.1.9",
    }
    cluster.give("pods", [pod("prefill-0", "prefill", **READY)])
    cluster.give_journal("prefill-0", "./prefill-0.dp0.jsonl", json.dumps(line).encode() + b"\nhalf a li")
    out = tmp_path / "out"
    result = kvops("collect", "--kubernetes", "-o", str(out), "--json")
    assert json.loads(result.output) == {
        "lines": 1, "unreadable": 1, "files": ["prefill-0.prefill-0.dp0.jsonl"], "failures": []
    }  # fmt: skip
    written = json.loads((out / "prefill-0.prefill-0.dp0.jsonl").read_text())
    assert written == line | {"transfer": {"peer": "<ip-1>:5600"}, "error": "cannot reach <ip-1>"}


def test_trace_reads_what_collect_brought(cluster: Cluster, tmp_path: Path) -> None:
    folder = Path(__file__).parents[2] / "fixtures" / "journals"
    pods = {"prefill-0": "prefill", "decode-0": "decode", "router-7d9f": "router"}
    cluster.give("pods", [pod(name, role, **READY) for name, role in pods.items()])
    for name, role in pods.items():
        file = next(folder.glob(f"{role}*.jsonl"))
        cluster.give_journal(name, f"./{file.name}", file.read_bytes())
    out = tmp_path / "out"
    assert kvops("collect", "--kubernetes", "-o", str(out)).exit_code == 0
    assert "10.213." not in "".join(path.read_text() for path in out.iterdir())
    result = kvops("trace", "--journal", str(out), "--slowest", "1", "--json")
    assert result.exit_code == 0, result.output
    (request,) = json.loads(result.output)
    assert [(span["who"], span["what"]) for span in request["spans"]] == [
        ("prefill-0", "queue"), ("prefill-0", "prefill"),
        ("decode-0", "queue"), ("decode-0", "wait for KV"), ("decode-0", "decode"),
    ]  # fmt: skip
    assert request["router"]["status"] == 200


def test_a_pod_cannot_write_outside_of_the_folder(cluster: Cluster, tmp_path: Path) -> None:
    cluster.give("pods", [pod("prefill-0", "prefill", **READY)])
    cluster.give_journal("prefill-0", "../../escaped.jsonl", b"{}\n")
    kvops("collect", "--kubernetes", "-o", str(tmp_path / "out"))
    assert [path.name for path in tmp_path.rglob("*escaped*")] == ["prefill-0.escaped.jsonl"]
    assert (tmp_path / "out" / "prefill-0.escaped.jsonl").exists()


def test_a_pod_that_cannot_be_read_does_not_lose_the_others(cluster: Cluster, tmp_path: Path) -> None:
    cluster.give("pods", [pod("decode-0", "decode"), pod("prefill-0", "prefill", **READY)])
    cluster.give_journal("prefill-0", "./prefill-0.dp0.jsonl", b"{}\n")
    result = kvops("collect", "--kubernetes", "-o", str(tmp_path / "out"))
    assert (result.exit_code, "decode-0 cannot be read: Error from server" in result.output) == (1, True)
    assert "1 lines in 1 files" in result.output


def test_a_folder_with_journals_is_not_added_to(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "old.jsonl").write_text("{}\n")
    cluster.give("pods", [pod("prefill-0", "prefill", **READY)])
    result = kvops("collect", "--kubernetes", "-o", str(tmp_path))
    assert (result.exit_code, "has journals already" in result.output) == (2, True)
    assert (tmp_path / "old.jsonl").read_text() == "{}\n"
