"""What ``kvops probe`` takes, and how it says no."""

from __future__ import annotations

import pytest
from click.testing import CliRunner, Result

from kvops.cli.probe import command, parse_address, parse_devices, parse_size


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(command, list(arguments))


@pytest.mark.parametrize(
    ("text", "size"),
    [("268435456", 2**28), ("256MiB", 2**28), ("256m", 2**28), ("1g", 2**30), ("1 GB", 2**30), ("4KiB", 4096)],
)
def test_sizes_are_binary_whatever_the_unit_is_called(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("7777", ("127.0.0.1", 7777)),
        (":7777", ("127.0.0.1", 7777)),
        ("10.0.0.1:7777", ("10.0.0.1", 7777)),
        ("[::1]:7777", ("::1", 7777)),
        ("p5en-1.internal:0", ("p5en-1.internal", 0)),
    ],
)
def test_an_address_without_a_host_is_loopback(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text) == address


def test_devices_are_this_sides_and_the_peers() -> None:
    assert (parse_devices("3"), parse_devices("0,1")) == ((3,), (0, 1))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--bytes", "lots"), "'lots' is no size; write it like 256MiB or 1GiB"),
        (("--bytes", "0"), "'0' is no size"),
        (("--bytes", "65GiB"), "--bytes 69793218560 is more than the 64 GiB that a probe moves at once"),
        (("--listen", "host:70000"), "'host:70000' is no HOST:PORT"),
        (("--connect", "host"), "'host' is no HOST:PORT"),
        (("--devices", "0,1,2"), "'0,1,2' is no device list; write it like 0 or 0,1"),
        (("--memory", "disk"), "'disk' is not one of 'dram', 'vram'"),
        (("--repeat", "0"), "0 is not in the range"),
        (("--listen", "1", "--connect", "2"), "--listen and --connect exclude each other"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_status_2(arguments: tuple[str, ...], says: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert says in result.output
    assert "Traceback" not in result.output
