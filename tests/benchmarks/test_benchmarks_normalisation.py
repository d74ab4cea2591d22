"""What is trained is the gradient of the whole global batch, and what it is compared with is not."""

from __future__ import annotations

import pytest

from benchmarks import normalisation as bench
from benchmarks.normalisation_batches import SETTINGS, loss_mask
from llm_pretrain.model import Decoder


@pytest.fixture(scope="module")
def model() -> Decoder:
    return bench.trained_model(10)


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_mean_over_all_loss_tokens_alone_is_exact(model: Decoder, setting: str):
    errors = bench.token_mean_errors(model, setting)
    assert errors[bench.OURS] < 1e-6
    assert errors[bench.OURS_EXACT] < 1e-12
    assert errors[bench.MEAN_OF_MEANS] > 0.01
    assert errors[bench.RANK_MEANS] > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
def test_shares_of_the_global_batch_alone_are_exact(model: Decoder, setting: str):
    per_sequence: set[float] = set()
    for world_size, accumulation in bench.LAYOUTS[:2]:
        errors = bench.router_errors(model, setting, world_size, accumulation)
        assert errors[bench.GLOBAL] < 1e-6
        assert errors[bench.GLOBAL_EXACT] < 1e-12
        for name in (bench.PER_MICRO_BATCH, bench.SYNCED, bench.RUNNING):
            assert errors[name] > 0.01, name
        per_sequence.add(round(errors[bench.PER_SEQUENCE], 6))
    assert len(per_sequence) == 1, "the default does not depend on the layout"


def test_settings_are_what_they_are_called():
    shares = {setting: loss_mask(setting, seed=1).double().mean(1) for setting in SETTINGS}
    assert shares["few masked tokens"].min() > 0.75
    assert shares["ragged padding"].std() > 0.2
    assert ((shares["80 % short documents"] < 0.2).double().mean() - 0.8).abs() < 0.05
