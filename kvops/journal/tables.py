"""Journals as tables: whole files at once, for figures over millions of lines.

``kvops trace`` follows single requests line by line (``reading``); here a columnar engine reads the same files with
only the columns that figures need, in bounded memory.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb
import numpy as np

from kvops.errors import KvopsError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

VERSION = 1
_MEMORY_LIMIT = "500MB"
_COLUMNS = {
    "kind": "VARCHAR",
    "v": "BIGINT",
    "ts": "DOUBLE",
    "engine": "STRUCT(name VARCHAR, role VARCHAR)",
    "request": "STRUCT(base_id VARCHAR, conversation VARCHAR, turn BIGINT)",
    "mode": "VARCHAR",
    "tokens": "STRUCT(prompt BIGINT, local_hit BIGINT, remote BIGINT, recomputed MAP(VARCHAR, BIGINT), offered BIGINT,"
    " generated BIGINT)",
    "times": "STRUCT(arrived DOUBLE, allocated DOUBLE, loaded DOUBLE, finished DOUBLE)",
    "outcome": "VARCHAR",
    "direction": "VARCHAR",
    "transfer": "STRUCT(bytes BIGINT, descriptors BIGINT, transfers BIGINT, queue_seconds DOUBLE,"
    " handshake_seconds DOUBLE, post_seconds DOUBLE, wire_seconds DOUBLE, wait_seconds DOUBLE)",
    "hold": "STRUCT(holder VARCHAR, blocks BIGINT, ttl_granted_seconds DOUBLE, held_seconds DOUBLE, ended_by VARCHAR)",
    "client_id": "VARCHAR",
    "legs": "STRUCT(id VARCHAR, started_at DOUBLE)[]",
    "conversation": "VARCHAR",
    "turn": "BIGINT",
    "first_byte_at": "DOUBLE",
    "ended_at": "DOUBLE",
}
# What vLLM makes of the X-Request-Id of a leg: chatcmpl-<id>, cmpl-<id>-<prompt>, <choice>_cmpl-<id>-<prompt>.
_LEG = r"regexp_replace(request.base_id, '^(?:\d+_)?(?:chatcmpl|cmpl|generate-tokens)-(.+?)(?:-\d+)?$', '\1')"
_TABLES = {
    # A line without its time, or whose engine is unknown, belongs nowhere: it counts as unreadable.
    "requests": f"""
        SELECT {_LEG} AS leg, engine.name AS engine, engine.role AS role, request.conversation AS conversation,
               request.turn AS turn, mode, direction, outcome, tokens.prompt AS prompt, tokens.local_hit AS local_hit,
               tokens.remote AS remote, tokens.recomputed AS recomputed, tokens.offered AS offered,
               tokens.generated AS generated, times.arrived AS arrived, times.allocated AS allocated,
               times.loaded AS loaded, times.finished AS finished, transfer.bytes AS bytes,
               transfer.descriptors AS descriptors, transfer.transfers AS transfers,
               transfer.handshake_seconds AS handshake, transfer.post_seconds AS post, transfer.wire_seconds AS wire,
               hold.blocks AS hold_blocks
        FROM lines WHERE kind = 'request' AND times.arrived IS NOT NULL""",
    "holds": f"""
        SELECT {_LEG} AS leg, ts, engine.name AS engine, hold.holder AS holder, hold.blocks AS blocks,
               hold.ttl_granted_seconds AS granted, hold.held_seconds AS held, hold.ended_by AS ended_by, mode,
               transfer.bytes AS bytes, transfer.descriptors AS descriptors, transfer.transfers AS transfers,
               transfer.handshake_seconds AS handshake, transfer.post_seconds AS post, transfer.wire_seconds AS wire
        FROM lines WHERE kind = 'hold' AND ts IS NOT NULL""",
    "routed": """
        SELECT row_number() OVER () AS id, client_id, list_transform(legs, lambda leg: leg.id) AS legs,
               conversation, turn, mode,
               outcome,
               list_min(list_transform(legs, lambda leg: leg.started_at)) AS started, first_byte_at, ended_at,
               NULL::VARCHAR AS cell
        FROM lines WHERE kind = 'router' AND ts IS NOT NULL""",
}


class Journal:
    """The lines of some journals in three tables: ``requests``, ``holds`` and ``routed``.

    Attributes:
        unreadable: lines that were no line of a journal, such as the torn last one of an engine that was killed.
        unknown_version: lines of a schema that this kvops does not know; they are left out.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        """Read ``files``, plain or compressed (``.gz``); current and rotated ones alike.

        Raises:
            KvopsError: a file cannot be read as text or is a broken archive.
        """
        self._db = duckdb.connect(
            config={
                "memory_limit": _MEMORY_LIMIT,
                # By default what does not fit into memory goes to a folder in the working directory.
                "temp_directory": str(Path(tempfile.gettempdir(), f"kvops-journal-{os.getpid()}")),
                "preserve_insertion_order": False,
                "autoinstall_known_extensions": False,
            }
        )
        try:
            self._load(files)
        except duckdb.Error as error:
            raise KvopsError(
                f"cannot read the journals: {str(error).splitlines()[0]}", "leave the named file out, or repair it"
            ) from None

    def _load(self, files: Sequence[Path]) -> None:
        columns = ", ".join(f"{name}: '{kind}'" for name, kind in _COLUMNS.items())
        parts = []
        # By kind of compression: a rotated file is called x.jsonl.1 and a compressed one x.jsonl.1.gz.
        for compression in ("gzip", "none"):
            names = [_literal(path) for path in files if (path.suffix == ".gz") == (compression == "gzip")]
            if names:
                parts.append(
                    f"SELECT * FROM read_json([{', '.join(names)}], columns = {{{columns}}},"
                    f" format = 'newline_delimited', ignore_errors = true, compression = '{compression}')"
                )
        self._db.execute(f"CREATE TEMP TABLE lines AS {' UNION ALL '.join(parts)}")
        known = f"coalesce(v, {VERSION}) = {VERSION}"
        self.unknown_version = int(self.one(f"SELECT count(*) FROM lines WHERE kind IS NOT NULL AND NOT {known}"))
        total = int(self.one("SELECT count(*) FROM lines")) - self.unknown_version
        self._db.execute(f"DELETE FROM lines WHERE NOT {known}")
        for name, query in _TABLES.items():
            self._db.execute(f"CREATE TEMP TABLE {name} AS {query}")
        self._db.execute("DROP TABLE lines")
        self.unreadable = total - sum(int(self.one(f"SELECT count(*) FROM {name}")) for name in _TABLES)

    def keep(self, cells: Mapping[str, str]) -> bool:
        """Keep only the lines of some requests; False, and all is kept, if none of theirs is known.

        Legs of a run may share their engines, so that each one's journals hold the other's requests, and warm-ups.

        Args:
            cells: by the id under which the client sent a request, its cell; column ``cell`` of ``routed`` after this.
        """
        self._db.execute(
            "CREATE OR REPLACE TEMP TABLE wanted AS SELECT unnest(?::VARCHAR[]) AS id, unnest(?::VARCHAR[]) AS cell",
            [list(cells), list(cells.values())],
        )
        if not self.one("SELECT count(*) FROM routed SEMI JOIN wanted ON wanted.id = routed.client_id"):
            return False
        self._db.execute(
            "CREATE OR REPLACE TEMP TABLE routed AS SELECT routed.* EXCLUDE (cell), wanted.cell FROM routed"
            " JOIN wanted ON wanted.id = routed.client_id"
        )
        for table in ("requests", "holds"):
            self._db.execute(f"DELETE FROM {table} WHERE leg NOT IN (SELECT unnest(legs) FROM routed)")
        return True

    def one(self, query: str) -> float:
        """Return the single number that ``query`` selects; NaN for NULL."""
        row = self._db.execute(query).fetchone()
        return float(row[0]) if row and row[0] is not None else float("nan")

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """Return the rows that ``query`` selects."""
        return self._db.execute(query).fetchall()

    def columns(self, query: str) -> dict[str, np.ndarray]:
        """Return the columns that ``query`` selects as arrays of floats, NaN for NULL."""
        found = self._db.execute(query).fetchnumpy()
        return {name: _with_nan(values) for name, values in found.items()}


def find_files(paths: Sequence[Path]) -> list[Path]:
    """Return the journal files among ``paths`` and in the folders among them.

    Raises:
        KvopsError: a path does not exist, or there is no journal.
    """
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            files += [
                file for file in path.rglob("*.jsonl*") if file.is_file() and not file.name.startswith("requests.")
            ]
        elif path.is_file():
            files.append(path)
        else:
            raise KvopsError(f"{path} does not exist", "give a file or folder of journals, or a folder of kvops bench")
    if not files:
        raise KvopsError(f"no journal in {', '.join(map(str, paths))}", "give a folder that holds *.jsonl files")
    return sorted(set(files))


def _literal(path: Path) -> str:
    # A name is a pattern to the reader of the files: its special characters are put in brackets, one by one.
    pattern = "".join(f"[{letter}]" if letter in "*?[" else letter for letter in str(path))
    return "'" + pattern.replace("'", "''") + "'"


def _with_nan(values: Any) -> np.ndarray:
    """Return a column as floats; NULL comes as a mask over it."""
    floats = np.array(values, dtype=float)
    floats[np.ma.getmaskarray(values)] = np.nan  # type: ignore[no-untyped-call]
    return floats
