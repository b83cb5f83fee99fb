"""What is killed is gone on with: nothing is lost, nothing repeated, nothing left behind."""

import pytest
from kills import findings
from verdicts import harmful

pytestmark = pytest.mark.slow


def test_runs_that_are_killed_end_as_if_nobody_had(tmp_path):
    found = list(findings(6, tmp_path, seed=0))
    assert len(found) == 6
    assert not harmful(found)
