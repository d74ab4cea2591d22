"""Running out of memory is recognised whoever says it, and told in one line with what to change."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from llm_pretrain.config.loading import from_dict
from llm_pretrain.config.tree import Config
from llm_pretrain.errors import CheckpointError, DataError, ResourceError
from llm_pretrain.launch import out_of_memory
from llm_pretrain.launch.out_of_memory import (
    MemoryLimit,
    check_memory,
    explain_out_of_memory,
    is_out_of_memory,
)

CUDA = (
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.15 GiB of which 5.25 "
    "MiB is free. Including non-PyTorch memory, this process has 79.13 GiB memory in use.\nmore lines"
)
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}


def raises(error: Exception) -> Callable[[], object]:
    def action() -> object:
        raise error

    return action


REAL: dict[str, Callable[[], object]] = {
    "torch": lambda: torch.empty(1 << 58, dtype=torch.uint8),
    "numpy": lambda: np.zeros(1 << 58, dtype=np.uint8),
    "C++": raises(RuntimeError("std::bad_alloc")),
    "the system": raises(OSError(errno.ENOMEM, "Cannot allocate memory")),
    "a GPU": raises(torch.OutOfMemoryError(CUDA)),
    "cuBLAS": raises(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`")),
    "a save": raises(
        CheckpointError("c: writing failed on rank 0: RuntimeError: can't allocate memory: you tr")
    ),
}


def config(**sections: dict[str, Any]) -> Config:
    model = {"vocab_size": 256} | SMALL | sections.pop("model", {})
    return from_dict({"model": model, **sections})


def line_of(action: Callable[[], object], *known: Any) -> str:
    with pytest.raises(ResourceError) as told, explain_out_of_memory(*known):
        action()
    (line,) = str(told.value).splitlines()
    return line


@pytest.mark.parametrize("where", REAL)
def test_whoever_runs_out_of_memory_it_is_one_line(where: str):
    with pytest.raises(Exception) as caught:  # noqa: PT011 (any kind)
        REAL[where]()
    assert is_out_of_memory(caught.value)
    assert line_of(REAL[where]).startswith("out of memory")


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("shapes differ"),
        DataError("no text"),
        OSError(errno.ENOSPC, "No space left"),
        KeyError(),
    ],
)
def test_other_errors_pass(error: Exception):
    assert not is_out_of_memory(error)
    with pytest.raises(type(error)), explain_out_of_memory(config()):
        raise error


def test_the_line_names_the_error_and_what_to_change():
    line = line_of(REAL["torch"], config(training={"micro_batch_size": 6, "global_batch_size": 12}))
    assert re.match(r"out of memory: .*tried to allocate \d+ bytes", line)
    assert "training.micro_batch_size 4 instead of 6 (the result stays)" in line
    line = line_of(REAL["a GPU"], config())
    assert "Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.15 GiB of which 5.25 MiB" in line
    assert "more lines" not in line


def test_what_is_in_use_already_is_not_advised():
    training = {"micro_batch_size": 1, "activation_checkpointing": True, "global_batch_size": 8}
    line = line_of(REAL["a GPU"], config(training=training))
    assert "micro_batch_size" not in line
    assert "activation_checkpointing" not in line
    assert "fsdp" not in line


def test_a_model_that_cannot_fit_is_refused_before_it_is_built(monkeypatch: pytest.MonkeyPatch):
    huge = config(model={"hidden_size": 16384, "intermediate_size": 65536, "num_hidden_layers": 40})
    with pytest.raises(ResourceError, match=r"parameters take [\d.]+ TiB with gradients"):
        check_memory(huge, 1, torch.device("cpu"))
    monkeypatch.setattr(out_of_memory, "_host_memory", lambda _: MemoryLimit(1 << 19, "it has"))
    with pytest.raises(ResourceError, match=r"it has 512\.0 KiB"):
        check_memory(config(), 1, torch.device("cpu"))
    monkeypatch.setattr(out_of_memory, "_host_memory", lambda _: MemoryLimit(1 << 24, "it has"))
    check_memory(config(), 1, torch.device("cpu"))


def test_a_step_that_may_not_fit_is_said_at_the_start(monkeypatch: pytest.MonkeyPatch):
    """The model fits; its activations do not."""
    gpu = torch.device("cuda", 0)
    total = [1 << 31]
    properties = lambda device: SimpleNamespace(total_memory=total[0])  # noqa: E731
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    long = config(training={"sequence_length": 1 << 18, "micro_batch_size": 1})
    (line,) = check_memory(long, 1, gpu)
    assert re.match(
        r"a step is estimated to need about [\d.]+ GiB, the GPU has 2\.0 GiB; if it runs out", line
    )
    assert "training.sequence_length" in line
    total[0] = 1 << 40
    assert check_memory(long, 1, gpu) == []


def test_a_container_s_limit_counts(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(out_of_memory, "_CGROUP", tmp_path / "memory.max")
    (tmp_path / "memory.max").write_text("max\n")
    assert out_of_memory._host_memory(1).total >= psutil.virtual_memory().total
    (tmp_path / "memory.max").write_text("1048576\n")
    assert out_of_memory._host_memory(1) == MemoryLimit(1 << 20, "the container may have")
