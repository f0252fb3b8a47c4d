"""The pages: every query parses, every command is one that kvops has, and the command line shows them."""

from __future__ import annotations

import json
import shlex
import subprocess
from urllib.parse import parse_qs, urlsplit

import click
import pytest
import yaml
from click.testing import CliRunner

from kvops import runbooks
from kvops.cli.main import main
from kvops.router.admin import OPENAPI

HEADINGS = (
    "Meaning",
    "Impact",
    "Verification",
    "Diagnosis",
    "Mitigation",
    "False positives",
    "Data to collect",
    "Tune",
    "References",
)
TRANSFER = {"alertname": "KvopsTransferStuck", "severity": "page", "instance": "d1:8200", "model_name": 'a"b'}
PEER = {"alertname": "KvopsPeerErrors", "severity": "ticket", "model_name": "m", "peer": "p1:5600"}
UNKNOWN = {"alertname": "DiskFull", "severity": "page"}

OTHER_COMMANDS = {"df -h", "ps -eo psr,pcpu,args --sort=-pcpu", "ps -ww -eo pid,args"}


def asks_the_admin_api(words: list[str]) -> bool:
    """Return whether a curl command names a path, method and query that the router's admin API has."""
    url = urlsplit(words[-1])
    method = words[words.index("-X") + 1].lower() if "-X" in words else "get"
    operation = OPENAPI["paths"][url.path][method]
    wanted = {parameter["name"] for parameter in operation.get("parameters", [])}
    return words[:2] == ["curl", "-s"] and set(parse_qs(url.query)) == wanted


def run(*arguments: str, stdin: str | None = None):
    return CliRunner().invoke(main, ["runbook", *arguments], input=stdin)


def payload(*labels: dict[str, str]) -> str:
    return json.dumps({"version": "4", "alerts": [{"status": "firing", "labels": each} for each in labels]})


def promtool_accepts(queries: list[str], folder) -> None:
    group = {"name": "queries", "rules": [{"record": f"q{n}", "expr": query} for n, query in enumerate(queries)]}
    (folder / "queries.yaml").write_text(yaml.safe_dump({"groups": [group]}, width=1000))
    done = subprocess.run(
        ["promtool", "check", "rules", "--lint=none", "queries.yaml"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.system("promtool")
def test_every_query_of_every_page_parses(tmp_path):
    promtool_accepts([query for page in runbooks.pages().values() for query in page.code("promql")], tmp_path)


@pytest.mark.system("promtool")
def test_every_query_still_parses_with_the_labels_of_an_alert(tmp_path):
    filled = [runbooks.with_labels(page, TRANSFER | PEER) for page in runbooks.pages().values()]
    promtool_accepts([query for page in filled for query in page.code("promql")], tmp_path)


@pytest.mark.parametrize("name", runbooks.pages())
def test_every_command_of_a_page_is_one_that_kvops_parses(name):
    for block in runbooks.pages()[name].code("console"):
        for line in block.splitlines():
            assert line.startswith("$ ")
            words = shlex.split(line[2:])
            if words[0] != "kvops":
                assert line[2:] in OTHER_COMMANDS or asks_the_admin_api(words)
                continue
            with click.Context(main) as parent:
                verb = main.get_command(parent, words[1])
                assert verb is not None, line
                verb.make_context(words[1], words[2:], parent=parent)


@pytest.mark.parametrize("name", [name for name in runbooks.pages() if name.startswith("Kvops")])
def test_an_alerts_page_has_every_section_in_order(name):
    text = runbooks.pages()[name].text
    places = [text.index(f"\n## {heading}\n") for heading in HEADINGS]
    assert places == sorted(places)


def test_a_page_is_found_in_any_case_and_without_its_prefix():
    assert run("kvopstransferstuck").output == run("TransferStuck").output
    assert "# KvopsTransferStuck" in run("TransferStuck").output


def test_an_unknown_alert_gets_the_nearest_name():
    result = run("KvopsTransferStick")
    assert result.exit_code == 2
    assert "did you mean KvopsTransferStuck?" in result.output


def test_the_list_names_every_page():
    listed = [line.split("\t")[0] for line in run("--list").output.splitlines()]
    assert listed == list(runbooks.pages())


def test_a_search_puts_the_symptom_first():
    assert run("--search", "answers are garbled").output.startswith("KvopsReadAfterExpiry\t")


def test_a_search_without_result_exits_1():
    assert run("--search", "zebra").exit_code == 1


def test_alerts_come_most_severe_first_with_their_labels_in_the_query():
    output = run("--for-alert-json", "-", stdin=payload(PEER, TRANSFER)).output
    assert output.index("# KvopsTransferStuck") < output.index("# KvopsPeerErrors")
    assert r'kvops_oldest_inflight_transfer_age_seconds{instance="d1:8200",model_name="a\"b"}' in output


def test_the_diagnosis_is_not_narrowed_to_the_alerts_engine():
    page = runbooks.with_labels(runbooks.pages()["KvopsTransferStuck"], TRANSFER)
    assert "d1:8200" not in page.text.partition("## Diagnosis")[2]


def test_an_alert_without_a_page_is_named_and_the_others_are_shown():
    result = run("--for-alert-json", "-", stdin=payload(UNKNOWN, PEER))
    assert result.exit_code == 0
    assert "no runbook for 'DiskFull'" in result.stderr
    assert "# KvopsPeerErrors" in result.stdout


@pytest.mark.parametrize("broken", ["", "{", "[]", '{"alerts": 1}', '{"alerts": [{"labels": {"a": 1}}]}', "\x00"])
def test_a_broken_payload_is_a_sentence(broken):
    result = run("--for-alert-json", "-", stdin=broken)
    assert result.exit_code == 2
    assert "not Alertmanager's webhook payload" in result.output


def test_json_holds_the_queries_and_commands():
    (page,) = json.loads(run("KvopsTransferStuck", "--json").output)
    assert page["severity"] == "page"
    assert "kvops doctor" in page["commands"]
    assert len(page["queries"]) >= 4


def test_nothing_to_show_is_a_sentence():
    assert run().exit_code == 2
    assert run("KvopsTransferStuck", "--list").exit_code == 2
