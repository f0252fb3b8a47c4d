"""Settings from the extra config and the environment."""

import logging

import pytest

from kvops_connectors.settings import Settings, load


def test_nothing_set_gives_the_defaults():
    assert load({}, {}) == Settings()


def test_the_environment_sets_and_the_extra_config_wins():
    environment = {"KVOPS_JOURNAL_DIR": "/var/log/a", "KVOPS_JOURNAL_FILES": "3", "KVOPS_TOKEN_TRUTH": "off"}
    settings = load({"kvops": {"journal_dir": "/var/log/b"}}, environment)
    assert (settings.journal_dir, settings.journal_files, settings.token_truth) == ("/var/log/b", 3, False)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("journal_max_bytes", "many"),
        ("journal_max_bytes", 1),
        ("journal_files", 2.5),
        ("journal_queue", True),
        ("role", "router"),
        ("token_truth", "maybe"),
        ("journal_dir", 7),
        ("push_cancel_grace_seconds", -1),
        ("push_cancel_grace_seconds", "nan"),
    ],
)
def test_a_bad_value_is_reported_and_replaced_by_the_default(name, value, caplog):
    with caplog.at_level(logging.WARNING, "vllm.kvops"):
        settings = load({"kvops": {name: value}}, {})
    assert getattr(settings, name) == getattr(Settings(), name)
    assert f"{name}={value!r}" in caplog.text


def test_an_unknown_setting_is_reported(caplog):
    with caplog.at_level(logging.WARNING, "vllm.kvops"):
        assert load({"kvops": {"jurnal_dir": "/x"}}, {}) == Settings()
    assert "jurnal_dir" in caplog.text


def test_settings_that_are_no_object_are_reported(caplog):
    with caplog.at_level(logging.WARNING, "vllm.kvops"):
        assert load({"kvops": "on"}, {}) == Settings()
    assert "'on'" in caplog.text


def test_the_mends_that_are_on_are_named():
    assert load({"kvops": {"token_truth": False}}, {}).mends == (
        "expired_readback",
        "single_load",
        "valid_handle",
        "push_timeout",
        "push_retry",
        "reconnect",
        "cpu_affinity",
    )
