from __future__ import annotations

import asyncio
import signal
import sys

from kvops.bench.results import read_requests, read_run


async def test_a_run_that_is_interrupted_keeps_what_it_has_and_says_why_it_ended(fleet, tmp_path):
    leg = f"given,mode=pull,router={fleet.url},prefill={fleet.url},decode={fleet.url}"
    options = ["--leg", leg, "--input-tokens", "8", "--rates", "0", "--seconds", "600", "--output-tokens", "2"]
    command = [sys.executable, "-m", "kvops.cli.main", "bench", "sweep", *options, "--out", str(tmp_path / "run")]
    bench = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    while len(fleet.bodies) < 10:
        assert bench.returncode is None
        await asyncio.sleep(0.05)

    bench.send_signal(signal.SIGINT)
    output, _ = await bench.communicate()

    assert bench.returncode == 1
    assert b"the run ended early: it was interrupted" in output
    assert read_run(tmp_path / "run").verdict.problems[0] == "the run ended early: it was interrupted"
    assert len(list(read_requests(tmp_path / "run"))) > 0
