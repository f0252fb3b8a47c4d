"""The shell script that becomes an engine in a pod or container, and the ports that all launchers use there."""

from __future__ import annotations

from importlib import resources
from typing import TYPE_CHECKING

from kvops import tiny_model
from kvops.launch.plan import engine_arguments
from kvops.launch.shell import command, quote, wrapped

if TYPE_CHECKING:
    from kvops.topology import Topology

# Every engine has an address of its own, so that all may listen on the same ports.
ROUTER_PORT, ENGINE_PORT, SIDE_CHANNEL_PORT, MASTER_PORT = 8000, 8100, 5600, 29501


def part(name: str) -> str:
    """Return the text of one of the scripts that lie beside this module."""
    return resources.files("kvops.launch").joinpath("scripts", name).read_text()


def start_script(topology: Topology, role: str, *, before: str = "") -> str:
    """Return the script that starts one engine; ``$ENGINE_ID`` differs after every restart.

    Args:
        topology: the fleet.
        role: prefill or decode.
        before: commands to run first, where an engine takes one node.
    """
    group = dict(topology.groups())[role]
    arguments = engine_arguments(
        topology, role, host="0.0.0.0", port=ENGINE_PORT, name="$POD_NAME", engine_id="$ENGINE_ID",  # noqa: S104
        journal="/journal",
    )  # fmt: skip
    model = "/cache/kvops-tiny" if topology.model == tiny_model.MODEL_NAME else topology.model
    if group.nodes == 1:
        start = ["python3", "-m", "vllm.entrypoints.openai.api_server", "--model", model]
        head = part("engine.sh") + before
        if topology.model == tiny_model.MODEL_NAME:
            write = (
                f'from pathlib import Path; from kvops.tiny_model import ensure_model; ensure_model(Path("{model}"))'
            )
            head += f"python3 -c {quote(write)}\n"
        return head + "exec " + wrapped(command([*start, *arguments])) + "\n"
    start = ["python3", "-m", "vllm.entrypoints.cli.main", "serve", model, "--nnodes", str(group.nodes)]
    start += ["--node-rank", "$LWS_WORKER_INDEX", "--master-addr", "$LWS_LEADER_ADDRESS"]
    start += ["--master-port", str(MASTER_PORT), "--distributed-executor-backend", "mp"]
    return part("engine_group.sh") + wrapped(command([*start, *arguments], last='"$@"')) + "\n"
