"""Hypothesis without time limits: a loaded machine is slow, not wrong.

``--hypothesis-profile=long --timeout=0`` fuzzes for minutes, with DOCTOR_EXAMPLES inputs to each parser.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

SLOW_IS_FINE = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("doctor", deadline=None, suppress_health_check=SLOW_IS_FINE, max_examples=40)
settings.register_profile(
    "long",
    deadline=None,
    suppress_health_check=SLOW_IS_FINE,
    max_examples=int(os.environ.get("DOCTOR_EXAMPLES", "5000")),
)
if settings.get_current_profile_name() != "long":
    settings.load_profile("doctor")
