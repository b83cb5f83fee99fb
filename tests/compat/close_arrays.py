"""Comparison of whole arrays: `pytest.approx` compares number by number in Python."""

from __future__ import annotations

from typing import Any

import numpy as np


def assert_close(actual: Any, expected: np.ndarray, *, abs: float = 1e-12, rel: float = 1e-6):
    """Fail unless the arrays have one shape and close numbers; `abs` and `rel` as in pytest."""
    assert np.shape(actual) == np.shape(expected)
    np.testing.assert_allclose(actual, expected, rtol=rel, atol=abs)
