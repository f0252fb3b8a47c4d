"""The plots of a report as SVG inside the page: no script, colours from the page's light and dark."""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from kvops.journal.figures import PHASES
from kvops.journal.legs import ALL

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.axes import Axes

    from kvops.journal.advice import Advice
    from kvops.journal.figures import Figures
    from kvops.journal.intervals import Estimate

# Stand-ins that matplotlib paints with; each becomes the style sheet's variable of that name.
_INK, _FAINT = "#010101", "#010102"
_SERIES = tuple(f"#0101{number:02x}" for number in range(0x10, 0x18))
_VARIABLES = {_INK: "--ink", _FAINT: "--faint", **{color: f"--s{n}" for n, color in enumerate(_SERIES)}}
_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "kvops",
    "font.family": ["sans-serif"],
    "font.size": 11,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _FAINT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _FAINT,
    "grid.alpha": 0.4,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "legend.frameon": False,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
}
_WIDTH_INCHES = 7.6


def latency(legs: Sequence[Figures], field: str, title: str) -> str | None:
    """Return bars of a latency by cell and leg, with intervals; None if no leg has it."""
    cells = list(dict.fromkeys(cell.name for leg in legs for cell in leg.cells))
    cells = [name for name in cells if name != ALL] or cells
    found = {(leg.leg, cell.name): getattr(cell, field) for leg in legs for cell in leg.cells}
    if not any(found.get((leg.leg, name)) for leg in legs for name in cells):
        return None
    with mpl.rc_context(_STYLE):
        figure, axes = _figure(0.9 + 0.3 * len(cells) * max(1, len(legs)))
        height = 0.8 / len(legs)
        for number, leg in enumerate(legs):
            values = [found.get((leg.leg, name)) for name in cells]
            places = np.arange(len(cells)) + number * height
            color = _SERIES[number % len(_SERIES)]
            _bars(axes, places, values, height=height, color=color, label=leg.leg)
        axes.set_yticks(np.arange(len(cells)) + 0.4 - height / 2, cells)
        axes.invert_yaxis()
        axes.set_xlabel("ms, mean with 95 % interval")
        _legend(axes, len(legs))
        return _svg(figure, title)


def phases(legs: Sequence[Figures]) -> str | None:
    """Return where requests wait for KV, one bar for each leg and direction; None without journals."""
    rows = [(_way(leg, flow.direction), flow) for leg in legs if leg.kv for flow in leg.kv.flows]
    stacks = {
        phase: [flow.phase_seconds[phase].value * 1e3 if phase in flow.phase_seconds else 0.0 for _, flow in rows]
        for phase in PHASES
    }
    return _stacked([name for name, _ in rows], stacks, "ms a request, mean", "Wait for KV by phase")


def reuse(legs: Sequence[Figures]) -> str | None:
    """Return where prefill's tokens came from; None without journals."""
    rows = [(leg.leg, leg.kv.prefill_tokens) for leg in legs if leg.kv and any(leg.kv.prefill_tokens.values())]
    names = {"computed": "computed", "remote": "read back from decode", "local_hit": "own prefix cache"}
    stacks = {text: [tokens[key] / sum(tokens.values()) * 100 for _, tokens in rows] for key, text in names.items()}
    return _stacked(
        [name for name, _ in rows], stacks, "% of prompt tokens on prefill", "Where prompt tokens came from"
    )


def computed(legs: Sequence[Figures]) -> str | None:
    """Return what prefill computed of a mean request, by leg and cell; None where no run's journals tell."""
    rows = {leg.leg: {one.cell: one.computed for one in leg.kv.prompts} for leg in legs if leg.kv and leg.kv.prompts}
    cells = list(dict.fromkeys(cell for amounts in rows.values() for cell in amounts))
    return _grouped(cells, rows, "tokens of a mean request", "Tokens that prefill computed")


def recomputed(legs: Sequence[Figures]) -> str | None:
    """Return tokens computed, by reason; None without journals."""
    rows = [(leg.leg, leg.kv.recomputed_tokens) for leg in legs if leg.kv and leg.kv.recomputed_tokens]
    reasons = sorted({reason for _, tokens in rows for reason in tokens})
    return _grouped(reasons, dict(rows), "tokens", "Computed tokens by reason")


def held(legs: Sequence[Figures]) -> str | None:
    """Return what holds cost, by holder and end; None without journals."""
    rows: dict[str, dict[str, float]] = {
        leg.leg: {f"{hold.holder}: {hold.ended_by}": hold.block_seconds for hold in leg.kv.held}
        for leg in legs
        if leg.kv and leg.kv.held
    }
    names = sorted({name for costs in rows.values() for name in costs})
    return _grouped(names, rows, "block-seconds", "Held blocks by holder and how the hold ended")


def ratios(compared: dict[str, dict[str, Estimate]], field: str, title: str) -> str | None:
    """Return the ratios of a comparison with their intervals around 1; None if there is none."""
    found = {cell: by_latency[field] for cell, by_latency in compared.items() if field in by_latency}
    if not found:
        return None
    with mpl.rc_context(_STYLE):
        figure, axes = _figure(0.9 + 0.3 * len(found))
        for place, ratio in enumerate(found.values()):
            low, high = _finite(ratio)
            errors = [[ratio.value - low], [high - ratio.value]]
            axes.errorbar([ratio.value], [place], xerr=errors, fmt="o", color=_SERIES[0], capsize=4, elinewidth=2)
        axes.axvline(1, color=_INK, linewidth=1)
        axes.set_yticks(range(len(found)), list(found))
        axes.set_ylim(len(found) - 0.5, -0.5)
        axes.set_xlabel("ratio with 95 % interval; left of 1 the first is faster")
        return _svg(figure, title)


def ttl_curves(ttls: Mapping[str, Advice]) -> str | None:
    """Return what decode's TTLs would win and pay, a line a leg, the advised one in bold; None without any."""
    found = {leg: advice for leg, advice in ttls.items() if advice.curve}
    if not found:
        return None
    with mpl.rc_context(_STYLE):
        figure, axes = _figure(3.6)
        for number, (leg, advice) in enumerate(found.items()):
            most = max(point.reused_tokens for point in advice.curve) or 1
            paid = [point.block_seconds for point in advice.curve]
            won = [100 * point.reused_tokens / most for point in advice.curve]
            axes.plot(paid, won, "o-", color=_SERIES[number % len(_SERIES)], label=leg)
            for point, across, up in zip(advice.curve, paid, won, strict=True):
                if point.ttl_seconds in (advice.value, 480, advice.curve[0].ttl_seconds):
                    chosen = point.ttl_seconds == advice.value
                    axes.annotate(
                        f"{point.ttl_seconds} s" + (", advised" if chosen else ""), (across, up), (6, -13),
                        textcoords="offset points", fontweight="bold" if chosen else None,
                    )  # fmt: skip
        axes.grid(visible=True, axis="y")
        axes.margins(x=0.15, y=0.12)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.set_xlabel("block-seconds held on decode")
        axes.set_ylabel("% of tokens read back")
        _legend(axes, len(found))
        return _svg(figure, "Decode's TTL")


def _way(leg: Figures, direction: str) -> str:
    return f"{leg.leg}, {'P to D' if direction == 'p_to_d' else 'D to P'}"


def _figure(height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(_WIDTH_INCHES, max(height, 1.6)), layout="constrained")
    axes = figure.subplots()
    axes.grid(visible=False, axis="y")
    return figure, axes


def _finite(estimate: Estimate) -> tuple[float, float]:
    """Return the ends of an interval, the value itself where an end is unknown."""
    low = estimate.low if np.isfinite(estimate.low) else estimate.value
    return low, estimate.high if np.isfinite(estimate.high) else estimate.value


def _bars(
    axes: Axes, places: np.ndarray, values: Sequence[Estimate | None], *, height: float, color: str, label: str
) -> None:
    means = np.array([value.value if value else np.nan for value in values]) * 1e3
    ends = np.array([_finite(value) if value else (np.nan, np.nan) for value in values]) * 1e3
    # As lists: matplotlib takes the rows of an array of one column for numbers.
    errors = np.abs(np.vstack([means - ends[:, 0], ends[:, 1] - means])).tolist()
    axes.barh(places, means, height * 0.9, color=color, label=label, xerr=errors, ecolor=_INK)


def _stacked(names: list[str], stacks: dict[str, list[float]], unit: str, title: str) -> str | None:
    if not names:
        return None
    with mpl.rc_context(_STYLE):
        figure, axes = _figure(1.3 + 0.35 * len(names))
        left = np.zeros(len(names))
        for number, (label, values) in enumerate(stacks.items()):
            axes.barh(names, values, 0.7, left=left, color=_SERIES[number], label=label)
            left += values
        axes.invert_yaxis()
        axes.set_xlabel(unit)
        _legend(axes, len(stacks))
        return _svg(figure, title)


def _grouped(names: list[str], series: Mapping[str, Mapping[str, float]], unit: str, title: str) -> str | None:
    if not names:
        return None
    with mpl.rc_context(_STYLE):
        figure, axes = _figure(1 + 0.3 * len(names) * max(1, len(series)))
        height = 0.8 / len(series)
        for number, (label, values) in enumerate(series.items()):
            places = np.arange(len(names)) + number * height
            amounts = [values.get(name, 0) for name in names]
            bars = axes.barh(places, amounts, height * 0.9, color=_SERIES[number % len(_SERIES)], label=label)
            axes.bar_label(bars, [f"{amount:,.0f}" for amount in amounts], padding=3, fontsize=9)
        axes.margins(x=0.12)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.set_yticks(np.arange(len(names)) + 0.4 - height / 2, names)
        axes.invert_yaxis()
        axes.set_xlabel(unit)
        _legend(axes, len(series))
        return _svg(figure, title)


def _legend(axes: Axes, series: int) -> None:
    if series > 1:
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=min(series, 5), fontsize=10)


def _svg(figure: Figure, title: str) -> str:
    """Return the figure as an element with a title for those who cannot see it."""
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'width="[\d.]+pt" height="[\d.]+pt"', 'role="img"', svg, count=1)
    # Ids must differ between the plots of one page.
    mark = re.sub(r"\W+", "-", title.lower())
    svg = re.sub(r'(id="|"#|url\(#)', rf"\g<1>{mark}-", svg)
    svg = re.sub(r"""\sxmlns(?::xlink)?="[^"]*"|\sfont-family="[^"]*\"""", "", svg)
    for color, variable in _VARIABLES.items():
        svg = svg.replace(color, f"var({variable})")
    return svg.replace(">", f"><title>{title}</title>", 1)
