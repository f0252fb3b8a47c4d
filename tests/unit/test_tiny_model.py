from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from kvops import tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.ensure_model(tmp_path_factory.mktemp("model") / "kvops-tiny")


def test_the_folder_is_written_once(model: Path) -> None:
    before = (model / "model.safetensors").stat().st_mtime_ns
    tiny_model.ensure_model(model)
    assert (model / "model.safetensors").stat().st_mtime_ns == before


def test_two_writers_make_the_same_model(model: Path, tmp_path: Path) -> None:
    other = tiny_model.ensure_model(tmp_path / "kvops-tiny")
    assert (other / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()


def test_no_scratch_is_left_behind(model: Path) -> None:
    assert [entry.name for entry in model.parent.iterdir()] == ["kvops-tiny"]


def test_any_text_survives_tokenising(model: Path) -> None:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    text = 'Grüße, 世界! {"a": [1, 2]}\n\ttabs and   spaces'
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_only_printable_tokens_can_be_generated(model: Path) -> None:
    head = load_file(model / "model.safetensors")["lm_head.weight"]
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    alive = {tokenizer.decode([index]) for index in range(len(head)) if head[index].any()}
    assert alive == {chr(code) for code in range(0x21, 0x7F)}


def test_bytes_per_token_follow_from_the_shape(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    floats = config["num_hidden_layers"] * 2 * config["num_key_value_heads"] * config["head_dim"]
    assert floats * 4 == tiny_model.KV_BYTES_PER_TOKEN


def test_the_model_lives_in_the_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert tiny_model.default_path() == Path("/somewhere/kvops/kvops-tiny")
