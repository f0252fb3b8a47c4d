from __future__ import annotations

import asyncio
import ssl
import subprocess
import sys
from pathlib import Path

import pytest

from ports import free_port

pytestmark = pytest.mark.system("openssl")


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    options = [
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "1",
        "-subj",
        "/CN=localhost",
        "-addext",
        "subjectAltName=IP:127.0.0.1",
    ]
    subprocess.run(
        ["openssl", "req", "-x509", *options, "-out", str(cert), "-keyout", str(key)], check=True, capture_output=True
    )
    return cert, key


async def test_the_router_serves_https_with_the_given_certificate(certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    port = free_port()
    engines = ["--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:1"]
    tls = ["--tls-cert", str(cert), "--tls-key", str(key), "--port", str(port)]
    router = await asyncio.create_subprocess_exec(sys.executable, "-m", "kvops.cli.main", "router", *engines, *tls)
    try:
        assert b"200" in await healthz(port, ssl.create_default_context(cafile=cert))
    finally:
        router.terminate()
        assert await router.wait() == 0


async def healthz(port: int, context: ssl.SSLContext) -> bytes:
    """Return the status line of /healthz, once the port is open."""
    for _ in range(600):
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        except ConnectionRefusedError:
            await asyncio.sleep(0.1)
            continue
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        line = await reader.readline()
        writer.close()
        await writer.wait_closed()
        return line
    raise AssertionError("the router did not come up")
