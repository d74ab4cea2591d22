"""The training run of both launch paths: build or restore the state, train, evaluate and save."""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from llm_pretrain.checkpoints.manifest import ResumePoint, newest_run_id
from llm_pretrain.config.loading import from_dict, resolve_model, to_dict
from llm_pretrain.config.tree import Config
from llm_pretrain.config.yaml_text import read_yaml_file
from llm_pretrain.data.assembly import Batch
from llm_pretrain.data.loader import evaluation_batches, global_batches, open_stores, worker_errors
from llm_pretrain.data.store import TokenStore, shared_documents
from llm_pretrain.distributed.collectives import any_rank, run_on_all_ranks, run_on_rank0
from llm_pretrain.errors import EXIT_PREEMPTED, ConfigError, printable
from llm_pretrain.export.config_json import match_hf_architecture
from llm_pretrain.hardware import gpu_count
from llm_pretrain.launch.out_of_memory import check_memory, explain_out_of_memory
from llm_pretrain.launch.process import SignalHandler
from llm_pretrain.launch.watchdog import heartbeat, peer_failure, report_hangs_to
from llm_pretrain.model.decoder import Decoder
from llm_pretrain.model.moe import update_router_bias
from llm_pretrain.model.sizes import count_parameters
from llm_pretrain.optim.build import build_optimizer, moments
from llm_pretrain.optim.ema import ema_parameters
from llm_pretrain.optim.schedule import learning_rate, set_learning_rate
from llm_pretrain.runs.folder import RunFolder
from llm_pretrain.runs.status import Status
from llm_pretrain.text import first_line, quantity
from llm_pretrain.training.agreement import check_launch, check_parameters, check_stores
from llm_pretrain.training.decision import Decision
from llm_pretrain.training.engine import Engine, forward_is_collective
from llm_pretrain.training.evaluation import Evaluator, PredictedCurve, Samples, zlib_bits_per_byte
from llm_pretrain.training.kernel_choice import choose_kernels
from llm_pretrain.training.machine import machine_warnings
from llm_pretrain.training.model_setup import (
    build_model,
    check_float8,
    check_repeatable,
    initialize_weights,
    initialize_zeros,
    kernels_in_use,
    load_initial_weights,
)
from llm_pretrain.training.recorder import OnRow, Recorder, record_attempt
from llm_pretrain.training.saving import CheckpointManager, rollback
from llm_pretrain.training.step import Step

if TYPE_CHECKING:
    from llm_pretrain.training.corruption import CorruptionCheck


def windows(batches: Iterable[Batch], size: int) -> Iterator[list[Batch]]:
    """Lists of `size` micro batches, one list per optimizer step."""
    with worker_errors():
        iterator = iter(batches)
        while window := list(islice(iterator, size)):
            yield window


class Trainer:
    """One attempt at a run, from its start or resume to its end."""

    check: CorruptionCheck | None = None
    """The check of steps that are computed twice; None without `training.check_every`."""

    def __init__(
        self,
        config: Config,
        engine: Engine,
        folder: RunFolder,
        status: Status,
        stop: SignalHandler,
        on_row: OnRow | None = None,
    ):
        self.on_row = on_row
        self.engine, self.folder, self.status, self.stop = engine, folder, status, stop
        heartbeat("opening the data", files=True)
        self.stores: list[TokenStore] = run_on_all_ranks(engine, lambda: open_stores(config))
        check_stores(engine, self.stores)
        self.config = run_on_all_ranks(engine, lambda: resolve_model(config, self.stores[0].vocab_size))
        with explain_out_of_memory(self.config, engine.world_size):
            self.config, self.kernels = choose_kernels(self.config, engine, folder)
        self.checkpoints = CheckpointManager(self.config, engine, folder, self.stores, status)

    def run(self) -> int:
        """Build, restore, train, save; returns the exit code."""
        config, engine = self.config, self.engine
        heartbeat("looking for a checkpoint", files=True)
        resume = run_on_all_ranks(engine, self.checkpoints.find)
        self.progress = self.checkpoints.progress(resume)
        if self.progress.step > config.training.max_steps:
            raise ConfigError(
                f"training.max_steps: expected at least {self.progress.step}, the step of the run's "
                f"checkpoint, found {config.training.max_steps}; raise it or choose another run.name"
            )
        found = resume.path if resume and not resume.start else None
        if found is None and self.status.checkpoint:  # deleted, or its disk is not mounted
            self.checkpoints.notes.append(
                f"starting from scratch: {self.status.checkpoint}, named in status.json, is not in "
                f"{self.folder.checkpoints}"
            )
        run_on_all_ranks(engine, lambda: self.status.resumed(self.progress.step, found))
        self.checkpoints.notes += run_on_all_ranks(
            engine, lambda: check_memory(config, engine.world_size, engine.device)
        )
        heartbeat("building the model", files=True)  # model.init_from reads files
        with torch.device("meta"):
            model = build_model(config, engine.device, engine.world_size)
        notes: list[str] = []

        def initialize(decoder: Decoder) -> None:
            if resume is not None:
                return initialize_zeros(decoder, engine.device)
            base = config.optimizer.base_hidden_size
            initialize_weights(decoder, config.run.seed, base, device=engine.device)
            notes.extend(run_on_all_ranks(engine, lambda: load_initial_weights(decoder, config)))
            check_parameters(engine, decoder, "after initialisation")  # DDP then copies rank 0's values

        optimizer = build_optimizer(model, config.optimizer, config.training.precision)
        loader = run_on_all_ranks(
            engine,
            lambda: global_batches(config, start_step=self.progress.step, stores=self.stores),
        )
        batches = engine.prepare(model, optimizer, loader, initialize)
        if self._stop_requested():  # nothing to save yet, and restoring may take longer than the grace period
            return self._preempted(partial(print_on_rank0, engine))
        if resume is not None:
            heartbeat(f"restoring step {resume.run.step}", files=True)
            self.checkpoints.restore(resume)
            check_parameters(engine, model, f"after restoring step {resume.run.step}")
        heartbeat("getting ready to train", files=True)
        is_collective = forward_is_collective(config, engine.world_size)
        self.evaluator = self._build_evaluator(is_collective=is_collective)
        self.predicted = PredictedCurve(config)
        # all ranks generate, since a rank that only waited for rank 0 would time out
        self.samples = run_on_all_ranks(
            engine, lambda: Samples(config, self.folder, self.stores[0], is_collective=is_collective)
        )
        self.decision = Decision(config, engine, self.progress)
        self.recorder = Recorder(
            config, engine, self.folder, self.progress, self.decision, self._must_settle, self.on_row
        )
        self.checkpoints.attach(self.recorder)
        if config.training.check_every:
            from llm_pretrain.training.corruption import CorruptionCheck

            warn = self.recorder.console.warning
            self.check = CorruptionCheck(self.decision, self.checkpoints, self.status, warn, self._flush)
            notes += self.check.notes()
        with closing(self.recorder), closing(self.checkpoints), gc_schedule() as self.collect_garbage:
            self._print_start(resume, notes)
            if resume is not None:
                heartbeat(f"writing the weights of step {resume.step}", files=True)
                self.checkpoints.write_missing_weights(resume, self.progress)
            return self._train(batches)

    def _train(self, batches: Iterable[Batch]) -> int:
        config, progress = self.config, self.progress
        saved_step = progress.step if self.checkpoints.is_saved(progress.step) else None
        if progress.evaluation_owed:
            saved_step = None  # the checkpoint says that the evaluation is pending: save again after it
        if progress.step == 0 or progress.evaluation_owed:
            self._evaluate_and_write(due=config.evaluation.eval_steps > 0)
        ending = self._stop_requested() or self._out_of_patience()
        remaining = windows(batches, config.gradient_accumulation_steps(self.engine.world_size))
        self.recorder.restart_clock()
        while progress.step < config.training.max_steps and not ending:
            heartbeat(f"waiting for the data of step {progress.step + 1}")
            self._step(next(remaining))
            self._evaluate_and_write(due=self._evaluation_is_due())
            self.decision.check_divergence(progress.step)
            self.collect_garbage(progress.step)
            ending = self._stop_requested() or self._out_of_patience()
            if not ending and self.checkpoints.is_due(progress.step):
                self._save()
            self.recorder.restart_clock()
        return self._finish(saved_step)

    def _step(self, micro_batches: list[Batch]) -> None:
        """One optimizer step: learning rate, gradients and update, router bias, metrics."""
        config, engine, progress = self.config, self.engine, self.progress
        model, optimizer = engine.model_and_optimizer()
        heartbeat(f"step {progress.step + 1}")
        rate = learning_rate(config, progress.step)
        set_learning_rate(optimizer, rate)
        step = self._take_step(micro_batches)
        if step.skipped == "rollback":
            rollback(self.checkpoints, progress, step, self.recorder.console.warning)
        bias_rate = config.model.router_bias_update_rate
        if bias_rate and step.num_loss_tokens and not step.skipped:
            update_router_bias(model, step.sums.expert_counts, bias_rate, step.found_inf)
        self.recorder.add(step, rate)

    def _take_step(self, micro_batches: list[Batch]) -> Step:
        if self.check and self.check.is_due(self.progress.step + 1):
            return self.check.take_step(micro_batches)
        step = Step.begin(micro_batches, self.engine, self.decision)
        if step.num_loss_tokens:
            self.engine.train_step(step)
        step.micro_batches = ()
        return step

    def _save(self, *, last: bool = False) -> None:
        if self.check:
            self.check.compare_replicas(self.progress.step)
        self.checkpoints.save(self.progress, last=last)

    def _evaluation_is_due(self) -> bool:
        eval_steps, step = self.config.evaluation.eval_steps, self.progress.step
        return eval_steps > 0 and (step % eval_steps == 0 or step == self.config.training.max_steps)

    def _out_of_patience(self) -> str | None:
        """Why the run ends before `training.max_steps`; None while `evaluation.patience` lasts."""
        patience, best = self.config.evaluation.patience, self.progress.best
        if not patience or best is None or best.later < patience:
            return None
        return f"evaluation.patience {patience}: no lower {best.metric} since step {best.step}"

    def _must_settle(self, step: int) -> bool:
        """Whether an evaluation or a checkpoint follows this step, or `check` computes the step twice."""
        is_checked = self.check is not None and self.check.is_due(step)
        return self._evaluation_is_due() or self.checkpoints.is_due(step) or is_checked

    def _evaluate_and_write(self, *, due: bool) -> None:
        """Evaluate if due, and write the step's row; then keep the best weights and generate samples.

        An evaluation that a stop signal ended stays pending: the resumed run repeats it, in a row of its own.
        With an average of the parameters (EMA), the average is evaluated and saved as the best weights.
        """
        if not due:
            self.progress.evaluation_owed = False
            self.recorder.flush()
            return
        step, console, metric = self.progress.step, self.recorder.console, self.config.checkpoint.best_metric
        model, optimizer = self.engine.model_and_optimizer()
        heartbeat(f"the evaluation after step {step}")
        with ema_parameters(optimizer):
            metrics = self.evaluator(model, console.evaluating)
            loss = metrics.get("eval/loss") if metrics else None
            self.progress.evaluation_owed = metrics is None
            if metrics:
                self.recorder.evaluation(metrics | self.predicted.metrics(step, loss, console))
                self.progress.evaluated(metrics)
            self.recorder.flush()
            if metrics is None:
                return
            if (best := metrics.get(metric)) is not None:
                heartbeat(f"keeping the best weights of step {step}", files=True)
                self.checkpoints.keep_best(self.progress, best)
            heartbeat(f"generating samples after step {step}")
            assert isinstance(model, Decoder)
            self.samples.write(model, step, console, rank=self.engine.rank)

    def _stop_requested(self) -> bool:
        """Whether any rank received a stop signal; raises on every rank if one failed to write a file."""
        heartbeat(f"checking for stop signals after step {self.progress.step}")
        stopping, failing = any_rank(self.engine, self.stop.requested, self.checkpoints.has_failed)
        if failing:
            self.checkpoints.raise_failure()
        self.checkpoints.record_finished_save()
        return stopping

    def _flush(self) -> None:
        """Record every step and write every row that is due."""
        self.recorder.settle()
        self.recorder.flush()
        self.decision.check_divergence(self.progress.step)

    def _finish(self, saved_step: int | None) -> int:
        """Save what is not saved yet and report how the run ended; returns the exit code."""
        step, console = self.progress.step, self.recorder.console
        self._flush()
        if saved_step != step:
            self._save(last=True)
        ended_early = self._out_of_patience()
        if (step < self.config.training.max_steps and not ended_early) or self.progress.evaluation_owed:
            self.recorder.hurried = True
            return self._preempted(console.info)
        reason = "; ".join(self.status.findings()) or None
        loss = self.progress.loss
        self.status.ended(step, 0, reason or ended_early, loss)
        shown = "" if loss is None else f" with loss {loss:.4f}"
        console.info(f"finished at step {step}{shown}: {self.folder.path}")
        if ended_early:
            console.info(ended_early)
        console.info(f"weights: {self.checkpoints.weights_of(step)}")
        if reason:
            console.warning(f"{reason}: {self.status.path}")
        if undone := sum(bool(fault.get("undone")) for fault in self.status.faults):
            text = "silent data corruption ended attempts at steps that later ones computed again"
            console.info(f"{text}: {undone}")
        return 0

    def _preempted(self, write: Callable[[str], object]) -> int:
        """Report that a signal stopped the run, with everything saved; returns the exit code."""
        step = self.progress.step
        reason = self.stop.signal.name if self.stop.signal else "a signal to another rank"
        self.status.ended(step, EXIT_PREEMPTED, reason, self.progress.loss)
        write(f"stopped by {reason} after step {step}; start the same command again to continue")
        return EXIT_PREEMPTED

    def _build_evaluator(self, *, is_collective: bool) -> Evaluator:
        config, engine = self.config, self.engine
        batches = run_on_all_ranks(
            engine,
            lambda: evaluation_batches(config, stores=self.stores) if config.evaluation.eval_steps else [],
        )
        labels, store = [source.label for source in config.data.sources], self.stores[0]

        def stop_requested() -> bool:
            return self.stop.requested

        return Evaluator(
            engine, engine.place, engine.forward, batches, store, stop_requested, labels, is_collective
        )

    def _print_start(self, resume: ResumePoint | None, notes: list[str]) -> None:
        """Print model, launch, warnings and resume point, and put the attempt on record.

        The record comes last: if this attempt is killed earlier, the record keeps the settings of the attempt
        before, with which the next start compares its settings.
        """
        config, engine, console = self.config, self.engine, self.recorder.console
        training, size = config.training, count_parameters(config.model)
        launched = f" by {engine.launcher}" if engine.world_size > 1 else ""
        active = f" ({quantity(size.active)} active)" if size.active != size.total else ""
        console.info(
            f"{config.run.name}: {quantity(size.total)} parameters{active}, "
            f"{engine.world_size} x {engine.device.type}{launched}, "
            f"{config.distributed.strategy}, {training.precision}"
        )
        if engine.device.type == "cuda":
            console.info(kernels_in_use(config, engine.device, engine.world_size))
        ranks, gpus = int(os.environ.get("LOCAL_WORLD_SIZE") or 1), gpu_count()
        for warning in run_on_rank0(engine, lambda: list(machine_warnings(config, gpus, ranks))):
            console.warning(warning)
        if self.kernels is not None:
            for note in self.kernels.notes:
                console.warning(note)
            if self.kernels.seconds:
                console.info(f"kernels compared with their definitions in {self.kernels.seconds:.1f} s")
        console.info(
            f"{training.max_steps} steps of {training.global_batch_size} x {training.sequence_length} tokens "
            f"in {self.folder.path}"
        )
        zlib_bits = zlib_bits_per_byte(self.stores)
        if zlib_bits is not None:
            console.info(f"validation text: zlib level 9 needs {zlib_bits:.4f} bits per byte")
        try:
            match_hf_architecture(config.model)
        except ConfigError as error:
            console.warning(
                f"transformers will not open the weights, llm_pretrain and perhaps GGUF will: {error}"
            )
        evaluated = [source.label for source in config.data.sources] if config.evaluation.eval_steps else []
        shared = run_on_rank0(engine, lambda: shared_documents(evaluated, self.stores))
        for warning in [*self.evaluator.unseen_sources(), *shared]:
            console.warning(warning)
        for note in [*notes, *self.checkpoints.notes]:
            console.info(note)
        if resume is not None:
            for warning in resume.warnings:
                console.warning(warning)
            before, run = resume.path.resolve().parent.parent / self.folder.config.name, resume.run
            how, since = ("started", "the run before") if resume.start else ("resumed", "the attempt before")
            for change in run_on_rank0(engine, lambda: config_diff(before, config, run.step, resume.step)):
                console.warning(f"changed since {since}: {change}")
            console.info(f"{how} from {resume.path} (written by {run.launcher} x {run.world_size})")
            if resume.step == training.max_steps:
                console.info(f"nothing left to do: training.max_steps is {training.max_steps}")
        step, kernels = self.progress.step, self.kernels
        run_on_rank0(engine, lambda: record_attempt(self.folder, config, engine, step, zlib_bits, kernels))


def print_on_rank0(engine: Engine, text: str) -> None:
    """Print a line before there is a console."""
    with suppress(OSError):  # the terminal is closed
        if engine.rank == 0:
            print(printable(text), flush=True)


UNFINISHED = (
    "the attempt before ended without recording why: it was killed, or the machine ran out of memory or "
    "stopped, or a token store was cut while it was read"
)


def pretrain(config: Config, engine: Engine, on_row: OnRow | None = None) -> int:
    """Run the training that `config` describes, from its newest checkpoint if it has one.

    Rank 0 calls `on_row` with each row of metrics.

    Returns:
        The worker's exit code: 0 finished, 75 stopped by a signal after a clean save.

    Raises:
        PretrainError: its kind decides the exit code, which `status.json` records too.
    """
    folder = RunFolder(config.run.folder)
    with SignalHandler(verbose=engine.rank == 0) as stop:
        check_launch(config, engine)  # also a barrier: now every rank handles signals
        heartbeat("opening the run's folder")
        folder.run_id = run_on_rank0(engine, lambda: folder.acquire(newest_run_id))
        status = Status(
            folder.status,
            rank=engine.rank,
            world_size=engine.world_size,
            launcher=engine.launcher,
            check=folder.check,
        )
        if status.unfinished:
            print_on_rank0(engine, f"{folder.path}: {UNFINISHED}")
        try:
            run_on_all_ranks(engine, status.started)  # rank 0 writes; its failure is raised on all
            report_hangs_to(folder, status)
            run_on_all_ranks(engine, lambda: check_float8(config))
            run_on_all_ranks(engine, lambda: moments(config.optimizer, "hidden"))  # tries a class out
            run_on_all_ranks(engine, lambda: check_repeatable(config, engine.device))
            trainer = Trainer(config, engine, folder, status, stop, on_row)
            with explain_out_of_memory(trainer.config, engine.world_size):
                exit_code = trainer.run()
        except BaseException as error:
            peer_error = peer_failure(error, engine.rank)
            status.failed(peer_error or error)
            if peer_error:
                raise peer_error from None
            raise
        finally:
            if engine.rank == 0 and config.logging.report:
                heartbeat("writing the report")
                report_run(folder)
            folder.release()
        heartbeat("leaving the process group")
        trainer.checkpoints.leave_group()
        engine.close()
    return exit_code


COLLECT_STEPS = 100
"""Steps between garbage collections; one takes under a millisecond, since older objects are frozen."""


@contextmanager
def gc_schedule() -> Iterator[Callable[[int], None]]:
    """Inside the block, freeze existing objects and collect garbage only every `COLLECT_STEPS` steps.

    Yields:
        A function to call after every step with the number of steps done, so that all ranks collect together.
    """
    was_enabled, had_frozen = gc.isenabled(), gc.get_freeze_count() > 0
    gc.collect()
    if not had_frozen:  # unfreezing would unfreeze the caller's objects too
        gc.freeze()
    gc.disable()

    def collect(step: int) -> None:
        if step % COLLECT_STEPS == 0:
            gc.collect()

    try:
        yield collect
    finally:
        if not had_frozen:
            gc.unfreeze()
        if was_enabled:
            gc.enable()


NOT_REPORTED = {"run.name", "run.output_dir", "checkpoint.resume"}
"""Settings that do not change the training."""


def config_diff(path: Path, config: Config, step_before: int = 0, step: int = 0) -> list[str]:
    """`section.field: old -> new` for each setting that differs from an earlier attempt's file at `path`.

    Then, if it differs, the learning rate after `step_before` steps by the file, and after `step` steps now.
    The list is empty if the file cannot be read.
    """
    try:
        before = read_yaml_file(path)
    except (OSError, ValueError):
        return []
    lines = []
    for section, fields in to_dict(config).items():
        old = before.get(section) if isinstance(before, dict) else None
        if not isinstance(old, dict):
            continue
        for name, value in fields.items():
            setting = f"{section}.{name}"
            if name in old and old[name] != value and setting not in NOT_REPORTED:
                lines.append(f"{setting}: {_yaml_value(old[name])} -> {_yaml_value(value)}")
    with suppress(ConfigError):  # the file is another version's
        old_rate, rate = learning_rate(from_dict(before), step_before), learning_rate(config, step)
        if rate != old_rate:
            lines.append(f"learning rate of the next step: {old_rate:.4g} -> {rate:.4g}")
    return lines


def _yaml_value(value: Any) -> str:
    """The value as YAML: `null` and `true` instead of Python's words."""
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def report_run(folder: RunFolder) -> None:
    """Write the run's `report.html` if it has metrics; a failure is a warning."""
    if not folder.metrics.exists():
        return
    from llm_pretrain.tracking.report import write_report

    try:
        folder.check()
        write_report([folder.path], folder.report)
    except Exception as error:  # a failed report must not fail the run
        print(f"warning: no report was written: {printable(first_line(error))}", file=sys.stderr, flush=True)
