"""The configuration: one tree of frozen dataclasses that decides everything about a run.

Every field is documented here and nowhere else. Loading is in `loading.py`, contradictions between
fields in `validation.py`. This module imports nothing of the package.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

VOCAB_MULTIPLE = 64
"""`model.vocab_size` defaults to the tokenizer's size rounded up to a multiple of this."""


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
class ModelConfig:
    """Shape of the decoder, in transformers' vocabulary (Qwen3 and Qwen3-MoE).

    Args:
        vocab_size: Rows of the embedding. Default: the tokenizer's size, rounded up to a multiple of 64.
        hidden_size: Width of the residual stream.
        intermediate_size: Width of a dense layer's SwiGLU.
        num_hidden_layers: Number of decoder layers.
        num_attention_heads: Number of query heads.
        num_key_value_heads: Number of key and value heads (grouped-query attention).
        head_dim: Width of one head. Default: hidden_size / num_attention_heads.
        max_position_embeddings: Longest position the exported model promises; at least the sequence length.
        rms_norm_eps: Epsilon of every RMSNorm.
        initializer_range: Standard deviation of the initial weights.
        tie_word_embeddings: Share the embedding with the output projection.
        attention_dropout: Dropout probability of the attention weights.
        hidden_dropout: Dropout probability of each block's output, before the residual addition.
        rope_theta: Base of the rotary frequencies.
        qk_norm: RMSNorm on queries and keys, per head (Qwen3); without it the model is a Llama or Mixtral.
        num_experts: Experts per mixture-of-experts layer; 0 makes every layer dense.
        num_experts_per_tok: Experts chosen for each token.
        moe_intermediate_size: Width of one expert's SwiGLU. Default: intermediate_size.
        norm_topk_prob: Normalise the chosen experts' probabilities to sum to one.
        first_k_dense_replace: Number of leading layers that stay dense.
        decoder_sparse_step: Every how many layers an expert layer stands (1: all).
        router_aux_loss_coef: Coefficient of the balance loss.
        router_aux_loss_scope: Over what the balance loss is taken. `sequence` does not depend on how
            the batch is split; `micro_batch` (Switch Transformer, transformers) does.
        router_z_loss_coef: Coefficient of the router's z-loss.
        router_bias_update_rate: Step of the loss-free balancing bias (arXiv:2408.15664); 0 turns it off.
    """

    vocab_size: int | None = None
    hidden_size: int = 512
    intermediate_size: int = 1408
    num_hidden_layers: int = 8
    num_attention_heads: int = 8
    num_key_value_heads: int = 2
    head_dim: int | None = None
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    tie_word_embeddings: bool = True
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    rope_theta: float = 1_000_000.0
    qk_norm: bool = True
    num_experts: int = 0
    num_experts_per_tok: int = 2
    moe_intermediate_size: int | None = None
    norm_topk_prob: bool = True
    first_k_dense_replace: int = 0
    decoder_sparse_step: int = 1
    router_aux_loss_coef: float = 0.001
    router_aux_loss_scope: Literal["sequence", "micro_batch"] = "sequence"
    router_z_loss_coef: float = 0.0
    router_bias_update_rate: float = 0.0

    @property
    def attention_head_dim(self) -> int:
        """Width of one head, resolved."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def expert_intermediate_size(self) -> int:
        """Width of one expert's SwiGLU, resolved."""
        return self.moe_intermediate_size or self.intermediate_size

    def is_moe_layer(self, layer: int) -> bool:
        """Whether decoder layer `layer` (from 0) routes to experts."""
        return (
            self.num_experts > 0
            and layer >= self.first_k_dense_replace
            and (layer + 1) % self.decoder_sparse_step == 0
        )

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the layers that route to experts."""
        return tuple(layer for layer in range(self.num_hidden_layers) if self.is_moe_layer(layer))


@dataclass(frozen=True)
class SourceConfig:
    """One token store of a mixture.

    Args:
        store: Folder written by `llm-pretrain prepare`.
        weight: Share of the samples drawn from it, relative to the other sources.
    """

    store: str
    weight: float = 1.0


@dataclass(frozen=True)
class DataConfig:
    """Where samples come from and in which order.

    Args:
        sources: Token stores and their weights.
        packing: How documents fill sequences: `best_fit` (few splits, ~no padding), `concat`, or `pad`.
        isolate_documents: Attention never crosses a document inside a sequence.
        seed: Seed of the sample order.
        num_workers: Worker processes that assemble batches; 0 assembles in the training process.
        on_error: What `prepare` does with a bad record: count and `skip` it, or `fail` with file and line.
    """

    sources: list[SourceConfig] = field(default_factory=list)
    packing: Literal["best_fit", "concat", "pad"] = "best_fit"
    isolate_documents: bool = True
    seed: int = 0
    num_workers: int = 0
    on_error: Literal["skip", "fail"] = "fail"


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer.

    Args:
        name: `adamw`: AdamW with decoupled weight decay (arXiv:1711.05101).
        learning_rate: Peak learning rate.
        weight_decay: Decay of matrices; norms and biases are never decayed.
        adam_beta1: First-moment decay.
        adam_beta2: Second-moment decay.
        adam_epsilon: Added to the root of the second moment.
    """

    name: Literal["adamw"] = "adamw"
    learning_rate: float = 1e-3
    weight_decay: float = 0.1
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_epsilon: float = 1e-8


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
        precision: `fp32`, or autocast in `bf16` or `fp16` (with a gradient scaler) over fp32 weights.
        max_grad_norm: Global gradient norm is clipped to this; 0 turns clipping off.
        z_loss_coef: Coefficient of the squared log-partition of the output softmax (PaLM, section 5).
        max_skipped_steps: The run stops as diverged after this many skipped steps in a row.
        deterministic: Deterministic algorithms, for bit identity on a GPU.
        activation_checkpointing: Recompute each layer's activations in the backward pass.
    """

    sequence_length: int = 512
    micro_batch_size: int = 8
    global_batch_size: int = 64
    max_steps: int = 1000
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    max_grad_norm: float = 1.0
    z_loss_coef: float = 0.0
    max_skipped_steps: int = 20
    deterministic: bool = False
    activation_checkpointing: bool = False


@dataclass(frozen=True)
class CheckpointConfig:
    """When full-precision checkpoints and half-precision weights are written and kept.

    Args:
        save_steps: Save every this many steps, and at the end; 0 saves at the end only.
        keep_last: Checkpoints and weights to keep; at least 2.
        resume: `auto` continues from the newest sound checkpoint of the run's folder, `never` refuses a
            folder that has checkpoints, a path names a checkpoint folder to start from.
        weights_dtype: Precision of the exported weights.
    """

    save_steps: int = 500
    keep_last: int = 2
    resume: str = "auto"
    weights_dtype: Literal["bf16", "fp16"] = "bf16"


@dataclass(frozen=True)
class EvaluationConfig:
    """Evaluation on the validation split.

    Args:
        eval_steps: Evaluate every this many steps, before the first and after the last; 0 turns it off.
        max_batches: Global batches of validation sequences to use. Default: the whole split.
    """

    eval_steps: int = 500
    max_batches: int | None = None


@dataclass(frozen=True)
class LoggingConfig:
    """What is recorded where.

    Args:
        logging_steps: A row in metrics.jsonl, a line on the console every this many steps.
        wandb_mode: Weights & Biases: `disabled`, `offline` (files only) or `online`.
        wandb_project: Its project name.
    """

    logging_steps: int = 10
    wandb_mode: Literal["disabled", "offline", "online"] = "offline"
    wandb_project: str = "llm_pretrain"


@dataclass(frozen=True)
class DistributedConfig:
    """How processes share the work.

    Args:
        strategy: `ddp`: every process holds the whole model; gradients are averaged.
        cpu_threads: Threads per process. Default: cores / processes on this machine.
        timeout_seconds: A collective that waits longer than this fails.
    """

    strategy: Literal["ddp"] = "ddp"
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
