"""A worker whose launcher died while the worker was starting ends; wrappers and shells are no reason to."""

from __future__ import annotations

import os
import sys

import psutil
import pytest

from llm_pretrain.errors import ResourceError
from llm_pretrain.launch import process

ELASTIC = {"TORCHELASTIC_RUN_ID": "none"}
ACCELERATE = {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "NO"}


class Parent:
    """What the process's parent is."""

    def __init__(self, words: list[str], variables: dict[str, str] | None):
        self.words, self.variables = words, variables

    def parent(self) -> Parent:
        return self

    def cmdline(self) -> list[str]:
        return self.words

    def environ(self) -> dict[str, str]:
        if self.variables is None:
            raise psutil.AccessDenied(1)
        return self.variables


@pytest.mark.parametrize(
    ("environment", "number", "words", "variables", "orphan"),
    [
        (ELASTIC, 7, ["/usr/bin/python3.11", "-m", "torch.distributed.run"], {}, False),
        (ELASTIC, 1, ["/usr/bin/python3", "/usr/bin/torchrun"], {}, False),  # a container's first process
        (ELASTIC, 7, ["bash", "wrapper.sh"], ELASTIC, False),  # torchrun --no-python
        (ELASTIC, 1, ["/sbin/init"], {}, True),
        (ELASTIC, 345, ["slurmstepd: [12.0]"], {}, True),  # adopts what its job leaves
        (ELASTIC, 7, ["/opt/trainer.par"], {}, False),  # a launcher that does not look like one
        (ACCELERATE, 1, ["/sbin/init"], {}, True),
        (ACCELERATE, 7, ["bash"], {}, False),  # set by hand in a shell
        ({"ACCELERATE_MIXED_PRECISION": "no"}, 1, ["/sbin/init"], {}, False),
        ({}, 1, ["/sbin/init"], {}, False),  # a daemon on purpose
    ],
)
def test_who_is_an_orphan(
    environment: dict[str, str],
    number: int,
    words: list[str],
    variables: dict[str, str] | None,
    orphan: bool,
    monkeypatch: pytest.MonkeyPatch,
):
    for name in (*ELASTIC, *ACCELERATE):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(psutil, "Process", lambda: Parent(words, variables))
    monkeypatch.setattr(os, "getppid", lambda: number)
    assert process.is_orphan() is orphan


@pytest.mark.skipif(sys.platform != "linux", reason="orphans are asked for on Linux alone")
def test_an_orphan_stops_with_one_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(process, "is_orphan", lambda: True)
    with pytest.raises(ResourceError, match="launcher was killed, start it again") as stopped:
        process.check_parent_alive()
    assert stopped.value.shared
    monkeypatch.setattr(process, "is_orphan", lambda: False)
    process.check_parent_alive()
