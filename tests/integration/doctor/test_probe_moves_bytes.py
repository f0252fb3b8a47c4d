"""The probe with real NIXL agents in real processes: bytes, corruption, and every way in which a side can end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

import kvops
from kvops.doctor.probe import child, run
from kvops.doctor.probe.errors import ProbeTroubleError
from kvops.doctor.probe.messages import Progress
from kvops.doctor.probe.report import Report
from kvops.errors import KvopsError

MIB = 2**20
PROBE = (sys.executable, "-m", "kvops.cli.main", "probe")
# How long a loaded machine may take; no test waits for it to pass.
PATIENCE_SECONDS = 240.0

pytestmark = pytest.mark.timeout(2 * PATIENCE_SECONDS)


def settings(**changes: object) -> run.Settings:
    base = {"backend": "UCX", "memory": "dram", "size_bytes": 16 * MIB, "repeat": 2, "devices": ()}
    return run.Settings(**(base | {"timeout_seconds": PATIENCE_SECONDS} | changes))


def show_nothing(step: Progress) -> None:
    pass


def sides_of(pid: int) -> dict[str, psutil.Process]:
    """The probe's processes below ``pid``, by role."""
    found = {}
    for process in psutil.Process(pid).children(recursive=True):
        try:
            arguments = process.cmdline()
        except psutil.NoSuchProcess:
            continue
        if "kvops.doctor.probe.side" in arguments:
            found[json.loads(arguments[-1])["role"]] = process
    return found


def wait_for_sides(pid: int, count: int) -> dict[str, psutil.Process]:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        sides = sides_of(pid)
        if len(sides) == count:
            return sides
        time.sleep(0.05)
    raise AssertionError(f"{count} sides did not start")


@pytest.fixture(autouse=True)
def nothing_is_left_behind():
    yield
    assert sides_of(os.getpid()) == {}


def test_a_gibibyte_goes_both_ways_and_every_byte_is_right() -> None:
    report = run.probe_pair(settings(size_bytes=1024 * MIB, repeat=1), show_nothing)
    assert {(each.operation, each.pattern, each.size_bytes, each.wrong_bytes) for each in report.runs} == {
        (operation, pattern, 1024 * MIB, 0)
        for operation in ("READ", "WRITE")
        for pattern in ("blocks", "merged", "buffer")
    }
    assert report.moved_bytes == 12 * 1024 * MIB
    assert report.verdict.headline == "moved and checked"


def test_the_report_names_the_way_the_plugins_and_the_descriptors_on_the_wire() -> None:
    report = run.probe_pair(settings(), show_nothing)
    assert report.evidence.route == "shared_memory"
    assert report.evidence.route_by == "log"
    assert [rail.transport for rail in report.evidence.rails] == ["cma"]
    assert "UCX" in report.me.plugins
    assert report.same_host
    on_wire = {each.pattern: (each.descriptors, each.wire_descriptors) for each in report.runs}
    assert on_wire == {"blocks": (512, 512), "merged": (512, 128), "buffer": (1, 1)}
    assert all(each.timed_by == "nixl telemetry" and each.p50_seconds <= each.p99_seconds for each in report.runs)


def test_tcp_is_seen_in_the_log_and_in_the_counters_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    report = run.probe_pair(settings(), show_nothing)
    assert report.evidence.route == "tcp"
    assert report.evidence.counters["net/lo/rx_bytes"] > report.moved_bytes


@pytest.mark.parametrize(("corrupted", "operation"), [("peer", "READ"), ("initiator", "WRITE")])
def test_one_wrong_byte_at_the_source_is_found_at_the_target(
    corrupted: str, operation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    side = tmp_path / "side_with_a_bad_source.py"
    side.write_text(
        "import json, sys\n"
        f"sys.path.insert(0, {str(Path(kvops.__file__).parents[1])!r})\n"
        "from kvops.doctor.probe import memory, side\n"
        "put = memory.HostBuffer.put\n"
        "def put_wrong(buffer, ids, pieces):\n"
        "    if 0 in ids:\n"
        "        pieces = pieces.copy()\n"
        "        pieces[list(ids).index(0), 1000] ^= 0x40\n"
        "    put(buffer, ids, pieces)\n"
        f"if json.loads(sys.argv[1])['role'] == {corrupted!r}:\n"
        "    memory.HostBuffer.put = put_wrong\n"
        "side.main(sys.argv[1])\n"
    )
    monkeypatch.setattr(child, "SIDE_COMMAND", (sys.executable, str(side)))
    report = run.probe_pair(settings(), show_nothing)
    assert {(each.operation, each.wrong_bytes) for each in report.runs if each.wrong_bytes} == {(operation, 1)}
    assert len([each for each in report.runs if each.wrong_bytes]) == 3
    assert report.verdict.state == "FAIL"
    assert "1 of 16777216 bytes arrived wrong" in report.verdict.headline


@pytest.mark.parametrize(("role", "name"), [("peer", "the peer"), ("initiator", "this side")])
def test_a_side_that_is_killed_in_the_middle_gives_one_sentence(role: str, name: str) -> None:
    def kill_in_the_middle(step: Progress) -> None:
        if step.done and (side := sides_of(os.getpid()).get(role)):
            side.kill()

    with pytest.raises(ProbeTroubleError) as caught:
        run.probe_pair(settings(size_bytes=64 * MIB, repeat=10_000), kill_in_the_middle)
    assert f"{name} was ended by SIGKILL, at READ blocks" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_side_that_hangs_is_ended_when_time_is_up() -> None:
    def stop_the_peer(step: Progress) -> None:
        if step.done:
            sides_of(os.getpid())["peer"].suspend()

    with pytest.raises(ProbeTroubleError, match=r"no end after 20 s, at "):
        run.probe_pair(settings(timeout_seconds=20.0, repeat=10_000), stop_the_peer)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_no_process_is_left_however_the_command_ends(number: signal.Signals) -> None:
    # What runs in the background of a shell is born deaf to SIGINT, and so would be its children.
    argv = ["env", "--default-signal=INT", *PROBE, "--bytes", "16MiB", "--repeat", "10000"]
    command = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    sides = wait_for_sides(command.pid, 2)
    command.send_signal(number)
    command.wait(PATIENCE_SECONDS)
    _, alive = psutil.wait_procs(sides.values(), PATIENCE_SECONDS)
    assert alive == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backend": "FOO"}, "NIXL has no plugin FOO here"),
        ({"memory": "vram", "devices": (7,)}, "CUDA|cuda"),
    ],
)
def test_what_cannot_be_done_here_is_one_sentence(changes: dict[str, object], message: str) -> None:
    with pytest.raises(KvopsError, match=message) as caught:
        run.probe_pair(settings(**changes), show_nothing)
    assert caught.value.exit_code == 2
    assert caught.value.fix


class Listening(threading.Thread):
    """``probe --listen`` in a thread of this process."""

    def __init__(self, **changes: object) -> None:
        super().__init__()
        self.listener = run.open_listener("127.0.0.1", 0)
        self.port = self.listener.getsockname()[1]
        self.settings = settings(**changes)
        self.result: Report | KvopsError | None = None

    def run(self) -> None:
        try:
            self.result = run.probe_listen(self.settings, self.listener, show_nothing)
        except KvopsError as error:
            self.result = error


def test_two_hosts_meet_at_a_port_and_both_sides_report() -> None:
    listening = Listening()
    listening.start()
    report = run.probe_connect(settings(), "127.0.0.1", listening.port, show_nothing)
    listening.join(PATIENCE_SECONDS)
    assert report.verdict.state == "PASS"
    assert isinstance(listening.result, Report)
    assert listening.result.moved_bytes == report.moved_bytes
    assert listening.result.checks == 6
    assert listening.result.verdict.state == "PASS"


def test_strangers_at_the_port_are_turned_away_and_the_probe_after_them_is_served() -> None:
    listening = Listening()
    listening.start()
    for greeting in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 5000, b""):
        with socket.create_connection(("127.0.0.1", listening.port)) as stranger, contextlib.suppress(OSError):
            stranger.sendall(greeting)
            stranger.shutdown(socket.SHUT_WR)
            assert stranger.recv(1) == b""
    report = run.probe_connect(settings(), "127.0.0.1", listening.port, show_nothing)
    listening.join(PATIENCE_SECONDS)
    assert report.verdict.state == "PASS"


def test_the_port_is_closed_once_a_probe_has_come() -> None:
    listening = Listening()
    listening.start()
    run.probe_connect(settings(), "127.0.0.1", listening.port, show_nothing)
    listening.join(PATIENCE_SECONDS)
    with pytest.raises(KvopsError, match="no probe answers at"):
        run.probe_connect(settings(), "127.0.0.1", listening.port, show_nothing)


def test_more_bytes_than_the_listener_gives_are_refused_on_both_sides() -> None:
    listening = Listening(size_bytes=4 * MIB)
    listening.start()
    with pytest.raises(KvopsError, match="the peer refused: the initiator asks for 16 MiB, this side gives at most 4"):
        run.probe_connect(settings(), "127.0.0.1", listening.port, show_nothing)
    listening.join(PATIENCE_SECONDS)
    assert isinstance(listening.result, KvopsError)


def test_a_listener_whose_initiator_dies_says_so_and_ends() -> None:
    listening = Listening(size_bytes=64 * MIB)
    listening.start()
    command = subprocess.Popen(
        [*PROBE, "--connect", f"127.0.0.1:{listening.port}", "--bytes", "64MiB", "--repeat", "10000"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    wait_for_sides(command.pid, 1)
    wait_for_sides(os.getpid(), 2)
    command.kill()
    command.wait()
    listening.join(PATIENCE_SECONDS)
    assert not listening.is_alive()
    assert isinstance(listening.result, ProbeTroubleError)
    assert "the peer went away" in str(listening.result)


def test_the_command_prints_json_alone_with_a_version() -> None:
    done = subprocess.run(
        [*PROBE, "--bytes", "4MiB", "--repeat", "1", "--json"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    assert done.stderr == ""
    report = json.loads(done.stdout)
    assert (report["v"], report["verdict"]["state"]) == (1, "PASS")


def test_the_command_fits_into_eighty_columns_when_piped() -> None:
    done = subprocess.run(
        [*PROBE, "--bytes", "4MiB", "--repeat", "1"],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"COLUMNS": "80"},
    )
    assert done.returncode == 0
    assert "PASS moved and checked" in done.stdout
    assert max(len(line.rstrip()) for line in done.stdout.splitlines()) <= 80
    assert "\x1b" not in done.stdout
