"""Two real processes save, fail and restore together; checkpoints do not depend on how many wrote them."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from checkpoint_helpers import Run, everything, same_bits
from safetensors.torch import load_file, save_file
from torch.nn.parallel import DistributedDataParallel

from llm_pretrain.checkpoints import tensor_files
from llm_pretrain.errors import CheckpointError, MismatchError

WORLD_SIZE = 2


def gather_objects(value):
    gathered: list = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def two_process_run(folder: Path, rank: int, **options) -> Run:
    return Run(folder, rank=rank, world_size=WORLD_SIZE, gather_objects=gather_objects, **options)


def raises(action) -> str:
    """The error's text, or nothing."""
    try:
        action()
    except (CheckpointError, MismatchError) as error:
        return f"{type(error).__name__}, {'shared' if error.shared else 'alone'}: {error}"
    return ""


def worker(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD_SIZE
    )
    results: dict[str, object] = {}

    # From one process, through DDP, on to step 4.
    run = two_process_run(folder / "checkpoints", rank, seed=10 + rank)
    found = run.restore()
    assert found is not None
    results["restored_world_size"] = found.world_size
    save_file(everything(run), folder / f"restored-{rank}.safetensors")
    module = DistributedDataParallel(run.model, broadcast_buffers=False)
    run.train(2, module)
    results["path"] = str(run.store.save(module, run.optimizer, run.scaler, run.facts()))
    save_file(everything(run), folder / f"step4-{rank}.safetensors")

    # One rank's disk is full: at its first file, and at its second.
    original, tensor_files.BYTES_PER_FILE = os.fsync, 1000
    for number in range(2):
        calls = []

        def failing(descriptor: int, calls: list = calls, number: int = number) -> None:
            calls.append(descriptor)
            if rank == 1 and len(calls) > number:
                raise OSError(errno.ENOSPC, "No space left on device")
            original(descriptor)

        os.fsync = failing
        run.step = 5
        results[f"full_disk_{number}"] = raises(run.save)
        os.fsync = original
    tensor_files.BYTES_PER_FILE = 1 << 20
    if rank == 1:
        run.model.half()
    results["half"] = raises(run.save)
    results["committed"] = run.store.committed()

    # One rank has another model.
    other = two_process_run(folder / "checkpoints", rank, width=16 if rank == 1 else 8)
    results["mismatch"] = raises(other.restore)

    # Damage in the share of files that rank 1 verifies; both fall back alike.
    if rank == 0:
        files = sorted((folder / "checkpoints" / "step-00000004").glob("*.safetensors"))
        (folder / "damaged").write_bytes(files[1].read_bytes())
        os.truncate(files[1], 10)
    dist.barrier()
    fallen = two_process_run(folder / "checkpoints", rank, seed=20)
    found = fallen.restore()
    assert found is not None
    results["fallen"] = (found.step, found.warnings)
    dist.barrier()
    if rank == 0:
        files[1].write_bytes((folder / "damaged").read_bytes())
    (folder / f"results-{rank}.json").write_text(json.dumps(results))
    del module
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def launched(tmp_path_factory) -> Path:
    """A folder after: one process to step 2, two processes to step 4, and several mishaps."""
    folder = tmp_path_factory.mktemp("ranks")
    Run(folder / "checkpoints", keep_last=3).train(2).save()
    context = mp.spawn(worker, args=(folder,), nprocs=WORLD_SIZE, join=False)
    assert context is not None
    while not context.join(timeout=120):
        pass
    return folder


@pytest.fixture(scope="module")
def results(launched) -> list[dict]:
    return [json.loads((launched / f"results-{rank}.json").read_text()) for rank in range(WORLD_SIZE)]


def test_two_processes_restore_what_one_saved(launched, results):
    expected = everything(Run(launched / "none").train(2))
    for rank in range(WORLD_SIZE):
        assert same_bits(load_file(launched / f"restored-{rank}.safetensors"), expected)
        assert results[rank]["restored_world_size"] == 1


def test_one_process_restores_what_two_saved(launched, results):
    expected = everything(Run(launched / "none").train(4))
    for rank in range(WORLD_SIZE):
        assert same_bits(load_file(launched / f"step4-{rank}.safetensors"), expected)
    run = Run(launched / "checkpoints", seed=3)
    found = run.restore()
    assert found is not None
    assert (found.step, found.world_size) == (4, 2)
    assert results[0]["path"] == results[1]["path"] == str(found.path)
    assert same_bits(everything(run), expected)
    assert same_bits(everything(run.train(2)), everything(Run(launched / "none").train(6)))


def test_both_processes_write_and_each_tensor_is_written_once(launched):
    files = sorted((launched / "checkpoints" / "step-00000004").glob("*.safetensors"))
    names = [name for file in files for name in load_file(file)]
    assert len(files) == WORLD_SIZE
    assert len(names) == len(set(names))
    sizes = [file.stat().st_size for file in files]
    assert max(sizes) < 0.8 * sum(sizes)


def test_a_full_disk_on_one_rank_stops_both(launched, results):
    for number in range(2):
        messages = [each[f"full_disk_{number}"] for each in results]
        assert messages[0] == messages[1]
        assert messages[0].startswith(
            f"CheckpointError, shared: {launched / 'checkpoints' / '.step-00000005.tmp-'}"
        )
        assert "rank 1" in messages[0]
        assert "rank 0" not in messages[0]
        assert "No space left on device" in messages[0]
    assert results[0]["committed"] == results[1]["committed"] == [2, 4]
    assert not list((launched / "checkpoints").glob(".step*"))


def test_an_error_on_one_rank_is_the_same_error_on_both(results):
    assert results[0]["half"] == results[1]["half"]
    assert "expected a parameter in float32, found float16" in results[0]["half"]
    assert results[0]["mismatch"] == results[1]["mismatch"]
    assert results[0]["mismatch"].startswith("MismatchError, shared: ")
    assert "norm.weight is float32[8] in the checkpoint, float32[16] here" in results[0]["mismatch"]


def test_damage_that_one_rank_finds_moves_both(results):
    assert results[0]["fallen"] == results[1]["fallen"]
    step, warnings = results[0]["fallen"]
    assert step == 2
    assert len(warnings) == 1
    assert "shard-00002" in warnings[0]
    assert "found 10" in warnings[0]
