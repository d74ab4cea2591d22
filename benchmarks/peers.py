"""Training loops that are measured side by side, each as its users run it, taking steps in turns.

Ours is `pretrain` with the torchrun engine: assembly, step, rows, console. Trainer is transformers', fed as
its users feed it. LitGPT's pretraining is in `peer_litgpt.py`, since it needs an environment of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.documents import Documents
from benchmarks.loop_overhead import BareLoop
from benchmarks.machine import ROOT
from benchmarks.turns import Turns
from llm_pretrain.config.loading import resolve_model
from llm_pretrain.config.tree import Config
from llm_pretrain.data.loader import open_stores, sequences_per_epoch
from llm_pretrain.launch.process import prepare_process
from llm_pretrain.optim.build import build_optimizer
from llm_pretrain.training.model_setup import build_model, initialize_weights
from llm_pretrain.training.step import Step
from llm_pretrain.training.trainer import pretrain
from train_pretrain import TorchrunEngine

StepDone = Callable[[], None]


@dataclass
class Side:
    """One loop of a comparison.

    Args:
        step: Takes one optimizer step; returns its seconds where it runs in another process.
        tokens: Loss-bearing tokens of a step, on average over the whole corpus.
        close: Ends the loop.
    """

    step: Callable[[], float | None]
    tokens: float
    close: Callable[[], object] = lambda: None


def ours(config: Config, documents: Documents) -> Side:
    """The loop that users run."""
    turns = Turns("ours", partial(_our_loop, config))
    return Side(turns, our_tokens(config), turns.close)


def our_tokens(config: Config) -> float:
    """Loss tokens of a micro batch, on average over an epoch of the packed store."""
    targets = sum(store.facts["splits"]["train"]["targets"] for store in open_stores(config))
    return targets / sequences_per_epoch(config) * config.training.micro_batch_size


class _TurningEngine(TorchrunEngine):
    step_done: StepDone

    def train_step(self, step: Step) -> None:
        super().train_step(step)
        self.step_done()  # the row, the next batch and the rest of the loop belong to the next turn


def _our_loop(config: Config, step_done: StepDone) -> None:
    prepare_process(config)
    engine = _TurningEngine(config)
    engine.step_done = step_done
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        pretrain(config, engine)


def bare(config: Config, documents: Documents) -> Side:
    """Batch assembly, forward, backward, clipping and optimizer of our model, and nothing else."""
    prepare_process(config)
    config = resolve_model(config, open_stores(config)[0].vocab_size)
    model = build_model(config)
    initialize_weights(model, config.run.seed)
    loop = BareLoop(config, model, build_optimizer(model, config.optimizer, config.training.precision))
    return Side(loop.step, our_tokens(config))


def trainer_padded(config: Config, documents: Documents) -> Side:
    """transformers.Trainer on one document a row, cut at the sequence length, padded to the longest of its
    batch (the friendlier of its two ways), by `DataCollatorForLanguageModeling`."""
    length = config.training.sequence_length
    rows = [each[:length].tolist() for each in documents.split()]
    loss_tokens = float(np.mean([len(row) - 1 for row in rows])) * config.training.micro_batch_size
    turns = Turns("trainer_padded", partial(_trainer_loop, config, rows, "padded"))
    return Side(turns, loss_tokens, turns.close)


def trainer_packed(config: Config, documents: Documents) -> Side:
    """transformers.Trainer on the documents joined and cut into rows of the sequence length, as its script
    `run_clm.py` does: attention crosses documents."""
    length = config.training.sequence_length
    rows = documents.ids[: len(documents.ids) // length * length].reshape(-1, length).tolist()
    turns = Turns("trainer_packed", partial(_trainer_loop, config, rows, "packed"))
    return Side(turns, float((length - 1) * config.training.micro_batch_size), turns.close)


def _trainer_loop(config: Config, rows: list[list[int]], form: str, step_done: StepDone) -> None:
    """Trainer with our settings; whatever is not named here is Trainer's default."""
    from datasets import Dataset
    from transformers import (
        DataCollatorForLanguageModeling,
        PreTrainedTokenizerFast,
        PrinterCallback,
        Trainer,
        TrainerCallback,
        TrainingArguments,
        default_data_collator,
    )

    class Turning(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            step_done()

    store = open_stores(config)[0]
    columns = {"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]}
    if form == "packed":
        columns["labels"] = rows
    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(store.path / "tokenizer"))
    padding = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    optimizer = config.optimizer
    trainer = Trainer(
        model=transformers_model(resolve_model(config, store.vocab_size)),
        args=TrainingArguments(
            output_dir=str(config.run.folder.with_name("trainer")),
            max_steps=config.training.max_steps,
            per_device_train_batch_size=config.training.micro_batch_size,
            learning_rate=optimizer.learning_rate,
            weight_decay=optimizer.weight_decay,
            adam_beta1=optimizer.adam_beta1,
            adam_beta2=optimizer.adam_beta2,
            adam_epsilon=optimizer.adam_epsilon,
            max_grad_norm=config.training.max_grad_norm,
            bf16=config.training.precision == "bf16",
            use_cpu=True,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_dict(columns),
        data_collator=padding if form == "padded" else default_data_collator,
        callbacks=[Turning()],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()


def transformers_model(config: Config) -> Any:
    """transformers' model of the same shape, with random weights of its own, in fp32; config resolved."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from llm_pretrain.export.config_json import huggingface_config

    described = huggingface_config(config.model, bos_token_id=1, eos_token_id=2, pad_token_id=3, dtype="fp32")
    described["output_router_logits"] = config.model.router_aux_loss_coef > 0 and config.model.num_experts > 0
    settings = AutoConfig.for_model(described.pop("model_type"), **described)
    return AutoModelForCausalLM.from_config(settings, dtype=torch.float32, attn_implementation="sdpa")


class LitGPT:
    """LitGPT's pretraining in a process of its own environment, which measures its steps itself.

    Args:
        python: An interpreter that has litgpt.
        clock: `process_time` or `perf_counter`.
    """

    def __init__(self, config: Config, documents: Documents, python: str, clock: str):
        folder = config.run.folder.with_name("litgpt")
        folder.mkdir(parents=True, exist_ok=True)
        np.save(folder / "ids.npy", documents.ids)
        model, training, optimizer = config.model, config.training, config.optimizer
        settings = {
            "clock": clock,
            "folder": str(folder),
            "length": training.sequence_length,
            "micro_batch_size": training.micro_batch_size,
            "precision": "bf16-mixed" if training.precision == "bf16" else "32-true",
            "max_norm": training.max_grad_norm,
            "optimizer": {
                "lr": optimizer.learning_rate,
                "weight_decay": optimizer.weight_decay,
                "betas": [optimizer.adam_beta1, optimizer.adam_beta2],
            },
            "tie": model.tie_word_embeddings,
            "model": {
                "padded_vocab_size": model.vocab_size,
                "n_layer": model.num_hidden_layers,
                "n_embd": model.hidden_size,
                "n_head": model.num_attention_heads,
                "n_query_groups": model.num_key_value_heads,
                "head_size": model.attention_head_dim,
                "intermediate_size": model.intermediate_size,
                "norm_eps": model.rms_norm_eps,
                "norm_qk": model.qk_norm,
                "rope_base": int(model.rope_theta),
            },
        }
        command = [python, str(ROOT / "benchmarks" / "peer_litgpt.py"), json.dumps(settings)]
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        self._log = (folder / "log.txt").open("w")
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
        )
        self._folder = folder

    def step(self) -> float:
        """Have it take a step; returns its seconds."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("took "):
                return float(line.split()[1])
        lines = (self._folder / "log.txt").read_text().splitlines()
        raise RuntimeError(f"litgpt: {lines[-1] if lines else 'ended without a word'}")

    def close(self) -> None:
        """End its process."""
        self._process.kill()
        self._process.wait()
        self._log.close()


def litgpt(config: Config, documents: Documents, *, python: str, clock: str) -> Side:
    """LitGPT's `pretrain`, compiled as it does by default, on the documents joined and cut into rows."""
    process = LitGPT(resolve_model(config, open_stores(config)[0].vocab_size), documents, python, clock)
    tokens = float(config.training.sequence_length * config.training.micro_batch_size)
    return Side(process.step, tokens, process.close)


def has_litgpt(python: str) -> bool:
    """Whether an interpreter can import it."""
    command = [python, "-c", "import litgpt.pretrain"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def default_litgpt_python() -> str:
    """BENCH_LITGPT_PYTHON, or this interpreter."""
    return os.environ.get("BENCH_LITGPT_PYTHON", sys.executable)
