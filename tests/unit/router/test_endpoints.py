from __future__ import annotations

from pathlib import Path

import pytest

from kvops.router.endpoints import EndpointError, Sources, parse

GIVEN = {"prefill": ["http://10.0.0.1:8100"], "decode": ["http://10.0.0.2:8200#0-2"]}


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        ("http://10.0.0.1:8100", ["http://10.0.0.1:8100"]),
        ("http://10.0.0.1:8100/", ["http://10.0.0.1:8100"]),
        ("https://[2001:db8::1]:8100#3", ["https://[2001:db8::1]:8100#3"]),
        ("http://p:8100#0-1", ["http://p:8100#0", "http://p:8100#1"]),
    ],
)
def test_a_spec_means_an_engine_or_its_ranks(spec: str, names: list[str]) -> None:
    assert [endpoint.name for endpoint in parse("prefill", spec)] == names


@pytest.mark.parametrize(
    "spec",
    [
        "10.0.0.1:8100",
        "ftp://p:1",
        "http://",
        "http://p:x",
        "http://p:8100/v1",
        "http://p:8100?x=1",
        "http://user:secret@p:8100",
        "http://p:8100#a",
        "http://p:8100#3-1",
        "http://[::1",
        "",
    ],
)
def test_what_is_no_engine_is_refused(spec: str) -> None:
    with pytest.raises(EndpointError):
        parse("prefill", spec)


async def test_ranks_are_endpoints_of_their_own() -> None:
    assert [(e.url, e.rank) for e in await Sources(GIVEN).resolve("decode")] == [
        ("http://10.0.0.2:8200", rank) for rank in (0, 1, 2)
    ]


async def test_a_headless_service_is_one_engine_for_each_address() -> None:
    sources = Sources(GIVEN | {"decode": ["dns+http://localhost:8200"]})
    assert sources.names_dns()
    assert "http://127.0.0.1:8200" in [endpoint.name for endpoint in await sources.resolve("decode")]


async def test_the_file_is_read_again_and_a_wrong_one_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "endpoints.yaml"
    file.write_text("prefill: [http://p:1]\ndecode: [http://d:1]\n")
    sources = Sources({}, file)
    file.write_text("prefill: [http://p:1]\ndecode: [http://d:1, http://d:22]\n")
    assert sources.file_changed()
    sources.reload()
    assert not sources.file_changed()
    file.write_text("prefill: []\ndecode: [http://d:1]\n")
    with pytest.raises(EndpointError, match="should be a list of URLs"):
        sources.reload()
    assert [endpoint.name for endpoint in await sources.resolve("decode")] == ["http://d:1", "http://d:22"]


@pytest.mark.parametrize("text", ["", "- a", "prefill: x\ndecode: y", "{", "prefill: [1]\ndecode: [2]", "\x00"])
def test_a_file_that_lists_no_engines_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "endpoints.yaml"
    file.write_text(text)
    with pytest.raises(EndpointError, match=str(file)):
        Sources({}, file)


def test_the_last_engine_of_a_role_stays() -> None:
    with pytest.raises(EndpointError, match="is the last prefill engine"):
        Sources(GIVEN).remove("prefill", "http://10.0.0.1:8100")
