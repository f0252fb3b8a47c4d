"""Facts about a host, each collected once, whatever the number of checks that ask."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, product
from typing import TYPE_CHECKING, Any, TypeVar

from kvops.doctor import manifest
from kvops.doctor.engines import Engine, is_engine, is_worker
from kvops.doctor.host import Argv, Gap, Host, Output, Why
from kvops.doctor.instances import Instance, instances
from kvops.doctor.parsers import (
    ParseError,
    cloud,
    fi_info,
    neuron,
    nvidia,
    packages,
    pci,
    proc,
    rdma,
    ucx,
    whole_number,
)
from kvops.doctor.parsers.versions import Version, version

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")

AMAZON = "1d0f"
NVIDIA = "10de"
NEURON_IDS = ("7164", "7264", "7364", "7564", "7565")
VERBS_FOLDERS = (
    "/usr/lib/x86_64-linux-gnu/libibverbs",
    "/usr/lib/aarch64-linux-gnu/libibverbs",
    "/usr/lib64/libibverbs",
)
MAX_PROCESSES = 4096
# What these print depends on the files beside them, so that only the engines' own container can answer.
READS_LIBRARIES = {"fi_info", "ucx_info", "ldconfig", "ldd", "dpkg-query", "rpm"}
CONTAINER_MARKS = ("/.dockerenv", "/run/.containerenv")


class UnavailableError(Exception):
    """A fact has no evidence, or evidence that cannot be read; the check that asked is then unknown."""


class _UnreadableEnvironment(Mapping[str, str]):
    """The environment of an engine that may not be read: whoever asks for a variable has no evidence."""

    def __init__(self, gap: Gap) -> None:
        self._gap = gap

    def __getitem__(self, name: str) -> str:
        raise UnavailableError(str(self._gap))

    def __iter__(self) -> Iterator[str]:
        raise UnavailableError(str(self._gap))

    def __len__(self) -> int:
        raise UnavailableError(str(self._gap))


@dataclass(frozen=True, slots=True)
class RdmaDevice:
    """A device of the RDMA subsystem, its PCI vendor and address."""

    name: str
    vendor: str
    address: str

    @property
    def is_efa(self) -> bool:
        """Tell whether it is an EFA, by vendor and not by name."""
        return self.vendor == AMAZON


class Facts:
    """What is known about one host. Properties raise `UnavailableError` when the evidence is missing."""

    def __init__(
        self,
        host: Host,
        *,
        instance_type: str = "",
        planned: Sequence[Engine] = (),
        previous: Facts | None = None,
        peer: Facts | None = None,
        named: Mapping[int, str] | None = None,
    ) -> None:
        """Look at a host.

        Args:
            host: the live machine or a snapshot.
            instance_type: overrides what the machine says it is.
            planned: engines about to be started, looked at instead of those that run.
            previous: an earlier look at the same host, for counters that must not rise.
            peer: the decode side, when this is the prefill side of a pair.
            named: pids of the engines to look at, in order and with their names; without it every engine that runs.
        """
        self.host = host
        self.planned = tuple(planned)
        self.previous = previous
        self.peer = peer
        self.named = dict(named or {})
        self._instance_type = instance_type

    # Reading

    def text(self, path: str) -> str:
        """Return a file's text.

        Raises:
            UnavailableError: it is not there, or could not be read.
        """
        return _present(self.host.read(path))

    def optional(self, path: str) -> str | None:
        """Return a file's stripped text, None when it is known to be absent."""
        found = self.host.read(path)
        return None if _is_absent(found) else _present(found).strip()

    def names(self, path: str) -> tuple[str, ...]:
        """Return the names in a directory, none when it is known to be absent."""
        found = self.host.listdir(path)
        return () if _is_absent(found) else _present(found)

    def has(self, path: str) -> bool:
        """Tell whether a path exists, by the listing of its directory."""
        parent, name = posixpath.split(path)
        return name in self.names(parent)

    def output(self, argv: Argv) -> Output:
        """Return what a command printed.

        Raises:
            UnavailableError: it was not run, is not there, or looks at other libraries than the engines do.
        """
        if argv[0] in READS_LIBRARIES:
            self.require_shared_files()
        return _present(self.host.run(argv))

    def installed(self, argv: Argv) -> bool:
        """Tell whether a command is there at all."""
        return not _is_absent(self.host.run(argv))

    def parsed(self, argv: Argv, parser: Callable[[str], T]) -> T:
        """Return what a parser makes of a command's standard output.

        Raises:
            UnavailableError: no output, or not what the tool is documented to print.
        """
        output = self.output(argv)
        if output.exit and not output.stdout.strip():
            last_line = (output.stderr.strip() or "no output").splitlines()[-1]
            raise UnavailableError(f"{' '.join(argv)} failed: {last_line[:120]}")
        return read_as(parser, output.stdout, " ".join(argv))

    def require_shared_files(self) -> None:
        """Go on only where the engines see the files that we see.

        Raises:
            UnavailableError: an engine runs in a container, whose libraries and packages are its own.
        """
        own = self.host.readlink("/proc/self/ns/pid")
        for engine in () if self.planned else self.running_engines:
            theirs = self.host.readlink(f"/proc/{engine.pid}/ns/pid")
            if isinstance(own, str) and isinstance(theirs, str) and own != theirs:
                raise UnavailableError(
                    f"{engine.name} runs in a container: run kvops doctor inside it to see its files"
                )

    # The machine

    @cached_property
    def in_container(self) -> bool:
        """Tell whether this is a container, which may be given a part of the machine's devices on purpose."""
        if any(isinstance(self.host.read(mark), str) for mark in CONTAINER_MARKS):
            return True
        own = self.host.read("/proc/self/environ")
        return isinstance(own, str) and "KUBERNETES_SERVICE_HOST" in proc.parse_environ(own)

    @cached_property
    def instance_type(self) -> str:
        """Return the instance type, or whatever else DMI calls the product; empty where there is no DMI."""
        return self._instance_type or self.optional("/sys/devices/virtual/dmi/id/product_name") or ""

    @property
    def seconds_since_boot(self) -> float:
        """Return the uptime of the kernel."""
        first = self.text("/proc/uptime").partition(" ")[0]
        if not re.fullmatch(r"\d{1,12}(?:\.\d{1,4})?", first):
            raise UnavailableError(f"/proc/uptime holds {first[:40]!r}")
        return float(first)

    @cached_property
    def profile(self) -> Instance | None:
        """Return what to expect of this instance type; None when it is not in the table."""
        return instances().get(self.instance_type)

    @cached_property
    def kernel_release(self) -> str:
        """Return the running kernel's release."""
        found = self.host.read("/proc/version")
        if isinstance(found, Gap):
            return self.parsed(manifest.UNAME, proc.parse_uname_release)
        return read_as(proc.parse_uname_release, found, "/proc/version")

    @property
    def kernel(self) -> Version:
        """Return the running kernel's version."""
        return proc.kernel_version(self.kernel_release)

    @cached_property
    def page_size(self) -> int:
        """Return the page size in bytes."""
        text = self.output(manifest.PAGE_SIZE).stdout.strip()
        size = whole_number(text)
        if size is None:
            raise UnavailableError(f"getconf PAGESIZE printed {text[:40]!r}")
        return size

    @cached_property
    def kernel_options(self) -> dict[str, str]:
        """Return the kernel's build options."""
        found = self.host.read(f"/boot/config-{self.kernel_release}")
        return proc.parse_kernel_options(self.text("/proc/config.gz") if isinstance(found, Gap) else found)

    @cached_property
    def modules(self) -> tuple[str, ...]:
        """Return the names of loaded and built-in kernel modules."""
        return self.names("/sys/module")

    @cached_property
    def kernel_log(self) -> str:
        """Return the kernel log."""
        output = self.output(manifest.DMESG)
        if output.exit and not output.stdout:
            raise UnavailableError(f"dmesg failed: {output.stderr.strip()[:80]}")
        return output.stdout

    # PCI and RDMA devices

    @cached_property
    def pci_devices(self) -> list[pci.PciDevice]:
        """Return the PCI devices, from sysfs or, where that was not captured, from lspci."""
        found = self.host.listdir("/sys/bus/pci/devices")
        if isinstance(found, Gap) and found.why is not Why.ABSENT:
            if isinstance(self.host.run(manifest.LSPCI), Output):
                return self.parsed(manifest.LSPCI, pci.parse_lspci)
            raise UnavailableError(str(found))
        return [self._pci_device(address) for address in self.names("/sys/bus/pci/devices")]

    def host_bridge(self, address: str) -> str:
        """Return the host bridge (``pci0000:50``) that a PCI device is under.

        Raises:
            UnavailableError: sysfs does not show it.
        """
        link = _present(self.host.readlink(f"/sys/bus/pci/devices/{address}"))
        found = re.search(r"/(pci[0-9a-f]{4,8}:[0-9a-f]{2})/", link)
        if found is None:
            raise UnavailableError(f"/sys/bus/pci/devices/{address} -> {link[:80]}: no host bridge in it")
        return found[1]

    def _pci_device(self, address: str) -> pci.PciDevice:
        folder = f"/sys/bus/pci/devices/{address}/"
        ids = (self.text(folder + name).strip().removeprefix("0x") for name in ("vendor", "device", "class"))
        return pci.PciDevice(address, next(ids), next(ids), next(ids)[:4])

    @cached_property
    def efa_pci(self) -> list[pci.PciDevice]:
        """Return the EFA devices by PCI id: names depend on the age of pci.ids."""
        return [d for d in self.pci_devices if d.vendor == AMAZON and re.fullmatch("efa[0-9a-f]", d.device)]

    @cached_property
    def efa_generations(self) -> list[str]:
        """Return the PCI device ids of the EFAs; where the bus was not captured, as ``ibv_devinfo`` has them."""
        try:
            return sorted({device.device for device in self.efa_pci})
        except UnavailableError:
            devices = [fields for fields in self.verbs_devices.values() if fields.get("vendor_id") == f"0x{AMAZON}"]
        numbers = {whole_number(fields.get("vendor_part_id", "")) for fields in devices}
        return sorted(f"{number:x}" for number in numbers if number is not None)

    @cached_property
    def verbs_devices(self) -> dict[str, dict[str, str]]:
        """Return what ``ibv_devinfo`` says of each device."""
        return self.parsed(manifest.IBV_DEVINFO, rdma.parse_ibv_devinfo)

    @cached_property
    def gpu_pci(self) -> list[pci.PciDevice]:
        """Return the NVIDIA display and 3D controllers."""
        return [d for d in self.pci_devices if d.vendor == NVIDIA and d.pci_class.startswith("03")]

    @cached_property
    def neuron_pci(self) -> list[pci.PciDevice]:
        """Return the Neuron devices."""
        return [d for d in self.pci_devices if d.vendor == AMAZON and d.device in NEURON_IDS]

    @cached_property
    def rdma_devices(self) -> list[RdmaDevice]:
        """Return the devices under ``/sys/class/infiniband``, from ``ibv_devinfo`` where that was not captured."""
        if self._only_captured("/sys/class/infiniband", manifest.IBV_DEVINFO):
            vendors = {name: fields.get("vendor_id", "") for name, fields in self.verbs_devices.items()}
            return [RdmaDevice(name, vendor.removeprefix("0x"), "") for name, vendor in vendors.items()]
        devices = []
        for name in self.names("/sys/class/infiniband"):
            folder = f"/sys/class/infiniband/{name}/device"
            link = self.host.readlink(folder)
            address = "" if isinstance(link, Gap) else posixpath.basename(link)
            devices.append(RdmaDevice(name, self.text(folder + "/vendor").strip().removeprefix("0x"), address))
        return devices

    @cached_property
    def efa_rdma(self) -> list[RdmaDevice]:
        """Return the EFA devices that the RDMA subsystem shows."""
        return [device for device in self.rdma_devices if device.is_efa]

    def _only_captured(self, folder: str, argv: Argv) -> bool:
        """Tell whether a snapshot has a command's output and not the folder that says the same."""
        listing = self.host.listdir(folder)
        uncaptured = isinstance(listing, Gap) and listing.why is not Why.ABSENT
        return uncaptured and isinstance(self.host.run(argv), Output)

    def counters(self, device: str) -> dict[str, int]:
        """Return the hardware counters of an RDMA device and of its port."""
        if self._only_captured(f"/sys/class/infiniband/{device}/ports/1/hw_counters", manifest.RDMA_STATISTIC):
            return self.parsed(manifest.RDMA_STATISTIC, rdma.parse_statistics).get(device, {})
        values: dict[str, int] = {}
        for folder in ("hw_counters", "ports/1/hw_counters"):
            path = f"/sys/class/infiniband/{device}/{folder}"
            for name in self.names(path):
                count = whole_number(self.text(f"{path}/{name}").strip())
                if count is not None:
                    values[name] = count
        return values

    @cached_property
    def all_counters(self) -> dict[str, dict[str, int]]:
        """Return the counters of every EFA device."""
        return {device.name: self.counters(device.name) for device in self.efa_rdma}

    def total(self, counter: str) -> int:
        """Return one counter summed over all EFA devices."""
        return sum(values.get(counter, 0) for values in self.all_counters.values())

    @cached_property
    def efa_driver(self) -> str | None:
        """Return the EFA driver's version with its suffix; None when the module shows none."""
        return self.optional("/sys/module/efa/version")

    @cached_property
    def verbs_providers(self) -> list[str]:
        """Return the EFA provider libraries of libibverbs (``libefa-rdmav59.so``) in the folders that exist."""
        self.require_shared_files()
        found = [f"{folder}/{name}" for folder in VERBS_FOLDERS for name in self.names(folder)]
        return [path for path in found if re.search(r"/libefa-rdmav\d{1,4}\.so$", path)]

    # Userspace

    @cached_property
    def libfabric(self) -> str:
        """Return libfabric's version with its AWS suffix."""
        return self.parsed(manifest.FI_INFO_VERSION, fi_info.parse_version)

    @property
    def libfabric_version(self) -> Version:
        """Return libfabric's version."""
        return version(self.libfabric)

    @cached_property
    def efa_endpoints(self) -> list[fi_info.FiEntry]:
        """Return what libfabric's EFA provider offers, nothing when it answers with an error."""
        output = self.output(manifest.FI_INFO_EFA)
        return read_as(fi_info.parse_entries, output.stdout, "fi_info -p efa")

    @cached_property
    def loader(self) -> dict[str, list[str]]:
        """Return the paths of each shared library in the loader's cache."""
        return self.parsed(manifest.LDCONFIG, packages.parse_loader_cache)

    def libraries(self, prefix: str) -> list[str]:
        """Return the paths in the loader's cache of libraries whose name starts so."""
        return [path for name, paths in self.loader.items() if name.startswith(prefix) for path in paths]

    @cached_property
    def os_packages(self) -> dict[str, str]:
        """Return the versions of Debian or RPM packages."""
        self.require_shared_files()
        outputs = [self.host.run(argv) for argv in (manifest.DPKG, manifest.RPM)]
        texts = [output.stdout for output in outputs if isinstance(output, Output) and output.exit == 0]
        if not texts:
            raise UnavailableError("dpkg-query and rpm: neither has answered")
        return packages.parse_os_packages("\n".join(texts))

    @cached_property
    def rdma_core(self) -> Version:
        """Return the version of rdma-core, from the packages that carry it."""
        for name in ("rdma-core", "libibverbs", "libibverbs1", "libibverbs-core"):
            if name in self.os_packages:
                return version(self.os_packages[name])
        raise UnavailableError("no package rdma-core or libibverbs")

    @cached_property
    def python_packages(self) -> dict[str, str]:
        """Return the versions of Python distributions by normal name."""
        for argv in self.host.captured_commands():
            if argv[:2] in {("pip", "list"), ("pip", "freeze"), ("pip3", "list"), ("pip3", "freeze")}:
                return packages.parse_pip_list(self.output(argv).stdout)
        folders = self.site_packages
        if not folders:
            raise UnavailableError("pip list: not captured")
        found: dict[str, str] = {}
        for folder in folders:
            for name, number in packages.parse_dist_infos(self.names(folder)).items():
                found.setdefault(name, number)
        return found

    @cached_property
    def site_packages(self) -> tuple[str, ...]:
        """Return the site-packages directories of the engines' interpreters, else those of kvops itself."""
        if self.planned:
            return self.host.python_paths()
        self.require_shared_files()
        maps = [self.host.read(f"/proc/{engine.pid}/maps") for engine in self.running_engines]
        closed = [answer for answer in maps if isinstance(answer, Gap) and answer.why is Why.DENIED]
        if closed:
            raise UnavailableError(f"{closed[0]}: run as the engines' user to see their packages")
        found = [path for engine in self.running_engines for path in self.mapped_files(engine.pid)]
        folders = [re.match(r".*/(?:site|dist)-packages(?=/)", path) for path in found]
        return tuple(dict.fromkeys(match[0] for match in folders if match)) or self.host.python_paths()

    def mapped_files(self, pid: int | None) -> list[str]:
        """Return the files that a process has mapped; none for one that is gone or not ours."""
        found = self.host.read(f"/proc/{pid}/maps")
        return [] if isinstance(found, Gap) else proc.parse_mapped_files(found)

    @cached_property
    def plugin_folders(self) -> tuple[str, ...]:
        """Return the folders where NIXL looks for backends: its variable, else beside the wheel's libraries."""
        self.require_shared_files()
        named = [env["NIXL_PLUGIN_DIR"] for env in self.environments.values() if env.get("NIXL_PLUGIN_DIR")]
        if named:
            return tuple(dict.fromkeys(named))
        return tuple(
            f"{folder}/{name}/plugins"
            for folder in self.site_packages
            for name in self.names(folder)
            if re.fullmatch(r"\.nixl(?:_cu\d+)?\.mesonpy\.libs", name)
        )

    @cached_property
    def nixl_plugins(self) -> dict[str, str]:
        """Return the path of each NIXL backend plugin by backend name."""
        if not self.plugin_folders:
            raise UnavailableError("no NIXL plugin folder: neither NIXL_PLUGIN_DIR nor a NIXL wheel was found")
        found: dict[str, str] = {}
        for folder in self.plugin_folders:
            for name in self.names(folder):
                if plugin := re.fullmatch(r"libplugin_(\w+)\.so", name):
                    found.setdefault(plugin[1], f"{folder}/{name}")
        return found

    # Accelerators

    @cached_property
    def nvidia_driver(self) -> nvidia.NvidiaDriver | None:
        """Return the loaded NVIDIA driver, None when there is none."""
        text = self.optional("/proc/driver/nvidia/version")
        return None if text is None else read_as(nvidia.parse_driver, text, "/proc/driver/nvidia/version")

    @cached_property
    def neuron_devices(self) -> list[neuron.NeuronDevice]:
        """Return what neuron-ls shows, from its JSON or, where only that was captured, from its table."""
        if isinstance(self.host.run(manifest.NEURON_LS), Gap):
            return self.parsed(manifest.NEURON_LS_TABLE, neuron.parse_table)
        return self.parsed(manifest.NEURON_LS, neuron.parse_json)

    @cached_property
    def ucx_domains(self) -> list[ucx.MemoryDomain]:
        """Return UCX's memory domains."""
        return self.parsed(manifest.UCX_DEVICES, ucx.parse_devices)

    @cached_property
    def ucx_version(self) -> Version:
        """Return UCX's version."""
        return version(self.parsed(manifest.UCX_VERSION, ucx.parse_version))

    # Engines

    @cached_property
    def processes(self) -> dict[int, tuple[str, ...]]:
        """Return the command lines of the processes; those that end while we look are left out."""
        pids = [int(name) for name in self.names("/proc") if name.isdecimal() and len(name) < 10]
        found = {pid: self.host.read(f"/proc/{pid}/cmdline") for pid in pids[:MAX_PROCESSES]}
        for answer in found.values():
            if isinstance(answer, Gap) and answer.why is Why.NOT_CAPTURED:
                raise UnavailableError(str(answer))
        return {pid: proc.parse_cmdline(text) for pid, text in found.items() if isinstance(text, str)}

    @cached_property
    def running_engines(self) -> list[Engine]:
        """Return the vLLM servers that run here."""
        engines = []
        for pid, argv in self._engine_processes():
            name = self.named.get(pid, f"vLLM (pid {pid})")
            engines.append(Engine(name, argv, self._environment_of(pid), pid, self))
        return engines

    def _environment_of(self, pid: int) -> Mapping[str, str]:
        path = f"/proc/{pid}/environ"
        found = self.host.read(path)
        if isinstance(found, Gap):
            return _UnreadableEnvironment(found)
        # A process that sets its title writes it over its environment; no process starts without any variable.
        return proc.parse_environ(found) or _UnreadableEnvironment(Gap(path, Why.UNREADABLE))

    def _engine_processes(self) -> list[tuple[int, tuple[str, ...]]]:
        if self.named:
            return [(pid, self.processes[pid]) for pid in self.named if pid in self.processes]
        return [(pid, argv) for pid, argv in self.processes.items() if is_engine(argv)]

    @cached_property
    def engines(self) -> list[Engine]:
        """Return the planned engines, else those that run."""
        return list(self.planned) or self.running_engines

    @property
    def kv_engines(self) -> list[Engine]:
        """Return the engines that have a KV transfer configuration."""
        return [engine for engine in self.engines if engine.kv_config is not None]

    @cached_property
    def engine_pairs(self) -> list[tuple[Engine, Engine]]:
        """Return (prefill, decode) pairs: this host's with the peer's, else every two here that serve one model.

        A host may run several fleets, and nothing but the name that they serve tells them apart.
        """
        if self.peer is not None:
            return list(product(self.kv_engines, self.peer.kv_engines))
        pairs = combinations(self.kv_engines, 2)
        if self.named:
            return list(pairs)
        return [_prefill_first(a, b) for a, b in pairs if self.planned or a.served_name == b.served_name]

    @cached_property
    def environments(self) -> dict[str, dict[str, str]]:
        """Return the environments that count, by the name of their owner: the engines', else this process's."""
        engines = {engine.name: dict(engine.env) for engine in self.engines}
        return engines or {"environment": proc.parse_environ(self.text("/proc/self/environ"))}

    def network_of(self, engine: Engine) -> str:
        """Return what tells the network namespace of an engine from others; empty where that cannot be seen."""
        link = self.host.readlink(f"/proc/{engine.pid}/ns/net")
        return link if isinstance(link, str) else ""

    def process_status(self, pid: str) -> str:
        """Return ``/proc/<pid>/status``, empty where it cannot be read."""
        text = self.host.read(f"/proc/{pid}/status")
        return text if isinstance(text, str) else ""

    @cached_property
    def loaded_plugins(self) -> list[str]:
        """Return the backends whose NIXL plugin an engine's process has mapped; none while they start."""
        mapped = [path for pid in self.worker_pids for path in self.mapped_files(pid)]
        return sorted({found[1] for path in mapped if (found := re.search(r"libplugin_(\w+)\.so", path))})

    @cached_property
    def worker_pids(self) -> list[int]:
        """Return the processes in which NIXL lives: the engines' cores and workers, else the servers themselves."""
        workers = [pid for pid, argv in self.processes.items() if is_worker(argv)]
        return workers or [engine.pid for engine in self.running_engines if engine.pid is not None]

    @cached_property
    def engine_log(self) -> str:
        """Return what the engines wrote to files, and what ``kubectl logs`` captured.

        Raises:
            UnavailableError: no engine writes to a file that can be read, or the engines are not started yet.
        """
        if self.planned:
            raise UnavailableError("the engines are not started yet")
        paths = dict.fromkeys(path for engine in self.running_engines for path in self._log_paths(engine.pid))
        texts = [found for found in map(self.host.read, paths) if isinstance(found, str)]
        captured = [argv for argv in self.host.captured_commands() if argv[:2] == ("kubectl", "logs")]
        texts += [self.output(argv).stdout for argv in captured]
        if not texts:
            raise UnavailableError("no engine log: no running engine writes to a file")
        return "\n".join(texts)

    def _log_paths(self, pid: int | None) -> list[str]:
        links = [self.host.readlink(f"/proc/{pid}/fd/{number}") for number in (1, 2)]
        return [link for link in links if isinstance(link, str) and link.startswith("/") and link[:5] != "/dev/"]

    def metrics_page(self, engine: Engine) -> str:
        """Return an engine's Prometheus page.

        Raises:
            UnavailableError: it was not asked, or did not answer.
        """
        tail = f":{engine.number('--port', 8000)}/metrics"
        captured = [argv for argv in self.host.captured_commands() if argv[0] == "curl" and argv[-1].endswith(tail)]
        output = self.output(captured[0] if captured else manifest.metrics_command(tail))
        if output.exit:
            raise UnavailableError(f"{engine.name} does not answer on {tail}")
        return output.stdout

    # The cloud

    def aws(self, operation: str) -> dict[str, Any]:
        """Return what ``aws ec2 <operation>`` (or another service's) answered.

        Raises:
            UnavailableError: AWS was not asked.
        """
        for argv in self.host.captured_commands():
            if argv[0] == "aws" and operation in argv[2:3]:
                return self.parsed(argv, cloud.parse_object)
        raise UnavailableError(f"aws {operation}: AWS was not asked (--aws)")

    def kubectl(self, argv: Argv) -> list[dict[str, Any]]:
        """Return the objects of a ``kubectl get``."""
        output = self.output(argv)
        if output.exit:
            # kubectl prints an empty list beside "Forbidden": no right to look is not "there is none".
            raise UnavailableError(f"{' '.join(argv)} failed: {output.stderr.strip()[:120]}")
        return cloud.rows(self.parsed(argv, cloud.parse_object), "items")


def _prefill_first(a: Engine, b: Engine) -> tuple[Engine, Engine]:
    swapped = (a.kv_config or {}).get("kv_role") == "kv_consumer" or (b.kv_config or {}).get("kv_role") == "kv_producer"
    return (b, a) if swapped else (a, b)


def _is_absent(found: object) -> bool:
    return isinstance(found, Gap) and found.why is Why.ABSENT


def _present(found: T | Gap) -> T:
    if isinstance(found, Gap):
        raise UnavailableError(str(found))
    return found


def read_as(parser: Callable[[str], T], text: str, what: str) -> T:
    """Return what a parser makes of a text.

    Raises:
        UnavailableError: the parser does not understand it.
    """
    try:
        return parser(text)
    except ParseError as error:
        raise UnavailableError(f"{what}: {error}") from error
