"""Micro batches: one sequence for all ranks, exact targets, digests of their content."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from support.corpora import make_config
from support.fork_server import python_path
from support.worker_datasets import Counted, Faulty
from torch.utils.data import DataLoader

from llm_pretrain.config.tree import Config
from llm_pretrain.data import loader as loading
from llm_pretrain.data.assembly import Batch
from llm_pretrain.data.loader import (
    evaluation_batches,
    global_batches,
    sequences_per_epoch,
    shard,
)
from llm_pretrain.data.store import TokenStore
from llm_pretrain.errors import DataError, ResourceError
from llm_pretrain.training.trainer import windows

TENSORS = ("input_ids", "position_ids", "document_ids", "labels", "loss_mask", "digest", "document_offsets")


@pytest.fixture(autouse=True)
def no_waiting_for_workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A loader's end waits twice 5 s for a worker that ignores signals; a training process kills it."""
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.01)
    yield
    loading._end_workers()


def equal(first: Batch, second: Batch) -> bool:
    numbers = ("num_loss_tokens", "step", "micro_batch")
    same = all(getattr(first, name) == getattr(second, name) for name in numbers)
    return same and all(torch.equal(getattr(first, name), getattr(second, name)) for name in TENSORS)


def batches_of(config: Config, start_step: int = 0) -> list[Batch]:
    return list(global_batches(config, start_step=start_step))


def one_epoch(store: TokenStore, **options: object) -> list[Batch]:
    sizes: dict = {"micro_batch_size": 1, "global_batch_size": 1, **options}
    count = sequences_per_epoch(make_config(store, **sizes))
    return batches_of(make_config(store, max_steps=count, **sizes))


@pytest.mark.parametrize(("packing", "sequence_length"), [("best_fit", 16), ("concat", 200), ("pad", 16)])
def test_an_epoch_trains_on_every_target_once(masked_store: TokenStore, packing: str, sequence_length: int):
    """Counts (input, label) pairs: a label across documents, a token lost or doubled changes the count."""
    expected: Counter[tuple[int, int]] = Counter()
    for tokens, targets in masked_store.split("train").iterate():
        ids, mask = tokens.tolist(), targets.tolist()
        expected.update((a, b) for a, b, m in zip(ids, ids[1:], mask[1:], strict=False) if m)
    found: Counter[tuple[int, int]] = Counter()
    for batch in one_epoch(masked_store, packing=packing, sequence_length=sequence_length):
        mask = batch.loss_mask
        found.update(zip(batch.input_ids[mask].tolist(), batch.labels[mask].tolist(), strict=True))
    assert found == expected
    assert found.total() == masked_store.facts["splits"]["train"]["targets"]


def test_the_samples_do_not_depend_on_the_split_into_micro_batches(masked_store: TokenStore):
    def rows(world_size: int, micro_batch_size: int) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        config = make_config(masked_store, micro_batch_size=micro_batch_size, max_steps=3)
        loader = global_batches(config, start_step=0)
        by_rank = [list(shard(loader, rank, world_size)) for rank in range(world_size)]
        found = sorted((b for share in by_rank for b in share), key=lambda b: (b.step, b.micro_batch))
        digests = [sum(b.digest for b in found if b.step == step) for step in range(3)]
        for rank, share in enumerate(by_rank):
            assert [b.micro_batch % world_size for b in share] == [rank] * len(share)
        tokens = [sum(b.num_loss_tokens for b in found if b.step == step) for step in range(3)]
        return torch.cat([b.input_ids for b in found]), torch.stack(digests), tokens  # type: ignore[arg-type]

    reference = rows(1, 1)
    for world_size, micro_batch_size in [(1, 8), (2, 1), (4, 2)]:
        ids, digests, tokens = rows(world_size, micro_batch_size)
        assert torch.equal(ids, reference[0])
        assert torch.equal(digests, reference[1])
        assert tokens == reference[2]


def test_starting_at_a_step_continues_the_sequence(masked_store: TokenStore):
    config = make_config(masked_store, max_steps=6)
    whole, rest = batches_of(config), batches_of(config, start_step=4)
    assert len(whole) == 6 * 4
    assert all(equal(a, b) for a, b in zip(whole[16:], rest, strict=True))
    assert not batches_of(config, start_step=6)


def test_a_limit_on_processes_is_one_line(store: TokenStore, monkeypatch):
    def fail(*_: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(loading.resource_tracker, "ensure_running", fail)
    with pytest.raises(ResourceError, match=r"^data\.num_workers: expected .* processes \(ulimit -u\)$"):
        iter(global_batches(make_config(store, num_workers=1), start_step=0))


def prepared_by_accelerate(loader: DataLoader[Batch], rank: int) -> DataLoader[Batch]:
    """Of two processes."""
    from accelerate.data_loader import prepare_data_loader

    return prepare_data_loader(
        loader, num_processes=2, process_index=rank, put_on_device=False, even_batches=False, rng_types=[]
    )


def test_accelerate_gives_each_rank_its_own_share(masked_store: TokenStore):
    config = make_config(masked_store, max_steps=3)
    for rank in range(2):
        prepared = prepared_by_accelerate(global_batches(config, start_step=1), rank)
        assert len(prepared) == 4
        ours = shard(global_batches(config, start_step=1), rank, 2)
        assert all(equal(a, b) for a, b in zip(ours, prepared, strict=True))


def test_workers_give_the_same_batches_and_keep_no_file_open(masked_store: TokenStore):
    """A step of 240 micro batches would need 1,700 files: one for each tensor in shared memory."""
    plain, worked = (batches_of(make_config(masked_store, max_steps=3, num_workers=n)) for n in (0, 2))
    assert all(equal(a, b) for a, b in zip(plain, worked, strict=True))
    for batch in worked:
        assert not any(tensor.is_shared() for tensor in [*batch.model_inputs().values(), batch.digest])


@pytest.mark.parametrize(
    ("error", "expected", "message"),
    [
        pytest.param(
            None, ResourceError, r": expected workers .* exited unexpectedly", marks=pytest.mark.slow
        ),
        (RuntimeError("No space left on device"), ResourceError, r"found: RuntimeError: No space left"),
        (DataError("store: expected all of it"), DataError, "^store: expected all of it$"),
    ],
)
def test_an_error_in_a_worker_is_one_line(
    store: TokenStore,
    error: Exception | None,
    expected: type[Exception],
    message: str,
):
    sampler = global_batches(make_config(store), start_step=0).batch_sampler
    loader = loading._loader(Faulty(error), sampler, 1)  # type: ignore[arg-type]
    with pytest.raises(expected, match=message) as caught:
        next(windows(loader, 2))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "error",
    [ConnectionResetError(104, "Connection reset by peer"), EOFError(), FileNotFoundError(2, "No such")],
)
def test_a_worker_that_ends_while_it_hands_over_a_batch_is_one_line(error: Exception):
    def batches_of_a_killed_worker() -> Iterator[Batch]:
        raise error
        yield

    with pytest.raises(ResourceError, match=r"^data\.num_workers: expected workers that go on, found: "):
        next(windows(batches_of_a_killed_worker(), 1))
    missing = FileNotFoundError(2, "No such file or directory", "store/train/tokens-00000.bin")
    with pytest.raises(FileNotFoundError), loading.worker_errors():
        raise missing


def test_a_small_shared_memory_is_named_before_the_start(store: TokenStore, monkeypatch: pytest.MonkeyPatch):
    config = make_config(store, micro_batch_size=8, sequence_length=1024, num_workers=2)
    assert loading.shared_memory_problem(config, 1) is None
    monkeypatch.setattr(loading.shutil, "disk_usage", lambda folder: SimpleNamespace(free=3 << 20))
    assert loading.shared_memory_problem(config, 1) is None
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    message = r"^data\.num_workers: expected 15 MiB free in /dev/shm for batches of 2 workers, found 3; "
    with pytest.raises(ResourceError, match=message):
        loading.global_batches(config, start_step=0)
    none = replace(config, data=replace(config.data, num_workers=0))
    assert loading.shared_memory_problem(none, 8) is None


def test_batches_are_ready_before_a_slow_consumer_asks(store: TokenStore, tmp_path: Path):
    """A worker is two batches ahead."""
    loader = global_batches(make_config(store, max_steps=20, num_workers=1), start_step=0)
    counted = loading._loader(Counted(loader.dataset, tmp_path), loader.batch_sampler, 1)  # type: ignore[arg-type]
    iterator = iter(counted)
    for taken in range(1, 4):
        next(iterator)
        ahead, deadline = taken + 2, time.monotonic() + 120
        while len(list(tmp_path.iterdir())) < ahead and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(list(tmp_path.iterdir())) == ahead


def test_accelerate_keeps_the_workers(store: TokenStore):
    loader = global_batches(make_config(store, num_workers=2), start_step=0)
    prepared, ours = prepared_by_accelerate(loader, 1), shard(loader, 1, 2)
    for name in ("num_workers", "prefetch_factor", "pin_memory", "worker_init_fn", "multiprocessing_context"):
        assert getattr(prepared, name) == getattr(loader, name) == getattr(ours, name), name
    assert prepared.num_workers == 2


SCRIPT = """if __name__ == "__main__":
    import sys, time, psutil
    from support.corpora import make_config
    from llm_pretrain.data.loader import global_batches
    from llm_pretrain.data.store import TokenStore
    config = make_config(TokenStore(sys.argv[1]), max_steps=1000, num_workers=1)
    next(batches := iter(global_batches(config, start_step=0)))
    print(*[child.pid for child in psutil.Process().children(recursive=True)], flush=True)
    time.sleep(float(sys.argv[2]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_killed", [False, True], ids=["ends", "killed"])
def test_workers_end_with_the_training_process(masked_store: TokenStore, tmp_path: Path, is_killed: bool):
    """It takes one batch, prints its children's ids, and ends in the midst of an epoch without waiting."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": python_path(*Path(__file__).parents[1:3])}
    command = [sys.executable, str(script), str(masked_store.path), "60" if is_killed else "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout
        children = [psutil.Process(int(pid)) for pid in process.stdout.readline().split()]
        try:
            assert is_killed or process.wait(timeout=300) == 0
        finally:
            process.kill()
    assert len(children) >= 2  # the worker and what started it
    _, alive = psutil.wait_procs(children, timeout=120)
    assert not alive


def test_the_digest_stays_on_the_cpu_and_the_rest_moves(store: TokenStore):
    batch = batches_of(make_config(store, max_steps=1))[0]
    moved = batch.to("meta")
    assert {tensor.device.type for tensor in moved.model_inputs().values()} == {"meta"}
    assert moved.digest.device.type == "cpu"
    names = ["input_ids", "position_ids", "document_ids", "labels", "loss_mask", "document_offsets"]
    assert list(moved.model_inputs()) == names


def test_stop_signals_to_the_process_group_leave_workers_alone(store: TokenStore):
    """The training process still needs its batches; torchrun signals a worker's whole group."""
    others = set(psutil.Process().children(recursive=True))  # of earlier tests, some about to end
    iterator = iter(global_batches(make_config(store, num_workers=1), start_step=0))
    next(iterator)
    process = psutil.Process()
    servers = [each for each in process.children() if "forkserver" in " ".join(each.cmdline())]
    workers = [each for each in process.children(recursive=True) if each not in others]
    assert servers
    assert workers
    family = {*servers, *workers}
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        for member in family:
            member.send_signal(number)
    gone, _ = psutil.wait_procs(family, timeout=0.3)
    assert not gone
    next(iterator)


def test_evaluation_covers_the_whole_split_once_in_a_fixed_order(masked_store: TokenStore):
    def rows(micro_batch_size: int, **options: object) -> torch.Tensor:
        config = make_config(masked_store, micro_batch_size=micro_batch_size, **options)  # type: ignore[arg-type]
        batches = evaluation_batches(config)
        assert [len(batch.input_ids) for batch in batches][:-1] == [micro_batch_size] * (len(batches) - 1)
        assert all(batch.step == 0 for batch in batches)
        return torch.cat([batch.input_ids for batch in batches])

    reference = rows(1)
    assert torch.equal(rows(3), reference)
    assert torch.equal(rows(3, seed=11), reference)
    total = sum(batch.num_loss_tokens for batch in evaluation_batches(make_config(masked_store)))
    assert total == masked_store.facts["splits"]["validation"]["targets"]
    limited = rows(2, max_batches=1, global_batch_size=4)
    assert torch.equal(limited, reference[:4])
