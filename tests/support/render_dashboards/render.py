"""Draw every dashboard as a PNG, 1440 px wide, with data from a live Prometheus in headless Chromium.

``python render.py BUNDLE.js OUT_FOLDER PROMETHEUS_URL START END [UID...]`` (unix seconds). ``BUNDLE.js`` comes from
``npm install`` and ``node build.mjs node_modules BUNDLE.js``. The Prometheus needs ``--web.cors.origin=.*``.
Exit status 1 if any panel is empty or failed; its name is printed.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from kvops_dashboards import stored

ROW_PIXELS = 38
BLANK_BYTES = 40_000
BROWSER = [
    "chromium",
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--hide-scrollbars",
    "--force-device-scale-factor=1",
]
# Grafana's components load chunks and fonts that are not there; what is drawn does not need them.
BUDGET = "--virtual-time-budget=60000"


def page(board: dict, bundle: Path, prometheus: str, start: int, end: int) -> str:
    render = {"board": board, "prometheus": prometheus, "start": start, "end": end, "rateWindow": "20s"}
    data = json.dumps(render).replace("</", "<\\/")
    return (
        '<!doctype html><meta charset="utf-8"><div id="root"></div>'
        f"<script>window.RENDER = {data}</script>"
        f'<script src="{bundle.as_uri()}"></script>'
    )


def draw(uid: str, board: dict, bundle: Path, out: Path, prometheus: str, start: int, end: int) -> list[str]:
    """Write ``out/UID.png`` and return the titles of panels that are empty or failed."""
    height = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in board["panels"]) * ROW_PIXELS + 44
    with tempfile.TemporaryDirectory() as folder:
        html = Path(folder) / "page.html"
        html.write_text(page(board, bundle, prometheus, start, end))
        common = [*BROWSER, BUDGET, f"--user-data-dir={folder}/profile", f"--window-size=1440,{height}"]
        shot = out / f"{uid}.png"
        for _ in range(3):
            subprocess.run(
                [*common, f"--screenshot={shot}", html.as_uri()], check=True, capture_output=True, timeout=120
            )
            # A busy machine can let the browser take the picture before the panels are there.
            if shot.stat().st_size > BLANK_BYTES:
                break
        dom = subprocess.run(
            [*common, "--dump-dom", html.as_uri()], check=True, capture_output=True, text=True, timeout=120
        ).stdout
    if "<title>drawn</title>" not in dom:
        return [f"not drawn: {re.sub('<[^>]*>', ' ', dom)[-400:]}"]
    drawn = dom.count("data-panel=")
    wanted = sum(panel["type"] != "row" for panel in board["panels"])
    if drawn != wanted:
        return [f"{drawn} of {wanted} panels were drawn"]
    bad = []
    for part in dom.split("data-panel=")[1:]:
        title = part[1 : part.index('"', 1)]
        if "data-empty" in part or "data-error" in part or ">no data<" in part:
            bad.append(title)
    return bad


def main() -> int:
    bundle, out, prometheus = Path(sys.argv[1]).resolve(), Path(sys.argv[2]), sys.argv[3]
    start, end, chosen = int(sys.argv[4]), int(sys.argv[5]), sys.argv[6:]
    out.mkdir(parents=True, exist_ok=True)
    failed = False
    for uid, board in stored.dashboards().items():
        if not chosen or uid in chosen:
            bad = draw(uid, board, bundle, out, prometheus, start, end)
            failed = failed or bool(bad)
            print(f"{uid}: {', '.join(bad) or 'every panel has data'}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
