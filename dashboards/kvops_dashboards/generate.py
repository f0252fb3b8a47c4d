"""The list of all dashboards, and their JSON: ``python -m kvops_dashboards.generate`` writes the committed copies."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from kvops_dashboards import bidirectional, fleet, push, request, router, stock, transfers

if TYPE_CHECKING:
    from kvops_dashboards.panels import Board

BOARDS: tuple[Board, ...] = (
    fleet.BOARD,
    transfers.BOARD,
    bidirectional.BOARD,
    push.BOARD,
    router.BOARD,
    request.BOARD,
    stock.BOARD,
)


def dashboard_json(board: Board) -> str:
    """Return the JSON of one dashboard, the same bytes every time."""
    return JSONEncoder(sort_keys=True, indent=2).encode(board.build()) + "\n"


def committed_json(board: Board) -> str:
    """Return the JSON that ships with the package, which needs no SDK to read."""
    return resources.files("kvops_dashboards").joinpath("json", f"{board.uid}.json").read_text()


def write_dashboards(folder: Path) -> list[Path]:
    """Write every dashboard to ``folder`` as ``<uid>.json`` and return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for board in BOARDS:
        file = folder / f"{board.uid}.json"
        file.write_text(dashboard_json(board))
        files.append(file)
    return files


if __name__ == "__main__":
    write_dashboards(Path(__file__).parent / "json")
