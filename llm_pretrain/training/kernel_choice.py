"""Checks kernels on devices that are new to the run, and replaces failing ones on all ranks alike."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from llm_pretrain.config.loading import compiles, to_dict, validate
from llm_pretrain.config.tree import Config
from llm_pretrain.distributed.collectives import gather_results, run_on_rank0
from llm_pretrain.errors import CheckpointError, ConfigError
from llm_pretrain.launch.watchdog import heartbeat
from llm_pretrain.model.kernels import DTYPES, configured_kernels, experts_requirement
from llm_pretrain.model.self_check import PARTS, KernelCheck, Part, check_kernels
from llm_pretrain.runs.folder import RunFolder
from llm_pretrain.runs.rows import read_rows
from llm_pretrain.training.engine import Engine
from llm_pretrain.training.model_setup import missing_compiler, refuse_kernels

SETTINGS: dict[Part, str] = {
    "experts": "training.experts_implementation",
    "attention": "training.attention_implementation",
    "loss": "training.loss_implementation",
    "compile": "training.compile",
}
_ORDER: dict[Part, tuple[str, ...]] = {
    "experts": ("grouped", "triton", "streamed"),
    "attention": ("varlen", "sdpa"),
    "loss": ("fused", "full"),
    "compile": ("on", "off"),
}
"""Implementations of each part; one that fails is replaced by the next that can run."""
_REPLACEMENTS = {SETTINGS[part]: order[1:] for part, order in _ORDER.items()}
"""Setting -> the values that may take the place of `auto`."""

CHECKED_DEVICES = {"cuda"}
"""Types of devices whose kernels are checked; this project's tests cover the kernels of a CPU."""


@dataclass
class KernelChoice:
    """What was checked and which kernels were replaced; recorded in the attempt's row of attempts.jsonl.

    Args:
        checked: Devices of all ranks, versions and settings. A later attempt with equal values is not checked
            again.
        replaced: Setting -> the name that takes the place of `auto`.
        notes: A line for each kernel that failed.
        seconds: Duration of all checks, on the slowest rank; 0 if an earlier attempt's choice is used.
    """

    checked: dict[str, Any]
    replaced: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0


def choose_kernels(config: Config, engine: Engine, folder: RunFolder) -> tuple[Config, KernelChoice | None]:
    """The configuration, with kernels that failed their check replaced; collective.

    Nothing is checked on a CPU. The run reuses the choice of an earlier attempt that had the same devices,
    versions and settings. A kernel that fails on any rank is replaced on all.

    Args:
        config: The run's, with `model.vocab_size`.
        engine: The run's, not prepared yet.
        folder: The run's, whose attempts.jsonl has the choices of earlier attempts.

    Returns:
        The configuration to train with, and the choice; None where nothing is checked.

    Raises:
        ConfigError: the configuration names a kernel that failed, no kernel of a part is left, or a kernel
            left the device unusable.
    """
    if engine.device.type not in CHECKED_DEVICES:
        return config, None
    heartbeat("checking the kernels", files=True)
    devices = gather_results(engine, lambda: _device_name(engine.device))
    facts = _facts(config, sorted(set(devices)))
    choice = run_on_rank0(engine, lambda: _earlier_choice(folder, facts))
    if choice is not None:
        for setting, value in choice.replaced.items():
            config = _with(config, setting, value)
        return config, choice
    choice = KernelChoice(facts)
    config = _replace_failing(config, engine, PARTS, choice, devices)
    if compiles(config, engine.world_size, on_gpu=engine.device.type == "cuda"):
        config = _replace_failing(config, engine, ("compile",), choice, devices)
    return config, choice


def _replace_failing(
    config: Config, engine: Engine, parts: Collection[Part], choice: KernelChoice, devices: list[str]
) -> Config:
    """Check `parts`, replace what fails, and check the replacements, until nothing fails; collective.

    Updates `choice`; returns the configuration with the replacements.
    """
    while parts:
        by_rank = gather_results(engine, partial(_checks_of_rank, config, engine.device, parts))
        choice.seconds += max(sum(check.seconds for check in checks) for checks in by_rank)
        failed = _failures(by_rank, devices)
        parts = [check.part for check, _ in failed if check.part != "compile"]  # `off` needs no check
        if failed:  # rank 0 decides: what a device allows may differ between ranks
            replaced = run_on_rank0(engine, partial(_replacements, config, failed, choice, engine.device))
            for setting, value, note in replaced:
                config = _with(config, setting, value)
                choice.replaced[setting] = value
                choice.notes.append(note)
    return config


def _replacements(
    config: Config, failed: list[tuple[KernelCheck, str]], choice: KernelChoice, device: torch.device
) -> list[tuple[str, str, str]]:
    """The setting of each failed check, the kernel to take instead, and a line for the console.

    Args:
        config: The configuration with the kernels that failed.
        failed: From `_failures`.
        choice: The choice with the replacements so far.
        device: Device of this rank.

    Raises:
        ConfigError: the configuration names a kernel that failed, or no other is left.
    """
    replaced, problems = [], []
    for check, where in failed:
        setting = SETTINGS.get(check.part, check.part)
        found = f"{setting}: expected a kernel that computes what its definition does, found"
        if check.part not in SETTINGS:
            alone = f"{check.implementation} alone, which {check.problem}{where}"
            problems.append(f"{found} {alone}; another training.precision or torch may have one")
            continue
        name = "torch.compile" if check.part == "compile" else f"{check.part} {check.implementation}"
        failure = f"{name} {check.problem}{where}"
        following = _next(config, check.part, check.implementation, device)
        value = _value(config, setting)
        if value != "auto" and setting not in choice.replaced:
            problems.append(f"{found} {value}, which {check.problem}{where}; set auto")
        elif following is None:
            earlier = [note for note in choice.notes if note.startswith(f"{check.part} ")]
            tried = "; ".join([*earlier, failure])
            problems.append(f"{found} none: {tried}; another training.precision may have one")
        else:
            instead = "layers run uncompiled" if check.part == "compile" else f"{following} takes its place"
            replaced.append((setting, following, f"{failure}; {instead}"))
    if problems:
        raise ConfigError(*problems)
    return replaced


def _checks_of_rank(config: Config, device: torch.device, parts: Collection[Part]) -> list[KernelCheck]:
    """Check `parts` on this rank.

    Raises:
        ConfigError: the configuration names a kernel that cannot run here, or a kernel left the device
            unusable.
    """
    refuse_kernels(config, device)
    if "compile" in parts and (missing := missing_compiler()):
        return [
            KernelCheck(
                part="compile",
                implementation="on",
                reference="uncompiled layer",
                forward_error=None,
                backward_error=None,
                bound=0.0,
                error=f"ConfigError: expected {missing}, found none",
                seconds=0.0,
            )
        ]
    dtype = DTYPES[config.training.precision]
    checks = check_kernels(config.model, configured_kernels(config), device, dtype, parts)
    for check in checks:
        if check.error is not None and (broken := _device_error(device)):
            advice = f"; set {' or '.join(_ORDER[check.part][1:])}" if check.part in SETTINGS else ""
            raise ConfigError(
                f"{SETTINGS.get(check.part, check.part)}: expected a kernel that runs on "
                f"{_device_name(device)}, found {check.implementation}, which raised {check.error} and left "
                f"the device unusable ({broken}){advice}"
            )
    return checks


def _device_error(device: torch.device) -> str | None:
    """Type of the error that any work on the device raises now; None if the device works.

    After an illegal memory access, for example, CUDA refuses all further work of the process.
    """
    try:
        torch.zeros(1, device=device).cpu()
    except Exception as error:
        return type(error).__name__
    return None


def _failures(by_rank: list[list[KernelCheck]], devices: list[str]) -> list[tuple[KernelCheck, str]]:
    """For each part that failed: its first failed check, and ` on DEVICE` with the rank if others passed."""
    failed: dict[Part, tuple[KernelCheck, str]] = {}
    for rank, checks in enumerate(by_rank):
        for check in checks:
            if check.problem and check.part not in failed:
                of_all_ranks = [each for other in by_rank for each in other if each.part == check.part]
                where = "" if all(each.problem for each in of_all_ranks) else f" (rank {rank})"
                failed[check.part] = check, f" on {devices[rank]}{where}"
    return list(failed.values())


def _next(config: Config, part: Part, failed: str, device: torch.device) -> str | None:
    """The first kernel after `failed` that the configuration and the device allow; None if there is none."""
    setting, order = SETTINGS[part], _ORDER[part]
    for name in order[order.index(failed) + 1 :] if failed in order else ():
        changed = _with(config, setting, name)
        refused = any(line.startswith(setting) for line in validate(changed, needs_data=False))
        dtype = DTYPES[config.training.precision]
        needed = experts_requirement(changed.model, configured_kernels(changed), device, dtype)
        if not refused and not needed:
            return name
    return None


def _with(config: Config, setting: str, value: str) -> Config:
    """A copy of the configuration with `setting`, named `section.field`, set to `value`."""
    section, _, name = setting.partition(".")
    return replace(config, **{section: replace(getattr(config, section), **{name: value})})


def _value(config: Config, setting: str) -> str:
    section, _, name = setting.partition(".")
    return getattr(getattr(config, section), name)


def _device_name(device: torch.device) -> str:
    """Name and compute capability, such as `NVIDIA H100 80GB HBM3 (9.0)`; a CPU's type."""
    if device.type != "cuda":
        return device.type
    capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
    return f"{torch.cuda.get_device_name(device)} ({capability})"


def _facts(config: Config, devices: list[str]) -> dict[str, Any]:
    """What the outcome of a check depends on, as JSON."""
    return {
        "devices": devices,
        "torch": str(torch.__version__),
        "precision": config.training.precision,
        "deterministic": config.training.deterministic,
        **{setting: _value(config, setting) for setting in SETTINGS.values()},
        "model": hashlib.sha256(json.dumps(to_dict(config)["model"]).encode()).hexdigest()[:12],
    }


def _earlier_choice(folder: RunFolder, facts: dict[str, Any]) -> KernelChoice | None:
    """The choice of the newest attempt with the same `facts`; None if no readable row has them."""
    try:
        rows = [row.get("kernels") for row in read_rows(folder.attempts)]
    except CheckpointError:
        return None
    for row in reversed(rows):
        if isinstance(row, dict) and row.get("checked") == facts:
            replaced, notes = row.get("replaced"), row.get("notes")
            if not isinstance(replaced, dict) or not isinstance(notes, list):
                continue
            if all(value in _REPLACEMENTS.get(name, ()) for name, value in replaced.items()):
                return KernelChoice(facts, replaced, [str(note) for note in notes])
    return None
