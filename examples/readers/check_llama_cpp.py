"""llama.cpp by the package xllamacpp, on a file of `llm-pretrain export --to gguf --dtype fp32`.

    python check_llama_cpp.py MODEL.gguf REFERENCE.json

With fp32 keys and values and without the flash kernel, which on a CPU computes in fp16.
"""

import json
import sys
import urllib.request

import xllamacpp
from comparison import Comparison

parameters = xllamacpp.CommonParams()
parameters.model.path = sys.argv[1]
parameters.n_ctx, parameters.verbosity, parameters.warmup = 256, 0, False
parameters.cache_type_k = parameters.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
parameters.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
server = xllamacpp.Server(parameters)
comparison = Comparison(f"llama.cpp (xllamacpp {xllamacpp.__version__})")


def post(path, body):
    data = json.dumps(body).encode()
    request = urllib.request.Request(
        server.listening_address + path, data, {"Content-Type": "application/json"}
    )
    return json.loads(urllib.request.urlopen(request).read())


comparison.ids(lambda text: post("/tokenize", {"content": text, "parse_special": False})["tokens"])
for row in comparison.prompts:
    # Token by token along the reference: the server keeps back tokens that are no whole characters.
    tokens, logprobs = [], []
    for index, expected in enumerate(row["greedy"]):
        answer = server.handle_completions(
            {
                "prompt": row["ids"] + row["greedy"][:index],
                "n_predict": 1,
                "temperature": 0,
                "n_probs": 1,
                "cache_prompt": False,
            }
        )
        found = answer["choices"][0]["logprobs"]
        if found is None or not found["content"]:
            continue
        comparison.greedy(
            {"greedy": [expected], "logprobs": [row["logprobs"][index]]},
            [found["content"][0]["id"]],
            [found["content"][0]["logprob"]],
        )
comparison.finish()
