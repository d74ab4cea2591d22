"""What both ranks of `test_checkpoint_ranks.py` do, and the results that they leave."""

from __future__ import annotations

import errno
import json
import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from support.checkpoint_helpers import Run, everything
from torch.nn.parallel import DistributedDataParallel

from llm_pretrain.checkpoints import tensor_files
from llm_pretrain.distributed.collectives import (
    BackgroundGroup,
    gather_results,
    run_on_all_ranks,
    run_on_rank0,
)


def raises(action) -> str:
    """The error's text, or nothing."""
    try:
        action()
    except Exception as error:
        kind = "shared" if getattr(error, "shared", False) else "alone"
        return f"{type(error).__name__}, {kind}: {error}"
    return ""


def run_rank(path: str) -> None:
    """Save, fail and restore in the folder that one process has saved in."""
    folder, rank = Path(path), int(os.environ["RANK"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
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
    results["path"] = str(run.save(module))
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
