"""mlx-lm, on Apple silicon or, with `mlx[cpu]`, on Linux.

python check_mlx.py WEIGHTS REFERENCE.json
"""

import sys
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
from comparison import Comparison
from mlx_lm import load
from mlx_lm.generate import generate_step
from mlx_lm.sample_utils import make_sampler

model, tokenizer = load(str(Path(sys.argv[1])))
model.set_dtype(mx.float32)
comparison = Comparison(f"mlx-lm {version('mlx-lm')}, mlx {version('mlx')}")
comparison.ids(lambda text: tokenizer.encode(text, add_special_tokens=False))
for row in comparison.prompts:
    tokens, logprobs = [], []
    steps = generate_step(
        mx.array(row["ids"]), model, max_tokens=len(row["greedy"]), sampler=make_sampler(temp=0.0)
    )
    for token, logprob in steps:
        tokens.append(int(token))
        logprobs.append(float(logprob[int(token)]))
    comparison.greedy(row, tokens, logprobs)
comparison.finish()
