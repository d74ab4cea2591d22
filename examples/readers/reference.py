"""Writes what our own decoder makes of a weights folder, for the other libraries to be compared with.

    python examples/readers/reference.py WEIGHTS REFERENCE.json

In this project's environment. Token ids of some texts, the likeliest continuation of each in fp32, and
the log-probability of every token of it; and the texts' bits per byte as `llm-pretrain evaluate` computes it.
"""

from __future__ import annotations

import json
import sys
import tempfile
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import torch

from llm_pretrain.__main__ import main as run_command
from llm_pretrain.data.tokenizers import open_tokenizer
from llm_pretrain.export.huggingface import load_pretrained, read_config

TEXTS = ["The function returns a list of", "春眠不觉晓,处处闻", "import os\n\ndef main(", "  It's 2 + 2 = "]
NEW_TOKENS = 16


def main(weights: Path, output: Path) -> None:
    model, tokenizer = load_pretrained(weights).eval(), open_tokenizer(weights)
    start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    rows = []
    for text in TEXTS:
        prompt = tokenizer.encode([text])[0]
        ids, logprobs = start + prompt, []
        for _ in range(NEW_TOKENS):
            with torch.no_grad():
                logits = model(torch.tensor([ids])).logits
            assert logits is not None
            row = logits[0, -1].double().log_softmax(-1)
            ids.append(int(row.argmax()))
            logprobs.append(float(row.max()))
        first = len(start) + len(prompt)
        rows.append(
            {
                "text": text,
                "text_ids": prompt,
                "ids": ids[:first],
                "greedy": ids[first:],
                "logprobs": logprobs,
            }
        )
    content = {
        "vocab_size": read_config(weights)["vocab_size"],
        "bits_per_byte": bits_per_byte(weights),
        "prompts": rows,
    }
    output.write_text(json.dumps(content, ensure_ascii=False, indent=1), encoding="utf-8")
    print(f"{output}: {len(rows)} texts, {NEW_TOKENS} tokens each")


def bits_per_byte(weights: Path) -> float:
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(StringIO()) as printed:
        file = Path(folder) / "texts.jsonl"
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
        if code := run_command(["evaluate", str(weights), "--input", str(file), "--json"]):
            sys.exit(code)
    return json.loads(printed.getvalue())["bits_per_byte"]


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
