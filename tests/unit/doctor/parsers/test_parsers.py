"""Each parser against the documented variants of its tool's output."""

from __future__ import annotations

import pytest

from kvops.doctor.parsers import ParseError, fi_info, neuron, nvidia, packages, pci, proc, rdma, ucx
from kvops.doctor.parsers.versions import at_least, version


class TestVersions:
    def test_an_aws_suffix_is_left_out(self) -> None:
        assert version("2.4.0amzn1.0") == (2, 4, 0)

    def test_a_gpudirect_suffix_is_left_out(self) -> None:
        assert version("3.0.0g") == (3, 0, 0)

    def test_missing_parts_count_as_zero(self) -> None:
        assert at_least((2, 4), (2, 4, 0))
        assert not at_least((2, 4), (2, 4, 1))

    def test_ten_is_more_than_nine(self) -> None:
        assert at_least(version("1.10"), version("1.9.9"))


class TestFiInfo:
    SHORT = (
        "provider: efa\n    fabric: efa-direct\n    domain: rdmap47s0-rdm\n    version: 206.0\n    type: FI_EP_RDM\n"
        "    protocol: FI_PROTO_EFA\nprovider: efa\n    fabric: efa\n    domain: rdmap47s0-dgrm\n"
        "    version: 206.0\n    type: FI_EP_DGRAM\n    protocol: FI_PROTO_EFA\n"
    )

    def test_entries_are_divided_by_their_provider_line(self) -> None:
        entries = fi_info.parse_entries(self.SHORT)
        assert [entry.domain for entry in entries] == ["rdmap47s0-rdm", "rdmap47s0-dgrm"]
        assert entries[0].fabric == "efa-direct"

    def test_layered_providers_of_old_releases_keep_their_name(self) -> None:
        text = "provider: efa;ofi_rxd\n    fabric: EFA-fe80::4b2:1ff:fe3c:9a01\n    domain: efa_0-dgrm\n"
        assert fi_info.parse_entries(text)[0].provider == "efa;ofi_rxd"

    def test_the_version_keeps_its_suffix(self) -> None:
        assert fi_info.parse_version("fi_info: 1.30\nlibfabric: 2.1.0amzn3.0\nlibfabric api: 2.1\n") == "2.1.0amzn3.0"

    def test_both_forms_of_variables_are_read(self) -> None:
        names = fi_info.parse_variable_names("# FI_EFA_IFACE: String\n# help\nFI_PROVIDER=efa\n")
        assert names == {"FI_EFA_IFACE", "FI_PROVIDER"}

    def test_other_text_is_refused(self) -> None:
        with pytest.raises(ParseError, match="provider"):
            fi_info.parse_entries("bash: fi_info: command not found\n")


class TestRdma:
    def test_devinfo_gives_the_fields_of_each_device(self) -> None:
        text = (
            "hca_id:\trdmap16s27\n\ttransport:\t\t\tunspecified (4)\n\tvendor_id:\t\t\t0x1d0f\n"
            "\tvendor_part_id:\t\t\t61344\n\thw_ver:\t\t\t\t0xEFA0\n\t\tport:\t1\n\t\t\tstate:\t\t\tPORT_ACTIVE (4)\n"
            "\t\t\tlink_layer:\t\tUnspecified\n"
        )
        device = rdma.parse_ibv_devinfo(text)["rdmap16s27"]
        assert device["vendor_part_id"] == "61344"
        assert device["link_layer"] == "Unspecified"

    def test_no_devices_is_an_answer(self) -> None:
        assert rdma.parse_ibv_devinfo("No IB devices found\n") == {}

    @pytest.mark.parametrize(
        "text",
        [
            "link rdmap0s31/1\n    tx_bytes 5\n    rdma_read_bytes 7\n",
            "link rdmap0s31/1 tx_bytes 5 rdma_read_bytes 7\n",
            '[{"ifname": "rdmap0s31", "port": 1, "tx_bytes": 5, "rdma_read_bytes": 7}]',
        ],
        ids=["pretty", "one-line", "json"],
    )
    def test_statistics_have_three_forms(self, text: str) -> None:
        assert rdma.parse_statistics(text) == {"rdmap0s31": {"tx_bytes": 5, "rdma_read_bytes": 7}}


class TestPci:
    @pytest.mark.parametrize(
        "line",
        [
            "0000:55:00.0 Ethernet controller [0200]: Amazon.com, Inc. Device [1d0f:efa2]",
            "55:00.0 Ethernet controller [0200]: Amazon.com, Inc. Elastic Fabric Adapter (EFA) [1d0f:efa2] (rev 01)",
            "55:00.0 0200: 1d0f:efa2",
        ],
        ids=["old-names", "new-names", "numbers"],
    )
    def test_a_device_is_known_by_its_numbers(self, line: str) -> None:
        assert pci.parse_lspci(line + "\n") == [pci.PciDevice("0000:55:00.0", "1d0f", "efa2", "0200")]

    def test_names_without_numbers_are_refused(self) -> None:
        with pytest.raises(ParseError, match="without -nn"):
            pci.parse_lspci("10:1b.0 Ethernet controller: Amazon.com, Inc. Device efa0\n")

    def test_an_address_gets_its_domain(self) -> None:
        assert pci.full_address("CC:00.0") == "0000:cc:00.0"


class TestNvidia:
    def test_the_open_module_is_told_from_the_proprietary(self) -> None:
        is_open = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n"
        closed = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024\n"
        assert nvidia.parse_driver(is_open) == nvidia.NvidiaDriver("580.95.05", is_open=True)
        assert nvidia.parse_driver(closed) == nvidia.NvidiaDriver("535.183.01", is_open=False)

    def test_nics_take_their_name_from_the_legend(self) -> None:
        text = (
            "\x1b[4m\tGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
            "GPU0\t X \tNV18\tPIX\t0-47\t0\t\tN/A\nGPU1\tNV18\t X \tSYS\t0-47\t0\t\tN/A\nNIC0\tPIX\tSYS\t X \n\n"
            "NIC Legend:\n\n  NIC0: rdmap79s0\n"
        )
        topology = nvidia.parse_topology(text)
        assert topology.gpus == ["GPU0", "GPU1"]
        assert topology.nics_of("GPU1") == {"rdmap79s0": "SYS"}

    def test_old_drivers_name_the_nics_in_the_header(self) -> None:
        text = "        GPU0    mlx5_0  CPU Affinity    NUMA Affinity\nGPU0     X      PXB     0-23    0\n"
        assert nvidia.parse_topology(text).nics_of("GPU0") == {"mlx5_0": "PXB"}

    def test_gpus_are_listed_without_their_uuid(self) -> None:
        assert nvidia.parse_gpu_list("GPU 0: NVIDIA H200 (UUID: GPU-1f)\n") == ["NVIDIA H200"]


class TestNeuron:
    def test_json_is_read(self) -> None:
        text = (
            '[{"neuron_device": 0, "bdf": "cc:00.0", "nc_count": 4, "connected_to": [12, 3], "neuron_processes": []}]'
        )
        assert neuron.parse_json(text) == [neuron.NeuronDevice(0, "cc:00.0", 4, (12, 3))]

    def test_the_current_table_is_read(self) -> None:
        text = (
            "logical-neuroncore-config: 2\n"
            "| 0      | 4      | 0-3      | 96 GB  | 12, 3, 4, 1   | 0000:cc:00.0 | 48-95,144-191 | 1    |\n"
        )
        assert neuron.parse_table(text) == [neuron.NeuronDevice(0, "0000:cc:00.0", 4, (12, 3, 4, 1), 2)]

    def test_the_old_table_is_read(self) -> None:
        text = "| 0 | 2 | 32 GB | 12, 3 | 10:1c.0 | 123 | python | 2.0.0 |\n|   |   |   |   |   | 124 | python | NA |\n"
        assert neuron.parse_table(text) == [neuron.NeuronDevice(0, "10:1c.0", 2, (12, 3))]


class TestUcx:
    TEXT = (
        "#\n# Memory domain: rdmap47s0\n#     Component: ib\n#             register: unlimited, dmabuf, cost: 16000\n"
        "#         memory types: host (access,reg,cache), cuda (access,reg,cache,dmabuf)\n#\n#      Transport: srd\n"
        "#         Device: rdmap47s0:1\n#           Type: network\n"
    )

    def test_a_domain_has_its_transports_and_memory(self) -> None:
        domain = ucx.parse_devices(self.TEXT)[0]
        assert domain.devices == (("srd", "rdmap47s0:1"),)
        assert domain.registers("cuda")
        assert not domain.registers("rocm")

    def test_memory_that_is_only_accessed_cannot_be_registered(self) -> None:
        text = "# Memory domain: tcp\n#         memory types: host (access,reg), cuda (access)\n"
        assert not ucx.parse_devices(text)[0].registers("cuda")

    def test_both_version_lines_are_read(self) -> None:
        assert ucx.parse_version("# Library version: 1.20.0\n") == "1.20.0"
        assert ucx.parse_version("# UCT version=1.12.1 revision 0000000\n") == "1.12.1"


class TestProc:
    def test_unlimited_memory_is_told_from_a_number(self) -> None:
        assert proc.parse_memlock_bytes("Max locked memory         unlimited            unlimited  bytes\n") == -1
        assert proc.parse_memlock_bytes("Max locked memory         65536                65536      bytes\n") == 65536

    def test_the_release_is_found_in_both_sources(self) -> None:
        uname = (
            "Linux node7 6.1.119-129.201.amzn2023.x86_64 #1 SMP PREEMPT_DYNAMIC Tue Dec 3 21:07:35 UTC 2024 x86_64\n"
        )
        assert proc.parse_uname_release(uname) == "6.1.119-129.201.amzn2023.x86_64"
        assert (
            proc.parse_uname_release("Linux version 5.15.0-1072-aws (buildd@bos03) (gcc (Ubuntu 11))")
            == "5.15.0-1072-aws"
        )

    def test_options_that_are_off_are_read(self) -> None:
        text = "CONFIG_INFINIBAND=m\n# CONFIG_PCI_P2PDMA is not set\n"
        assert proc.parse_kernel_options(text) == {"CONFIG_INFINIBAND": "m", "CONFIG_PCI_P2PDMA": "n"}


class TestPackages:
    @pytest.mark.parametrize(
        "text",
        [
            "Package Version\n------- -------\nnixl    1.5.1\nvllm    0.32.0\n",
            "nixl==1.5.1\nvllm==0.32.0\n",
            '[{"name": "nixl", "version": "1.5.1"}, {"name": "vllm", "version": "0.32.0"}]',
        ],
        ids=["columns", "freeze", "json"],
    )
    def test_pip_has_three_formats(self, text: str) -> None:
        assert packages.parse_pip_list(text) == {"nixl": "1.5.1", "vllm": "0.32.0"}

    def test_distribution_folders_give_versions(self) -> None:
        names = ["nixl_cu12-1.5.1.dist-info", "torch-2.9.0+cu128.dist-info", "torch", "six.py"]
        assert packages.parse_dist_infos(names) == {"nixl-cu12": "1.5.1", "torch": "2.9.0+cu128"}

    def test_ldd_says_what_is_missing(self) -> None:
        text = (
            "\tlinux-vdso.so.1 (0x00007ffe)\n\tlibefa.so.1 => not found\n\tlibc.so.6 => /lib64/libc.so.6 (0x00007f)\n"
        )
        assert packages.parse_ldd(text) == {"libefa.so.1": "", "libc.so.6": "/lib64/libc.so.6"}

    def test_both_forms_of_dkms_status_are_read(self) -> None:
        text = "efa/2.13.0: added\nefa, 1.16.0, 5.10.0, x86_64: installed\n"
        assert [state for _, state in packages.parse_dkms(text)] == ["added", "installed"]
