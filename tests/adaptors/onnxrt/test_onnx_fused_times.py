"""Times of ops that ONNX Runtime fuses belong to these ops, whatever the kernel's name."""

from __future__ import annotations

import numpy as np
import pytest
from onnx_nets import graph, op

from neural_mp.adaptors.common.conversion import profile
from neural_mp.adaptors.onnxrt.adaptor import OnnxRuntimeAdaptor

GENERATOR = np.random.default_rng(0)
X = GENERATOR.normal(size=(64, 256)).astype(np.float32)
WEIGHT = GENERATOR.normal(size=(256, 256)).astype(np.float32) / 16
BIAS = np.ones(256, np.float32)
NETS = {
    "Gemm, Relu": [op("Gemm", "x w b", "y", name="layer"), op("Relu", "y", "z", name="after")],
    "MatMul, Add": [op("MatMul", "x w", "y", name="layer"), op("Add", "y b", "z", name="after")],
    "MatMul, Add, Relu": [
        op("MatMul", "x w", "y", name="layer"),
        op("Add", "y b", "s", name="sum"),
        op("Relu", "s", "z", name="after"),
    ],
    "Transpose, MatMul": [
        op("Transpose", "w", "t", name="turn", perm=[1, 0]),
        op("MatMul", "x t", "z", name="layer"),
    ],
    "Sigmoid, Mul": [
        op("MatMul", "x w", "y", name="layer"),
        op("Sigmoid", "y", "s", name="gate"),
        op("Mul", "y s", "z", name="after"),
    ],
}


@pytest.mark.parametrize("nodes", NETS.values(), ids=list(NETS))
def test_no_time_is_left_to_unknown_kernels(nodes):
    model = graph(nodes, {"x": ["n", 256]}, ["z"], {"w": WEIGHT, "b": BIAS})
    adaptor = OnnxRuntimeAdaptor()
    loaded = adaptor.load(model, example={"x": X})
    found = profile(adaptor.op_timing, loaded, {"x": X})
    assert set(found) <= {op.name for op in adaptor.graph(loaded)}
    assert max(found, key=lambda op: sum(found[op])) == "layer"
