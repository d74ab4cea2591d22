"""Two real processes save, fail and restore together; checkpoints do not depend on how many wrote them."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import signal
from datetime import timedelta
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from checkpoint_helpers import Run, everything, same_bits
from safetensors.torch import load_file, save_file
from torch.nn.parallel import DistributedDataParallel

from llm_pretrain.checkpoints import tensor_files
from llm_pretrain.distributed.collectives import (
    BackgroundGroup,
    gather_results,
    run_on_all_ranks,
    run_on_rank0,
)

WORLD_SIZE = 2


def raises(action) -> str:
    """The error's text, or nothing."""
    try:
        action()
    except Exception as error:
        kind = "shared" if getattr(error, "shared", False) else "alone"
        return f"{type(error).__name__}, {kind}: {error}"
    return ""


def worker(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD_SIZE
    )
    ranks = BackgroundGroup(timedelta(seconds=60))
    results: dict[str, object] = {}

    # One rank meets an error that is no PretrainError.
    numbers = iter([4, "none"][rank:])
    results["bug"] = raises(lambda: run_on_all_ranks(ranks, lambda: int(next(numbers)), "counting"))
    results["rank0"] = run_on_rank0(ranks, lambda: [rank, "of rank 0"])
    results["all"] = gather_results(ranks, lambda: 10 * rank)

    # From one process, through DDP, on to step 4.
    run = Run(folder / "checkpoints", ranks=ranks, seed=10 + rank)
    found = run.restore()
    assert found is not None
    results["restored_world_size"] = found.run.world_size
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
    other = Run(folder / "checkpoints", ranks=ranks, width=16 if rank == 1 else 8)
    results["mismatch"] = raises(other.restore)

    # Damage in the share of files that rank 1 verifies; both fall back alike.
    if rank == 0:
        files = sorted((folder / "checkpoints" / "step-00000004").glob("*.safetensors"))
        (folder / "damaged").write_bytes(files[1].read_bytes())
        os.truncate(files[1], 10)
    dist.barrier()
    fallen = Run(folder / "checkpoints", ranks=ranks, seed=20)
    found = fallen.restore()
    assert found is not None
    results["fallen"] = (found.step, found.warnings)
    dist.barrier()
    if rank == 0:
        files[1].write_bytes((folder / "damaged").read_bytes())
    (folder / f"results-{rank}.json").write_text(json.dumps(results))
    del module
    dist.barrier()
    ranks.close()
    dist.destroy_process_group()


def stop_forkserver() -> None:
    """By a signal: left to itself it waits for every process that it started, a data loader's workers too."""
    server: Any = forkserver._forkserver
    if server._forkserver_pid is not None:
        os.kill(server._forkserver_pid, signal.SIGKILL)
    server._stop()


@pytest.fixture(scope="module")
def launched(tmp_path_factory) -> Path:
    """A folder after: one process to step 2, two processes to step 4, and several mishaps."""
    folder = tmp_path_factory.mktemp("ranks")
    Run(folder / "checkpoints", keep_last=3).train(2).save()
    multiprocessing.set_forkserver_preload(["checkpoint_helpers"])  # imports torch once for both ranks
    stop_forkserver()  # one that an earlier test started has other modules
    context = mp.start_processes(worker, (folder,), WORLD_SIZE, join=False, start_method="forkserver")
    assert context is not None
    while not context.join(timeout=120):
        pass
    stop_forkserver()  # it blocks no signals, as that of training does
    return folder


@pytest.fixture(scope="module")
def results(launched) -> list[dict]:
    return [json.loads((launched / f"results-{rank}.json").read_text()) for rank in range(WORLD_SIZE)]


def test_actions_on_ranks_agree_on_results_and_errors(results):
    message = "invalid literal for int() with base 10: 'none'"
    assert results[0]["bug"] == f"PretrainError, shared: counting failed on rank 1: ValueError: {message}"
    assert results[1]["bug"] == f"ValueError, alone: {message}"
    for each in results:
        assert each["rank0"] == [0, "of rank 0"]
        assert each["all"] == [0, 10]


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
    assert (found.step, found.run.world_size) == (4, 2)
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
