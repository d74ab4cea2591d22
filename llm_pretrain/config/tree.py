"""The configuration of a run: a tree of frozen dataclasses, documented and checked field by field."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

from llm_pretrain.config.distributed_config import DistributedConfig
from llm_pretrain.config.model_config import ModelConfig
from llm_pretrain.config.optimizers import OPTIMIZERS, declaration, refusal
from llm_pretrain.config.schema import (
    LARGEST_INTEGER,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Range,
    show,
)
from llm_pretrain.text import setting_text

_Seed = Annotated[int, Range(ge=0, le=(1 << 63) - 1)]


@dataclass(frozen=True)
class RunConfig:
    """Name, folder and seed of a run.

    Args:
        name: Name of the run: letters, digits, `.`, `_` and `-`.
        output_dir: Folder of the run. Default: `runs/NAME`.
        seed: Seed of the initial weights and of dropout.
    """

    name: str = "pretrain"
    output_dir: str | None = None
    seed: _Seed = 0

    @property
    def folder(self) -> Path:
        """Folder of the run."""
        return Path(self.output_dir) if self.output_dir else Path("runs") / self.name

    def check(self) -> Iterator[str]:
        """One line for each impossible value."""
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}", self.name):
            yield (
                "run.name: expected at most 128 letters, digits, `.`, `_` and `-`, the first no `.` or `-`, "
                f"found {self.name!r}"
            )
        if f"{self.output_dir}/".startswith("~/"):  # else `rm -rf ~` would seem right
            yield f"run.output_dir: expected a path without ~ of the shell, found {self.output_dir!r}"


@dataclass(frozen=True)
class SourceConfig:
    """One token store of a mixture.

    Args:
        store: Folder written by `llm-pretrain prepare`.
        weight: Share of the samples drawn from this store, relative to the other sources. With 0 the store
            is only evaluated (and counts in `eval/loss`), unless `weight_changes` give it a weight later.
        name: Name of the source in metrics, if there are several. Default: name of the folder.
    """

    store: str
    weight: NonNegativeFloat = 1.0
    name: str | None = None

    @property
    def label(self) -> str:
        """Name of the source in metrics."""
        return self.name or Path(self.store).name


@dataclass(frozen=True)
class WeightChange:
    """Weights of the mixture from a given step on.

    Args:
        step: First optimizer step (from 0) that uses these weights, rounded up to the next block of the
            sample order.
        weights: One weight for each of `data.sources`, in the same order; 0 leaves a source out.
    """

    step: NonNegativeInt
    weights: list[NonNegativeFloat]


@dataclass(frozen=True)
class DataConfig:
    """Sources of the samples, and their order.

    Args:
        sources: Token stores and their weights.
        weight_changes: Weights that replace those of the sources from given steps on, in ascending order.
        packing: How documents are packed into sequences: `best_fit` (few documents are split, almost no
            padding), `concat` (documents one after another, split at the end of each sequence), or `pad` (one
            document per sequence, padded).
        isolate_documents: Attention does not cross document boundaries inside a sequence.
        seed: Seed of the sample order.
        num_workers: Worker processes that assemble batches; 0 assembles them in the training process.
            Default: 2 on a GPU, so that no step waits for its batch, else 0.
    """

    sources: list[SourceConfig] = field(default_factory=list)
    weight_changes: list[WeightChange] = field(default_factory=list)
    packing: Literal["best_fit", "concat", "pad"] = "best_fit"
    isolate_documents: bool = True
    seed: _Seed = 0
    num_workers: Annotated[int, Range(ge=0, le=1 << 10)] | None = None

    def check(self, needs_data: bool = True) -> Iterator[str]:
        """One line for each problem of the sources and their weights; no store is opened."""
        if needs_data and not self.sources:
            yield (
                "data.sources: expected at least one token store, found none; make one with "
                "`llm-pretrain prepare`, then --data.sources '[{store: FOLDER}]'"
            )
        yield from self._check_sources()
        yield from self._check_source_names()
        yield from self._check_weight_changes()

    def _check_sources(self) -> Iterator[str]:
        if self.sources and not any(source.weight for source in self.sources):
            yield "data.sources: expected at least one weight above 0, found none"

    def _check_source_names(self) -> Iterator[str]:
        """Problems of the sources' names; a single source has no metrics of its own, so any name is valid."""
        first: dict[str, int] = {}
        for k, source in enumerate(self.sources):
            if source.name is None and len(self.sources) == 1:
                continue
            label = source.label if source.name is None else source.name
            name, origin = f"data.sources[{k}].name", ", the folder's name" if source.name is None else ""
            if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}", label):
                yield (
                    f"{name}: expected 1 to 64 letters, digits, `.`, `_` and `-`, the first no `.` or `-`, "
                    f"found {label!r}{origin}; set {name}"
                )
            elif label in first:
                yield (
                    f"{name}: expected a name of its own for the metrics, found {label!r}{origin}, which "
                    f"data.sources[{first[label]}] has too; set {name}"
                )
            first.setdefault(label, k)

    def _check_weight_changes(self) -> Iterator[str]:
        last_step = -1
        for j, change in enumerate(self.weight_changes):
            name = f"data.weight_changes[{j}]"
            if change.step <= last_step:
                yield (
                    f"{name}.step: expected more than the {last_step} of the change before, "
                    f"found {change.step}"
                )
            last_step = max(last_step, change.step)
            if len(change.weights) != len(self.sources):
                yield (
                    f"{name}.weights: expected {len(self.sources)}, one for each of data.sources, "
                    f"found {len(change.weights)}"
                )
            if change.weights and not any(change.weights):
                yield f"{name}.weights: expected at least one weight above 0, found none"


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer.

    Args:
        name: `adamw`: AdamW with decoupled weight decay (arXiv:1711.05101). `muon`: orthogonalised momentum
            (github.com/KellerJordan/Muon) for the matrices of the layers, AdamW for embedding, head and
            norms. Or a class with torch's interface by its import path, such as `my_package.Lion`
            (docs/optimizers.md).
        options: Arguments of such a class by name, besides `lr` and `weight_decay`.
        learning_rate: Peak learning rate; with `muon`, of the parameters that AdamW updates.
        muon_learning_rate: Peak learning rate of the matrices that Muon updates.
        weight_decay: Weight decay of matrices; norms and biases are not decayed.
        adam_beta1: Decay rate of the first moment.
        adam_beta2: Decay rate of the second moment.
        adam_epsilon: Added to the square root of the second moment.
        base_hidden_size: muP (arXiv:2203.03466): hidden size of the base model for which the learning rates
            were tuned. Initial values and learning rates are scaled from this width to model.hidden_size, so
            that the best learning rate of the base model stays the best. model.initializer_range is then the
            value for the base model, about base_hidden_size to the power -0.5. Default: no scaling.
        ema_decay: Decay per step of an exponential moving average of the parameters, which evaluation and
            exported weights then use. 0 turns it off.
    """

    name: str = "adamw"
    options: dict[str, bool | int | float | str | list[float] | None] = field(default_factory=dict)
    learning_rate: PositiveFloat = 1e-3
    muon_learning_rate: PositiveFloat = 0.02
    weight_decay: NonNegativeFloat = 0.1
    adam_beta1: Fraction = 0.9
    adam_beta2: Fraction = 0.95
    adam_epsilon: Annotated[float, Range(gt=0, ge=1e-37)] = 1e-8  # fp32 rounds less to 0: a division by 0
    base_hidden_size: PositiveInt | None = None
    ema_decay: Fraction = 0.0

    @property
    def matrix_rate(self) -> float | None:
        """Peak learning rate of the layers' matrices; None if it is `learning_rate`."""
        setting = declaration(self.name).matrix_rate
        return None if setting is None else getattr(self, setting)

    def check(self) -> Iterator[str]:
        """One line for each impossible value."""
        if self.name in OPTIMIZERS and self.options:
            yield f"optimizer.options: expected none with {self.name}, found {show(self.options)}"
        elif self.name not in OPTIMIZERS and not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)+", self.name):
            choices = ", ".join(OPTIMIZERS)
            yield (
                f"optimizer.name: expected {choices} or a class by its import path (my_package.Lion), found "
                f"{show(self.name)}"
            )
        if self.ema_decay:
            yield from refusal(self.name, "average", f"with optimizer.ema_decay {self.ema_decay}")


@dataclass(frozen=True)
class ScheduleConfig:
    """The learning rate as a function of the step.

    Args:
        name: Shape after the warm-up: `cosine`, `linear`, `constant`, or `wsd` (warm-up, stable, decay).
        warmup_steps: Steps of linear warm-up, from the peak / warmup_steps in the first one.
        min_learning_rate: Learning rate at the end of `cosine`, `linear` and `wsd`.
        decay_steps: Length of the decay in steps. Default: all steps after the warm-up (`wsd`: of
            those, at most the schedule's last fifth).
        offset_steps: Steps of the schedule before the run's first, and in addition to training.max_steps:
            the steps of another run, to go on with its schedule (`checkpoint.start_from`).
    """

    name: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    warmup_steps: NonNegativeInt = 0
    min_learning_rate: NonNegativeFloat = 0.0
    decay_steps: PositiveInt | None = None
    offset_steps: NonNegativeInt = 0


@dataclass(frozen=True)
class TrainingConfig:
    """Batch size, sequence length, precision, kernels, and handling of bad steps.

    Args:
        sequence_length: Tokens per sequence: S inputs and S labels.
        micro_batch_size: Sequences per forward and backward pass of one process.
        global_batch_size: Sequences per optimizer step, over all processes.
        max_steps: Optimizer steps of the whole run.
        max_tokens: Tokens of the whole run, padding included, instead of max_steps, which replaces it when
            settings are loaded: as many steps as hold them. An epoch has the tokens that `prepare` counts.
        precision: `fp32`, or autocast in `bf16` or `fp16` (with a gradient scaler) over fp32 weights. `auto`
            is replaced when settings are loaded: by `bf16` if the GPU or CPU multiplies in it, else by
            `fp32`.
        max_grad_norm: Maximum of the global gradient norm, for clipping; 0 turns clipping off.
        z_loss_coef: Coefficient of the squared log-partition of the output softmax (PaLM, section 5).
        max_skipped_steps: Number of skipped steps in a row after which the run stops as diverged.
        spike_action: What to do with a step whose loss or gradient norm is far above those of the steps
            before: `log` it, `skip` its update, or `rollback` to the parameters and optimizer state of the
            last periodic checkpoint and continue with the data of the next step (docs/exactness.md has the
            bounds).
        deterministic: Use deterministic algorithms, for bit identity on a GPU.
        check_every: Compute every N-th step, and those after which a checkpoint is due, twice, and stop if
            a difference of results, or of what ranks hold alike, stays (docs/checking.md); 0 turns it off.
        activation_checkpointing: Recompute the activations of each layer in the backward pass.
        compile: Compile each layer with `torch.compile`: `auto` (on a GPU only), `on`, `off`.
        float8: Compute the matrix products of the layers in FP8 through torchao, on GPUs with FP8 (extra
            `float8`).
        experts_implementation: Kernel of the experts: `auto` (the fastest for device and dtype), `streamed`
            (CPU), `grouped` (CUDA; by torch, or by Triton where torch's kernel cannot run), `triton` (CUDA,
            by Triton), `reference` (slow; defines the result).
        attention_implementation: Kernel of attention within documents: `auto`, `sdpa` (one call per document
            on a CPU, a mask elsewhere) or `varlen` (CUDA).
        loss_implementation: Kernel of output projection and cross-entropy: `auto`, `full` (keeps all logits
            in memory), `fused` (in chunks, forward and backward in one).
    """

    sequence_length: Annotated[int, Range(gt=0, le=1 << 24)] = 512
    micro_batch_size: Annotated[int, Range(gt=0, le=1 << 20)] = 8
    global_batch_size: PositiveInt = 64
    max_steps: PositiveInt = 1000
    max_tokens: Annotated[int, Range(gt=0, le=1 << 53)] | None = None
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    max_grad_norm: NonNegativeFloat = 1.0
    z_loss_coef: NonNegativeFloat = 0.0
    max_skipped_steps: PositiveInt = 20
    spike_action: Literal["log", "skip", "rollback"] = "log"
    deterministic: bool = False
    check_every: NonNegativeInt = 0
    activation_checkpointing: bool = False
    compile: Literal["auto", "on", "off"] = "auto"
    float8: bool = False
    experts_implementation: Literal["auto", "streamed", "grouped", "triton", "reference"] = "auto"
    attention_implementation: Literal["auto", "sdpa", "varlen"] = "auto"
    loss_implementation: Literal["auto", "full", "fused"] = "auto"

    @property
    def tokens_per_step(self) -> int:
        """Positions of an optimizer step, padding included."""
        return self.global_batch_size * self.sequence_length

    def check(self) -> Iterator[str]:
        """One line for each contradiction between fields of this section, and for each missing package.

        Kernels that need a GPU are checked once the device is known, in training/model_setup.py.
        """
        if self.attention_implementation == "varlen" and self.precision == "fp32":
            yield (
                "training.attention_implementation: expected another than varlen with training.precision "
                "fp32, found varlen; use bf16"
            )
        if self.float8 and self.precision not in ("auto", "bf16"):
            yield (
                f"training.float8: expected false with training.precision {self.precision}, found true; "
                "set bf16"
            )
        if self.float8 and (tokens := self.micro_batch_size * self.sequence_length) % 16:
            yield (
                "training.float8: expected training.micro_batch_size * training.sequence_length to be a "
                f"multiple of 16, which FP8 products need, found {tokens}"
            )


@dataclass(frozen=True)
class CheckpointConfig:
    """When full-precision checkpoints and half-precision weights are written and kept.

    Args:
        save_steps: Steps between two checkpoints; the end of the run is always saved. 0 saves the end only.
        keep_last: Number of checkpoints and of exported weights to keep; at least 2.
        keep_best: Keep the weights with the lowest evaluation loss in `weights/best`.
        best_metric: That loss: `eval/loss`, or `eval/source/NAME/loss` of one source of a mixture.
        async_save: Copy the state to host memory, and write it to disk while training continues. Needs host
            memory for a rank's share of the state; the files are the same.
        resume: `auto` continues from the newest valid checkpoint in the run's folder; `never` stops if the
            folder has checkpoints; a path names a checkpoint folder to start from (of the run's own only the
            newest).
        start_from: Checkpoint of another run, or that run's folder for its newest: a new run begins at step 0
            with its weights, optimizer state and spike history, and with data and batch size of its own.
        weights_dtype: Precision of the exported weights.
    """

    save_steps: NonNegativeInt = 500
    keep_last: Annotated[int, Range(ge=2)] = 2
    keep_best: bool = True
    best_metric: str = "eval/loss"
    async_save: bool = False
    resume: str = "auto"
    start_from: str | None = None
    weights_dtype: Literal["bf16", "fp16"] = "bf16"


@dataclass(frozen=True)
class PredictedLoss:
    """The evaluation loss that is expected after a step, and the interval in which it should be.

    Args:
        step: Optimizer steps done.
        loss: Nats per token.
        low: Lower end of the interval.
        high: Upper end of the interval.
    """

    step: int
    loss: float
    low: float
    high: float

    @property
    def losses(self) -> tuple[float, float, float]:
        """The loss and the ends of its interval."""
        return self.loss, self.low, self.high


@dataclass(frozen=True)
class EvaluationConfig:
    """Evaluation on the validation split.

    Args:
        eval_steps: Steps between two evaluations; the initial and the final model are evaluated too. 0 turns
            evaluation off.
        max_batches: Number of global batches of the validation split to evaluate on. Default: the whole
            split.
        patience: Evaluations in a row without a new lowest `checkpoint.best_metric` after which the run ends;
            0 trains all steps. Without `checkpoint.keep_best` nothing is compared.
        sample_prompts: Prompts from which text is generated at every evaluation, for samples.jsonl and the
            report.
        sample_tokens: Number of tokens to generate for each prompt.
        prediction: Evaluation loss that is expected after given steps, ascending, as `llm-pretrain plan`
            writes it: metrics and report show it beside the real one, and a run that leaves its interval says
            so. Between steps it is interpolated.
    """

    eval_steps: NonNegativeInt = 500
    max_batches: PositiveInt | None = None
    patience: NonNegativeInt = 0
    sample_prompts: list[str] = field(default_factory=list)
    sample_tokens: PositiveInt = 48
    prediction: list[PredictedLoss] = field(default_factory=list)

    def predicted(self, step: int) -> PredictedLoss | None:
        """The expected loss after `step` steps; None outside the steps of the prediction."""
        for before, after in pairwise([*self.prediction, *self.prediction[-1:]]):
            if step == before.step or before.step < step < after.step:
                share = (step - before.step) / ((after.step - before.step) or 1)
                pairs = zip(before.losses, after.losses, strict=True)
                return PredictedLoss(step, *(left + (right - left) * share for left, right in pairs))
        return None


@dataclass(frozen=True)
class LoggingConfig:
    """Metrics, trackers and the report.

    Args:
        logging_steps: Steps between two rows in metrics.jsonl and lines on the console.
        wandb_mode: Weights & Biases: `disabled`, `offline` (files only) or `online`. Default: WANDB_MODE of
            the environment, else `offline`.
        wandb_project: Weights & Biases project. Default: WANDB_PROJECT, else `llm_pretrain`.
        tensorboard: Also write TensorBoard files, with the same keys (extra `tensorboard`).
        report: Write `report.html` at the end of the run.
        parameters_sha256: Add a digest of all parameters to every row, as `train/parameters_sha256`. Reads
            all parameters each time; for comparisons of short runs.
    """

    logging_steps: PositiveInt = 10
    wandb_mode: Literal["disabled", "offline", "online"] | None = None
    wandb_project: str | None = None
    tensorboard: bool = False
    report: bool = True
    parameters_sha256: bool = False


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
        """Micro batches per process and optimizer step, G / (D * B), with data-parallel degree D."""
        data = self.distributed.mesh(world_size).data
        return self.training.global_batch_size // (self.training.micro_batch_size * data)

    def stage_layers(self, stage: int) -> range:
        """The layers of a stage of a pipeline."""
        layers, stages = self.model.num_hidden_layers, self.distributed.num_stages
        return range(layers * stage // stages, layers * (stage + 1) // stages)

    def check(self, needs_data: bool) -> Iterator[str]:
        """One line for each contradiction at any number of processes, ranges of single numbers aside."""
        yield from self.run.check()
        yield from self.model.check()
        yield from self.data.check(needs_data)
        yield from self.optimizer.check()
        yield from self.training.check()
        yield from self.check_schedule()
        yield from self._check_lengths()
        yield from self._check_recovery()
        yield from self._check_best()
        if self.distributed.strategy == "deepspeed":
            yield from self._check_deepspeed()

    @property
    def longest_sequence(self) -> int:
        """`model.max_position_embeddings`, resolved."""
        is_set = self.model.max_position_embeddings is not None or self.model.rope_type == "yarn"
        return self.model.longest_sequence if is_set else self.training.sequence_length

    def check_batch(self, world_size: int) -> Iterator[str]:
        """One line if the global batch cannot be divided among so many processes."""
        micro, total = self.training.micro_batch_size, self.training.global_batch_size
        ranks = self.distributed.mesh(world_size).data
        unit = micro * ranks
        if total % unit == 0:
            return
        below = total // unit * unit
        sizes = f"{below} or {below + unit}" if below else str(unit)
        yield (
            "training.global_batch_size: expected a multiple of training.micro_batch_size * "
            f"{'world size' if ranks == world_size else 'data-parallel ranks'} = {micro} * {ranks} = {unit}, "
            f"found {total}; {sizes} would work"
        )

    def check_schedule(self) -> Iterator[str]:
        """One line for each contradiction of the schedule with the run's length and learning rate."""
        schedule, peak = self.schedule, self.optimizer.learning_rate
        steps = self.training.max_steps + schedule.offset_steps
        length = "training.max_steps" + (" + schedule.offset_steps" if schedule.offset_steps else "")
        if schedule.warmup_steps > steps:
            yield (
                f"schedule.warmup_steps: expected at most {length} = {steps}, "
                f"found {schedule.warmup_steps}; lower it, or raise training.max_steps"
            )
        if schedule.min_learning_rate >= peak and schedule.name != "constant":
            yield (
                f"schedule.min_learning_rate: expected less than optimizer.learning_rate = {peak}, "
                f"found {schedule.min_learning_rate}; lower it, or set schedule.name: constant"
            )
        rest = steps - schedule.warmup_steps
        if schedule.name == "wsd" and schedule.decay_steps is not None and schedule.decay_steps > rest >= 0:
            yield (
                f"schedule.decay_steps: expected at most {length} - schedule.warmup_steps = "
                f"{rest} for the wsd schedule, found {schedule.decay_steps}"
            )

    def _check_lengths(self) -> Iterator[str]:
        longest, dropout = self.longest_sequence, self.model.attention_dropout
        if self.training.sequence_length > longest:
            yield (
                f"training.sequence_length: expected at most model.max_position_embeddings = {longest}, "
                f"found {self.training.sequence_length}"
            )
        if self.evaluation.sample_prompts and self.evaluation.sample_tokens >= longest:
            yield (
                f"evaluation.sample_tokens: expected less than model.max_position_embeddings = {longest}, "
                f"found {self.evaluation.sample_tokens}"
            )
        kernel = self.training.attention_implementation
        if kernel == "varlen" and dropout > 0:
            yield (
                f"training.attention_implementation: expected auto or sdpa with model.attention_dropout "
                f"{dropout}, found {kernel}"
            )

    def _check_recovery(self) -> Iterator[str]:
        resume, start = self.checkpoint.resume, self.checkpoint.start_from
        sources = {"resume": None if resume in ("auto", "never") else resume, "start_from": start}
        for name, source in sources.items():
            if source is not None and not os.path.isdir(source) and not self._has_own_checkpoints(source):
                words = "auto, never or " if name == "resume" else ""
                yield f"checkpoint.{name}: expected {words}a checkpoint's folder, found {source!r}"
        if start is not None and (sources["resume"] or self.model.init_from):
            yield f"checkpoint.start_from: expected none with model.init_from or resume: PATH, found {start}"
        if self.training.spike_action == "rollback" and self.checkpoint.save_steps == 0:
            yield (
                "training.spike_action: expected log or skip with checkpoint.save_steps 0, found rollback, "
                "which goes back to a periodic checkpoint; set checkpoint.save_steps"
            )

    def _check_best(self) -> Iterator[str]:
        sources = self.data.sources if len(self.data.sources) > 1 else []
        names = ["eval/loss", *(f"eval/source/{source.label}/loss" for source in sources)]
        metric = self.checkpoint.best_metric
        if metric not in names:
            yield f"checkpoint.best_metric: expected {' or '.join(names)}, found {show(metric)}"

    def _has_own_checkpoints(self, source: str) -> bool:
        """Whether the run has checkpoints; it resumes from them even if another run's folder is gone."""
        own = self.run.folder / "checkpoints"
        try:
            return bool(source) and Path(source).resolve().parent != own.resolve() and any(own.glob("step-*"))
        except (OSError, ValueError):
            return False

    def _check_deepspeed(self) -> Iterator[str]:
        """Settings that DeepSpeed does not support."""
        where = "with distributed.strategy deepspeed"
        for name, refused, expected, why in (
            ("training.precision", ("fp16",), "fp32 or bf16",
             ", whose loss scale DeepSpeed keeps to itself and no checkpoint contains; use bf16"),
            ("training.compile", ("on",), "auto or off",
             ", whose graphs the hooks of DeepSpeed would break; use ddp or fsdp"),
            ("training.float8", (True,), "false", "; use ddp or fsdp"),
            ("training.spike_action", ("skip", "rollback"), "log",
             ", but its engine updates the parameters before the step can be checked; use ddp or fsdp"),
            ("training.check_every", range(1, LARGEST_INTEGER), "0",
             ", but its engine updates the parameters before the step can be checked; use ddp or fsdp"),
        ):  # fmt: skip
            section, _, setting = name.partition(".")
            found = getattr(getattr(self, section), setting)
            if found in refused:
                yield f"{name}: expected {expected} {where}, found {setting_text(found)}{why}"
        yield from refusal(self.optimizer.name, "deepspeed", where, "; use ddp or fsdp")
        if decay := self.optimizer.ema_decay:
            yield (
                f"optimizer.ema_decay: expected 0 with distributed.strategy deepspeed, found {decay}, but "
                "ZeRO's optimizer has no place for an average of the parameters; use ddp or fsdp"
            )
