"""Going back to the last periodic checkpoint after a spike: parameters, optimizer, scaler and spike history.

Step, schedule and data go on, as after every skipped step. Where there is nothing to go back to, the step is
only skipped.
"""

from __future__ import annotations

from collections.abc import Callable

from llm_pretrain.checkpoints import ResumePoint
from llm_pretrain.errors import CheckpointError, MismatchError
from llm_pretrain.training.engine import StepResult
from llm_pretrain.training.progress import Progress
from llm_pretrain.training.saving import Saving
from llm_pretrain.training.spikes import SpikeHistory
from llm_pretrain.training.watchdog import beat


def roll_back(
    saving: Saving, progress: Progress, result: StepResult, warn: Callable[[str], None]
) -> StepResult:
    """Fill model, optimizer and scaler from the newest periodic checkpoint; collective.

    Only periodic ones count: a checkpoint that a stop signal wrote is not in a run that nobody stopped.

    Returns:
        The step's result, with `skipped="spike"` where there is no sound one to go back to.
    """
    step = progress.step + 1
    beat(f"rolling back at step {step}", files=True)
    saving.settle()  # the checkpoint to go back to may still be on its way to the disk
    target, problem = _target(saving, progress)
    if target is None:
        warn(f"step {step}: training.spike_action: rollback acts as skip: {problem}")
        return result._replace(skipped="spike")
    saving.restore(target)
    # what followed the checkpoint is not the past of these parameters: their losses may be higher
    progress.spikes = SpikeHistory.resumed(target.extra.get("spikes"))
    warn(f"step {step}: parameters and optimizer are those of {target.path} again")
    return result


def _target(saving: Saving, progress: Progress) -> tuple[ResumePoint | None, str]:
    """The checkpoint to go back to, verified, the same on every rank; or None and why there is none."""
    path = saving.checkpoints.newest_periodic(progress.step)
    if path is None:
        return None, "no periodic checkpoint has been written yet"
    try:
        return saving.checkpoints.find(expected=saving.fingerprints_at, source=path), ""
    except (CheckpointError, MismatchError) as error:
        return None, str(error)
