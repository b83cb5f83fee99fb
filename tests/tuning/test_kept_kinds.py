"""Figures of a run that a page divides by, or rounds, are what can be divided by and rounded."""

import pytest

from neural_mp.core.op_timings import OpTimings
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.trial import Outcome, Trial
from neural_mp.errors import NeuralMPError
from neural_mp.profiling.kernel_records import read_profile


@pytest.mark.parametrize("seconds", [0, -1.0, float("inf"), float("nan"), "1", None])
def test_an_op_takes_time(seconds):
    with pytest.raises(NeuralMPError, match="expected"):
        OpTimings.from_dict({"ops": {"conv": {"int8": seconds}}, "conversion": None, "value": 0.0})


@pytest.mark.parametrize("share", [float("nan"), float("inf"), -1, "1"])
def test_what_a_trial_takes_is_a_number(share):
    document = Trial(PrecisionPlan(), Outcome.MET).to_dict()
    with pytest.raises(NeuralMPError, match="expected") as caught:
        Trial.from_dict({**document, "objectives": {"relative_latency": share}})
    assert caught.value.keys == ("objectives", "relative_latency")


@pytest.mark.parametrize(
    "change",
    [
        {"dur": 10**400},
        {"dur": None},
        {"args": None},
        {"args": {"op_name": "Conv", "input_type_shape": 3}},
        {"args": {"op_name": "Conv", "output_type_shape": ["float"]}},
        {"args": {"op_name": "Conv", "input_type_shape": [{"float": 3}]}},
    ],
)
def test_events_of_a_profile_that_are_not_as_written_count_as_malformed(change):
    event = {"cat": "Node", "name": "a", "dur": 5, "args": {"op_name": "Conv"}}
    assert read_profile([event, {**event, **change}]).malformed == 1
