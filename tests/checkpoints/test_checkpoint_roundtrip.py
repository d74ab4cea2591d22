"""What is restored is what was saved, to the last bit, and training goes on as if never interrupted."""

from __future__ import annotations

import pytest
import torch
from safetensors import safe_open
from support.checkpoint_helpers import FINGERPRINTS, Run, everything, same_bits
from torch import nn
from torch.amp.grad_scaler import GradScaler

from llm_pretrain import hardware
from llm_pretrain.errors import MismatchError
from llm_pretrain.hardware import __version__


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("resumed_fused", [False, True])
def test_continues_bit_identically(tmp_path, fused, resumed_fused):
    """The moments survive a change of their implementation too."""
    first = Run(tmp_path, fused=fused).train(3)
    path = first.save()
    saved = everything(first)
    resumed = Run(tmp_path, seed=1, fused=resumed_fused)
    found = resumed.restore()

    assert same_bits(everything(resumed), saved)
    assert resumed.optimizer.param_groups[0]["fused"] is resumed_fused
    assert found is not None
    assert (found.step, found.run.tokens_seen, found.run.wandb_id, found.run.world_size) == (3, 36, "abc", 1)
    assert (found.run.launcher, found.path, found.run.extra) == ("torchrun", path, {"skipped_in_a_row": 1})
    assert found.warnings == []
    if fused == resumed_fused:
        assert same_bits(everything(resumed.train(4)), everything(first.train(4)))


def test_saving_changes_nothing(tmp_path):
    saving, plain = Run(tmp_path / "a"), Run(tmp_path / "b")
    for _ in range(3):
        saving.save()
        saving.train(1)
    assert same_bits(everything(saving), everything(plain.train(3)))


def test_moments_reach_an_optimizer_that_has_some(tmp_path):
    first = Run(tmp_path).train(3)
    first.save()
    resumed = Run(tmp_path, seed=1).train(2)
    resumed.model(torch.zeros(1, 2, dtype=torch.int64)).sum().backward()
    resumed.restore()
    assert same_bits(everything(resumed), everything(first))
    assert same_bits(everything(resumed.train(1)), everything(first.train(1)))


def test_every_finite_bit_pattern_survives(tmp_path):
    """A zero's sign, the smallest and the largest; of those so many that their sum is no finite number."""
    first = Run(tmp_path).train(1)
    patterns = [0x80000000, 0x00000001, 0x807FFFFF, 0x7F7FFFFF, 0x7F7FFFFF, 0x7F7FFFFF, 0x00800000]
    bits = torch.tensor(patterns, dtype=torch.int64).to(torch.int32).view(torch.float32)
    with torch.no_grad():
        first.model.experts.view(-1)[: len(bits)] = bits
    first.save()
    resumed = Run(tmp_path, seed=1)
    resumed.restore()
    assert same_bits(everything(resumed), everything(first))


def test_tied_parameters_are_saved_once_and_stay_tied(tmp_path):
    first = Run(tmp_path).train(1)
    path = first.save()
    names = [name for file in path.glob("*.safetensors") for name in safe_open(file, "pt").keys()]  # noqa: SIM118  # a handle, not a dict
    assert "embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    resumed = Run(tmp_path, seed=1)
    resumed.restore()
    assert resumed.model.lm_head.weight is resumed.model.embed_tokens.weight
    assert "rotary" not in names


def untie(run: Run) -> None:
    run.model.lm_head.weight = nn.Parameter(run.model.embed_tokens.weight.detach().clone())


def change_optimizer(run: Run) -> None:
    run.optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda run: run.model.bfloat16(), r"experts is float32\[3, 8, 8\] in the checkpoint, bfloat16"),
        (untie, r"lm_head\.weight is tied to embed_tokens.weight in the checkpoint"),
        (change_optimizer, "optimizer is AdamW in the checkpoint, SGD here"),
    ],
    ids=["half precision", "untied", "optimizer"],
)
def test_what_does_not_fit_the_checkpoint_is_a_mismatch(tmp_path, change, message):
    Run(tmp_path).train(1).save()
    other = Run(tmp_path).train(1)
    change(other)
    with pytest.raises(MismatchError, match=message):
        other.restore()


def test_mismatches_are_named_with_both_values(tmp_path):
    run = Run(tmp_path).train(1)
    path = run.save()
    other = {**FINGERPRINTS, "model.hidden_size": "16", "new.key": "1"}
    del other["data.store.0"]
    before = everything(run)
    with pytest.raises(MismatchError) as caught:
        run.restore(expected=other)
    message = str(caught.value)
    assert str(path) in message
    assert "model.hidden_size is 8 in the checkpoint, 16 here" in message
    assert "data.store.0 is ab12 in the checkpoint, absent here" in message
    assert "new.key is absent in the checkpoint, 1 here" in message
    assert "global_batch_size" not in message
    assert "\n" not in message
    assert caught.value.shared
    assert same_bits(everything(run), before)


def test_hyper_parameters_are_the_configurations(tmp_path):
    first = Run(tmp_path).train(1)
    first.optimizer.param_groups[0]["lr"] = 0.1 + 0.2
    first.optimizer.param_groups[0]["steps_averaged"] = 7
    first.save()
    resumed = Run(tmp_path)
    resumed.optimizer.param_groups[0]["betas"] = (0.8, 0.9)
    found = resumed.restore()
    group = resumed.optimizer.param_groups[0]
    assert (group["lr"], group["steps_averaged"], group["betas"]) == (0.1 + 0.2, 7, (0.8, 0.9))
    assert found is not None
    assert [
        w for w in found.warnings if "betas was [0.9, 0.999]" in w and "[0.8, 0.9]" in w
    ] == found.warnings


def make_scaler(**options) -> GradScaler:
    scaler = GradScaler("cpu", **options)
    if scaler.is_enabled():
        scaler.scale(torch.ones(()))
    return scaler


FRESH, UNUSED = "the checkpoint has no loss scale: it starts at 1024", "loss scale 8 is not used"


@pytest.mark.parametrize(
    ("saved", "current", "warning"),
    [(8.0, None, UNUSED), (8.0, 0.0, UNUSED), (None, 1024.0, FRESH), (0.0, 1024.0, FRESH)],
)
def test_a_scale_without_its_counterpart_is_reported(tmp_path, saved, current, warning):
    """None: no scaler; 0: one that is switched off."""
    first, resumed = Run(tmp_path).train(1), Run(tmp_path)
    for run, scale in ((first, saved), (resumed, current)):
        if scale is not None:
            run.scaler = make_scaler(init_scale=scale) if scale else make_scaler(enabled=False)
    first.save()
    found = resumed.restore()
    assert found is not None
    assert len(found.warnings) == 1
    assert warning in found.warnings[0]
    assert not current or resumed.scaler.get_scale() == current


def other_arithmetic(patch: pytest.MonkeyPatch) -> None:
    patch.setenv("ATEN_CPU_CAPABILITY", "default")
    patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")


def more_threads(patch: pytest.MonkeyPatch) -> None:
    threads = torch.get_num_threads() + 1
    patch.setattr(torch, "get_num_threads", lambda: threads)


CAPABILITY = torch.backends.cpu.get_cpu_capability()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (other_arithmetic, [f"cpu_capability was {CAPABILITY}", "ATEN_CPU_CAPABILITY was unset"]),
        (more_threads, ["cpu_threads was 1"]),
        (lambda patch: patch.setattr(hardware, "__version__", "99.0"), [f"llm_pretrain was {__version__}"]),
    ],
    ids=["arithmetic", "threads", "version"],
)
def test_what_has_changed_on_the_machine_is_told(tmp_path, monkeypatch, change, expected):
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    Run(tmp_path).train(1).save()
    change(monkeypatch)
    found = Run(tmp_path).restore()
    assert found is not None
    assert [warning.split(" when ")[0] for warning in found.warnings] == expected


def test_scaler_is_restored_exactly(tmp_path):
    first = Run(tmp_path).train(1)
    first.scaler = make_scaler(init_scale=3.0, growth_interval=5)
    first.scaler.update(new_scale=float(torch.tensor(1 / 3)))
    first.save()
    resumed = Run(tmp_path)
    resumed.scaler = make_scaler()
    found = resumed.restore()
    assert resumed.scaler.state_dict() == first.scaler.state_dict()
    assert found is not None
    assert found.warnings == []
