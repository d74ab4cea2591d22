"""The package's functions for programs and notebooks: `import llm_pretrain as lp`."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from llm_pretrain.config import loading
from llm_pretrain.config.tree import Config, SourceConfig, TrainingConfig
from llm_pretrain.errors import EXIT_PREEMPTED, CheckpointError, ConfigError, PretrainError
from llm_pretrain.text import reason_of

os.environ.setdefault(
    "OMP_WAIT_POLICY", "passive"
)  # as `llm-pretrain train` does; read when torch is imported

if TYPE_CHECKING:
    import torch

    from llm_pretrain.audit.comparison import Comparison
    from llm_pretrain.audit.step_samples import StepSequence
    from llm_pretrain.checkpoints.opening import OpenedModel
    from llm_pretrain.data.assembly import Batch
    from llm_pretrain.data.tokenizers import Tokenizer
    from llm_pretrain.model.decoder import Decoder
    from llm_pretrain.training.store_evaluation import Figures

Row = Mapping[str, Any]


def load_config(*files: str | Path, **sections: Mapping[str, Any]) -> Config:
    """The configuration of presets and files, and of settings by section; later ones override earlier ones.

    Args:
        files: Names of presets, such as `tiny-moe`, and YAML files.
        sections: Settings by section: `training={"max_steps": 50}`.

    Raises:
        ConfigError: Every setting that is unknown, of a wrong type, out of range or contradicted.
    """
    argv = [word for file in files for word in ("--config", str(file))]
    return loading.load_config(argv, _without_paths(sections), needs_data=False, world_size=1)


def _without_paths(value: Any) -> Any:
    """The value as YAML would give it: text in place of paths, lists in place of tuples."""
    if isinstance(value, Mapping):
        return {name: _without_paths(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_without_paths(each) for each in value]
    return str(value) if isinstance(value, Path) else value


def train(
    config: Config,
    *,
    on_row: Callable[[Row], object] | None = None,
    nproc: int | None = None,
    launcher: Literal["torchrun", "accelerate"] = "torchrun",
) -> Run:
    """Train, or resume the run in `config.run.folder`; returns the run, finished or stopped after a save.

    Args:
        config: The run's configuration.
        on_row: Gets each new row of metrics, as metrics.jsonl has it.
        nproc: Processes to launch on this machine; None trains in this process.
        launcher: Which of the two scripts trains.

    Raises:
        PretrainError: The training failed; `exit_code` is the script's.
    """
    from llm_pretrain.launch.jobs import SCRIPTS

    config = loading.resolve_precision(config)
    if problems := loading.validate(config, nproc or 1):
        raise ConfigError(*problems)
    if nproc is not None:
        _train_apart(config, on_row, nproc, launcher)
        return open_run(config.run.folder)
    from llm_pretrain.launch.process import prepare_process
    from llm_pretrain.launch.watchdog import hang_watchdog
    from llm_pretrain.training.trainer import pretrain

    script = importlib.import_module(Path(SCRIPTS[launcher]).stem)
    engine = script.TorchrunEngine if launcher == "torchrun" else script.AccelerateEngine
    prepare_process(config)
    with hang_watchdog(config):
        pretrain(config, engine(config), on_row)
    return open_run(config.run.folder)


def _train_apart(config: Config, on_row: Callable[[Row], object] | None, nproc: int, launcher: str) -> None:
    from llm_pretrain.runs.monitor import RunMonitor
    from llm_pretrain.runs.status import read_status

    folder, command = config.run.folder, [sys.executable, "-m", "llm_pretrain", "train"]
    monitor = RunMonitor(folder)
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
        file.write(loading.dump_yaml(config))
        file.flush()
        command += ["--launcher", launcher, "--nproc", str(nproc), "--config", file.name]
        process, code = subprocess.Popen(command), None
        try:
            while code is None:
                with suppress(subprocess.TimeoutExpired):
                    code = process.wait(0.5)
                for row in monitor.update():
                    if on_row:
                        on_row(row)
        finally:
            if code is None:  # an interrupt, or an error of on_row: the run saves and stops
                process.send_signal(signal.SIGINT)
                process.wait()
    if (code := process.wait()) not in (0, EXIT_PREEMPTED):
        status = read_status(folder / "status.json")
        reason = status.get("reason") if status.get("exit_code") == code else None
        error = PretrainError(f"{folder}: the run ended with exit code {code}: {reason or 'see its output'}")
        error.exit_code = code
        raise error


class Run:
    """A run's folder as it was when it was opened; `checkpoints` are those of now.

    Attributes: `path`; `status` (status.json) and `state`; `attempts` (rows of attempts.jsonl).
    """

    def __init__(self, path: str | Path):
        from llm_pretrain.runs.record import read_run

        self.path, self._record = Path(path), read_run(Path(path))
        self.status, self.state = self._record.status, self._record.state
        self.attempts = self._record.attempts

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}, {self.state} at step {self.status.get('step')})"

    @cached_property
    def config(self) -> Config:
        """The settings of the last attempt."""
        return loading.from_dict(self._record.config)

    @property
    def rows(self) -> list[Row]:
        """The rows of metrics.jsonl by step, without those of work that was lost and done again."""
        return list(self._record.rows)

    @cached_property
    def columns(self) -> dict[str, np.ndarray]:
        """Each figure of the rows, float64 [rows], NaN where a row lacks it: `columns["train/loss"]`."""
        from llm_pretrain.runs.rows import finite_number

        numbers = [{key: finite_number(value) for key, value in row.items()} for row in self.rows]
        names = dict.fromkeys(key for row in numbers for key, value in row.items() if value is not None)
        return {name: np.array([row.get(name) for row in numbers], dtype=np.float64) for name in names}

    @property
    def checkpoints(self) -> dict[int, Path]:
        """Folders of the full-precision checkpoints by step."""
        from llm_pretrain.checkpoints.folders import committed_folders

        return committed_folders(self.path / "checkpoints")

    def batch(self, step: int, *, with_loss: bool = False) -> list[StepSequence]:
        """The sequences that the run read at a step; see `llm-pretrain inspect RUN --step N --loss`."""
        from llm_pretrain.audit.step_samples import sequences_of_step

        return sequences_of_step(self.path, step, with_loss=with_loss)


def open_run(path: str | Path) -> Run:
    """Open a run's folder. Raises ConfigError for another folder, CheckpointError for damaged rows."""
    return Run(path)


def compare_runs(left: str | Path | Run, right: str | Path | Run) -> Comparison:
    """Compare the rows and the final parameters of two runs bit for bit; `verdict` is `identical`, or not."""
    from llm_pretrain.audit import comparison

    first, second = (each.path if isinstance(each, Run) else Path(each) for each in (left, right))
    return comparison.compare_runs(first, second)


def batches(config: Config, start_step: int = 0) -> Iterator[list[Batch]]:
    """Yield the micro batches of each step, those of all ranks together; steps count from 0."""
    from llm_pretrain.data.loader import global_batches
    from llm_pretrain.training.trainer import windows

    count = config.training.global_batch_size // config.training.micro_batch_size
    return windows(global_batches(config, start_step=start_step), count)


def generate(
    source: TrainedModel | str | Path,
    prompts: str | Sequence[str],
    *,
    max_new_tokens: int = 100,
    temperature: float = 0.8,
    top_k: int = 50,
    top_p: float = 1.0,
    seed: int = 0,
    token_healing: bool = True,
) -> str | list[str]:
    """The prompt with its continuation, or a list of them for several; arguments as of the command.

    Raises:
        ConfigError: A setting is out of range, or a prompt is empty or longer than the model's positions.
    """
    from llm_pretrain.model.generation import generate_texts

    source = source if isinstance(source, TrainedModel) else open_model(source)
    texts = [prompts] if isinstance(prompts, str) else list(prompts)
    for row, text, _ in generate_texts(
        source.model,
        [source.encode(text) for text in texts],
        source.tokenizer.token_pieces(),
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop_ids=source.stop_ids,
        token_healing=token_healing,
    ):
        texts[row] += text
    return texts[0] if isinstance(prompts, str) else texts


def evaluate(
    source: TrainedModel | str | Path,
    *,
    stores: Sequence[str] = (),
    inputs: Sequence[str] = (),
    split: Literal["validation", "train"] = "validation",
    max_batches: int | None = None,
    sequence_length: int | None = None,
    micro_batch_size: int | None = None,
    precision: Literal["fp32", "bf16", "fp16"] | None = None,
) -> Figures:
    """Loss, perplexity and bits per byte on stores, on files, or (without both) on the run's own stores.

    The arguments are those of `llm-pretrain evaluate`. Raises ConfigError and DataError as it does.
    """
    source = source if isinstance(source, TrainedModel) else open_model(source)
    config = evaluation_config(
        source,
        stores=stores,
        has_files=bool(inputs),
        max_batches=max_batches,
        sequence_length=sequence_length,
        micro_batch_size=micro_batch_size,
        precision=precision,
    )
    return figures_of(source, config, inputs, split)


def figures_of(
    source: TrainedModel, config: Config, inputs: Sequence[str], split: Literal["validation", "train"]
) -> Figures:
    """The figures on files, or without any on the stores of `config`.

    They take as many threads as a process of the run, since others would change the order of summation.
    """
    import torch

    from llm_pretrain.launch.process import default_threads
    from llm_pretrain.training.store_evaluation import evaluate_files, evaluate_stores

    before, threads = torch.get_num_threads(), config.distributed.cpu_threads
    if threads is None and source.opened.world_size:
        threads = default_threads(source.opened.world_size)
    torch.set_num_threads(threads or before)
    try:
        if inputs:
            return evaluate_files(source.model, source.tokenizer, config, inputs)
        return evaluate_stores(source.model, source.tokenizer, config, split)
    finally:
        torch.set_num_threads(before)


def evaluation_config(
    source: TrainedModel,
    *,
    stores: Sequence[str],
    has_files: bool,
    max_batches: int | None,
    sequence_length: int | None,
    micro_batch_size: int | None,
    precision: Literal["fp32", "bf16", "fp16"] | None,
) -> Config:
    """The run's configuration, or the defaults outside of a run, overridden by the arguments."""
    run, limit = source.opened.run, source.model.config.longest_sequence
    config = run or Config(training=TrainingConfig(precision="fp32"))
    length = sequence_length or config.training.sequence_length
    if run is None and sequence_length is None:
        length = min(length, limit)
    if length > limit:
        raise ConfigError(
            f"--sequence_length: expected at most the model's {limit} positions (max_position_embeddings), "
            f"found {length}"
        )
    sources = config.data.sources
    if stores:
        sources = [SourceConfig(store) for store in stores]
    elif not sources and not has_files:
        raise ConfigError("--store: expected a store, since SOURCE is in no run; name --store or --input")
    limit_of_run = None if has_files else config.evaluation.max_batches
    training = replace(
        config.training,
        sequence_length=length,
        micro_batch_size=micro_batch_size or config.training.micro_batch_size,
        precision=precision or config.training.precision,
    )
    return replace(
        config,
        data=replace(config.data, sources=sources),
        training=training,
        evaluation=replace(
            config.evaluation, max_batches=limit_of_run if max_batches is None else max_batches or None
        ),
    )


@dataclass(frozen=True)
class TrainedModel:
    """An opened model with its tokenizer, which can be unpacked: `model, tokenizer = open_model(path)`.

    Args:
        model: On `device`, in eval mode.
        tokenizer: The model's.
        start_id: The first id of a text, as in training: BOS, or else EOS; None with neither.
        stop_ids: Ids that end a text.
        opened: The opened files.
        device: The model's device.
    """

    model: Decoder
    tokenizer: Tokenizer
    start_id: int | None
    stop_ids: frozenset[int]
    opened: OpenedModel
    device: torch.device

    def __iter__(self) -> Iterator[Any]:
        return iter((self.model, self.tokenizer))

    def encode(self, text: str) -> list[int]:
        """Start id and the ids of the text, in which no special token is recognised."""
        start = [] if self.start_id is None else [self.start_id]
        return start + self.tokenizer.encode([text])[0]


def open_model(
    source: str | Path,
    tokenizer: str | Path | None = None,
    device: str | None = None,
    dtype: Literal["fp32", "bf16"] = "fp32",
) -> TrainedModel:
    """Open a trained model with its tokenizer.

    Args:
        source: Weights folder (RUN/weights/step-00000100, RUN/weights/best, Hugging Face's), checkpoint
            (RUN/checkpoints/step-00000100), or RUN, RUN/weights, RUN/checkpoints for the latest in it.
        tokenizer: Tokenizer folder (default: the one beside the model).
        device: Device: cpu, cuda, cuda:1 … (default: cuda where there is one).
        dtype: What the model computes in; bf16 takes half the memory.

    Raises:
        CheckpointError: The model or its tokenizer is missing, damaged or does not match.
        ConfigError: The device does not exist, or the decoder does not support the architecture.
        DataError: The tokenizer is damaged.
    """

    from llm_pretrain.checkpoints import opening
    from llm_pretrain.data.tokenizers import Tokenizer
    from llm_pretrain.model.kernels import DTYPES

    on, opened = _device(device), opening.open_model(source)
    folder = Path(tokenizer) if tokenizer else opened.tokenizer_folder
    if folder is None:
        raise CheckpointError(
            f"{opened.path / 'tokenizer.json'}: expected the tokenizer beside the {opened.kind}, found no "
            "such file; name its folder with --tokenizer"
        )
    if not (folder / "tokenizer.json").is_file():
        raise CheckpointError(f"{folder / 'tokenizer.json'}: expected a tokenizer, found no such file")
    chosen = Tokenizer(folder)
    rows = opened.model.lm_head.weight.shape[0]
    if chosen.vocab_size > rows:
        raise CheckpointError(
            f"{folder / 'tokenizer.json'}: expected at most the model's {rows} ids, found "
            f"{chosen.vocab_size}; it is another model's tokenizer"
        )
    own = opened.tokenizer_folder
    if own is not None and Tokenizer(own).hash != chosen.hash:
        print(f"warning: {folder} is not the tokenizer beside the model, {own}", file=sys.stderr)
    ends = _ids(opened.token_ids.get("eos_token_id")) or _ids(chosen.eos_token_id)
    starts = _ids(opened.token_ids.get("bos_token_id")) or _ids(chosen.bos_token_id) or ends
    return TrainedModel(
        model=opened.model.to(on, DTYPES[dtype]),
        tokenizer=chosen,
        start_id=starts[0] if starts else None,
        stop_ids=frozenset(ends),
        opened=opened,
        device=on,
    )


def _ids(value: object) -> list[int]:
    """The ids of a JSON entry, a number, a list of numbers, or neither."""
    values = value if isinstance(value, list) else [value]
    return [each for each in values if isinstance(each, int)]


def _device(name: str | None) -> torch.device:
    import torch

    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()  # fails on `meta`, which has no values
    except (RuntimeError, AssertionError, ImportError) as error:  # no package for it
        reason = reason_of(error).partition(". ")[0]
        raise ConfigError(
            f"--device: expected cpu or a device of this machine, found {name} ({reason})"
        ) from None
    return device
