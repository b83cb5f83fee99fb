"""Noise of weights at the outputs: one measurement per layer, the median where there is none."""

from __future__ import annotations

import pytest

from neural_mp.core.precision import Precision
from neural_mp.tuning.measurement.probe import propagate_to_outputs

COARSE, FINE = "uint4 asymmetric per_group 128 minmax", "uint8 asymmetric per_group 32 minmax"
NOISE = {op: {COARSE: 4.0, FINE: 1.0} for op in ("first", "second", "third")}


def test_scores_of_a_layer_get_the_factor_that_its_noisiest_form_shows():
    requests = []

    def measure(plan):
        ((op, config),) = plan.items()
        requests.append((config.precision, str(config.weight)))
        return {"first": 8.0, "second": 0.4, "third": None}[op]

    scores = propagate_to_outputs(NOISE, measure)
    assert requests == [(Precision.INT4, COARSE)] * 3
    assert scores["first"] == {COARSE: 8.0, FINE: 2.0}
    assert scores["second"] == pytest.approx({COARSE: 0.4, FINE: 0.1})
    middle = (2.0 + 0.1) / 2
    assert scores["third"] == pytest.approx({COARSE: 4 * middle, FINE: middle})


def test_without_measurements_the_scores_stay():
    assert propagate_to_outputs(NOISE, lambda plan: None) == NOISE
    assert propagate_to_outputs({"op": {COARSE: 0.0}}, lambda plan: 1.0) == {"op": {COARSE: 0.0}}
    assert propagate_to_outputs({}, lambda plan: 1.0) == {}
