"""The report as one HTML file that needs nothing else: no network, no script."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from kvops import __version__
from kvops.journal import plots, text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvops.journal.advice import Advice
    from kvops.journal.figures import Figures
    from kvops.journal.intervals import Estimate

_STYLE = """
:root { color-scheme: light dark; --page: #fff; --card: #f6f7f9; --ink: #1b1f24; --faint: #8b949e; --line: #d5dae0;
  --s0: #0969da; --s1: #d4670a; --s2: #1a7f37; --s3: #8250df; --s4: #bf3989;
  --s5: #9a6700; --s6: #57606a; --s7: #0a7ea4 }
@media (prefers-color-scheme: dark) { :root { --page: #0d1117; --card: #161b22; --ink: #e6edf3; --faint: #7d8590;
  --line: #30363d; --s0: #58a6ff; --s1: #f0883e; --s2: #3fb950; --s3: #bc8cff; --s4: #f778ba; --s5: #d29922;
  --s6: #a3adb8; --s7: #39c5cf } }
body { margin: 0 auto; max-width: 1360px; padding: 1rem; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem }
.plots { margin-top: 1rem; display: grid;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 560px), 1fr)); gap: 1rem }
figure { margin: 0; padding: .75rem; background: var(--card); border: 1px solid var(--line); border-radius: 6px;
  align-self: start }
figcaption { font-weight: 600; margin-bottom: .25rem }
svg { width: 100%; height: auto; display: block } svg text { font-family: system-ui, sans-serif !important }
.scroll { overflow-x: auto } table { border-collapse: collapse;
  font-variant-numeric: tabular-nums; white-space: nowrap }
th, td { padding: .25rem .75rem .25rem 0; text-align: right; border-bottom: 1px solid var(--line) }
th { font-weight: 500; color: var(--faint) } td:nth-child(-n+2), th:nth-child(-n+2) { text-align: left }
.note { color: var(--faint); margin: .25rem 0 } .remark { border-left: 4px solid var(--s1); padding-left: .75rem }
"""


def page(
    legs: Sequence[Figures],
    compared: dict[str, dict[str, Estimate]] | None = None,
    names: tuple[str, str] | None = None,
    *,
    remarks: Sequence[str] = (),
    ttls: Mapping[str, Advice] | None = None,
) -> str:
    """Return the HTML of a report.

    Args:
        legs: what to report on.
        compared: ratios of two legs.
        names: of these two.
        remarks: what the reader must know before believing the figures.
        ttls: advice on decode's TTL, by leg.
    """
    drawn = {
        "Time to first token": plots.latency(legs, "ttft_seconds", "Time to first token"),
        "Time per output token": plots.latency(legs, "tpot_seconds", "Time per output token"),
        "Wait for KV by phase": plots.phases(legs),
        "Tokens that prefill computed": plots.computed(legs),
        "Where prompt tokens came from": plots.reuse(legs),
        "Computed tokens by reason": plots.recomputed(legs),
        "Held blocks": plots.held(legs),
        "Decode's TTL: reuse won against blocks held": plots.ttl_curves(ttls or {}),
    }
    if compared and names:
        drawn |= {
            f"{name}: {names[0]} / {names[1]}": plots.ratios(compared, field, name + " ratio")
            for field, name in (("ttft_seconds", "TTFT"), ("tpot_seconds", "TPOT"))
        }
    figures = "".join(
        f"<figure><figcaption>{escape(title)}</figcaption>{svg}</figure>" for title, svg in drawn.items() if svg
    )
    tables = [_table(*table) for table in text.tables(legs, compared, names)]
    told = "".join(f'<p class="note">{escape(line)}</p>' for line in text.about(legs))
    told += "".join(f'<p class="remark">{escape(line)}</p>' for line in remarks)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="icon" href="data:,"><title>kvops report</title>'
        f"<style>{_STYLE}</style></head><body><h1>kvops report</h1>"
        f'<p class="note">{escape(", ".join(f"{leg.leg} ({leg.mode})" for leg in legs))}; kvops {__version__}; '
        "brackets hold 95 % intervals</p>"
        f'{told}<div class="plots">{figures}</div>{"".join(tables)}</body></html>\n'
    )


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<h2>{escape(title)}</h2><div class="scroll"><table><tr>{head}</tr>{body}</table></div>'
