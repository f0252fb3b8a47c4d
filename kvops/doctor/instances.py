"""Expectations per EC2 instance type, from ``instances.toml``."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files


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
