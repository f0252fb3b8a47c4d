"""Asking a cluster through ``kubectl``, for reading only."""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING, Any

from kvops.errors import KvopsError

if TYPE_CHECKING:
    from collections.abc import Sequence

FLEET_SELECTOR = "app.kubernetes.io/part-of=kvops"
ROLE_LABEL = "app.kubernetes.io/component"
_TIMEOUT_SECONDS = 30


def get(*arguments: str) -> list[dict[str, Any]]:
    """Return the objects of ``kubectl get ARGUMENTS``.

    Raises:
        KvopsError: there is no kubectl, or the cluster does not answer.
    """
    try:
        done = subprocess.run(
            ["kubectl", "get", *arguments, "-o", "json", f"--request-timeout={_TIMEOUT_SECONDS}s"],
            capture_output=True,
            check=False,
            timeout=2 * _TIMEOUT_SECONDS,
        )
    except FileNotFoundError:
        raise missing() from None
    except subprocess.TimeoutExpired:
        raise KvopsError("the cluster does not answer", "check 'kubectl cluster-info'") from None
    if done.returncode:
        raise KvopsError(f"kubectl get {arguments[0]}: {reason(done.stderr)}", "check 'kubectl config current-context'")
    try:
        items: list[dict[str, Any]] = json.loads(done.stdout)["items"]
    except (ValueError, KeyError, TypeError):
        raise KvopsError(f"kubectl get {arguments[0]} did not answer with a list", "check your kubectl") from None
    return items


def fleet_pods(namespace: str) -> list[dict[str, Any]]:
    """Return the pods of the fleet in ``namespace``, by name.

    Raises:
        KvopsError: there is none, or the cluster does not answer.
    """
    pods = get("pods", "-n", namespace, "-l", FLEET_SELECTOR)
    if not pods:
        raise KvopsError(
            f"namespace {namespace} has no pod with the label {FLEET_SELECTOR}",
            "name the fleet's namespace with --namespace, or kubectl apply what kvops render kubernetes wrote",
        )
    return sorted(pods, key=lambda pod: str(pod["metadata"]["name"]))


def missing() -> KvopsError:
    """Return the error for a machine without kubectl."""
    return KvopsError("kubectl is not installed here", "run this where kubectl reaches the cluster")


def reason(stderr: bytes) -> str:
    """Return the line of kubectl's complaint that says what is wrong: the last one."""
    lines: Sequence[str] = stderr.decode(errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else "failed without a word"
