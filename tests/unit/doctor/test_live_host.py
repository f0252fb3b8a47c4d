"""Reading the machine itself: what is not there, not allowed, or does not answer is said and never waited for."""

from __future__ import annotations

import gzip
import os
import sys
from typing import TYPE_CHECKING

import pytest

from kvops.doctor import host as live
from kvops.doctor.aws import ask
from kvops.doctor.host import Gap, LiveHost, Output, Why
from kvops.errors import KvopsError

if TYPE_CHECKING:
    from pathlib import Path


def test_a_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "version").write_text("3.0.0g\n")
    assert LiveHost().read(str(tmp_path / "version")) == "3.0.0g\n"


def test_a_compressed_file_gives_its_text(tmp_path: Path) -> None:
    (tmp_path / "config.gz").write_bytes(gzip.compress(b"CONFIG_X=y\n"))
    assert LiveHost().read(str(tmp_path / "config.gz")) == "CONFIG_X=y\n"


def test_a_broken_compressed_file_is_unreadable(tmp_path: Path) -> None:
    (tmp_path / "config.gz").write_bytes(gzip.compress(b"CONFIG_X=y\n")[:-9])
    assert LiveHost().read(str(tmp_path / "config.gz")) == Gap(str(tmp_path / "config.gz"), Why.UNREADABLE)


def test_a_missing_file_is_absent(tmp_path: Path) -> None:
    path = str(tmp_path / "nothing")
    host = LiveHost()
    assert host.read(path) == host.listdir(path) == host.readlink(path) == Gap(path, Why.ABSENT)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    path = str(tmp_path / "pipe")
    os.mkfifo(path)
    assert LiveHost().read(path) == Gap(path, Why.UNREADABLE)


def test_a_long_file_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MAX_FILE_BYTES", 10)
    (tmp_path / "log").write_text("x" * 100)
    assert LiveHost().read(str(tmp_path / "log")) == "x" * 10


def test_a_command_gives_both_streams_and_its_status() -> None:
    code = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"
    assert LiveHost().run((sys.executable, "-c", code)) == Output(3, "out\n", "err\n")


def test_words_of_a_command_never_reach_a_shell() -> None:
    found = LiveHost().run((sys.executable, "-c", "import sys; print(sys.argv[1])", "$(id); true"))
    assert isinstance(found, Output)
    assert found.stdout == "$(id); true\n"


def test_a_command_that_does_not_exist_is_absent() -> None:
    assert LiveHost().run(("no-such-tool-of-ours", "-v")) == Gap("no-such-tool-of-ours -v", Why.ABSENT)


def test_a_command_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "COMMAND_TIMEOUT_SECONDS", 0.2)
    argv = (sys.executable, "-c", "import time; time.sleep(60)")
    assert LiveHost().run(argv) == Gap(" ".join(argv), Why.TIMED_OUT)


def test_a_command_runs_once(tmp_path: Path) -> None:
    code = f"open({str(tmp_path / 'runs')!r}, 'a').write('x')"
    host = LiveHost()
    for _ in range(3):
        host.run((sys.executable, "-c", code))
    host.prefetch([(sys.executable, "-c", code)])
    assert (tmp_path / "runs").read_text() == "x"


class TestAws:
    ID = "i-0123456789abcdef0"
    TOOL = """#!/bin/sh
echo "$@" >> {log}
case "$2" in
describe-instances) echo '{{"Reservations": [{{"Instances": [{{"InstanceType": "p5en.48xlarge",
  "SecurityGroups": [{{"GroupId": "sg-1"}}]}}]}}]}}' ;;
*) echo '{{}}' ;;
esac
"""

    def host(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LiveHost:
        tool = tmp_path / "aws"
        tool.write_text(self.TOOL.format(log=tmp_path / "calls"))
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        (tmp_path / "id").write_text(self.ID + "\n")
        monkeypatch.setattr("kvops.doctor.aws.ID_FILES", (str(tmp_path / "id"),))
        return LiveHost()

    def test_only_describe_calls_about_this_instance_are_made(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        host = self.host(tmp_path, monkeypatch)
        ask(host)
        calls = (tmp_path / "calls").read_text().splitlines()
        assert len(calls) == 4
        assert all(call.startswith("ec2 describe-") for call in calls)
        assert {argv[2] for argv in host.captured_commands()} == {
            "describe-instances",
            "describe-security-groups",
            "describe-network-interfaces",
            "describe-instance-types",
        }

    def test_a_refusal_is_one_sentence(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        host = self.host(tmp_path, monkeypatch)
        (tmp_path / "aws").write_text("#!/bin/sh\necho 'UnauthorizedOperation' >&2\nexit 254\n")
        with pytest.raises(KvopsError, match="UnauthorizedOperation"):
            ask(host)
