"""A snapshot is hostile until read, and tells absence from lack of evidence."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from typing import TYPE_CHECKING

import pytest
from doctor_hosts import Fixture, p5en
from hypothesis import given
from hypothesis import strategies as st

from kvops.doctor import snapshot
from kvops.doctor.capture import write
from kvops.doctor.facts import Facts
from kvops.doctor.host import Gap, Output, Why
from kvops.doctor.run import run
from kvops.doctor.snapshot import SnapshotHost, load
from kvops.errors import KvopsError

if TYPE_CHECKING:
    from pathlib import Path


def unpack(members: dict[str, bytes], folder: Path) -> Path:
    for name, data in members.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    return folder


def archive(path: Path, *entries: tarfile.TarInfo, data: bytes = b"") -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for entry in entries:
            tar.addfile(entry, io.BytesIO(data[: entry.size]) if entry.isreg() else None)
    return path


def entry(name: str, kind: bytes = tarfile.REGTYPE, size: int = 0, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.size, info.linkname = kind, size, target
    return info


def findings(host: SnapshotHost) -> list[object]:
    return [result.finding for result in run(Facts(host)).results]


class TestLayouts:
    def test_a_folder_gives_what_its_archive_gives(self, tmp_path: Path) -> None:
        members = p5en().members()
        folder = unpack(members, tmp_path / "node7")
        write(members, tmp_path / "node7.tar.gz")
        assert findings(load(folder)) == findings(load(tmp_path / "node7.tar.gz")) == findings(p5en().host())

    def test_an_archive_of_the_folder_itself_is_read(self, tmp_path: Path) -> None:
        unpack(p5en().members(), tmp_path / "node7")
        with tarfile.open(tmp_path / "x.tar.gz", "w:gz") as tar:
            tar.add(tmp_path / "node7", arcname="node7")
        assert findings(load(tmp_path / "x.tar.gz")) == findings(p5en().host())

    @pytest.mark.system("zstd")
    def test_zstd_is_read(self, tmp_path: Path) -> None:
        write(p5en().members(), tmp_path / "node7.tar.zst")
        assert findings(load(tmp_path / "node7.tar.zst")) == findings(p5en().host())

    def test_one_hand_written_file_is_a_snapshot(self, tmp_path: Path) -> None:
        unpack({"root/sys/devices/virtual/dmi/id/product_name": b"p5en.48xlarge\n"}, tmp_path)
        assert Facts(load(tmp_path)).instance_type == "p5en.48xlarge"

    def test_a_command_is_found_whatever_folder_it_ran_from(self) -> None:
        index = json.dumps([{"argv": ["/opt/amazon/efa/bin/fi_info", "--version"], "stdout": "00.out"}]).encode()
        host = SnapshotHost({"commands/index.json": index, "commands/00.out": b"libfabric: 2.4.0\n"})
        assert host.run(("fi_info", "--version")) == Output(0, "libfabric: 2.4.0\n", "")


class TestAbsence:
    def test_what_nothing_speaks_of_was_not_captured(self) -> None:
        assert SnapshotHost({}).read("/sys/module/efa/version") == Gap("/sys/module/efa/version", Why.NOT_CAPTURED)

    def test_a_listing_proves_absence_of_everything_below(self) -> None:
        host = Fixture().listing("/sys/module", "nvidia").host()
        assert host.read("/sys/module/efa/version") == Gap("/sys/module/efa/version", Why.ABSENT)
        assert host.read("/sys/module/nvidia/version") == Gap("/sys/module/nvidia/version", Why.NOT_CAPTURED)

    def test_an_absent_folder_makes_its_files_absent(self) -> None:
        host = Fixture().absent("/sys/class/infiniband").host()
        assert host.read("/sys/class/infiniband/x/node_guid") == Gap("/sys/class/infiniband/x/node_guid", Why.ABSENT)

    def test_meta_says_why(self) -> None:
        gaps = [{"argv": ["dmesg"], "why": "denied"}, {"path": "/proc/1/limits", "why": "timed_out"}]
        host = SnapshotHost({"meta.json": json.dumps({"not_captured": gaps}).encode()})
        assert host.run(("dmesg",)) == Gap("dmesg", Why.DENIED)
        assert host.read("/proc/1/limits") == Gap("/proc/1/limits", Why.TIMED_OUT)

    def test_a_command_whose_output_is_missing_was_not_captured(self) -> None:
        host = SnapshotHost({"commands/index.json": b'[{"argv": ["dmesg"], "stdout": "00.out"}]'})
        assert host.run(("dmesg",)) == Gap("dmesg", Why.NOT_CAPTURED)
        assert "missing" in host.problems[0]


class TestHostileSnapshots:
    def test_a_path_out_of_the_archive_is_refused(self, tmp_path: Path) -> None:
        for name in ("../etc/passwd", "root/../../etc/passwd", "/etc/passwd"):
            path = archive(tmp_path / "x.tar.gz", entry(name))
            with pytest.raises(KvopsError, match="outside of itself"):
                load(path)

    def test_a_link_is_text_and_never_followed(self, tmp_path: Path) -> None:
        secret = tmp_path / "secret"
        secret.write_text("private")
        folder = tmp_path / "snapshot"
        (folder / "root/etc").mkdir(parents=True)
        (folder / "root/etc/passwd").symlink_to(secret)
        (folder / "root/var").symlink_to(tmp_path)
        host = load(folder)
        assert host.read("/etc/passwd") == Gap("/etc/passwd", Why.NOT_CAPTURED)
        assert host.readlink("/etc/passwd") == str(secret)
        assert host.read("/var/secret") == Gap("/var/secret", Why.NOT_CAPTURED)

    def test_links_in_an_archive_are_text_too(self, tmp_path: Path) -> None:
        link = entry("root/etc/passwd", tarfile.SYMTYPE, target="/etc/passwd")
        hard = entry("root/etc/shadow", tarfile.LNKTYPE, target="/etc/shadow")
        host = load(archive(tmp_path / "x.tar.gz", link, hard, entry("meta.json", size=2), data=b"{}"))
        assert host.readlink("/etc/passwd") == "/etc/passwd"
        assert isinstance(host.read("/etc/passwd"), Gap)
        assert isinstance(host.read("/etc/shadow"), Gap)

    def test_devices_and_pipes_are_passed_over(self, tmp_path: Path) -> None:
        path = archive(
            tmp_path / "x.tar.gz", entry("root/dev/pipe", tarfile.FIFOTYPE), entry("meta.json", size=2), data=b"{}"
        )
        assert isinstance(load(path).read("/dev/pipe"), Gap)

    def test_a_member_that_is_too_large_is_refused_unread(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(snapshot, "MAX_MEMBER_BYTES", 1000)
        path = archive(tmp_path / "x.tar.gz", entry("root/big", size=1001), data=bytes(1001))
        with pytest.raises(KvopsError, match="1001 bytes"):
            load(path)

    def test_too_many_members_are_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(snapshot, "MAX_MEMBERS", 3)
        path = archive(tmp_path / "x.tar.gz", *(entry(f"root/{number}") for number in range(4)))
        with pytest.raises(KvopsError, match="larger than 3 members"):
            load(path)

    def test_a_bomb_is_stopped_while_it_unpacks(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(snapshot, "MAX_TOTAL_BYTES", 1 << 20)
        monkeypatch.setattr(snapshot, "MAX_MEMBERS", 10)
        header = tarfile.TarInfo("pax")
        header.type, header.size = tarfile.XHDTYPE, 64 << 20
        path = tmp_path / "bomb.tar.gz"
        path.write_bytes(gzip.compress(header.tobuf() + bytes(64 << 20)))
        with pytest.raises(KvopsError, match="unpacks to more"):
            load(path)

    @pytest.mark.parametrize("data", [b"", b"not an archive", b"\x1f\x8b\x08garbage", b"\x28\xb5\x2f\xfdgarbage"])
    def test_a_broken_archive_is_one_sentence(self, tmp_path: Path, data: bytes) -> None:
        path = tmp_path / "x.tar.gz"
        path.write_bytes(data)
        with pytest.raises(KvopsError, match=r"x\.tar\.gz"):
            load(path)

    def test_no_file_is_one_sentence(self, tmp_path: Path) -> None:
        with pytest.raises(KvopsError, match="cannot read the snapshot"):
            load(tmp_path / "nothing.tar.gz")

    def test_a_folder_that_is_no_snapshot_is_refused(self, tmp_path: Path) -> None:
        unpack({"a/b": b"", "c": b""}, tmp_path)
        with pytest.raises(KvopsError, match="holds no snapshot"):
            load(tmp_path)

    @given(cut=st.integers(0, 4000), noise=st.binary(max_size=20))
    def test_a_damaged_archive_is_never_a_traceback(
        self, tmp_path_factory: pytest.TempPathFactory, cut: int, noise: bytes
    ) -> None:
        path = tmp_path_factory.mktemp("damaged") / "x.tar.gz"
        write(Fixture().file("/proc/version", "Linux version 6.1.0").host()._members, path)
        data = path.read_bytes()
        path.write_bytes(data[:cut] + noise + data[cut + 1 :])
        try:
            host = load(path)
        except KvopsError:
            return
        run(Facts(host))

    @pytest.mark.parametrize("text", [b"[", b"7", b"[1]", b'[{"argv": []}]', b'[{"argv": "dmesg"}]', b"\xff"])
    def test_a_broken_index_is_reported_and_leaves_no_commands(self, text: bytes) -> None:
        host = SnapshotHost({"commands/index.json": text})
        assert host.problems
        assert isinstance(host.run(("dmesg",)), Gap)
