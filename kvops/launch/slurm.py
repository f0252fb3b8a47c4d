"""The fleet as one Slurm batch script: a step an engine, the router on the first node.

Sources: sbatch(1) for ``--signal=B:TERM@seconds`` and ``--exclusive``, srun(1) for ``--overlap`` and how it forwards
signals to its step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvops import tiny_model
from kvops.errors import KvopsError
from kvops.launch.engine_script import ENGINE_PORT, MASTER_PORT, ROUTER_PORT, SIDE_CHANNEL_PORT, part
from kvops.launch.plan import engine_arguments
from kvops.launch.shell import command, quote, wrapped

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvops.topology import Topology


def render(topology: Topology) -> dict[str, str]:
    """Return the batch script by its file name; the same topology gives the same bytes.

    Raises:
        KvopsError: the fleet's model is written at start, which several nodes cannot share.
    """
    if topology.model == tiny_model.MODEL_NAME:
        raise KvopsError(
            f"model {topology.model} is no folder that all nodes see", "write it to a shared folder and name that"
        )
    body = part("fleet.sh")
    parts = {
        "#HEADER": "\n".join(_header(topology)),
        "#SETTINGS": f"PYTHON={quote(topology.slurm.python)}\nRUN={quote(topology.slurm.run_folder)}/$SLURM_JOB_ID",
        "#ENGINES": "\n\n".join(_engine_function(topology, role) for role in ("prefill", "decode")),
        "#STEPS": "\n".join(_steps(topology)),
        "#ROUTER": _router(topology),
    }
    for mark, text in parts.items():
        body = body.replace(mark, text)
    return {"kvops.sbatch": body}


def nodes(topology: Topology) -> int:
    """Return how many nodes the job takes: one for each engine, or as many as the engine spans."""
    return sum(group.replicas * group.nodes for _, group in topology.groups())


def _header(topology: Topology) -> Iterator[str]:
    settings = topology.slurm
    yield "#SBATCH --job-name=kvops"
    yield f"#SBATCH --nodes={nodes(topology)}"
    yield "#SBATCH --ntasks-per-node=1"
    yield "#SBATCH --exclusive"
    yield f"#SBATCH --time={settings.time_limit}"
    yield f"#SBATCH --signal=B:TERM@{settings.drain_seconds}"
    if settings.partition:
        yield f"#SBATCH --partition={settings.partition}"
    if settings.account:
        yield f"#SBATCH --account={settings.account}"


def _engine_function(topology: Topology, role: str) -> str:
    """Return the shell function that becomes an engine of one role on the node where it is called."""
    group = dict(topology.groups())[role]
    arguments = engine_arguments(
        topology, role, host="0.0.0.0", port=ENGINE_PORT, name="$POD_NAME", engine_id="$ENGINE_ID",  # noqa: S104
        journal="$JOURNAL",
    )  # fmt: skip
    env = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(SIDE_CHANNEL_PORT)} | topology.transport.env | group.env
    lines = [f"{role}() {{", *(f"  export {key}={quote(value)}" for key, value in env.items())]
    if group.nodes == 1:
        start = ["-m", "vllm.entrypoints.openai.api_server", "--model", topology.model]
        words = command([*start, *arguments])
    else:
        start = ["-m", "vllm.entrypoints.cli.main", "serve", topology.model, "--nnodes", str(group.nodes)]
        start += ["--node-rank", "$SLURM_NODEID", "--master-addr", "$MASTER", "--master-port", str(MASTER_PORT)]
        lines += ["  local headless=()", '  [ "$SLURM_NODEID" = 0 ] || headless=(--headless)']
        words = command([*start, *arguments], last='"${headless[@]}"')
    return "\n".join([*lines, '  exec "$PYTHON" ' + wrapped(words, "    "), "}"])


def _steps(topology: Topology) -> Iterator[str]:
    first = 0
    for role, group in topology.groups():
        for index in range(group.replicas):
            yield f"engine {role} {role}-{index} {first} {group.nodes}"
            first += group.nodes


def _router(topology: Topology) -> str:
    argv = ["--mode", topology.mode.value, "--host", topology.router.host]
    argv += ["--port", str(topology.router.port or ROUTER_PORT), "--decoder-ttl", str(topology.kv.decoder_ttl)]
    if topology.router.api_key_file:
        argv += ["--api-key-file", str(topology.router.api_key_file)]
    first, urls = 0, []
    for role, group in topology.groups():
        ranks = f"#0-{group.data_parallel - 1}" if group.data_parallel > 1 else ""
        for _ in range(group.replicas):
            urls.append(f'--{role} "http://${{ADDRESSES[{first}]}}:{ENGINE_PORT}{ranks}"')
            first += group.nodes
    return wrapped(
        ['"$PYTHON" -m kvops.cli.main router', *urls, *command([*argv]), '--journal "$JOURNAL/router.jsonl"']
    )
