"""The decision on a step: apply it or skip it, the same on every rank."""

from __future__ import annotations

import math

import torch

from llm_pretrain.config.tree import Config
from llm_pretrain.errors import DivergedError
from llm_pretrain.model.kernels import is_gpu
from llm_pretrain.training.engine import Engine
from llm_pretrain.training.progress import Progress
from llm_pretrain.training.step import Step


class Decision:
    """Decides whether an optimizer step is applied.

    On a GPU the decision stays on the device if nothing on the host depends on it. The optimizer's kernel
    then reads `found_inf`, as under `GradScaler`, and updates no parameter, moment or step counter if it is
    1. The recorder later reads many decisions at once. This changes no recorded metric.

    Args:
        config, engine, progress: The run's; the engine is prepared.
    """

    def __init__(self, config: Config, engine: Engine, progress: Progress):
        self.config, self.engine, self.progress = config, engine, progress
        self.stays_on_device = decides_on_device(config, engine)

    def __call__(self, step: Step) -> bool:
        """Whether the optimizer may step.

        Raises:
            DivergedError: a value is not finite under DeepSpeed, whose engine has stepped already.
        """
        _, optimizer = self.engine.model_and_optimizer()
        if self.stays_on_device:
            is_finite = torch.isfinite(step.numbers()[: 1 + len(step.sums.losses)]).all()
            step.found_inf = torch.logical_not(is_finite).float()
            optimizer.found_inf = step.found_inf  # type: ignore[attr-defined]  # torch's name, as GradScaler sets it
            return True
        self.settle(step)
        if self.config.distributed.strategy == "deepspeed":
            from llm_pretrain.distributed.deepspeed import stop_if_diverged

            stop_if_diverged(optimizer, step.skipped, self.progress.step)
        return not step.skipped

    def settle(self, step: Step) -> None:
        """Fill in the step's `grad_norm`, `loss`, `skipped` and `spike`; waits for the device."""
        grad_norm, *losses = step.numbers()[: 1 + len(step.sums.losses)].tolist()
        if not math.isfinite(grad_norm):
            step.grad_norm = None
            step.skipped = "overflow" if self.engine.scaler.is_enabled() else "nonfinite_gradient"
            return
        step.grad_norm = grad_norm
        if not all(map(math.isfinite, losses)):
            step.skipped = "nonfinite_loss"
            return
        loss, action = losses[0] / step.num_loss_tokens, self.config.training.spike_action
        step.spike = self.progress.spikes.detect(loss, grad_norm, step.num_loss_tokens, action)
        step.loss = loss
        step.skipped = step.spike.skipped if step.spike else None

    def check_divergence(self, number: int) -> None:
        """Stop after `training.max_skipped_steps` skipped steps in a row, on every rank.

        Raises:
            DivergedError: the limit is reached at step `number`.
        """
        limit, skipped = self.config.training.max_skipped_steps, self.progress.skipped_in_a_row
        if skipped >= limit:
            error = DivergedError(
                f"training.max_skipped_steps: {skipped} steps in a row were skipped, the last is step "
                f"{number} (train/skipped in {self.config.run.folder / 'metrics.jsonl'} says why)"
            )
            error.shared = True
            raise error


def decides_on_device(config: Config, engine: Engine) -> bool:
    """Whether the decision on a step may stay on the device.

    False if the host needs the decision before the next step: for spikes that are skipped or rolled back,
    fp16's loss scale, a digest of the parameters in every row, or an optimizer that does not read
    `found_inf`. Also False under DeepSpeed, whose engine ignores the decision.
    """
    return (
        is_gpu(engine.device)
        and not engine.scaler.is_enabled()
        and config.training.spike_action == "log"
        and config.distributed.strategy != "deepspeed"
        and not config.logging.parameters_sha256
        and getattr(engine.model_and_optimizer()[1], "_step_supports_amp_scaling", False)
    )
