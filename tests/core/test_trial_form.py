"""A trial as it is kept."""

from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.trial import Outcome, Trial


def test_a_trial_says_its_node_and_one_kept_without_it_is_still_read():
    trial = Trial(PrecisionPlan({}), Outcome.MET, 0.9, node="north")
    record = trial.to_dict()
    assert Trial.from_dict(record) == trial
    del record["node"]
    assert Trial.from_dict(record).node == ""
