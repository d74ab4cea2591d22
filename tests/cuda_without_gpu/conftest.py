"""The tests of this folder run with `-p fake_cuda` only; see `make test-cuda`."""

import sys

import pytest

FAKE_CUDA = sys.modules.get("fake_cuda")
REASON = "no fake device; start with: make test-cuda" if FAKE_CUDA is None else FAKE_CUDA.REASON

if FAKE_CUDA is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def _device() -> None:
    if REASON:
        pytest.skip(REASON)
