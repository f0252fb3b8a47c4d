"""What leaves the machine: enough to find the same, and nothing that tells whose it is."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from doctor_cases import cluster, colocated
from doctor_hosts import HEALTHY, LOG, Fixture, p5en
from hypothesis import assume, given
from hypothesis import strategies as st

from kvops.doctor import manifest
from kvops.doctor.capture import capture, write
from kvops.doctor.facts import Facts
from kvops.doctor.redact import Redactor
from kvops.doctor.run import live_host, run
from kvops.doctor.snapshot import SnapshotHost, load
from kvops.errors import KvopsError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvops.doctor.host import Host


def states(host: Host) -> list[tuple[str, str]]:
    return [(result.check.id, result.state) for result in run(Facts(host)).results]


def recapture(host: Fixture) -> SnapshotHost:
    return SnapshotHost(capture(host.host()))


@pytest.mark.parametrize("name", HEALTHY)
def test_a_capture_gives_what_the_host_gave(name: str) -> None:
    assert states(recapture(HEALTHY[name]())) == states(HEALTHY[name]().host())


def test_a_capture_of_a_cluster_gives_what_the_host_gave() -> None:
    assert states(recapture(cluster().host)) == states(cluster().host.host())


def test_two_engines_of_a_host_are_captured() -> None:
    assert states(recapture(colocated().host)) == states(colocated().host.host())


def without_addresses(host: Host) -> list[str]:
    """Return every finding, with one word for whatever a capture hides of an engine that happens to run here."""
    address = r"<[a-z0-9]+-\d+>|\b\d{1,3}(?:\.\d{1,3}){3}\b"
    return [re.sub(address, "<address>", f"{result.check.id} {result.finding}") for result in run(Facts(host)).results]


def test_this_machine_read_back_gives_the_same_findings() -> None:
    live = live_host()
    before = without_addresses(live)
    assert without_addresses(SnapshotHost(capture(live))) == before


@pytest.fixture
def engine_here() -> Iterator[int]:
    """A process that looks like a vLLM server, with a secret on its command line and in its environment."""
    config = json.dumps({"kv_connector": "NixlConnector", "kv_role": "kv_both"})
    options = ["vllm.entrypoints.openai.api_server", "--kv-transfer-config", config, "--api-key", "planted-secret-1"]
    env = {**os.environ, "OPENAI_TOKEN": "planted-secret-2", "VLLM_NIXL_SIDE_CHANNEL_PORT": "45600"}
    process = subprocess.Popen([sys.executable, "-c", "input()", *options], env=env, stdin=subprocess.PIPE)
    yield process.pid
    process.kill()
    process.wait()
    assert process.stdin is not None
    process.stdin.close()


def test_a_running_engine_is_captured_without_its_secrets(engine_here: int) -> None:
    live = live_host()
    facts = Facts(live)
    before = {result.check.id: result.state for result in run(facts).results}
    members = capture(live)
    after = {result.check.id: result.state for result in run(Facts(SnapshotHost(members))).results}
    assert engine_here in {engine.pid for engine in facts.kv_engines}
    assert f"root/proc/{engine_here}/cmdline" in members
    assert after == before
    assert not any(b"planted-secret" in data for data in members.values())


SECRETS = {
    "key": ("api_key={}", st.from_regex(r"[A-Za-z0-9]{20,40}", fullmatch=True)),
    "token": ("HF_TOKEN: {}", st.from_regex(r"hf_[A-Za-z0-9]{30}", fullmatch=True)),
    "bearer": ("Authorization: Bearer {}", st.from_regex(r"[A-Za-z0-9]{24}", fullmatch=True)),
    "password": ("url postgres://user:{}@db/", st.from_regex(r"[A-Za-z0-9]{12,20}", fullmatch=True)),
    "access key": ("id {} used", st.from_regex(r"AKIA[A-Z0-9]{16}", fullmatch=True)),
    "address": (
        "peer {} port 1",
        st.ip_addresses(v=4).map(str).filter(lambda a: not a.startswith(("127.", "0.0.0.0"))),
    ),
    "gid": (
        "GID {}",
        st.from_regex(r"fe80::[1-9a-f][0-9a-f]{2}:[0-9a-f]{4}:fe[0-9a-f]{2}:[0-9a-f]{4}", fullmatch=True),
    ),
    "mac": ("ether {}", st.from_regex(r"0[26ae](:[0-9a-f]{2}){5}", fullmatch=True)),
    "guid": ("node_guid: {}", st.from_regex(r"[1-9a-f][0-9a-f]{3}(:[0-9a-f]{4}){3}", fullmatch=True)),
    "gpu serial": ("Serial Number : {}", st.from_regex(r"1[0-9]{12}", fullmatch=True)),
    "gpu uuid": ("GPU 0: H200 (UUID: {})", st.uuids().map(lambda value: f"GPU-{value}")),
    "account": ("arn:aws:iam::{}:role/x", st.from_regex(r"[1-9][0-9]{11}", fullmatch=True)),
    "instance": ("instance-id: {}", st.from_regex(r"i-0[0-9a-f]{16}", fullmatch=True)),
    "internal name": (
        "host {}",
        st.from_regex(r"ip-10-[0-9]{1,3}-[0-9]{1,3}-[0-9]{1,3}\.us-east-2\.compute\.internal", fullmatch=True),
    ),
}


@st.composite
def planted(draw: st.DrawFn) -> tuple[str, str]:
    """Return a secret, and the line in which it stands."""
    line, values = SECRETS[draw(st.sampled_from(sorted(SECRETS)))]
    value = draw(values)
    return value, line.format(value)


@pytest.mark.heavy
@given(secret=planted(), everywhere=st.sampled_from(["files", "commands", "links", "listings"]))
def test_a_planted_secret_is_gone_from_every_place(secret: tuple[str, str], everywhere: str) -> None:
    value, line = secret
    host = cluster().host
    if everywhere == "files":
        host.files = {path: f"{text.rstrip()}\n{line}\n" for path, text in host.files.items()}
        host.env(MY_SETTING=line, NCCL_NOTE=line)
    elif everywhere == "commands":
        host.commands = {
            argv: (f"{out}\n{line}\n", f"{err}\n{line}\n", code) for argv, (out, err, code) in host.commands.items()
        }
    elif everywhere == "links":
        host.links = {path: f"{target} {line}" for path, target in host.links.items()}
    else:
        assume("://" not in line)  # no name of a file can hold an address of that form
        for names in host.listings.values():
            names.append(line.replace("/", "_"))
    members = capture(host.host())
    leaks = [name for name, data in members.items() if value.encode() in data or value in name]
    assert leaks == []


def everything_of_the_manifest(line: str) -> Fixture:
    """A host on which every path and every command of the manifest says the same line; names cannot hold a URL."""
    host = p5en()
    name = "x" if "://" in line else line.replace("/", "_")
    for pattern in manifest.PATHS:
        path = pattern.removesuffix("->").rstrip("/").replace("*", "x0")
        if pattern.endswith("/"):
            host.listing(path, name)
        elif pattern.endswith("->"):
            host.link(path, line)
        else:
            host.file(path, f"{line}\n")
        for place, _ in enumerate(pattern.split("/")):
            if pattern.split("/")[place].startswith("*"):
                host.listing("/".join(path.split("/")[:place]), "x0")
    for argv in (*manifest.COMMANDS, *manifest.FOR_PEOPLE, manifest.GDRCOPY_SANITY):
        host.commands[argv] = (f"efa nvidia vllm:nixl_x {line}\n", f"{line}\n", 0)
    return host


@pytest.mark.heavy
@given(secret=planted())
def test_a_planted_secret_is_gone_from_every_place_of_the_manifest(secret: tuple[str, str]) -> None:
    value, line = secret
    members = capture(everything_of_the_manifest(line).host())
    captured = {" ".join(entry["argv"]) for entry in json.loads(members["commands/index.json"])}
    assert {" ".join(argv) for argv in (*manifest.COMMANDS, *manifest.FOR_PEOPLE)} <= captured
    leaks = [name for name, data in members.items() if value.encode() in data or value in name]
    assert leaks == []


def test_every_path_of_the_manifest_is_captured() -> None:
    members = capture(everything_of_the_manifest("x").host())
    for pattern in manifest.PATHS:
        path = pattern.removesuffix("->").rstrip("/").replace("*", "x0")
        suffix = "/.listing" if pattern.endswith("/") else ".link" if pattern.endswith("->") else ""
        assert f"root{path}{suffix}" in members, pattern


def test_other_peoples_processes_on_a_gpu_stay_on_the_machine() -> None:
    text = (
        "    Product Name                          : NVIDIA H200\n    Serial Number                         : 1650123456789\n"
        "    Processes\n        Process ID                        : 77\n            Type                          : C\n"
        "            Name                          : /home/alice/secret-project/train.py\n"
    )
    data = capture(p5en().command("nvidia-smi -q", text).host())
    said = b"".join(data.values())
    assert b"NVIDIA H200" in said
    assert b"secret-project" not in said
    assert b"1650123456789" not in said


@pytest.mark.heavy
@given(secret=planted())
def test_a_secret_on_the_command_line_of_an_engine_is_gone(secret: tuple[str, str]) -> None:
    value, line = secret
    host = p5en()
    path = "/proc/4242/cmdline"
    host.file(path, host.files[path] + f"--api-key\0{value}\0--note\0{line}\0--served-token={value}\0")
    assert not any(value.encode() in data for data in capture(host.host()).values())


def test_the_hosts_own_name_is_gone() -> None:
    host = p5en().file("/proc/sys/kernel/hostname", "blueberry7\n").command("uname -a", "Linux blueberry7 6.1.119 #1\n")
    host.file("/proc/version", "Linux version 6.1.119 (root@blueberry7)\n").log(
        "engine on blueberry7.lab: NIXL ready\n"
    )
    assert not any(b"blueberry7" in data for data in capture(host.host()).values())


def test_prompts_in_the_engines_log_stay_on_the_machine() -> None:
    host = p5en()
    host.log(
        host.files[LOG] + "INFO Received request cmpl-1: prompt: 'my NIXL secret plan', params\nINFO other words\n"
    )
    text = capture(host.host())[f"root{LOG}"].decode()
    assert "secret plan" not in text
    assert "other words" not in text
    assert "provider=efa" in text


def test_other_processes_and_their_environment_stay_on_the_machine() -> None:
    host = p5en()
    host.listings["/proc"].append("77")
    host.file("/proc/77/cmdline", "backup\0--target\0customer-database\0")
    members = capture(host.host())
    assert not any(b"customer-database" in data for data in members.values())
    assert b"77" not in members["root/proc/.listing"].split()


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("libibverbs.so.1.14.59.0", "1.14.59.0"),
        ("version:        2.30.2.0", "2.30.2.0"),
        ("rdma_read_bytes 123456789012", "123456789012"),
        ('"memory_size": 103079215104', "103079215104"),
        ("0000:55:00.0 Ethernet controller", "0000:55:00.0"),
        ("VLLM_NIXL_SIDE_CHANNEL_HOST=127.0.0.1", "127.0.0.1"),
        ("std::string at 12:30:05", "std::string at 12:30:05"),
        ("--max-num-batched-tokens 8192", "8192"),
        ("--tokenizer Qwen/Qwen3-32B", "Qwen/Qwen3-32B"),
    ],
)
def test_what_checks_need_is_kept(text: str, kept: str) -> None:
    assert kept in Redactor("node7").text(text)


def test_equal_values_stay_equal() -> None:
    redactor = Redactor("")
    assert redactor.text("10.0.1.17 10.0.1.18") == "<ip-1> <ip-2>"
    assert redactor.text("10.0.1.18") == "<ip-2>"


class TestWriting:
    def test_the_file_is_for_its_owner_only(self, tmp_path: Path) -> None:
        path = tmp_path / "node7.tar.gz"
        write({"meta.json": b"{}"}, path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert load(path).meta == {}

    def test_an_existing_file_is_never_overwritten(self, tmp_path: Path) -> None:
        path = tmp_path / "node7.tar.gz"
        path.write_text("mine")
        with pytest.raises(KvopsError, match="exists"):
            write({"meta.json": b"{}"}, path)
        assert path.read_text() == "mine"

    def test_another_ending_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(KvopsError, match=r"\.tar\.gz"):
            write({}, tmp_path / "node7.zip")

    def test_a_folder_that_is_not_there_is_one_sentence(self, tmp_path: Path) -> None:
        with pytest.raises(KvopsError, match="cannot write"):
            write({}, tmp_path / "no" / "node7.tar.gz")
