"""Where dashboards, alerts and runbooks point at each other."""

from __future__ import annotations

from kvops_dashboards.rules import values

TAG = "kvops"
ALERT_LIST_URL = "/alerting/list?queryString=Kvops"


def see(*pages: str) -> str:
    """Return the last line of a panel's description: links to the runbook pages (or reference pages) named.

    Args:
        pages: file names under ``runbooks/`` without ``.md``, such as ``KvopsTransferStuck``.
    """
    prefix = values()["runbook_url_prefix"].rstrip("/")
    return "Runbook: " + ", ".join(f"[{page}]({prefix}/{page}.md)" for page in pages)
