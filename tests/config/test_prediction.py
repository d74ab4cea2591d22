"""`evaluation.prediction`: what is expected between its steps, and what is refused."""

from __future__ import annotations

import pytest

from llm_pretrain.config.tree import EvaluationConfig, PredictedLoss

CURVE = [PredictedLoss(10, 4.0, 3.8, 4.2), PredictedLoss(20, 3.0, 2.9, 3.3)]


def test_it_is_interpolated_between_its_steps():
    config = EvaluationConfig(prediction=CURVE)
    assert config.predicted(10) == CURVE[0]
    assert config.predicted(15) == PredictedLoss(15, 3.5, pytest.approx(3.35), pytest.approx(3.75))
    assert config.predicted(20) == CURVE[1]
    assert config.predicted(9) is None
    assert config.predicted(21) is None
    uneven = [
        PredictedLoss(0, 9.0, 0.1, 99.0),
        PredictedLoss(3, 0.7, 0.1, 99.0),
        PredictedLoss(7, 0.3, 0.2, 0.6),
    ]
    config = EvaluationConfig(prediction=uneven)
    assert [config.predicted(each.step) for each in uneven] == uneven, "to the last bit"
    between = config.predicted(1)
    assert between is not None
    assert between.losses[1:] == (0.1, 99.0)


def test_one_entry_is_of_its_step_alone():
    config = EvaluationConfig(prediction=CURVE[:1])
    assert config.predicted(10) == CURVE[0]
    assert config.predicted(11) is None
    assert EvaluationConfig().predicted(0) is None
