"""Where dashboards, alerts and runbooks point at each other."""

from __future__ import annotations

TAG = "kvops"
RUNBOOK_URL_PREFIX = "https://github.com/kvops/kvops/blob/main/runbooks"
ALERT_LIST_URL = "/alerting/list?queryString=Kvops"


def see(*pages: str) -> str:
    """Return the last line of a panel's description: links to the runbook pages (or reference pages) named.

    Args:
        pages: file names under ``runbooks/`` without ``.md``, such as ``KvopsTransferStuck``.
    """
    return "Runbook: " + ", ".join(f"[{page}]({RUNBOOK_URL_PREFIX}/{page}.md)" for page in pages)
