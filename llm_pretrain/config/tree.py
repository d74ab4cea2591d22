"""The configuration: one tree of frozen dataclasses that decides everything about a run.

Every field is documented here and nowhere else. Loading is in `loading.py`, contradictions between
fields in `validation.py`, the `model` section in `model_config.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from llm_pretrain.config.model_config import ModelConfig


@dataclass(frozen=True)
class RunConfig:
    """Name, place and seed of a run.

    Args:
        name: Name of the run; letters, digits, `.`, `_` and `-`.
        output_dir: The run's own folder. Default: `runs/NAME`.
        seed: Seed of the initial weights and of dropout.
    """

    name: str = "pretrain"
    output_dir: str | None = None
    seed: int = 0

    @property
    def folder(self) -> Path:
        """The run's own folder."""
        return Path(self.output_dir) if self.output_dir else Path("runs") / self.name


@dataclass(frozen=True)
class SourceConfig:
    """One token store of a mixture.

    Args:
        store: Folder written by `llm-pretrain prepare`.
        weight: Share of the samples drawn from it, relative to the other sources; 0 only where
            `weight_changes` bring the source in.
        name: What metrics call it, where there are several. Default: the folder's name.
    """

    store: str
    weight: float = 1.0
    name: str | None = None

    @property
    def label(self) -> str:
        """What metrics call this source."""
        return self.name or Path(self.store).name


@dataclass(frozen=True)
class WeightChange:
    """New weights of the mixture from a step on.

    Args:
        step: First optimizer step (from 0) that draws with these weights, rounded up to the next block of
            the sample order.
        weights: One weight for each of `data.sources`, in their order; 0 leaves a source out.
    """

    step: int
    weights: list[float]


@dataclass(frozen=True)
class DataConfig:
    """Where samples come from and in which order.

    Args:
        sources: Token stores and their weights.
        weight_changes: Weights that replace those of the sources at given steps, in ascending order.
        packing: How documents fill sequences: `best_fit` (few splits, ~no padding), `concat`, or `pad`.
        isolate_documents: Attention never crosses a document inside a sequence.
        seed: Seed of the sample order.
        num_workers: Worker processes that assemble batches; 0 assembles in the training process. Default: 2
            on a GPU, so that a step never waits for its batch, else 0.
        on_error: What `prepare` does with a bad record: count and `skip` it, or `fail` with file and line.
    """

    sources: list[SourceConfig] = field(default_factory=list)
    weight_changes: list[WeightChange] = field(default_factory=list)
    packing: Literal["best_fit", "concat", "pad"] = "best_fit"
    isolate_documents: bool = True
    seed: int = 0
    num_workers: int | None = None
    on_error: Literal["skip", "fail"] = "fail"


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer.

    Args:
        name: `adamw`: AdamW with decoupled weight decay (arXiv:1711.05101). `muon`: orthogonalised momentum
            (github.com/KellerJordan/Muon) for the layers' matrices, AdamW for embedding, head and norms.
        learning_rate: Peak learning rate. With `muon`, that of what AdamW updates.
        muon_learning_rate: Peak learning rate of the matrices that Muon updates.
        muon_momentum: Its momentum (Nesterov's).
        weight_decay: Decay of matrices; norms and biases are never decayed.
        adam_beta1: First-moment decay.
        adam_beta2: Second-moment decay.
        adam_epsilon: Added to the root of the second moment.
        base_hidden_size: Width at which the learning rates were found. Set, initial values and learning rates
            of other widths follow from it, so that the best rate stays the best (arXiv:2203.03466).
            `model.initializer_range` is then the base's: about its width to the power -0.5.
        ema_decay: Keep an exponential moving average of the parameters with this decay per step; evaluation
            and exported weights are the average's. 0 turns it off.
    """

    name: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = 1e-3
    muon_learning_rate: float = 0.02
    muon_momentum: float = 0.95
    weight_decay: float = 0.1
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_epsilon: float = 1e-8
    base_hidden_size: int | None = None
    ema_decay: float = 0.0


@dataclass(frozen=True)
class ScheduleConfig:
    """The learning rate as a pure function of the step.

    Args:
        name: Shape after the warm-up: `cosine`, `linear`, `constant`, or `wsd` (warm-up, stable, decay).
        warmup_steps: Steps of linear warm-up from 0.
        min_learning_rate: Where `cosine`, `linear` and `wsd` end.
        decay_steps: Length of the decay. Default: all steps after the warm-up (`wsd`: the last fifth).
    """

    name: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    warmup_steps: int = 0
    min_learning_rate: float = 0.0
    decay_steps: int | None = None


@dataclass(frozen=True)
class TrainingConfig:
    """Batch, length, precision and the safety of a step.

    Args:
        sequence_length: Tokens per sequence: S inputs and S labels.
        micro_batch_size: Sequences per forward and backward pass on one process.
        global_batch_size: Sequences per optimizer step, over all processes.
        max_steps: Optimizer steps of the whole run.
        precision: `fp32`, or autocast in `bf16` or `fp16` (with a gradient scaler) over fp32 weights. `auto`
            becomes `bf16` where the GPU or CPU multiplies in it, else `fp32`, when settings are loaded.
        max_grad_norm: Global gradient norm is clipped to this; 0 turns clipping off.
        z_loss_coef: Coefficient of the squared log-partition of the output softmax (PaLM, section 5).
        max_skipped_steps: The run stops as diverged after this many skipped steps in a row.
        spike_action: What follows a step whose loss or gradient norm is far beyond those of the steps before:
            `log` it, `skip` its update, or `rollback` to the parameters and optimizer state of the last
            periodic checkpoint and go on with the next step's data (docs/exactness.md has the bounds).
        deterministic: Deterministic algorithms, for bit identity on a GPU.
        activation_checkpointing: Recompute each layer's activations in the backward pass.
        compile: Compile each layer with `torch.compile`: `auto` on a GPU only, `on`, `off`.
        float8: Products of the layers' matrices in FP8 through torchao, on GPUs with FP8 (extra `float8`).
        experts_implementation: Kernel of the experts: `auto` the fastest one for the device and type,
            `streamed` (CPU), `grouped` (CUDA, bf16), `reference` (the definition; slow).
        attention_implementation: Kernel of attention within documents: `auto`, `sdpa` (one call per document
            on a CPU, a mask elsewhere), `varlen` or `flex` (CUDA).
        loss_implementation: Kernel of head and cross-entropy: `auto`, `full` (holds all logits), `fused` (in
            chunks, forward and backward in one), `liger` (CUDA, extra `liger`).
    """

    sequence_length: int = 512
    micro_batch_size: int = 8
    global_batch_size: int = 64
    max_steps: int = 1000
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    max_grad_norm: float = 1.0
    z_loss_coef: float = 0.0
    max_skipped_steps: int = 20
    spike_action: Literal["log", "skip", "rollback"] = "log"
    deterministic: bool = False
    activation_checkpointing: bool = False
    compile: Literal["auto", "on", "off"] = "auto"
    float8: bool = False
    experts_implementation: Literal["auto", "streamed", "grouped", "reference"] = "auto"
    attention_implementation: Literal["auto", "sdpa", "varlen", "flex"] = "auto"
    loss_implementation: Literal["auto", "full", "fused", "liger"] = "auto"


@dataclass(frozen=True)
class CheckpointConfig:
    """When full-precision checkpoints and half-precision weights are written and kept.

    Args:
        save_steps: Save every this many steps, and at the end; 0 saves at the end only.
        keep_last: Checkpoints and weights to keep; at least 2.
        keep_best: Keep the weights of the lowest evaluation loss in `weights/best`.
        async_save: Copy the state to the processor's memory, and write it while training goes on. Takes as
            much memory again as a rank's share of the state; what is written is the same.
        resume: `auto` continues from the newest sound checkpoint of the run's folder, `never` refuses a
            folder that has checkpoints, a path names a checkpoint folder to start from.
        weights_dtype: Precision of the exported weights.
    """

    save_steps: int = 500
    keep_last: int = 2
    keep_best: bool = True
    async_save: bool = False
    resume: str = "auto"
    weights_dtype: Literal["bf16", "fp16"] = "bf16"


@dataclass(frozen=True)
class EvaluationConfig:
    """Evaluation on the validation split.

    Args:
        eval_steps: Evaluate every this many steps, before the first and after the last; 0 turns it off.
        max_batches: Global batches of validation sequences to use. Default: the whole split.
        sample_prompts: Texts that are continued at every evaluation, into samples.jsonl and the report.
        sample_tokens: Tokens of each continuation.
    """

    eval_steps: int = 500
    max_batches: int | None = None
    sample_prompts: list[str] = field(default_factory=list)
    sample_tokens: int = 48


@dataclass(frozen=True)
class LoggingConfig:
    """What is recorded where.

    Args:
        logging_steps: A row in metrics.jsonl, a line on the console every this many steps.
        wandb_mode: Weights & Biases: `disabled`, `offline` (files only) or `online`.
        wandb_project: Its project name.
        tensorboard: Write TensorBoard files too, under the same keys (extra `tensorboard`).
        report: Write the run's `report.html` at its end.
        parameters_sha256: Add a digest of all parameters, `train/parameters_sha256`, to every row; reads them
            all, for comparisons of short runs.
    """

    logging_steps: int = 10
    wandb_mode: Literal["disabled", "offline", "online"] = "offline"
    wandb_project: str = "llm_pretrain"
    tensorboard: bool = False
    report: bool = True
    parameters_sha256: bool = False


@dataclass(frozen=True)
class DistributedConfig:
    """How processes share the work.

    Args:
        strategy: `ddp`: every process holds the whole model; gradients are averaged. `fsdp`: parameters,
            gradients and optimizer state are sharded layer by layer (FSDP2). `deepspeed`: DeepSpeed's ZeRO,
            through Accelerate only (extra `deepspeed`).
        zero_stage: What ZeRO shards: 1 optimizer state, 2 gradients too, 3 parameters too. Default: what
            `accelerate launch` was told, else 2.
        cpu_threads: Threads per process. Default: cores / processes on this machine.
        timeout_seconds: A process without a sign of life (a step, a batch of an evaluation, bytes of a save)
            for this long is taken to hang: it leaves its threads' stacks and ends with exit code 71. Also how
            long ranks wait for each other at the start.
    """

    strategy: Literal["ddp", "fsdp", "deepspeed"] = "ddp"
    zero_stage: Literal[1, 2, 3] | None = None
    cpu_threads: int | None = None
    timeout_seconds: int = 1800


@dataclass(frozen=True)
class Config:
    """The whole configuration of a pretraining run."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)

    def gradient_accumulation_steps(self, world_size: int) -> int:
        """Micro batches per process and optimizer step: G / (W * B). Divisibility is validated at load."""
        return self.training.global_batch_size // (self.training.micro_batch_size * world_size)
