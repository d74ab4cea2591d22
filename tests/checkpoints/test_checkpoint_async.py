"""A checkpoint is staged in memory and written later, by a thread beside the training."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from support.checkpoint_helpers import Run, everything, same_bits
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from llm_pretrain.checkpoints import state, tensor_files
from llm_pretrain.checkpoints.state import HostBuffers
from llm_pretrain.checkpoints.tensor_files import write_safetensors
from llm_pretrain.errors import DivergedError


def staged(run: Run, buffers: HostBuffers | None):
    return run.store.stage(run.model, run.optimizer, run.scaler, run.facts(), buffers=buffers)


def state_at(folder: Path) -> dict[str, torch.Tensor]:
    run = Run(folder, seed=1)
    assert run.restore() is not None
    return everything(run)


def test_training_changes_nothing_of_what_was_staged(tmp_path, monkeypatch):
    monkeypatch.setattr(state, "BUFFER_BYTES", 512)  # several buffers
    run = Run(tmp_path).train(2)
    before = everything(run)
    taken = staged(run, HostBuffers())
    run.train(3)
    run.store.write(taken)
    assert same_bits(state_at(tmp_path), before)


def test_scalars_scaler_and_facts_are_those_of_the_staged_step(tmp_path):
    run = Run(tmp_path).train(2)
    run.scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    run.scaler.scale(torch.ones(()))
    extra = {"list": [1]}
    facts = run.facts(extra=extra)
    taken = run.store.stage(run.model, run.optimizer, run.scaler, facts, buffers=HostBuffers())
    run.train(1)
    run.scaler.update(8.0)
    extra["list"].append(2)
    run.model.updates += 1
    run.optimizer.param_groups[0]["lr"] = 9.0
    run.store.write(taken)
    again = Run(tmp_path, seed=1)
    again.scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    found = again.restore()
    assert found is not None
    assert found.run.extra == {"list": [1]}
    assert again.scaler.get_scale() == 64.0
    assert again.model.updates.item() == 3
    assert again.optimizer.param_groups[0]["lr"] == 1e-2
    assert again.optimizer.state[again.model.experts]["step"].item() == 2


def test_an_empty_tensor_is_written_once_and_an_empty_shard_never():
    """Of one row split over two ranks the second holds nothing."""
    (none,) = state.own_pieces({"none": torch.zeros(0, 3)}, rank=0, world_size=1)
    assert none.name == "none"
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        rows = {
            name: distribute_tensor(torch.ones(number, 3), init_device_mesh("cpu", (2,)), [Shard(0)])
            for name, number in (("one", 1), ("two", 2))
        }
        assert [piece.name for piece in state.own_pieces(rows, rank=1, world_size=2)] == ["two"]
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("found", "copied"), [(math.nan, False), (-math.inf, True)])
def test_what_is_not_finite_is_never_saved(tmp_path, found, copied):
    run = Run(tmp_path).train(1)
    run.save()
    sound = everything(run)
    for name, tensor in (
        ("experts", run.model.experts.data),
        ("norm.weight", run.model.norm.weight.data),
        ("optimizer.state.experts.exp_avg_sq", run.optimizer.state[run.model.experts]["exp_avg_sq"]),
        ("router_bias", run.model.router_bias),
    ):
        kept = tensor.clone()
        tensor.view(-1)[-1] = found
        run.step = 2
        with pytest.raises(DivergedError, match=rf"^{name}: expected finite .* found -?(nan|inf)") as caught:
            run.store.write(staged(run, HostBuffers() if copied else None))
        assert caught.value.shared
        tensor.copy_(kept)
    assert run.store.committed() == [1]
    assert not list(tmp_path.glob(".step-*"))
    assert same_bits(state_at(tmp_path), sound)


def test_our_files_are_those_of_the_safetensors_library(tmp_path):
    """Byte for byte where all elements are of one type, as in exported weights; else the same tensors."""
    for dtype in (torch.bfloat16, torch.float32):
        tensors = {name: torch.randn(5, 3).to(dtype) for name in ("z", "a.weight", "ü")}
        write_safetensors(tmp_path / "ours", tensors, {"format": "pt"})
        save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
        assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    mixed = {
        f"{number}.{dtype}": torch.arange(number, number + 6).view(2, 3).to(dtype)
        for number, dtype in enumerate(tensor_files._DTYPES)
    }
    mixed["empty"] = torch.empty(0, 4)
    write_safetensors(tmp_path / "mixed", mixed, {"format": "pt"})
    assert same_bits(load_file(tmp_path / "mixed"), mixed)
