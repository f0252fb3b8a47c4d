"""Where the rules come from: short keys for documents, ``repo#number`` for public issues."""

from __future__ import annotations

_EC2 = "https://docs.aws.amazon.com/AWSEC2/latest/UserGuide"
_NIXL = "https://github.com/ai-dynamo/nixl/blob/main"
_EFA_DRIVER = "https://github.com/amzn/amzn-drivers/blob/master/kernel/linux/efa"
_LIBFABRIC = "https://github.com/ofiwg/libfabric"
_OFI_NCCL = "https://github.com/aws/aws-ofi-nccl"
_UCX = "https://github.com/openucx/ucx"
_NEURON = "https://awsdocs-neuron.readthedocs-hosted.com/en/latest"
_AWSOME = "https://github.com/awslabs/awsome-distributed-ai"

DOCUMENTS = {
    "A-AWS": f"{_AWSOME}/tree/main/4.validation_and_observability/2.gpu-cluster-healthcheck",
    "A-DLC": "https://github.com/aws/deep-learning-containers/tree/master/test/efa/scripts",
    "A-EKSEFA": "https://github.com/aws-samples/aws-efa-eks",
    "A-NVS": "https://github.com/NVIDIA/NVSentinel/pull/1750",
    "ANYSCALE": "https://github.com/anyscale/ray-serve-llm-perf-examples",
    "AWSOME-CHEAT": f"{_AWSOME}/blob/main/1.architectures/efa-cheatsheet.md",
    "DRV-CONF": f"{_EFA_DRIVER}/conf",
    "DRV-MAIN": f"{_EFA_DRIVER}/src/efa_main.c",
    "DRV-P2P": f"{_EFA_DRIVER}/src/efa_p2p.c",
    "DRV-RN": f"{_EFA_DRIVER}/RELEASENOTES.md",
    "DRV-SYSFS": f"{_EFA_DRIVER}/src/efa_sysfs.c",
    "DRV-VERBS": f"{_EFA_DRIVER}/src/efa_verbs.c",
    "DYN-EFA": "https://github.com/ai-dynamo/dynamo/blob/main/docs/kubernetes/cloud-providers/eks/efa.md",
    "EC2-ACC": f"{_EC2}/efa-acc-inst-types.html",
    "EC2-API": "https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_EfaInfo.html",
    "EC2-BW": f"{_EC2}/ec2-instance-network-bandwidth.html",
    "EC2-CHG": f"{_EC2}/efa-changelog.html",
    "EC2-CREATE": f"{_EC2}/create-efa.html",
    "EC2-MON": f"{_EC2}/efa-working-monitor.html",
    "EFA-KCONFIG": "https://git.zx2c4.com/linux-dev/plain/drivers/infiniband/hw/efa/Kconfig",
    "EKS-DRA": "https://docs.aws.amazon.com/eks/latest/userguide/device-management-efa.html",
    "EKS-HP": "https://docs.aws.amazon.com/eks/latest/userguide/ml-hugepages.html",
    "FIEFA": "https://ofiwg.github.io/libfabric/main/man/fi_efa.7.html",
    "K8S-DEBUG": "https://kubernetes.io/docs/tasks/debug/debug-application/debug-pods/",
    "K8S-HP": "https://kubernetes.io/docs/tasks/manage-hugepages/scheduling-hugepages",
    "LF-ENV": f"{_LIBFABRIC}/blob/main/prov/efa/src/efa_env.c",
    "LF-HELP": f"{_LIBFABRIC}/tree/main/prov/efa",
    "LF-HMEM": f"{_LIBFABRIC}/blob/main/prov/efa/src/efa_hmem.c",
    "LF-INFO": f"{_LIBFABRIC}/blob/main/util/info.c",
    "LF-NEURON": f"{_LIBFABRIC}/blob/main/src/hmem_neuron.c",
    "LF-NEWS": f"{_LIBFABRIC}/blob/main/NEWS.md",
    "LF-OVERVIEW": f"{_LIBFABRIC}/blob/main/prov/efa/docs/overview.md",
    "LF-PR10402": f"{_LIBFABRIC}/pull/10402",
    "LF-PR11530": f"{_LIBFABRIC}/pull/11530",
    "LF-PR12251": f"{_LIBFABRIC}/pull/12251",
    "MOONCAKE-EFA": "https://github.com/kvcache-ai/Mooncake",
    "NCCL-TS": "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html",
    "NEU-DOCKER": f"{_NEURON}/deploy/environments/docker-setup.html",
    "NEU-DRVSHARED": f"{_NEURON}/neuron-runtime/api/neuron_driver_shared.html",
    "NEU-FAQ": f"{_NEURON}/deploy/faq.html",
    "NEU-LS": f"{_NEURON}/tools/neuron-sys-tools/neuron-ls.html",
    "NEU-RN": f"{_NEURON}/release-notes/components/runtime.html",
    "NEU-TRN1": f"{_NEURON}/frameworks/torch/torch-neuronx/setup-trn1-multi-node-execution.html",
    "NEU-TS": f"{_NEURON}/neuron-runtime/nrt-troubleshoot.html",
    "NIXL-AGENT": f"{_NIXL}/src/core/nixl_agent.cpp",
    "NIXL-AWSEFA": f"{_NIXL}/contrib/aws-efa/README.md",
    "NIXL-HWINFO": f"{_NIXL}/src/utils/common/hw_info.cpp",
    "NIXL-LF": "https://github.com/ai-dynamo/nixl/tree/main/src/plugins/libfabric",
    "NIXL-LFC": f"{_NIXL}/src/utils/libfabric/libfabric_common.cpp",
    "NIXL-LOG": f"{_NIXL}/src/utils/common/nixl_log.cpp",
    "NIXL-PLUGIN": f"{_NIXL}/src/core/nixl_plugin_manager.cpp",
    "NIXL-README": f"{_NIXL}/src/plugins/libfabric/README.md",
    "NIXL-TOPO": "https://github.com/ai-dynamo/nixl/tree/main/test/unit/utils/libfabric/topo",
    "NIXL-TOPOCPP": f"{_NIXL}/src/utils/libfabric/libfabric_topology.cpp",
    "NIXL-UCX": "https://github.com/ai-dynamo/nixl/tree/main/src/plugins/ucx",
    "NIXLBENCH": "https://github.com/ai-dynamo/nixl/tree/main/benchmark/nixlbench",
    "NV-GDR13": "https://docs.nvidia.com/cuda/archive/13.4.1/gpudirect-rdma/contents.html",
    "NV-GPUOP": "https://docs.nvidia.com/datacenter/cloud-native/gpu-operator/latest/gpu-operator-rdma.html",
    "NV-XID": "https://docs.nvidia.com/deploy/xid-errors/",
    "NV-VM": "https://docs.nvidia.com/ai-enterprise/planning-resource/optimizing-vm-configuration-ai-inference/latest/appendix.html",
    "OFI-PLAT": f"{_OFI_NCCL}/blob/master/src/platform-aws.cpp",
    "OFI-PR861": f"{_OFI_NCCL}/pull/861",
    "OFI-SRC": _OFI_NCCL,
    "OFI-TOPO": f"{_OFI_NCCL}/tree/master/topology",
    "PCLUSTER-EFA": "https://docs.aws.amazon.com/parallelcluster/latest/ug/efa-v3.html",
    "PCS-PG": "https://docs.aws.amazon.com/pcs/latest/userguide/working-with_networking_efa_create-placement-group.html",
    "PERFTEST-README": "https://github.com/linux-rdma/perftest",
    "UCX-ALIAS": f"{_UCX}/blob/master/src/ucp/core/ucp_context.c",
    "UCX-EFAMD": f"{_UCX}/blob/master/src/uct/ib/efa/base/ib_efa_md.c",
    "UCX-NEWS": f"{_UCX}/blob/master/NEWS",
    "UCX-TLINFO": f"{_UCX}/blob/master/src/tools/info/tl_info.c",
    "VLLM-COMPAT": "https://docs.vllm.ai/en/latest/features/nixl_connector_compatibility.html",
    "VLLM-META": "https://github.com/vllm-project/vllm/blob/main/vllm/distributed/kv_transfer/kv_connector/v1/nixl/metadata.py",
    "VLLM-NEURON": "https://github.com/vllm-project/vllm-neuron/blob/main/docs/design/vllm/disaggregated-inference.md",
    "VLLM-NIXL": "https://docs.vllm.ai/en/latest/features/nixl_connector_usage.html",
}

REPOSITORIES = {
    "DeepEP": "deepseek-ai/DeepEP",
    "InferenceX": "SemiAnalysisAI/InferenceX",
    "Mooncake": "kvcache-ai/Mooncake",
    "amzn-drivers": "amzn/amzn-drivers",
    "aws-do-eks": "aws-samples/aws-do-eks",
    "aws-efa-eks": "aws-samples/aws-efa-eks",
    "aws-ofi-nccl": "aws/aws-ofi-nccl",
    "awsome": "awslabs/awsome-distributed-ai",
    "bottlerocket-core-kit": "bottlerocket-os/bottlerocket-core-kit",
    "dynamo": "ai-dynamo/dynamo",
    "eks-ami": "awslabs/amazon-eks-ami",
    "eks-charts": "aws/eks-charts",
    "eksctl": "eksctl-io/eksctl",
    "gdrcopy": "NVIDIA/gdrcopy",
    "gvisor": "google/gvisor",
    "libfabric": "ofiwg/libfabric",
    "modelexpress": "ai-dynamo/modelexpress",
    "nccl": "NVIDIA/nccl",
    "nixl": "ai-dynamo/nixl",
    "node_exporter": "prometheus/node_exporter",
    "nvcf": "NVIDIA/nvcf",
    "nvogkm": "NVIDIA/open-gpu-kernel-modules",
    "pcluster": "aws/aws-parallelcluster",
    "perftest": "linux-rdma/perftest",
    "ray": "ray-project/ray",
    "rdma-core": "linux-rdma/rdma-core",
    "talos-pkgs": "siderolabs/pkgs",
    "uccl": "uccl-project/uccl",
    "ucx": "openucx/ucx",
    "vllm": "vllm-project/vllm",
}

HOUSE_RULE = "house rule"
"""The source of a threshold that is kvops' own proposal."""


def url(key: str) -> str:
    """Return the address of a source, or the key itself for a house rule.

    Raises:
        KeyError: the key is in neither table.
    """
    if key == HOUSE_RULE:
        return key
    if "#" in key:
        name, _, number = key.partition("#")
        return f"https://github.com/{REPOSITORIES[name]}/issues/{number}"
    return DOCUMENTS[key]
