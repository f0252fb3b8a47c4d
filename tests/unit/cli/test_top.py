from __future__ import annotations

import io

from click.testing import CliRunner
from rich.console import Console

from kvops.cli.main import main
from kvops.cli.top import Row, row_of, table_of
from kvops.metrics_text import Samples

LABELS = 'engine="0",model_name="m"'


def scrape(tokens: int, moved: int, waits: int, *, instrumented: bool = True) -> Samples:
    text = f"""# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{{LABELS}}} 3
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{{{LABELS}}} 0.25
# TYPE vllm:prompt_tokens counter
vllm:prompt_tokens_total{{{LABELS}}} {tokens}
# TYPE vllm:prompt_tokens_by_source counter
vllm:prompt_tokens_by_source_total{{{LABELS},source="external_kv_transfer"}} {moved}
"""
    if instrumented:
        text += f"""# TYPE kvops_connector_info gauge
kvops_connector_info{{{LABELS}}} 1
# TYPE kvops_held_blocks gauge
kvops_held_blocks{{{LABELS},holder="prefill"}} 4
kvops_held_blocks{{{LABELS},holder="decode"}} 5
# TYPE kvops_request_kv_wait_seconds histogram
kvops_request_kv_wait_seconds_bucket{{{LABELS},direction="p_to_d",le="+Inf"}} {waits}
kvops_request_kv_wait_seconds_count{{{LABELS},direction="p_to_d"}} {waits}
kvops_request_kv_wait_seconds_sum{{{LABELS},direction="p_to_d"}} {waits * 0.02}
"""
    return Samples(text)


def test_rates_are_those_of_the_interval() -> None:
    row = row_of("decode-0", scrape(100, 100, 2), scrape(500, 400, 6), 2.0)
    assert (row.prompt_tokens, row.transferred_tokens, row.running) == (200, 150, 3)


def test_the_wait_is_the_mean_of_what_arrived_in_the_interval() -> None:
    row = row_of("decode-0", scrape(0, 0, 2), scrape(0, 0, 6), 2.0)
    assert row.kv_wait_seconds is not None
    assert round(row.kv_wait_seconds, 6) == 0.02


def test_holds_of_both_kinds_add_up() -> None:
    assert row_of("d", scrape(0, 0, 0), scrape(0, 0, 0), 1.0).held_blocks == 9


def test_stock_connectors_do_not_show_zero_for_what_nobody_measured() -> None:
    stock = scrape(0, 0, 0, instrumented=False)
    assert row_of("d", stock, stock, 1.0).held_blocks is None


def test_a_restarted_engine_shows_no_negative_rate() -> None:
    assert row_of("d", scrape(500, 0, 0), scrape(10, 0, 0), 1.0).prompt_tokens == 0


def test_a_silent_engine_is_named() -> None:
    assert "decode-1" in str(table_of([], ["decode-1"]).caption)


def test_no_figure_is_cut_on_80_columns() -> None:
    row = Row("10.0.12.131:8200", 999, 999, 1.0, 9999, 152_340.0, 152_340.0, 12_345.0, 12.4e9, 0.999, 12.0, 999)
    screen = io.StringIO()
    Console(width=80, file=screen).print(table_of([row], []))
    header, line, *rest = [" ".join(text.split()) for text in screen.getvalue().splitlines()]
    assert header == "engine run wait KV held in/s by KV out/s KV/s KV wait oldest bad"
    assert line == "10.0.12.131:8200 999 999 100% 9999 152k 100% 12k 12.4 GB 999 ms 12 s 999"
    assert rest == []


def test_without_a_fleet_it_says_what_to_do() -> None:
    result = CliRunner().invoke(main, ["top"])
    assert (result.exit_code, "no fleet named default is running" in result.output) == (2, True)


def test_engines_that_do_not_answer_are_named() -> None:
    result = CliRunner().invoke(main, ["top", "http://127.0.0.1:1"])
    assert (result.exit_code, "http://127.0.0.1:1" in result.output) == (2, True)
