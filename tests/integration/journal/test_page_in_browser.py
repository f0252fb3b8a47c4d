"""The report's page in a real browser that can reach nothing."""

from __future__ import annotations

import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from kvops.journal.advice import Advice, Point
from kvops.journal.figures import Cell, Figures, Flow, Held, Kv, Prompts
from kvops.journal.intervals import Estimate
from kvops.journal.legs import ALL
from kvops.journal.page import page


def figures(leg: str, mode: str) -> Figures:
    found = Estimate(0.2, 0.18, 0.23, 100)
    cell = Cell(name=ALL, requests=100, failed=1, output_tokens_per_second=9.5, ttft_seconds=found, tpot_seconds=found)
    flow = Flow(
        direction="p_to_d", requests=100, phase_seconds={"queue": found, "data": found}, post_share=0.2, bytes=10**9,
        bytes_per_second=1e9, descriptors_per_transfer=64.0, bytes_per_descriptor=1e5,
    )  # fmt: skip
    held = Held(holder="decode", ended_by="expired", holds=3, block_seconds=1234.0, longest_seconds=480.0)
    tokens = {"local_hit": 10, "remote": 50, "computed": 40}
    prompts = [Prompts(cell=ALL, requests=100, computed=40.0, remote=50.0, local_hit=10.0)]
    kv = Kv(flows=[flow], prefill_tokens=tokens, prompts=prompts, recomputed_tokens={"new_tokens": 40}, held=[held], unreadable_lines=1, unknown_version_lines=0)  # fmt: skip
    return Figures(leg=leg, mode=mode, cells=[cell], kv=kv, about=[f"{leg}: measured <somewhere>"])


@pytest.fixture
def content() -> str:
    ratio = Estimate(0.5, 0.4, 0.6, 100)
    compared = {ALL: {"ttft_seconds": ratio, "tpot_seconds": ratio}}
    ttl = Advice(topic="ttl", value=60, curve=[Point(14, 500, 100.0), Point(60, 900, 300.0), Point(480, 1000, 900.0)])
    legs = [figures("push", "push"), figures("pull", "pull")]
    return page(legs, compared, ("push", "pull"), remarks=["the run FAILED: no KV moved"], ttls={"pull": ttl})


def test_the_page_says_how_it_was_measured_and_what_is_wrong_with_it(content: str) -> None:
    assert "pull: measured &lt;somewhere&gt;" in content
    assert "the run FAILED: no KV moved" in content


def test_the_ttl_that_is_advised_stands_out_among_others(content: str) -> None:
    assert [text in content for text in ("60 s, advised", "480 s", "14 s", "900 s")] == [True, True, True, False]


def test_the_page_refers_to_nothing_outside_itself(content: str) -> None:
    found: list[tuple[str, str | None]] = []

    class References(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            found.extend(
                (name, value) for name, value in attrs if name in ("src", "href", "xlink:href", "srcset", "data")
            )

    References().feed(content)

    assert all(value == "data:," or (value or "").startswith("#") for _, value in found)
    assert not re.search(r"https?:|@import|<script|url\((?!#)", content)


def test_ids_of_the_plots_are_unique(content: str) -> None:
    ids = re.findall(r'\sid="([^"]+)"', content)

    assert len(ids) == len(set(ids))


def test_every_reference_within_the_page_has_its_target(content: str) -> None:
    targets = set(re.findall(r'\sid="([^"]+)"', content))

    assert set(re.findall(r'href="#([^"]+)"', content)) | set(re.findall(r"url\(#([^)]+)\)", content)) <= targets


@pytest.mark.system("chromium")
@pytest.mark.parametrize(("flags", "bright"), [((), True), (("--blink-settings=preferredColorScheme=0",), False)])
@pytest.mark.parametrize("width", [800, 1440])
def test_the_page_is_drawn_light_and_dark_without_network(
    content: str, tmp_path: Path, flags: tuple[str, ...], bright: bool, width: int
) -> None:
    file, picture = tmp_path / "report.html", tmp_path / "report.png"
    file.write_text(content)
    command = [
        "chromium", "--headless", "--no-sandbox", "--disable-gpu", "--host-resolver-rules=MAP * ~NOTFOUND", *flags,
        f"--user-data-dir={tmp_path}/profile", f"--window-size={width},1200", f"--screenshot={picture}", file.as_uri(),
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, timeout=100)

    colors = np.round(imread(picture)[..., :3] * 255).astype(int)
    assert (colors[0, 0].mean() > 128) == bright
    series = np.array([9, 105, 218] if bright else [88, 166, 255])
    assert (np.abs(colors - series).max(axis=2) < 3).sum() > 1000
