"""TRL: one step of supervised fine-tuning on conversations, the loss on the assistant's turns alone.

python check_trl.py WEIGHTS
"""

import sys
import tempfile
from importlib.metadata import version

from datasets import Dataset
from transformers import AutoTokenizer
from trl import SFTConfig, SFTTrainer

talk = [{"role": "user", "content": "Name a list method."}, {"role": "assistant", "content": "append"}]
with tempfile.TemporaryDirectory() as folder:
    settings = SFTConfig(
        output_dir=folder, max_steps=1, per_device_train_batch_size=2, report_to="none", use_cpu=True,
        max_length=128, assistant_only_loss=True, logging_steps=1, save_strategy="no", bf16=False,
    )  # fmt: skip
    trainer = SFTTrainer(
        sys.argv[1],
        args=settings,
        train_dataset=Dataset.from_list([{"messages": talk}] * 2),
        processing_class=AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=False),
    )
    result = trainer.train()
print(f"ok  trl {version('trl')}: one step, loss {result.training_loss:.4f}")
