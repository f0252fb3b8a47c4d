"""What the scripted hour says of the alerts that an act fired."""

from __future__ import annotations

from kvops_dashboards.alerts import ALERTS
from scripted_hour import SCRIPT, WATCHDOG, act, healthy, verdict

PLAYED = act(healthy, "KvopsPeerSlow", may=("KvopsKvWaitHigh",))


def test_the_alerts_of_an_act_and_what_may_follow_are_right():
    assert verdict(PLAYED, 100, {"KvopsPeerSlow": [110], "KvopsKvWaitHigh": [111], WATCHDOG: [100]}) == []


def test_an_alert_that_goes_on_from_the_act_before_is_neither_missing_nor_wrong():
    assert verdict(PLAYED, 100, {"KvopsPeerSlow": [99, 100], "KvopsTargetDown": [99, 100]}) == []


def test_a_missing_alert_and_one_too_many_are_named():
    assert verdict(PLAYED, 100, {"KvopsTargetDown": [105]}) == [
        "healthy should have fired KvopsPeerSlow",
        "healthy should not have fired KvopsTargetDown",
    ]


def test_every_alert_of_the_script_is_one():
    named = {name for acts in SCRIPT.values() for each in acts for name in each.fires | each.may_fire}
    assert named <= set(ALERTS)
