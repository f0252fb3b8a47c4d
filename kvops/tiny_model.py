"""A tiny Qwen3-shaped model with random weights, for fleets that prove the KV path rather than the prose.

Two properties matter more than size. Greedy answers must change when a single KV block is wrong, or comparing answers
proves nothing: so the weights are spread wide and the query and key norms are scaled until attention is sharp. And
answers must tokenise back to the very tokens that were generated, or no turn of a conversation could reuse the KV of
the one before: so only printable ASCII bytes, one token each, can ever win.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

MODEL_NAME = "kvops-tiny"
CONTEXT_TOKENS = 32768
LAYERS = 4
KV_HEADS = 2
HEAD_DIM = 32
_HIDDEN, _INTERMEDIATE, _HEADS = 128, 256, 4
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# ChatML without a system prompt: each turn extends the text of the one before, so its KV stays a valid prefix.
_CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# K and V of every layer in float32: what one token of prompt costs on the wire.
KV_BYTES_PER_TOKEN = LAYERS * 2 * KV_HEADS * HEAD_DIM * 4


def default_path() -> Path:
    """Return where the model is kept: ``$XDG_CACHE_HOME/kvops/kvops-tiny`` (default ``~/.cache``)."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "kvops" / MODEL_NAME


def ensure_model(path: Path) -> Path:
    """Write the model to ``path`` unless it is there already, and return ``path``.

    The folder appears whole or not at all, so two fleets starting at once cannot read half a model.

    Raises:
        ModuleNotFoundError: numpy, safetensors or tokenizers are missing; vLLM brings all three.
    """
    if (path / "config.json").exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        draft = Path(scratch) / MODEL_NAME
        draft.mkdir()
        _write_tokenizer(draft)
        _write_weights(draft)
        (draft / "config.json").write_text(json.dumps(_config(), indent=2))
        if not path.exists():
            draft.rename(path)
    return path


def _vocabulary() -> dict[str, int]:
    from tokenizers.pre_tokenizers import ByteLevel  # noqa: PLC0415

    return {token: index for index, token in enumerate([*_SPECIAL, *sorted(ByteLevel.alphabet())])}


def _config() -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": _HIDDEN,
        "intermediate_size": _INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "vocab_size": len(_vocabulary()),
        "max_position_embeddings": CONTEXT_TOKENS,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 2,
        # Full precision keeps near-ties from flipping between a whole prefill and one that starts from loaded KV.
        "dtype": "float32",
    }


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers  # noqa: PLC0415

    tokenizer = Tokenizer(models.BPE(vocab=_vocabulary(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": CONTEXT_TOKENS,
        "clean_up_tokenization_spaces": False,
        "chat_template": _CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def _write_weights(folder: Path) -> None:
    import numpy as np  # noqa: PLC0415
    from safetensors.numpy import save_file  # noqa: PLC0415

    random = np.random.default_rng(20240229)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> np.ndarray[Any, np.dtype[np.float32]]:
        return random.standard_normal((rows, columns), dtype=np.float32) * np.float32(gain / np.sqrt(columns))

    def ones(size: int, value: float = 1.0) -> np.ndarray[Any, Any]:
        return np.full(size, value, dtype=np.float32)

    vocabulary = _vocabulary()
    tensors = {
        "model.embed_tokens.weight": matrix(len(vocabulary), _HIDDEN, gain=np.sqrt(_HIDDEN)),
        "model.norm.weight": ones(_HIDDEN),
        "lm_head.weight": matrix(len(vocabulary), _HIDDEN, gain=4.0),
    }
    printable = [vocabulary[chr(code)] for code in range(0x21, 0x7F)]
    unprintable = np.setdiff1d(np.arange(len(vocabulary)), printable)
    tensors["lm_head.weight"][unprintable] = 0.0
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        tensors |= {
            prefix + "input_layernorm.weight": ones(_HIDDEN),
            prefix + "post_attention_layernorm.weight": ones(_HIDDEN),
            prefix + "self_attn.q_proj.weight": matrix(_HEADS * HEAD_DIM, _HIDDEN),
            prefix + "self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, _HIDDEN),
            prefix + "self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, _HIDDEN),
            prefix + "self_attn.o_proj.weight": matrix(_HIDDEN, _HEADS * HEAD_DIM, gain=4.0),
            prefix + "self_attn.q_norm.weight": ones(HEAD_DIM, 3.0),
            prefix + "self_attn.k_norm.weight": ones(HEAD_DIM, 3.0),
            prefix + "mlp.gate_proj.weight": matrix(_INTERMEDIATE, _HIDDEN),
            prefix + "mlp.up_proj.weight": matrix(_INTERMEDIATE, _HIDDEN),
            prefix + "mlp.down_proj.weight": matrix(_HIDDEN, _INTERMEDIATE),
        }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
