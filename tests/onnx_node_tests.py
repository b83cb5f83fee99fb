"""The single-op tests of the onnx package: models and inputs."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
from onnx.backend.test.case.test_case import TestCase
from onnx.reference.ops import op_pool_common


def _unpooled(
    padded: np.ndarray,
    x_shape: Sequence[int],
    kernel: object,
    strides: object,
    out_shape: Sequence[int],
    *_: object,
    **__: object,
) -> np.ndarray:
    return np.zeros([*x_shape[:2], *out_shape], padded.dtype)


@cache
def node_tests() -> tuple[TestCase, ...]:
    """Return the tests, without the right expected outputs of pooling.

    To compute these takes ten seconds; the reference here is what ONNX Runtime computes.
    """
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")  # the package casts numbers that are too large on purpose
        patch.setattr(op_pool_common, "pool", _unpooled)
        from onnx.backend.test.case.node import collect_testcases

        return tuple({case.name: case for case in collect_testcases(None)}.values())
