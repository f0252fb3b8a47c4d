"""The server's TLS."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def server_context(cert: Path, key: Path) -> ssl.SSLContext:
    """Return the context for a certificate chain and its key, both PEM.

    Raises:
        OSError: a file cannot be read or used.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert, key)
    return context
