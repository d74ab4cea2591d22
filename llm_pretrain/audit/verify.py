"""Checks a run's files against each other and against its data."""

from __future__ import annotations

import time
from pathlib import Path

from llm_pretrain.audit.checks import Check, Checks


def verify_run(checks: Checks, folder: Path, samples: str | int | None) -> None:
    """Check a finished, stopped or running run from its files, which are only read.

    Args:
        checks: Receives the results.
        folder: The run's folder.
        samples: Rows whose samples are assembled again: `all`, a number, or None for some seconds' worth.

    Raises:
        ConfigError: `folder` is missing, or is not a run's.
    """
    from llm_pretrain.audit import checkpoint_checks, data_checks, history_checks
    from llm_pretrain.runs.record import REPLAYS_FILE, check_run_folder

    check_run_folder(folder)
    run = history_checks.RunFiles(folder)
    checks.run("status.json", history_checks.check_status_file, run)
    checks.run("config.yaml", history_checks.read_config, run)
    run.manifests = checkpoint_checks.read_manifests(folder / "checkpoints")
    if run.known_config is None:
        checks.skip("everything else", "it rests on config.yaml")
    else:
        checks.run("rows", history_checks.read_history, run)
        checks.run("data", checkpoint_checks.check_data, run)
        if run.known_config.training.check_every or run.status.get("faults"):
            checks.run("computed twice", history_checks.check_twice, run)
        if run.attempts and run.fingerprints is not None:
            data_checks.check_samples(checks, run, samples)
        else:
            checks.skip("samples", "the rows or the stores cannot be read")
        checkpoint_checks.check_checkpoints(checks, run)
        checkpoint_checks.check_weights(checks, run)
    if (folder / REPLAYS_FILE).exists():
        checks.run("replays", _check_replays, folder, run.status.get("step"))
    if run.status:
        checks.run("status", history_checks.check_status, run)


def _check_replays(check: Check, folder: Path, last: int | None) -> None:
    """Report the verdicts of a run's replays, and the steps at which a replay and the run differ."""
    from llm_pretrain.runs.record import difference_lines, read_replays, replay_summary

    replays = read_replays(folder, check.problems)
    for line in difference_lines(replays):
        check.fail(f"not what a replay gave: {line}")
    if replays:
        newest = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(replays[-1]["time"]))
        verdict = replays[-1].get("verdict")
        check.looked_at = f"{replay_summary(replays, last)}; the last on {newest}: {verdict}"
