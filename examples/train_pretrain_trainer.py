"""The same run by transformers' own Trainer: a witness whose arithmetic none of us wrote.

`torchrun --nproc_per_node N examples/train_pretrain_trainer.py --config FILE`, options as the other scripts'.
Model, loss, accumulation, clipping and optimizer are transformers'; ours are the weights that it starts
from, the samples and their order, and the metrics. It evaluates nothing and saves nothing; docs/trainer.md
says what it found.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import AutoModelForCausalLM, PreTrainedModel, PrinterCallback, Trainer, TrainingArguments
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a clone runs its own package

from llm_pretrain.checkpoints.manifest import newest_run_id
from llm_pretrain.config.loading import dump_yaml, load_config, resolve_model
from llm_pretrain.config.tree import Config
from llm_pretrain.data.assembly import Batch
from llm_pretrain.data.loader import MicroBatches, global_batches, open_stores
from llm_pretrain.data.store import TokenStore
from llm_pretrain.errors import ConfigError, OutputError
from llm_pretrain.export.config_json import huggingface_config
from llm_pretrain.export.huggingface import to_huggingface
from llm_pretrain.launch.checks import check_world_size, obey_use_cpu
from llm_pretrain.launch.process import prepare_process, report_errors
from llm_pretrain.model.decoder import Decoder
from llm_pretrain.optim.schedule import decay_length, learning_rate
from llm_pretrain.runs.folder import RunFolder
from llm_pretrain.runs.rows import MetricsWriter
from llm_pretrain.runs.status import Status
from llm_pretrain.training.model_setup import initialize_weights


class WitnessTrainer(Trainer):
    """Trainer, with a row of metrics.jsonl for each step that it logs; its arithmetic is left alone.

    Args:
        config: The run's, with the model's vocabulary.
        store: Whose special tokens the model's config names.
        metrics: Where rows go; None on ranks that write none.
    """

    def __init__(self, config: Config, store: TokenStore, world_size: int, metrics: MetricsWriter | None):
        self.config, self.metrics = config, metrics
        samples = global_batches(config, start_step=0).dataset
        assert isinstance(samples, MicroBatches)
        self.samples = samples
        self.digest = torch.zeros(8, dtype=torch.int64)
        self.num_loss_tokens = self.tokens_seen = 0
        self.aux_loss = 0.0
        model = initial_model(config, store)
        super().__init__(
            model=model,
            args=training_arguments(config, world_size),
            train_dataset=samples,
            data_collator=self.collate,  # type: ignore[arg-type]  # typed for lists of samples
        )
        self.remove_callback(PrinterCallback)
        if self.args.n_gpu > 1:
            raise ConfigError(
                "launch: one process on several GPUs would split each micro batch; use torchrun"
            )
        check_world_size(self.args.world_size)
        model.register_forward_hook(self._note_aux_loss)

    def collate(self, batch: Batch) -> dict[str, Tensor]:
        """What the model gets, and `sample_numbers` [B].

        `shift_labels` are labels that are shifted already: the target of a sequence's last token is not
        among its inputs. Where positions start anew transformers' mask begins another document.
        """
        size = len(batch.input_ids)
        first = batch.step * self.config.training.global_batch_size + batch.micro_batch * size
        return {
            "input_ids": batch.input_ids,
            "position_ids": batch.position_ids,
            "labels": batch.labels,
            "shift_labels": batch.labels,
            "sample_numbers": torch.arange(first, first + size),
        }

    def training_step(
        self, model: torch.nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Trainer's, after a digest of what it was given."""
        numbers = inputs.pop("sample_numbers").tolist()
        self.digest += self.samples.digest(numbers, inputs["input_ids"], inputs["shift_labels"])
        self.num_loss_tokens = int(num_items_in_batch or 0)
        return super().training_step(model, inputs, num_items_in_batch)

    def create_scheduler(self, num_training_steps: int, optimizer: Optimizer | None = None) -> LRScheduler:
        """Trainer's own schedule where it has ours, else our learning rate as a function of the step."""
        self._check_decay()
        if self.lr_scheduler is None and own_schedule(self.config) is None:
            peak = self.config.optimizer.learning_rate
            chosen: Any = optimizer or self.optimizer
            self.lr_scheduler = LambdaLR(chosen, lambda step: learning_rate(self.config, step) / peak)
        return super().create_scheduler(num_training_steps, optimizer)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Trainer's, and one row; every rank takes part."""
        if "loss" in logs:
            self._write_row(logs)
        super().log(logs, start_time)

    def _write_row(self, logs: dict[str, float]) -> None:
        """`trainer/loss` is what Trainer says, unrounded: the mean over ranks of its micro batches' sum."""
        step, config = self.state.global_step, self.config
        self.tokens_seen += self.num_loss_tokens
        aux_loss_sum = torch.tensor([self.aux_loss], dtype=torch.float64, device=self.args.device)
        aux_loss = float(self.accelerator.reduce(aux_loss_sum, "sum"))  # type: ignore[arg-type]
        self.aux_loss = 0.0
        if step % config.logging.logging_steps:
            return
        digest = self.accelerator.reduce(self.digest.to(self.args.device), "sum")
        self.digest = torch.zeros(8, dtype=torch.int64)
        row: dict[str, object] = {
            "step": step,
            "time": time.time(),
            "train/loss": logs["loss"] - aux_loss,
            "train/grad_norm": logs["grad_norm"],
            "train/learning_rate": logs["learning_rate"],
            "train/loss_tokens": self.num_loss_tokens,
            "train/tokens": self.tokens_seen,
            "train/skipped": None,
            "trainer/loss": logs["loss"],
            "data/batch_sha256": "".join(f"{int(word) & 0xFFFF_FFFF:08x}" for word in digest),
        }
        if config.model.moe_layers:
            row["train/aux_loss"] = aux_loss
        if self.metrics is not None:
            self.metrics.append(row)
            print(f"step {step}/{config.training.max_steps}  loss {row['train/loss']:.6f}", flush=True)

    def _note_aux_loss(self, module: torch.nn.Module, arguments: Any, output: Any) -> None:
        """Sum what this micro batch adds to the step's objective: Trainer neither averages it over ranks
        (it multiplies the whole loss by their number, which DDP's mean undoes) nor over micro batches."""
        if getattr(output, "aux_loss", None) is not None:
            self.aux_loss += self.config.model.router_aux_loss_coef * float(output.aux_loss.detach())

    def _check_decay(self) -> None:
        """Trainer chooses by name what decays, we by dimensions; both must choose the same."""
        model: Any = self.model
        decaying = set(self.get_decay_parameter_names(model))
        named = model.named_parameters()  # a tied head once; Trainer lists it twice
        differing = [name for name, each in named if (each.dim() >= 2) != (name in decaying)]
        if differing and self.config.optimizer.weight_decay:
            raise ConfigError(
                "optimizer.weight_decay: expected 0 for a model whose parameters Trainer and we decay "
                f"differently ({differing[0]}), found {self.config.optimizer.weight_decay}"
            )


def initial_model(config: Config, store: TokenStore) -> PreTrainedModel:
    """transformers' model with the weights that our runs start from, in fp32, read by its own loader."""
    decoder = Decoder(config.model)
    initialize_weights(decoder, config.run.seed)
    described = huggingface_config(
        config.model,
        bos_token_id=store.bos_token_id,
        eos_token_id=store.eos_token_id,
        pad_token_id=store.pad_token_id,
        dtype="fp32",
    )
    # transformers adds its balance loss only where the config asks for the router's logits
    described["output_router_logits"] = adds_balance_loss(config)
    with tempfile.TemporaryDirectory() as folder:
        weights = to_huggingface(decoder.state_dict(), config.model, torch.float32)
        save_file(weights, Path(folder) / "model.safetensors", {"format": "pt"})
        (Path(folder) / "config.json").write_text(json.dumps(described))
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation="sdpa",
            output_loading_info=True,
            trust_remote_code=False,
        )
        model, report = loaded
    strays = {kind: names for kind, names in report.items() if names}
    assert not strays, f"weights that did not find their place: {strays}"
    return model


def adds_balance_loss(config: Config) -> bool:
    """Whether transformers' auxiliary loss is part of the objective."""
    return bool(config.model.moe_layers) and config.model.router_aux_loss_coef > 0


def training_arguments(config: Config, world_size: int) -> TrainingArguments:
    """The configuration in Trainer's words; whatever is not named here is Trainer's default."""
    training, optimizer = config.training, config.optimizer
    on_gpu = torch.cuda.is_available()
    name, arguments = own_schedule(config) or ("constant", {})
    older = not hasattr(TrainingArguments, "activation_checkpointing")  # transformers 5.17
    checkpointing: dict[str, Any] = {
        "gradient_checkpointing" if older else "activation_checkpointing": training.activation_checkpointing
    }
    return TrainingArguments(
        output_dir=str(config.run.folder),
        max_steps=training.max_steps,
        per_device_train_batch_size=training.micro_batch_size,
        gradient_accumulation_steps=config.gradient_accumulation_steps(world_size),
        train_sampling_strategy="sequential",  # the samples stand in our order already
        dataloader_drop_last=True,
        remove_unused_columns=False,
        optim="adamw_torch",
        learning_rate=optimizer.learning_rate,
        weight_decay=optimizer.weight_decay,
        adam_beta1=optimizer.adam_beta1,
        adam_beta2=optimizer.adam_beta2,
        adam_epsilon=optimizer.adam_epsilon,
        max_grad_norm=training.max_grad_norm,
        lr_scheduler_type=name,
        lr_scheduler_kwargs=arguments,
        bf16=training.precision == "bf16",
        fp16=training.precision == "fp16",
        **checkpointing,
        use_cpu=not on_gpu,
        ddp_backend=("nccl" if on_gpu else "gloo") if world_size > 1 else None,
        ddp_timeout=config.distributed.timeout_seconds,
        seed=config.run.seed,
        logging_steps=1,
        logging_nan_inf_filter=False,  # it would log the mean of earlier losses in place of NaN
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )


def own_schedule(config: Config) -> tuple[str, dict[str, Any]] | None:
    """Trainer's name and arguments for our schedule; None where it has none that is the same.

    Its warm-up begins at 0 and ours at peak / warmup_steps, and its decays end with the run.
    """
    schedule, steps = config.schedule, config.training.max_steps
    peak, lowest = config.optimizer.learning_rate, schedule.min_learning_rate
    if schedule.warmup_steps:
        return None
    if schedule.name == "constant":
        return "constant", {}
    if schedule.name == "wsd":
        decay_steps = decay_length(config)
        arguments = {"num_decay_steps": decay_steps, "decay_type": "linear", "min_lr_ratio": lowest / peak}
        return ("warmup_stable_decay", arguments) if decay_steps <= steps else None
    if schedule.decay_steps not in (None, steps):
        return None
    if schedule.name == "cosine":
        return "cosine_with_min_lr", {"min_lr": lowest}
    return ("polynomial", {"lr_end": lowest, "power": 1.0}) if lowest else ("linear", {})


def check_config(config: Config) -> None:
    """Raises ConfigError naming each field that Trainer or transformers' models cannot follow."""
    model, training = config.model, config.training
    wanted = {
        "distributed.strategy": (config.distributed.strategy, "ddp"),
        "model.attention_dropout": (model.attention_dropout, 0),
        "model.hidden_dropout": (model.hidden_dropout, 0),
        "model.init_from": (model.init_from, None),
        "optimizer.base_hidden_size": (config.optimizer.base_hidden_size, None),
        "optimizer.ema_decay": (config.optimizer.ema_decay, 0),
        "optimizer.name": (config.optimizer.name, "adamw"),
        "training.float8": (training.float8, False),
        "training.spike_action": (training.spike_action, "log"),
        "training.z_loss_coef": (training.z_loss_coef, 0),
    }
    if model.moe_layers:
        wanted |= {
            "model.n_shared_experts": (model.n_shared_experts, 0),
            "model.scoring_func": (model.scoring_func, "softmax"),
            "model.norm_topk_prob": (model.norm_topk_prob or model.qk_norm, True),
            "model.routed_scaling_factor": (model.routed_scaling_factor, 1),
            "model.router_bias_update_rate": (model.router_bias_update_rate, 0),
            "model.router_z_loss_coef": (model.router_z_loss_coef, 0),
        }
    if training.precision == "fp16" and not torch.cuda.is_available():
        wanted["training.precision"] = (training.precision, "fp32 or bf16 on a CPU")
    problems = [
        f"{field}: expected {right}, all that Trainer can do the same, found {value}; "
        "set it so, or leave the trainer path out"
        for field, (value, right) in wanted.items()
        if value != right
    ]
    if problems:
        raise ConfigError(*problems)


def train(config: Config) -> int:
    """The whole run; returns the exit code."""
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    check_config(config)
    stores = open_stores(config)
    config = resolve_model(config, stores[0].vocab_size)
    folder = RunFolder(config.run.folder)
    if rank == 0:
        folder.acquire(newest_run_id)
        if folder.metrics.exists():
            raise OutputError(
                f"{folder.path}: expected a new run folder (nothing here resumes), found a run's"
            )
    status = Status(folder.status, rank=rank, world_size=world_size, launcher="trainer")
    metrics = None
    try:
        status.started()
        if rank == 0:
            folder.config.write_text(dump_yaml(config))
            metrics = MetricsWriter(folder.metrics)
        trainer = WitnessTrainer(config, stores[0], world_size, metrics)
        prepare_process(config)  # once more: Accelerate chooses a number of threads of its own
        trainer.train()
        status.ended(trainer.state.global_step, 0, None)
        trainer.accelerator.end_training()
    except BaseException as error:
        status.failed(error)
        raise
    finally:
        if metrics is not None:
            metrics.close()
        folder.release()
    return 0


def main(argv: list[str] | None = None) -> int:
    """Train with the options in `argv` (default: the command line's); returns the exit code."""
    with report_errors():
        obey_use_cpu()
        config = load_config(argv)
        prepare_process(config)
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        return train(config)
    raise AssertionError("unreachable: report_errors exits after an error")


if __name__ == "__main__":
    sys.exit(main())
