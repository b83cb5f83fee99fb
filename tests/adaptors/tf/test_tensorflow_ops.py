"""The table of op types agrees with TensorFlow's own registry."""

from __future__ import annotations

import pytest

pytest.importorskip("tensorflow")

from neural_mp.adaptors.tensorflow.graph.ops import INTEGER_KERNELS, LAYERS, OPS, ROWS
from neural_mp.adaptors.tensorflow.graph.runtime import (
    every_op_type,
    has_kernel,
    list_kernel_dtypes,
)
from neural_mp.amp import KINDS


def test_every_op_type_exists_once_in_tensorflow():
    names = " ".join(row.names for row in ROWS).split()
    assert sorted(names) == sorted(OPS)
    assert set(names) <= every_op_type()


def test_kinds_are_those_of_mixed_precision():
    assert {row.kind for row in OPS.values()} - {""} <= set(KINDS)


def test_kernels_of_layers_and_moving_ops_are_registered():
    moving = {row.kernel for row in OPS.values() if row.kernel}
    assert all(map(has_kernel, {*INTEGER_KERNELS, *moving}))
    assert all(list_kernel_dtypes(name) for name in LAYERS)
