"""Suggestions for misspelled names."""

from __future__ import annotations

import pytest

from neural_mp.core.hardware import TARGETS
from neural_mp.errors import did_you_mean


@pytest.mark.parametrize(
    ("name", "known", "words"),
    [
        ("arm", TARGETS, "; did you mean 'arm-dotprod'?"),
        ("avx51", TARGETS, "; did you mean 'avx512'"),
        ("", ("a-b",), "; known are a-b"),
    ],
)
def test_a_prefix_is_nearer_than_similar_letters(name, known, words):
    assert did_you_mean(name, known).startswith(words)
