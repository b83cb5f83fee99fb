"""Whatever users hand over ends in a result, one error of ours, or their own exception."""

import pytest
from user_objects import cases, findings
from verdicts import harmful

pytestmark = pytest.mark.slow


def test_what_does_not_fit_is_named_and_what_users_raise_is_theirs(tmp_path):
    assert not harmful(findings(45, tmp_path, 0))


def test_no_case_is_there_twice():
    names = [case.name for case in cases()]
    assert len(names) == len(set(names))
    assert len(names) >= 200
