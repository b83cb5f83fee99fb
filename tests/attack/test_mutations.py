"""What is changed in a file ends in a right result or in one error; the long form makes 10,000."""

import pytest
from mutations import GROUPS, MUTATIONS
from verdicts import Verdict, harmful

FEW = 600


@pytest.mark.slow
def test_a_file_with_one_thing_changed_is_read_right_or_refused(tmp_path):
    findings = list(MUTATIONS.findings(FEW, tmp_path, 1))
    assert not harmful(findings)
    for name in GROUPS:
        of_group = [found for found in findings if found.case.startswith(f"{name}: ")]
        assert {found.verdict for found in of_group} == {Verdict.RIGHT, Verdict.REFUSED}, name
    assert len(findings) == FEW
