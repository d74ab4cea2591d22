"""PEFT: one step of LoRA, and the merged model.

python check_peft.py WEIGHTS
"""

import sys

import peft
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=False)
base = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32, trust_remote_code=False)
model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
batch = tokenizer("The function returns a list of names.", return_tensors="pt", return_token_type_ids=False)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
losses = []
for _ in range(2):
    loss = model(**batch, labels=batch["input_ids"]).loss
    losses.append(loss.item())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
model.merge_and_unload()
learns = losses[1] < losses[0]
figures = f"loss {losses[0]:.4f}, after one step {losses[1]:.4f}"
print(f"{'ok' if learns else 'DIFFERS'}  peft {peft.__version__}: {figures}")
if not learns:
    sys.exit(1)
