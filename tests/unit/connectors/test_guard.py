"""The guard around every hook."""

import logging

from kvops_connectors import guard as module
from kvops_connectors.guard import Guard


def broken(*args):
    raise RuntimeError("no such field")


def test_a_hook_that_raises_gives_none_and_is_counted():
    guard = Guard("scheduler")
    assert guard(broken, 1, 2) is None
    assert guard(lambda: 7) == 7
    assert (guard.take_errors(), guard.take_errors()) == (1, 0)


def test_errors_are_logged_once_a_minute(monkeypatch, caplog):
    now = 100.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    guard = Guard("worker")
    with caplog.at_level(logging.WARNING, "vllm.kvops"):
        for now in (100.0, 101.0, 159.0, 161.0):  # noqa: B007
            guard(broken)
    assert len(caplog.records) == 2
    assert guard.errors == 4
