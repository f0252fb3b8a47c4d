"""The router's settings."""

import pytest

from kvops.router.settings import margin_of


@pytest.mark.parametrize("ttl_seconds", [1, 12, 30, 480, 3600])
def test_a_handle_stays_usable_for_most_of_its_ttl_however_short_that_is(ttl_seconds):
    assert 0 < margin_of(ttl_seconds) <= ttl_seconds / 4


def test_the_margin_grows_no_further_than_prefill_may_queue():
    assert margin_of(480) == margin_of(3600) == 30
