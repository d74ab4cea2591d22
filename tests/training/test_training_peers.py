"""Which errors mean that another rank is gone; what real launches raise is in tests/faults."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from llm_pretrain.config.distributed_config import DistributedConfig
from llm_pretrain.config.tree import Config
from llm_pretrain.errors import CheckpointError, DataError, StuckError
from llm_pretrain.launch.watchdog import collective_timeout, peer_failure

CLOSED = (
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:21343. "
    "This may be caused by other ranks that exited"
)
LOST = {
    "closed": RuntimeError(CLOSED),
    "reset": RuntimeError(
        "[../gloo/gloo/transport/tcp/pair.cc:799] Read error [10.0.0.2]:3: Connection reset by peer"
    ),
    "timed out": RuntimeError(
        "[../gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 8000ms for recv operation"
    ),
    "aborted": dist.DistBackendError("NCCL communicator was aborted on rank 0. Original reason: timed out"),
    "store": dist.DistNetworkError("recv, remote peer closed connection"),
}
OURS = {
    "shapes": RuntimeError(
        "[enforce fail at ../third_party/gloo/gloo/transport/tcp/pair.cc:446] op.nbytes. 8 vs 4"
    ),
    "misuse": dist.DistBackendError(
        "NCCL error in: ../x.cpp:1, invalid usage, ncclInvalidUsage: gloo timed out"
    ),
    "memory": dist.DistBackendError(
        "ncclUnhandledCudaError: Call to CUDA failed. Cuda failure 'out of memory'"
    ),
    "data": DataError(CLOSED),
}


@pytest.mark.parametrize("name", LOST)
def test_a_lost_peer_is_one_line(name: str):
    said = peer_failure(LOST[name], 2)
    assert isinstance(said, StuckError)
    assert str(said).startswith("rank 2: lost the connection to another rank in the run (")
    assert len(str(said).splitlines()) == 1
    assert ".cc:" not in str(said)


@pytest.mark.parametrize("name", OURS)
def test_a_bug_of_ours_keeps_its_traceback(name: str):
    assert peer_failure(OURS[name], 0) is None


def test_a_lost_peer_behind_a_failed_checkpoint_counts():
    def save() -> None:
        try:
            raise LOST["closed"]
        except RuntimeError:
            raise CheckpointError("step-4: writing tensors failed on rank 1") from None

    with pytest.raises(CheckpointError) as raised:
        save()
    assert peer_failure(raised.value, 0) is not None
    assert peer_failure(CheckpointError("step-4: no space left on device"), 0) is None


def test_a_collective_outwaits_the_watchdog():
    config = Config(distributed=DistributedConfig(timeout_seconds=7))
    assert collective_timeout(config).total_seconds() >= 4 * 7
