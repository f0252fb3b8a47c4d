"""Expectations per EC2 instance type, from ``instances.toml``."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Instance:
    """What one instance type should show; None where nothing is published. The data file describes the fields."""

    name: str
    gpus: int = 0
    neurons: int = 0
    efas: int = 0
    efa_gbps: int | None = None
    total_gbps: int | None = None
    efa_pci: str | None = None
    gpudirect: bool | None = None
    gpus_per_group: int | None = None
    efas_per_group: int | None = None
    pcie_gbytes: float | None = None
    foreign_rdma: int = 0
    page_size: int = 4096
    neuron_pci: str | None = None
    host_bridge_only: bool = False
    device_rdma: bool = True
    nvswitch: bool = False

    @property
    def needs_every_efa(self) -> bool:
        """Tell whether an EFA less is a fault: P and Trn types are launched for it, others are used with fewer."""
        return self.name.startswith(("p", "trn"))


@cache
def instances() -> dict[str, Instance]:
    """Return every known instance type by name."""
    text = files("kvops.doctor").joinpath("instances.toml").read_text("utf-8")
    return {name: Instance(name=name, **fields) for name, fields in tomllib.loads(text).items()}


class Line(NamedTuple):
    """The EFAs of one instance type: how many, GB/s of each, and how many are near one accelerator."""

    efas: int
    gb_per_second: float
    near_one_accelerator: int


def line_of(instance_type: str) -> Line | None:
    """Return what the EFAs of a type carry; None where they do not reach accelerators, or no rate is published.

    Where no topology is published, a type's EFAs count as shared evenly by its accelerators.
    """
    instance = instances().get(instance_type)
    if instance is None or not instance.gpudirect or instance.efa_gbps is None:
        return None
    near = instance.efas_per_group or max(1, instance.efas // (instance.gpus or instance.neurons))
    return Line(instance.efas, instance.efa_gbps / 8, near)
