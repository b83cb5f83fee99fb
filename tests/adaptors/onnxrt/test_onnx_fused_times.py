"""Times of ops that ONNX Runtime fuses belong to these ops, whatever the kernel's name."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
from onnx_nets import graph, op

from neural_mp.adaptors.loaded_model import LoadedModel
from neural_mp.adaptors.onnxrt import profiler
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
    times = LoadedModel(adaptor, loaded).profile_ops({"x": X})
    assert set(times) <= {op.name for op in adaptor.graph(loaded)}
    assert max(times, key=lambda op: sum(times[op])) == "layer"


SKIP = {
    "SkipLayerNormalization": [
        op("MatMul", "x w", "m", name="layer"),
        op("Add", "m b", "a", name="bias"),
        op("Add", "a x", "r", name="residual"),
        op("LayerNormalization", "r b b", "z", name="norm", axis=-1),
    ],
    "two of them": [
        op("MatMul", "x w", "m", name="layer"),
        op("Add", "m x", "r", name="residual"),
        op("LayerNormalization", "r b b", "n", name="norm", axis=-1),
        op("MatMul", "n w", "m2", name="layer2"),
        op("Add", "m2 n", "r2", name="residual2"),
        op("LayerNormalization", "r2 b b", "z", name="norm2", axis=-1),
    ],
    "functions": [
        op("MatMul", "x w", "m", name="layer"),
        op("HardSwish", "m", "s", name="hard"),
        op("Mish", "s", "t", name="mish"),
        op("HardSwish", "t", "z", name="hard2"),
    ],
}


@pytest.mark.parametrize("nodes", SKIP.values(), ids=list(SKIP))
def test_fused_and_inlined_kernels_count_towards_their_ops(nodes):
    """Every op that no other kernel runs has time, and no time has another name."""
    model = graph(nodes, {"x": ["n", 8, 256]}, ["z"], {"w": WEIGHT, "b": BIAS})
    adaptor = OnnxRuntimeAdaptor()
    batch = {"x": GENERATOR.normal(size=(4, 8, 256)).astype(np.float32)}
    times = LoadedModel(adaptor, adaptor.load(model, example=batch)).profile_ops(batch)
    kinds = {node.name: node.op_type for node in model.graph.node}
    assert set(times) <= set(kinds)
    fused = ("Add",)
    assert all(sum(times[name]) > 0 for name, kind in kinds.items() if kind not in fused)


def test_ops_are_timed_where_the_optimized_graph_cannot_be_written(monkeypatch):
    """The kernel of the fused ops then has a name of its own."""
    monkeypatch.setattr(profiler, "TemporaryDirectory", lambda: nullcontext("/no/such/folder"))
    nodes = SKIP["SkipLayerNormalization"]
    model = graph(nodes, {"x": ["n", 8, 256]}, ["z"], {"w": WEIGHT, "b": BIAS})
    adaptor = OnnxRuntimeAdaptor()
    batch = {"x": np.ones((4, 8, 256), np.float32)}
    times = LoadedModel(adaptor, adaptor.load(model, example=batch)).profile_ops(batch)
    assert sum(times["layer"]) > 0
    assert "SkipLayerNormalization" in times
