"""The admin API against its own OpenAPI document, with requests that schemathesis makes up."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from kvops.router.admin import serve_admin
from kvops.router.app import listen, make_router, served
from kvops.router.endpoints import Sources
from kvops.router.settings import Settings


@pytest.mark.heavy
@pytest.mark.timeout(300)
async def test_the_admin_api_does_what_its_document_says(tmp_path: Path) -> None:
    router = make_router(Sources({"prefill": ["http://127.0.0.1:1"], "decode": ["http://127.0.0.1:1"]}), Settings())
    (listener,) = listen("127.0.0.1", 0)
    (admin,) = listen("127.0.0.1", 0)
    port = admin.getsockname()[1]
    admin.close()
    async with served(router, listener), serve_admin(router, port):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "schemathesis.cli", "run", f"http://127.0.0.1:{port}/openapi.json"),
            # That a URL means an engine, no schema can say.
            *(
                "--checks",
                "all",
                "--exclude-checks",
                "positive_data_acceptance",
                "--max-examples",
                "60",
                "--seed",
                "1",
                "--generation-database",
                "none",
            ),
            # It keeps what it finds in the folder that it runs in.
            cwd=tmp_path,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        text, _ = await process.communicate()
    assert process.returncode == 0, text.decode()[-6000:]
