"""A probe that began and found trouble."""

from __future__ import annotations

from kvops.errors import KvopsError


class ProbeTroubleError(KvopsError):
    """The probe ran and found that KV would not move here: exit status 1, where not having run is 2."""

    exit_code = 1
