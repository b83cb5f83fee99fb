"""Two runs at once do not mix."""

import pytest
from together import findings
from verdicts import harmful

pytestmark = pytest.mark.slow


def test_two_runs_at_once_do_not_mix(tmp_path):
    found = list(findings(4, tmp_path, seed=0))
    assert len(found) == 4
    assert not harmful(found)
