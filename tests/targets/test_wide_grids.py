"""Grids of 16 bits leave room for values beyond the calibrated range."""

import importlib.util

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper
from onnx_nets import graph, op

from neural_mp.adaptors.onnxrt.targets.adaptor import TargetAdaptor
from neural_mp.adaptors.onnxrt.targets.audit.qnn_audit import audit_by_qnn
from neural_mp.adaptors.onnxrt.targets.quant_grid import make_observed_grid
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


@pytest.fixture(scope="module")
def clipped(tmp_path_factory):
    """A file for the NPU with the activation of MobileNet 3 in 16 bits."""
    nodes = [op("Add", "x three", "a"), op("Clip", "a low high", "b"), op("Mul", "x b", "y")]
    constants = {"three": np.float32(3), "low": np.float32(0), "high": np.float32(6)}
    net = graph(nodes, {"x": list(X.shape)}, ["y"], constants, opset=21)
    adaptor = TargetAdaptor(load_profile("qnn"))
    held = adaptor.load(net, example=(X,))
    space = adaptor.space(held, Hardware())
    wide = {
        name: next(c for c in space.choices(name) if c.precision is Precision.INT16)
        for name in space.tunable_ops
    }
    plan = space.resolve(space.fastest_plan().replacing(wide))
    result = adaptor.convert(held, plan, adaptor.observe(held, [X], space), space)
    path = tmp_path_factory.mktemp("clipped") / "model.onnx"
    adaptor.single_file.save_file(result, path, {})
    return onnx.load(path)


def test_room_ends_at_the_bounds_of_the_op(clipped):
    """No value of other data exceeds what a Clip lets through."""
    (clip,) = [node for node in clipped.graph.node if node.op_type == "Clip"]
    (quantize,) = [node for node in clipped.graph.node if clip.output[0] in node.input]
    constants = {t.name: numpy_helper.to_array(t) for t in clipped.graph.initializer}
    scale, zero = (constants[name] for name in quantize.input[1:])
    assert zero == 0
    assert 65535 * float(scale) == pytest.approx(6, rel=1e-4)


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("onnxruntime_qnn") is None,
    reason="requires onnxruntime-qnn: pip install -e '.[qnn]', on Python 3.11 or later",
)
def test_a_clip_in_16_bits_is_computed_as_simulated(clipped):
    """QNN computes a Clip that writes a grid beyond its bounds with 2 dB."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(clipped.SerializeToString(), options)
    (name,) = [output.name for output in session.get_outputs()]
    simulated = [{name: session.run(None, {"x": X})[0]}]
    audit = audit_by_qnn(clipped, load_profile("qnn"), [{"x": X}], simulated)
    assert audit.sqnr_db > 40
