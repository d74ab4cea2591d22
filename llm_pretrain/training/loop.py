"""The training loop, once for both launch paths. It knows no launcher and calls no collective itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from itertools import islice

from llm_pretrain.checkpoints import ResumePoint
from llm_pretrain.config import Config, dump_yaml, resolve_model
from llm_pretrain.data import Batch, TokenStore, evaluation_batches, global_batches, open_stores
from llm_pretrain.errors import EXIT_PREEMPTED, ConfigError
from llm_pretrain.export import home_of
from llm_pretrain.files import replace_text
from llm_pretrain.model import Decoder, count_parameters, initialize_weights, update_router_bias
from llm_pretrain.training.agreement import on_any_rank, on_every_rank, on_first_rank
from llm_pretrain.training.attempts import note_attempt
from llm_pretrain.training.averaging import averaged
from llm_pretrain.training.books import Books
from llm_pretrain.training.building import build_model
from llm_pretrain.training.changes import changed_settings
from llm_pretrain.training.engine import Engine, forwards_together
from llm_pretrain.training.evaluation import Evaluator, zlib_bits_per_byte
from llm_pretrain.training.garbage import scheduled_collections
from llm_pretrain.training.initial_weights import load_initial_weights
from llm_pretrain.training.objective import expert_counts
from llm_pretrain.training.optimizers import build_optimizer
from llm_pretrain.training.out_of_memory import check_memory
from llm_pretrain.training.recorder import Recorder
from llm_pretrain.training.rolling_back import roll_back
from llm_pretrain.training.run_folder import RunFolder
from llm_pretrain.training.samples import Samples
from llm_pretrain.training.saving import Saving
from llm_pretrain.training.schedule import learning_rate, set_learning_rate
from llm_pretrain.training.signals import StopRequest
from llm_pretrain.training.status import Status
from llm_pretrain.training.watchdog import beat


def windows(batches: Iterable[Batch], size: int) -> Iterator[list[Batch]]:
    """Whole windows of `size` micro batches: one optimizer step each."""
    iterator = iter(batches)
    while window := list(islice(iterator, size)):
        yield window


class Training:
    """One attempt at a run, from its start or resume to its end."""

    def __init__(self, config: Config, engine: Engine, folder: RunFolder, status: Status, stop: StopRequest):
        self.engine, self.folder, self.status, self.stop = engine, folder, status, stop
        beat("opening the data", files=True)
        self.stores: list[TokenStore] = on_every_rank(engine, lambda: open_stores(config))
        self.config = on_every_rank(engine, lambda: resolve_model(config, self.stores[0].vocab_size))
        self.saving = Saving(self.config, engine, folder, self.stores, status)

    def run(self) -> int:
        """Build, restore, train, save; returns the exit code."""
        config, engine = self.config, self.engine
        beat("looking for a checkpoint", files=True)
        resume = on_every_rank(engine, self.saving.find)
        self.progress = self.saving.progress(resume)
        if self.progress.step > config.training.max_steps:
            raise ConfigError(
                f"training.max_steps: expected at least {self.progress.step}, the step of the run's "
                f"checkpoint, found {config.training.max_steps}; raise it or choose another run.name"
            )
        if resume is None and self.status.checkpoint:  # deleted, or on a disk that is not there
            self.saving.notes.append(
                f"from scratch: status.json names {self.status.checkpoint}, and there is no checkpoint"
            )
        self.status.running(self.progress.step, resume.path if resume else None)
        on_every_rank(engine, lambda: check_memory(config, engine))
        beat("building the model", files=True)  # which may read weights
        model = build_model(config, engine.device)
        initialize_weights(model, config.run.seed, config.optimizer.base_hidden_size)
        notes = [] if resume else on_every_rank(engine, lambda: load_initial_weights(model, config))
        optimizer = build_optimizer(model, config.optimizer, config.training.precision)
        loader = on_every_rank(
            engine,
            lambda: global_batches(config, start_step=self.progress.step, world_size=engine.world_size),
        )
        batches = engine.prepare(model, optimizer, loader)
        if self._stop_agreed():  # there is nothing to save; what follows may take longer than a grace period
            return self._preempted(self._print)
        if resume is not None:
            beat(f"restoring step {resume.step}", files=True)
            self.saving.restore(resume)
        beat("getting ready to train", files=True)
        self.evaluator = self._build_evaluator()
        self.samples = self._open_samples()
        changes = on_first_rank(engine, self._write_config)
        self.recorder = Recorder(config, engine, self.folder, self.progress)
        self.books = Books(config, engine, self.progress, self.recorder, self._books_are_needed)
        self.saving.attach(self.recorder)
        with closing(self.recorder), closing(self.saving), scheduled_collections() as self.collect_garbage:
            self._announce(resume, changes or [], notes)
            return self._train(batches)

    def _train(self, batches: Iterable[Batch]) -> int:
        config, progress = self.config, self.progress
        saved_step = progress.step if self.saving.holds(progress.step) else None
        if progress.evaluation_owed:
            saved_step = None  # the checkpoint says so; at the run's end another must not
        if progress.step == 0 or progress.evaluation_owed:
            self._evaluate_and_write(due=config.evaluation.eval_steps > 0)
        stopping = self._stop_agreed()
        remaining = windows(batches, config.gradient_accumulation_steps(self.engine.world_size))
        self.recorder.restart_clock()
        while progress.step < config.training.max_steps and not stopping:
            beat(f"waiting for the data of step {progress.step + 1}")
            self._step(next(remaining))
            self._evaluate_and_write(due=self._evaluation_is_due())
            self.books.check_divergence(progress.step)
            self.collect_garbage(progress.step)
            stopping = self._stop_agreed()
            if not stopping and self.saving.is_due(progress.step):
                self.saving.save(progress)
            self.recorder.restart_clock()
        return self._finish(saved_step)

    def _step(self, micro_batches: list[Batch]) -> None:
        """One optimizer step: learning rate, the engine's work, the router's bias, the books."""
        config, engine, progress = self.config, self.engine, self.progress
        model, optimizer = engine.model_and_optimizer()
        beat(f"step {progress.step + 1}")
        rate = learning_rate(config, progress.step)
        set_learning_rate(optimizer, rate)
        result = engine.train_step(micro_batches, self.books.judge)
        if result.skipped == "rollback":
            result = roll_back(self.saving, progress, result, self.recorder.console.warning)
        if config.model.router_bias_update_rate and result.sums is not None and not result.skipped:
            counts, rate_of_bias = expert_counts(result.sums, config), config.model.router_bias_update_rate
            found_inf = result.unread.found_inf if result.unread else None
            update_router_bias(model, counts, rate_of_bias, found_inf)
        self.books.enter(result, rate)

    def _evaluation_is_due(self) -> bool:
        eval_steps, step = self.config.evaluation.eval_steps, self.progress.step
        return eval_steps > 0 and (step % eval_steps == 0 or step == self.config.training.max_steps)

    def _books_are_needed(self, step: int) -> bool:
        """Whether something follows this step that writes or depends on what became of it."""
        return self._evaluation_is_due() or self.saving.is_due(step)

    def _evaluate_and_write(self, *, due: bool) -> None:
        """Evaluate if due, and write the step's row: one row per step, whole.

        An evaluation that a stop signal cut short is owed: the resumed run writes it as a row of its own.
        Where an average of the parameters is kept, that is evaluated, and kept where it is the best.
        """
        if not due:
            self.progress.evaluation_owed = False
            self.recorder.flush()
            return
        beat(f"the evaluation after step {self.progress.step}")
        with averaged(self.engine.model_and_optimizer()[1]):
            metrics = self.evaluator()
            self.progress.evaluation_owed = metrics is None
            if metrics:
                self.recorder.evaluation(metrics)
                self.progress.evaluated(metrics)
            self.recorder.flush()
            if metrics is not None:
                self._after_evaluation(metrics.get("eval/loss"))

    def _after_evaluation(self, loss: float | None) -> None:
        """What every evaluation brings with it: the best weights, and samples."""
        model, _ = self.engine.model_and_optimizer()
        if loss is not None:
            beat(f"keeping the best weights of step {self.progress.step}", files=True)
            self.saving.keep_best(self.progress, loss)
        beat(f"generating samples after step {self.progress.step}")
        assert isinstance(model, Decoder)
        self.samples.write(model, self.progress.step, self.recorder.console, rank=self.engine.rank)

    def _stop_agreed(self) -> bool:
        """Whether any rank was asked to stop, the same on all; what one rank alone met ends all here."""
        beat(f"agreeing whether to stop after step {self.progress.step}")
        stopping, failing = on_any_rank(self.engine, self.stop.requested, self.saving.has_stopped)
        if failing:
            self.saving.stop()
        self.saving.announce()
        return stopping

    def _settle(self) -> None:
        """Write all rows that are due and know what became of every step, where a run ends at any step."""
        self.books.settle()
        self.recorder.flush()
        self.books.check_divergence(self.progress.step)

    def _finish(self, saved_step: int | None) -> int:
        """Save what is not saved yet and say how the run ended; returns the exit code."""
        step, console = self.progress.step, self.recorder.console
        self._settle()
        if saved_step != step:
            self.saving.save(self.progress, last=True)
        if step < self.config.training.max_steps or self.progress.evaluation_owed:
            self.recorder.hurried = True
            return self._preempted(console.info)
        self.status.ended(step, 0, None)
        console.info(f"finished at step {step}: {self.folder.path}")
        console.info(f"weights: {self.saving.weights_of(step)}")
        return 0

    def _preempted(self, say: Callable[[str], object]) -> int:
        """Write and say that the run was asked to stop, with all of it saved; returns the exit code."""
        step = self.progress.step
        reason = self.stop.signal.name if self.stop.signal else "a signal to another rank"
        self.status.ended(step, EXIT_PREEMPTED, reason)
        say(f"stopped by {reason} after step {step}; start the same command again to continue")
        return EXIT_PREEMPTED

    def _print(self, text: str) -> None:
        """Before there is a console."""
        with suppress(OSError):  # a closed terminal
            if self.engine.rank == 0:
                print(text, flush=True)

    def _build_evaluator(self) -> Evaluator:
        config = self.config
        batches = on_every_rank(
            self.engine, lambda: evaluation_batches(config) if config.evaluation.eval_steps else []
        )
        labels = [source.label for source in config.data.sources]
        together = forwards_together(config, self.engine.world_size)
        return Evaluator(self.engine, batches, self.stores[0], lambda: self.stop.requested, labels, together)

    def _open_samples(self) -> Samples:
        """On every rank, also where a forward pass does not take all: one that waited for the first to
        generate, for longer than the time-out, would take it for hung."""
        together = forwards_together(self.config, self.engine.world_size)
        return on_every_rank(
            self.engine, lambda: Samples(self.config, self.folder, self.stores[0], together=together)
        )

    def _write_config(self) -> list[str]:
        """Replace the folder's configuration by this attempt's; returns what that changes."""
        changes = changed_settings(self.folder.config, self.config)
        replace_text(self.folder.config, dump_yaml(self.config))
        return changes

    def _without_home(self) -> list[str]:
        """A line for a model that no other library opens; better read before weeks of training than after."""
        try:
            home_of(self.config.model)
        except ConfigError as error:
            return [f"the weights will open with llm_pretrain only: {error}"]
        return []

    def _announce(self, resume: ResumePoint | None, changes: list[str], notes: list[str]) -> None:
        config, engine, console = self.config, self.engine, self.recorder.console
        training, size = config.training, count_parameters(config.model)
        console.info(
            f"{config.run.name}: {size.total / 1e6:.1f}M parameters ({size.active / 1e6:.1f}M active), "
            f"{engine.world_size} x {engine.device.type} by {engine.launcher}, "
            f"{config.distributed.strategy}, {training.precision}"
        )
        console.info(
            f"{training.max_steps} steps of {training.global_batch_size} x {training.sequence_length} tokens "
            f"in {self.folder.path}"
        )
        zlib_bits = zlib_bits_per_byte(self.stores)
        if zlib_bits is not None:
            console.info(f"validation text: zlib level 9 needs {zlib_bits:.4f} bits per byte")
        note_attempt(self.folder, config, engine, self.progress.step, zlib_bits)
        for warning in [*self._without_home(), *self.evaluator.unseen_sources()]:
            console.warning(warning)
        for note in [*notes, *self.saving.notes]:
            console.info(note)
        if resume is not None:
            for warning in resume.warnings:
                console.warning(warning)
            for change in changes:
                console.warning(f"changed since the attempt before: {change}")
            console.info(f"resumed from {resume.path} (written by {resume.launcher} x {resume.world_size})")
            if resume.step == training.max_steps:
                console.info(f"nothing left to do: training.max_steps is {training.max_steps}")
