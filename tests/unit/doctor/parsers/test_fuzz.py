"""Whatever a tool prints, a parser returns or raises ParseError, and the doctor ends with a report."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING

import pytest
from doctor_cases import cluster, colocated, neuron_cluster, set_config
from doctor_hosts import p5en, trn2
from hypothesis import given
from hypothesis import strategies as st

from kvops.doctor.check import State
from kvops.doctor.facts import Facts
from kvops.doctor.parsers import (
    ParseError,
    cloud,
    fi_info,
    metrics,
    neuron,
    nixlbench,
    nvidia,
    packages,
    pci,
    proc,
    rdma,
    ucx,
    versions,
)
from kvops.doctor.run import run
from kvops.doctor.snapshot import SnapshotHost

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.heavy


def parse_names_of_distributions(text: str) -> object:
    return packages.parse_dist_infos(text.splitlines())


def total_of_failures(page: str) -> object:
    return metrics.total(page, "vllm:nixl_num_failed_transfers(?:_total)?")


PARSERS: tuple[Callable[[str], object], ...] = (
    versions.version,
    fi_info.parse_entries,
    fi_info.parse_version,
    fi_info.parse_variable_names,
    rdma.parse_ibv_devinfo,
    rdma.parse_statistics,
    pci.parse_lspci,
    pci.parse_redirecting_bridges,
    pci.full_address,
    pci.shows_acs,
    nixlbench.parse_nixlbench,
    nvidia.parse_driver,
    nvidia.parse_gpu_list,
    nvidia.parse_topology,
    neuron.parse_json,
    neuron.parse_table,
    ucx.parse_devices,
    ucx.parse_version,
    proc.parse_memlock_bytes,
    proc.parse_meminfo,
    proc.may_lock_any_memory,
    proc.parse_effective_uid,
    proc.parse_environ,
    proc.parse_cmdline,
    proc.parse_mapped_files,
    proc.parse_uname_release,
    proc.parse_kernel_options,
    proc.parse_df_size_bytes,
    proc.parse_modes,
    proc.kernel_version,
    packages.normal_name,
    packages.parse_pip_list,
    parse_names_of_distributions,
    packages.parse_os_packages,
    packages.parse_loader_cache,
    packages.parse_ldd,
    packages.parse_modinfo,
    packages.parse_dkms,
    packages.parse_installer_version,
    cloud.parse_object,
    total_of_failures,
)
WORDS = st.sampled_from(
    [
        "provider: efa",
        "hca_id:",
        "link a/1",
        "GPU0",
        "GPU1\tX",
        "NIC0",
        "|",
        "{",
        "[",
        '"name":',
        "NVRM version:",
        "# Memory domain:",
        "# Device:",
        "libfabric:",
        "efa, 1",
        "=>",
        "\t",
        "\n",
        "\0",
        "0000:00:00.0",
        "9" * 400,
        "9" * 5000,
        "null",
        "Max locked memory",
        "\x1b[4m",
        "é",
        "not found",
        "vllm:nixl_num_failed_transfers_total",
        "vllm-0.32.0.dist-info",
    ]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=20,
)
GARBAGE = st.text(max_size=200) | st.lists(WORDS, max_size=30).map(" ".join) | JSON.map(json.dumps)


@pytest.mark.parametrize(
    "parser", PARSERS, ids=lambda parser: f"{parser.__module__.rsplit('.', 1)[-1]}.{parser.__name__}"
)
@given(text=GARBAGE)
def test_a_parser_never_crashes(parser: Callable[[str], object], text: str) -> None:
    with contextlib.suppress(ParseError):
        parser(text)


def defects(members: dict[str, bytes]) -> list[str]:
    results = run(Facts(SnapshotHost(members))).results
    return [r.finding.message for r in results if r.state is State.UNKNOWN and "has a defect" in r.finding.message]


@pytest.mark.parametrize("build", [p5en, trn2])
@given(data=st.data())
def test_garbage_in_a_snapshot_is_never_a_crash(build: Callable, data: st.DataObject) -> None:
    members = build().members()
    for member in data.draw(st.lists(st.sampled_from(sorted(members)), min_size=1, max_size=12, unique=True)):
        members[member] = data.draw(st.binary(max_size=60) | GARBAGE.map(lambda text: text.encode("utf-8", "replace")))
    assert defects(members) == []


@pytest.mark.parametrize("build", [p5en, trn2])
@given(data=st.data())
def test_a_shortened_or_shuffled_member_is_never_a_crash(build: Callable, data: st.DataObject) -> None:
    members = build().members()
    for member in data.draw(st.lists(st.sampled_from(sorted(members)), min_size=1, max_size=12, unique=True)):
        text = members[member]
        cut = data.draw(st.integers(0, len(text)))
        members[member] = text[:cut] + data.draw(st.binary(max_size=4)) + text[cut:] * data.draw(st.integers(0, 2))
    assert defects(members) == []


@given(answer=JSON)
@pytest.mark.parametrize(
    "operation",
    ["describe-instances", "describe-security-groups", "describe-network-interfaces", "describe-instance-types"],
)
def test_any_json_of_aws_is_never_a_crash(operation: str, answer: object) -> None:
    keys = ("Reservations", "SecurityGroups", "NetworkInterfaces", "InstanceTypes")
    host = p5en().without("aws")
    host.command(f"aws ec2 {operation} --output json", json.dumps(dict.fromkeys(keys, answer)))
    assert defects(host.members()) == []


def nodes(value: object, path: tuple[object, ...] = ()) -> list[tuple[object, ...]]:
    """Return the path of every node in a JSON value but its root."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [inner for key, child in items for inner in [(*path, key), *nodes(child, (*path, key))]]


def with_replaced(value: object, path: tuple[object, ...], new: object) -> object:
    """Put another value at a path."""
    holder = value
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = new
    return value


@pytest.mark.parametrize("scene", [cluster, neuron_cluster, colocated], ids=lambda scene: scene.__name__)
@given(data=st.data())
def test_json_of_another_shape_is_never_a_crash(scene: Callable, data: st.DataObject) -> None:
    host = scene().host
    argvs = [argv for argv, (stdout, _, _) in host.commands.items() if stdout.startswith(('{"', "[{"))]
    for argv in data.draw(st.lists(st.sampled_from(argvs), min_size=1, max_size=3, unique=True)):
        value = json.loads(host.commands[argv][0])
        value = with_replaced(value, data.draw(st.sampled_from(nodes(value))), data.draw(JSON))
        host.commands[argv] = (json.dumps(value), "", 0)
    assert defects(host.members()) == []


@given(data=st.data())
def test_a_kv_configuration_of_another_shape_is_never_a_crash(data: st.DataObject) -> None:
    host = p5en()
    set_config(
        host,
        top=data.draw(
            st.dictionaries(
                st.sampled_from(
                    ["kv_connector", "kv_role", "kv_buffer_device", "kv_buffer_size", "kv_load_failure_policy"]
                ),
                JSON,
            )
        ),
        backends=data.draw(JSON),
    )
    assert defects(host.members()) == []
