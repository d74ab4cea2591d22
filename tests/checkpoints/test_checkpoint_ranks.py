"""Two real processes save, fail and restore together; checkpoints do not depend on how many wrote them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file
from support.checkpoint_helpers import Run, everything, same_bits
from support.fork_server import Request, fork_server

WORLD_SIZE = 2


@pytest.fixture(scope="module")
def launched(tmp_path_factory) -> Path:
    """A folder after: one process to step 2, two processes to step 4, and several mishaps."""
    folder = tmp_path_factory.mktemp("ranks")
    Run(folder / "checkpoints", keep_last=3).train(2).save()
    output = folder / "output"
    request = Request(
        "support.checkpoint_ranks:run_rank",
        [str(folder)],
        WORLD_SIZE,
        launcher="torchrun",
        output=str(output),
    )
    assert fork_server().run(request, 240) == [0, 0], output.read_text()
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
