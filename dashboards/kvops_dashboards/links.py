"""Where dashboards, alerts and runbooks point at each other."""

from __future__ import annotations

TAG = "kvops"
ALERT_LIST_URL = "/alerting/list?queryString=Kvops"


def see(*pages: str) -> str:
    """Return the last line of a panel's description: the commands that show the pages, which need no published copy.

    ``stored.dashboards`` makes links of them where the pages are published.

    Args:
        pages: file names under ``runbooks/`` without ``.md``, such as ``KvopsTransferStuck``.
    """
    return "Runbook: " + ", ".join(f"`kvops runbook {page}`" for page in pages)
