"""Layer normalizations from moments, as JAX writes them, become one op for targets."""

from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx_nets import graph, op, run

from neural_mp.adaptors.onnxrt.targets.adaptor import TargetAdaptor
from neural_mp.targets import load_profile

SIZE = 16


def list_normalization(variance_axes, with_maximum=True, with_shift=True):
    """The nodes of γ · (x - mean) / √(mean(x²) - mean² + ε) + β, as JAX writes them."""
    nodes = [
        op("ReduceSum", "x axes", "sum", keepdims=0),
        op("Mul", "sum share", "mean"),
        op("Mul", "x x", "squares"),
        op("ReduceSum", f"squares {variance_axes}", "sum_of_squares", keepdims=0),
        op("Mul", "sum_of_squares share", "mean_of_squares"),
        op("Mul", "mean mean", "squared_mean"),
        op("Sub", "mean_of_squares squared_mean", "difference"),
        op("Max", "least difference", "variance") if with_maximum else None,
        op("Reshape", f"{'variance' if with_maximum else 'difference'} kept", "column"),
        op("Add", "column eps", "safe"),
        op("Sqrt", "safe", "root"),
        op("Reciprocal", "root", "inverse"),
        op("Mul", "inverse gain", "factor"),
        op("Reshape", "mean kept", "mean_column"),
        op("Sub", "x mean_column", "centered"),
        op("Mul", "centered factor", "scaled" if with_shift else "y"),
        op("Add", "scaled shift", "y") if with_shift else None,
    ]
    return [node for node in nodes if node is not None]


def moments_normalization(axis, with_maximum=True, with_shift=True, variance_axis=None):
    """γ · (x - mean) / √(mean(x²) - mean² + ε) + β over an axis of [batch, 16, 16]."""
    draw = np.random.default_rng(5)
    row = (1, SIZE, 1) if axis == 1 else (1, 1, SIZE)
    shape = [4, SIZE, SIZE]
    shape[axis] = 1
    constants = {
        "gain": draw.normal(1, 0.3, row).astype(np.float32),
        "shift": draw.normal(size=row).astype(np.float32),
        "eps": np.float32(1e-6),
        "least": np.float32(0),
        "share": np.float32(1 / SIZE),
        "axes": np.array([axis], np.int64),
        "other": np.array([axis if variance_axis is None else variance_axis], np.int64),
        "kept": np.array(shape, np.int64),
    }
    nodes = list_normalization("other", with_maximum, with_shift)
    inputs = {"x": [4, SIZE, SIZE]}
    return graph(nodes, inputs, ["y"], constants, opset=17)


def rewritten(net):
    draw = np.random.default_rng(0)
    data = draw.normal(3, 2, (4, SIZE, SIZE)).astype(np.float32)
    adaptor = TargetAdaptor(load_profile("qnn"))
    model = adaptor.load(net, example=(data,))
    kinds = [node.op_type for node in model.program.graph]
    (expected,) = run(net, x=data)
    return kinds, adaptor.predict(replace(model, given=None, _runners={}), data), expected


@pytest.mark.parametrize("options", [{}, {"with_maximum": False}, {"with_shift": False}])
def test_over_the_last_axis_one_op_remains(options):
    kinds, actual, expected = rewritten(moments_normalization(2, **options))
    assert kinds == ["LayerNormalization"]
    np.testing.assert_allclose(actual, expected, atol=1e-4)


def test_another_axis_is_moved_to_the_end_and_back():
    kinds, actual, expected = rewritten(moments_normalization(1))
    assert kinds == ["Transpose", "LayerNormalization", "Transpose"]
    np.testing.assert_allclose(actual, expected, atol=1e-4)


def test_a_free_batch_is_one_size_in_all_columns():
    """A Reshape changes no number of elements, whatever names a file has for the sizes."""
    draw = np.random.default_rng(5)
    constants = {
        "gain": draw.normal(1, 0.3, SIZE).astype(np.float32),
        "shift": draw.normal(size=SIZE).astype(np.float32),
        "eps": np.float32(1e-6),
        "share": np.float32(1 / SIZE),
        **{name: np.array([n], np.int64) for name, n in (("axes", 1), ("zero", 0), ("one", 1))},
    }
    nodes = [
        op("Shape", "x", "sizes"),
        op("Slice", "sizes zero one", "batch"),
        op("Concat", "batch one", "kept", axis=0),
        *list_normalization("axes", with_maximum=False),
    ]
    net = graph(nodes, {"x": ["n", SIZE]}, ["y"], constants, opset=17)
    net.graph.value_info.extend(
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["other", 1])
        for name in ("column", "safe", "root", "inverse", "mean_column")
    )
    data = draw.normal(3, 2, (4, SIZE)).astype(np.float32)
    adaptor = TargetAdaptor(load_profile("qnn"))
    model = adaptor.load(net, example=(data,))
    assert [node.op_type for node in model.program.graph] == ["LayerNormalization"]
    actual = adaptor.predict(replace(model, given=None, _runners={}), data)
    np.testing.assert_allclose(actual, run(net, x=data)[0], atol=1e-4)


def test_moments_over_different_axes_stay():
    kinds, actual, expected = rewritten(moments_normalization(1, variance_axis=2))
    assert "LayerNormalization" not in kinds
    np.testing.assert_allclose(actual, expected, atol=1e-4)
