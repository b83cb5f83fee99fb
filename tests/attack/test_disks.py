"""Whatever a disk does, what was computed is not lost."""

import pytest
from disks import findings
from verdicts import harmful

pytestmark = pytest.mark.slow


def test_disks_that_fail_cost_no_result(tmp_path):
    found = list(findings(6, tmp_path, seed=0))
    assert len(found) == 6
    assert not harmful(found)
