"""What every tokenizer that we train has in common: special tokens, chat template, the files of its folder.

Training is in `tokenizer_training.py`, opening in `tokenizers.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<pad>")
"""Ids 0 to 3: unknown (never produced), first of a document, last of a document, padding."""
CHAT_TOKENS = ("<|im_start|>", "<|im_end|>")
"""Ids 4 and 5, wherever there is a chat template."""

CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
    {{- '<|im_start|>' + message['role'] + '\\n' -}}
    {%- if message['role'] == 'assistant' -%}
        {%- generation -%}{{- message['content'] + '<|im_end|>' -}}{%- endgeneration -%}
    {%- else -%}
        {{- message['content'] + '<|im_end|>' -}}
    {%- endif -%}
    {{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""
"""ChatML behind a BOS token, as documents begin with one; the marks say what an assistant has to learn."""


def write_files(folder: Path, tokenizer_json: dict[str, Any], *, chat: bool, model: bytes | None) -> None:
    """Writes a tokenizer as a Hugging Face folder, with SentencePiece's own `model` beside it if given."""
    folder.mkdir(parents=True, exist_ok=True)
    unknown, first, last, padding = SPECIAL_TOKENS
    names = {"unk_token": unknown, "bos_token": first, "eos_token": last, "pad_token": padding}
    extra: dict[str, Any] = {"additional_special_tokens": list(CHAT_TOKENS)} if chat else {}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": True,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1 << 30,
        **names,
        **extra,
    }
    if chat:
        config["chat_template"] = CHAT_TEMPLATE
        (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8", newline="")
    if model is not None:
        (folder / "tokenizer.model").write_bytes(model)
    for file, content in (
        ("tokenizer.json", tokenizer_json),
        ("tokenizer_config.json", config),
        ("special_tokens_map.json", names | extra),
    ):
        (folder / file).write_text(
            json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8", newline=""
        )


def tokenizer_json(vocabulary: dict[str, int], *, chat: bool, **parts: Any) -> dict[str, Any]:
    """A tokenizer.json whose special tokens are not looked for in text, and that puts BOS before a text.

    `parts` holds `model`, `decoder` and, where there is one, `normalizer` and `pre_tokenizer`.
    """
    special = SPECIAL_TOKENS + (CHAT_TOKENS if chat else ())
    bos = SPECIAL_TOKENS[1]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added_token(vocabulary[token], token) for token in special],
        "normalizer": parts.get("normalizer"),
        "pre_tokenizer": parts.get("pre_tokenizer"),
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [_special(bos, 0), _sequence("A", 0)],
            "pair": [_special(bos, 0), _sequence("A", 0), _special(bos, 1), _sequence("B", 1)],
            "special_tokens": {bos: {"id": bos, "ids": [vocabulary[bos]], "tokens": [bos]}},
        },
        "decoder": parts["decoder"],
        "model": parts["model"],
    }


def bpe_model(
    vocabulary: dict[str, int], merges: list[Any], *, byte_fallback: bool, unk_token: str | None
) -> dict[str, Any]:
    """The `model` entry of a tokenizer.json for byte-pair merges in the order of `merges`."""
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unk_token,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": byte_fallback,
        "byte_fallback": byte_fallback,
        "ignore_merges": False,
        "vocab": vocabulary,
        "merges": merges,
    }


def _added_token(index: int, content: str) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": index, "content": content, **flags}


def _special(token: str, type_id: int) -> dict[str, Any]:
    return {"SpecialToken": {"id": token, "type_id": type_id}}


def _sequence(name: str, type_id: int) -> dict[str, Any]:
    return {"Sequence": {"id": name, "type_id": type_id}}
