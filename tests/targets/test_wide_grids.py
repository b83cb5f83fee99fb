"""Grids of 16 bits leave room for values beyond the calibrated range."""

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from onnx_nets import graph, op
from qdq_models import emulated

from neural_mp.adaptors.onnxrt.targets.adaptor import TargetAdaptor
from neural_mp.adaptors.onnxrt.targets.audit.file_audit import simulate_file
from neural_mp.adaptors.onnxrt.targets.audit.qnn_audit import audit_by_qnn
from neural_mp.adaptors.onnxrt.targets.quantization import make_observed_grid
from neural_mp.core.enums import QuantDType
from neural_mp.core.hardware import Hardware
from neural_mp.core.precision import Precision
from neural_mp.targets import load_profile

X = np.random.default_rng(0).normal(0, 15, (1, 8, 16, 16)).astype(np.float32)


@pytest.mark.parametrize(
    ("dtype", "covered"), [("uint8", 1.0), ("uint16", 2.0), ("int8", 1.0), ("int16", 2.0)]
)
def test_values_beyond_the_calibrated_range_saturate_in_8_bits_only(dtype, covered):
    """A calibration set is a sample: other data exceeds its range."""
    low, high = -1.5, 3.0
    grid = make_observed_grid((low, high), QuantDType(dtype), load_profile("qnn").activation)
    beyond = np.array([covered * low, covered * high], np.float32)
    restored = grid.dequantize_integers(grid.quantize_values(beyond))
    np.testing.assert_allclose(restored, beyond, atol=float(grid.scale))
    far = np.array([3 * high], np.float32)
    assert grid.dequantize_integers(grid.quantize_values(far)) < 2.1 * high


def make_wide_file(nodes, constants, folder) -> onnx.ModelProto:
    """Return the file for QNN of a net whose ops all run in 16 bits."""
    net = graph(nodes, {"x": list(X.shape)}, ["y"], constants, opset=21)
    adaptor = TargetAdaptor(load_profile("qnn"))
    loaded = adaptor.load(net, example=(X,))
    space = adaptor.space(loaded, Hardware())
    wide = {
        name: next(c for c in space.choices(name) if c.precision is Precision.INT16)
        for name in space.tunable_ops
    }
    plan = space.resolve(space.fastest_plan().replacing(wide))
    result = adaptor.convert(loaded, plan, adaptor.observe(loaded, [X], space), space)
    path = folder / "model.onnx"
    adaptor.single_file.save_file(result, path, {})
    return onnx.load(path)


@pytest.fixture(scope="module")
def clipped(tmp_path_factory):
    """The activation of MobileNet 3."""
    nodes = [op("Add", "x three", "a"), op("Clip", "a low high", "b"), op("Mul", "x b", "y")]
    constants = {"three": np.float32(3), "low": np.float32(0), "high": np.float32(6)}
    return make_wide_file(nodes, constants, tmp_path_factory.mktemp("clipped"))


@pytest.fixture(scope="module")
def nearly_dead(tmp_path_factory):
    """Depthwise and plain convolutions with channels of tiny weights, as training leaves."""
    draw = np.random.default_rng(1)
    sizes = np.array([1, 1, 1, 1, 1e-6, 1e-9, 1e-11, 0])[:, None, None, None]
    weights = {
        "deep": draw.normal(size=(8, 1, 5, 5)) * sizes,
        "plain": draw.normal(size=(8, 8, 1, 1)) * sizes,
    }
    biases = {"low": draw.normal(size=8), "high": draw.normal(size=8)}
    constants = {n: a.astype(np.float32) for n, a in {**weights, **biases}.items()}
    nodes = [
        op("Conv", "x deep low", "a", group=8, pads=[2, 2, 2, 2]),
        op("Conv", "a plain high", "y"),
    ]
    return make_wide_file(nodes, constants, tmp_path_factory.mktemp("nearly_dead"))


def test_room_ends_at_the_bounds_of_the_op(clipped):
    """No value of other data exceeds what a Clip lets through."""
    (clip,) = [node for node in clipped.graph.node if node.op_type == "Clip"]
    (quantize,) = [node for node in clipped.graph.node if clip.output[0] in node.input]
    constants = {t.name: numpy_helper.to_array(t) for t in clipped.graph.initializer}
    scale, zero = (constants[name] for name in quantize.input[1:])
    assert zero == 0
    assert 65535 * float(scale) == pytest.approx(6, rel=1e-4)


def test_steps_of_sums_are_not_negligible_beside_those_of_results(nearly_dead):
    """Scales of products with a weight are no less than a millionth of the result's."""
    constants = {t.name: numpy_helper.to_array(t) for t in nearly_dead.graph.initializer}
    writers = {output: n for n in nearly_dead.graph.node for output in n.output}
    readers = {name: n for n in nearly_dead.graph.node for name in n.input}
    for node in nearly_dead.graph.node:
        if node.op_type == "Conv":
            data, weight = (constants[writers[name].input[1]] for name in node.input[:2])
            result = constants[readers[node.output[0]].input[1]]
            assert (data * weight / result).min() >= 0.9e-6


@emulated
@pytest.mark.parametrize("net", ["clipped", "nearly_dead"])
def test_ops_in_16_bits_are_computed_as_simulated(net, request):
    """A Clip that writes a grid beyond its bounds, and channels of tiny scales, have 2 dB."""
    model, feeds = request.getfixturevalue(net), [{"x": X}]
    audit = audit_by_qnn(model, load_profile("qnn"), feeds, simulate_file(model, feeds))
    assert audit.sqnr_db > 40
