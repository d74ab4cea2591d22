"""Faults for a process of its own: called before a script's `main`, they last until the process ends."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from support import corruption_plan, faults
from support.engines import engine_class
from support.faults import Patch, defined, replace_everywhere

from llm_pretrain.checkpoints import state, tensor_files
from llm_pretrain.checkpoints.store import CheckpointStore
from llm_pretrain.training.evaluation import Evaluator
from llm_pretrain.training.recorder import Recorder

_patch = Patch()


def _substitute(name: str, other: Callable[..., Any]) -> None:
    """Call `other(original, *arguments)` instead of a function of the package."""
    original = defined(name)
    replace_everywhere(_patch, original, lambda *a, **k: other(original, *a, **k))


# Engines


def break_engine(launcher: str, fault: str) -> None:
    """A fault of `support.faults` in the script of one launcher."""
    if (launcher == "accelerate") == ("ACCELERATE_MIXED_PRECISION" in os.environ):
        getattr(faults, fault)(_patch, engine_class(launcher))


def multiply_the_learning_rate(factor: float) -> None:
    """Steps have another learning rate than their rows say."""
    _substitute("set_learning_rate", lambda original, optimizer, value: original(optimizer, value * factor))


# Meshes


# Saving and resuming


def write_the_parts_of_every_replica() -> None:
    """Each holder of a part of a sharded tensor takes it for its own alone."""
    _substitute("_replica", lambda original, *_: (0, 1))


def number_experts_by_rank() -> None:
    """Every rank saves its experts under the first numbers."""
    right = state.local_part

    def local_part(tensor: Any) -> Any:
        part, offsets = right(tensor)
        mesh = getattr(tensor, "device_mesh", None)
        if mesh is not None and "ep" in (mesh.mesh_dim_names or ()):
            offsets = (0, *offsets[1:])
        return part, offsets

    _patch.setattr(state, "local_part", local_part)


def number_layers_by_stage() -> None:
    """Each stage of a pipeline saves its first layer as the first."""

    def held_pieces(original: Callable[..., Any], tensors: Any, *, pipeline: Any, **ranks: int) -> list[Any]:
        first = pipeline.config.stage_layers(pipeline.rank).start
        pieces = original(tensors, pipeline=pipeline, **ranks)
        return [
            replace(
                each, name=re.sub(r"(?<=layers\.)\d+", lambda found: str(int(found[0]) - first), each.name)
            )
            for each in pieces
        ]

    _substitute("held_pieces", held_pieces)


def ask_for_too_much_in_saves(rank: int) -> None:
    """One rank's saves ask for what no machine has."""
    right = tensor_files._chunks

    def chunks(*arguments: Any) -> Any:
        if os.environ["RANK"] == str(rank):
            torch.empty(1 << 58, dtype=torch.uint8)
        return right(*arguments)

    _patch.setattr(tensor_files, "_chunks", chunks)


def restore_no_optimizer() -> None:
    """A checkpoint's optimizer state is dropped."""
    load = CheckpointStore.load

    def forgetful(self: CheckpointStore, found: Any, model: Any, optimizer: Any, *others: Any) -> None:
        load(self, found, model, optimizer, *others)
        optimizer.state.clear()

    _patch.setattr(CheckpointStore, "load", forgetful)


# Computing


def flip_a_bit_of_rank_1() -> None:
    """Rank 1's memory changes after the first step."""
    add = Recorder.add

    def flipped(self: Recorder, step: Any, rate: float) -> None:
        add(self, step, rate)
        model: Any = self.engine.model_and_optimizer()[0]
        if self.engine.rank == 1 and self.progress.step == 1:
            model.model.norm.weight.detach().view(torch.int32)[0] ^= 1

    _patch.setattr(Recorder, "add", flipped)


def flip_a_bit(kind: str, *arguments: Any) -> None:
    """One of the flips of `corruption_plan` on rank 1."""
    getattr(corruption_plan, kind)(*arguments)(_patch, object)


# Hanging


def slow_evaluation(seconds: float) -> None:
    """Every batch of an evaluation, and every token of a sample, takes so long."""
    _after_heartbeats(lambda: time.sleep(seconds))


def _after_heartbeats(act: Callable[[], object]) -> None:
    module: Any = sys.modules[Evaluator.__module__]
    heartbeat = module.heartbeat

    def slow(*arguments: Any, **options: Any) -> None:
        heartbeat(*arguments, **options)
        act()

    _patch.setattr(module, "heartbeat", slow)


# Writing


def without_fsync(pattern: str) -> None:
    """What matches `pattern` is never synced."""
    fsync = os.fsync

    def sync(file: Any) -> None:
        number = file if isinstance(file, int) else file.fileno()
        if not re.search(pattern, os.readlink(f"/proc/self/fd/{number}")):
            fsync(number)

    _patch.setattr(os, "fsync", sync)


def write_manifest_late() -> None:
    """A checkpoint gets its name before its manifest is written."""
    write, late = defined("write_manifest"), []

    def commit_first(commit: Callable[..., Path], *arguments: Any) -> Path:
        path = commit(*arguments)
        while late:
            write(path, *late.pop())
        return path

    _substitute("write_manifest", lambda original, folder, *content: late.append(content))
    _substitute("commit_folder", commit_first)
