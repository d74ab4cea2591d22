"""transformers 4 or 5: the model, its cache, the tokenizer, a pipeline and the chat template.

python check_transformers.py WEIGHTS REFERENCE.json
"""

import sys

import torch
import transformers
from comparison import Comparison
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

weights = sys.argv[1]
comparison = Comparison(f"transformers {transformers.__version__}")
tokenizer = AutoTokenizer.from_pretrained(weights, trust_remote_code=False)
model = AutoModelForCausalLM.from_pretrained(weights, trust_remote_code=False).float().eval()
comparison.ids(lambda text: tokenizer(text, add_special_tokens=False)["input_ids"])
for row in comparison.prompts:
    count = len(row["greedy"])
    out = model.generate(
        torch.tensor([row["ids"]]),
        attention_mask=torch.ones(1, len(row["ids"]), dtype=torch.long),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tokens = out.sequences[0, len(row["ids"]) :].tolist()
    logprobs = torch.cat(out.logits).double().log_softmax(-1).max(-1).values.tolist()
    comparison.greedy(row, tokens, logprobs)
generate = pipeline("text-generation", model=model, tokenizer=tokenizer)
print("pipeline:", repr(generate("The function", max_new_tokens=8, do_sample=False)[0]["generated_text"]))
if tokenizer.chat_template:
    messages = [{"role": "user", "content": "Hello"}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    answer = generate(messages, max_new_tokens=8, do_sample=False)[0]["generated_text"][-1]
    print("chat:", repr(prompt), "->", answer["role"], repr(answer["content"]))
comparison.finish()
