"""Models that are quantized already (QDQ): their scales become ranges, and their float ops ops."""

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from onnx_bodies import draw
from onnx_nets import MACHINE, Converted, graph, kernels, op, run
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

from neural_mp import MixedPrecision
from neural_mp.adaptors.onnxrt.adaptor import OnnxRuntimeAdaptor
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import Precision
from neural_mp.profiling.audit import audit_ops
from neural_mp.space import list_effective_ops
from neural_mp.testing import signal_to_noise

X = {"x": draw(8, 3, 12, 12, seed=9)}
LAYERS = ("c1", "c2", "y")


def float_net() -> onnx.ModelProto:
    """Two convolutions with a residual sum between, pooling and a matrix product."""
    nodes = [
        op("Conv", "x w1 b1", "c1", pads=[1] * 4),
        op("Relu", "c1", "r1"),
        op("MaxPool", "r1", "m", kernel_shape=[2, 2], strides=[2, 2]),
        op("Conv", "m w2", "c2", pads=[1] * 4),
        op("Add", "c2 m", "s"),
        op("Relu", "s", "r2"),
        op("GlobalAveragePool", "r2", "g"),
        op("Flatten", "g", "f"),
        op("MatMul", "f w3", "y"),
    ]
    constants = {
        "w1": draw(8, 3, 3, 3) / 5,
        "b1": draw(8, seed=1) / 5,
        "w2": draw(8, 8, 3, 3, seed=2) / 8,
        "w3": draw(8, 10, seed=3),
    }
    return graph(nodes, {"x": ["n", 3, 12, 12]}, ["y"], constants)


class Reader(CalibrationDataReader):
    def __init__(self):
        self._batches = iter([X])

    def get_next(self):
        return next(self._batches, None)


def by_tool(folder, **options) -> onnx.ModelProto:
    onnx.save(float_net(), folder / "float.onnx")
    quantize_static(
        *(str(folder / name) for name in ("float.onnx", "int8.onnx")),
        Reader(),
        quant_format=QuantFormat.QDQ,
        **options,
    )
    return onnx.load(folder / "int8.onnx")


def fake_quantized(folder) -> onnx.ModelProto:
    """Float weights and tensors that are rounded in place, as trained models are exported."""
    model = float_net()
    nodes, constants = [], {}
    arrays = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    values = run_all(model)
    scales = {name: np.abs(v).max() / 127 for name, v in {**values, **arrays}.items()}
    rounded = {name: f"{name}/rounded" for name in ("x", "r1", "r2", "f", "w1", "w2", "w3")}
    for name, result in rounded.items():
        constants[f"{name}/scale"] = np.float32(scales[name])
        constants[f"{name}/zero"] = np.int8(0)
        nodes.append(op("QuantizeLinear", f"{name} {name}/scale {name}/zero", f"{name}/int8"))
        nodes.append(op("DequantizeLinear", f"{name}/int8 {name}/scale {name}/zero", result))
    ready, ordered = {"x", *arrays, *constants}, []
    waiting = [*nodes, *(copied(node, rounded) for node in model.graph.node)]
    while waiting:
        node = next(n for n in waiting if ready.issuperset(filter(None, n.input)))
        waiting.remove(node)
        ordered.append(node)
        ready.update(node.output)
    return graph(ordered, {"x": ["n", 3, 12, 12]}, ["y"], {**arrays, **constants})


def copied(node: onnx.NodeProto, rounded: dict[str, str]) -> onnx.NodeProto:
    duplicate = onnx.NodeProto.FromString(node.SerializeToString())
    duplicate.input[:] = [rounded.get(name, name) for name in node.input]
    return duplicate


def run_all(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    """The values of all tensors."""
    shown = onnx.ModelProto.FromString(model.SerializeToString())
    names = [name for node in model.graph.node for name in node.output]
    del shown.graph.output[:]
    shown.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in names)
    return {**X, **dict(zip(names, run(shown, **X), strict=True))}


def by_ourselves(folder) -> onnx.ModelProto:
    converted = Converted(float_net(), X)
    return converted.adaptor.native(converted.model)


SIGNED = {"activation_type": QuantType.QInt8, "weight_type": QuantType.QInt8}
UNSIGNED = {"activation_type": QuantType.QUInt8, "weight_type": QuantType.QUInt8}
MIXED = {"activation_type": QuantType.QUInt8, "weight_type": QuantType.QInt8, "reduce_range": True}
SOURCES = {
    "tool, signed": lambda folder: by_tool(folder, **SIGNED),
    "tool, signed per channel": lambda folder: by_tool(folder, per_channel=True, **SIGNED),
    "tool, unsigned": lambda folder: by_tool(folder, **UNSIGNED),
    "tool, mixed per channel": lambda folder: by_tool(folder, per_channel=True, **MIXED),
    "fake quantization": fake_quantized,
    "own writer": by_ourselves,
}


@pytest.fixture(params=SOURCES)
def source(request, tmp_path) -> onnx.ModelProto:
    return SOURCES[request.param](tmp_path)


def test_the_layers_of_a_quantized_model_are_planned(source):
    converted = Converted(source, X)
    assert converted.float.obstacle is None
    assert any("quantized already" in text for text in converted.float.warnings)
    plan = converted.space.resolve(converted.space.fastest_plan()).plan
    assert {plan[layer].precision for layer in LAYERS if layer in plan} == {Precision.INT8}
    assert converted.kernels["QLinearConv"] == 2
    expected = run(float_net(), **X)[0]
    assert signal_to_noise(expected, converted.result) > 22


def test_the_scales_of_a_quantized_model_are_kept(source):
    """Of the first convolution: those that it had, whatever the data."""
    adaptor = OnnxRuntimeAdaptor()
    model = adaptor.load(source, example=X)
    space = adaptor.space(model, MACHINE)
    louder = {"x": X["x"] * 0.1}
    observations = adaptor.observe(model, [louder], space)
    expected = scale_of(source, "x")
    low, high = observations.ranges["x"]["minmax"]
    assert (high - low) / 255 == pytest.approx(expected, rel=1e-5)


def scale_of(model: onnx.ModelProto, tensor: str) -> float:
    arrays = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    node = next(
        n for n in model.graph.node if n.op_type == "QuantizeLinear" and n.input[0] == tensor
    )
    return float(arrays[node.input[1]])


def test_a_relu_that_quantization_stands_for_is_kept():
    """The tool drops a Relu before an unsigned scale from 0 on."""
    constants = {
        "w1": draw(8, 3, 3, 3),
        "w2": draw(4, 8, 1, 1, seed=1),
        "s": np.float32(0.05),
        "z": np.uint8(0),
    }
    nodes = [
        op("Conv", "x w1", "c"),
        op("QuantizeLinear", "c s z", "q"),
        op("DequantizeLinear", "q s z", "d"),
        op("Conv", "d w2", "y"),
    ]
    model = graph(nodes, {"x": ["n", 3, 12, 12]}, ["y"], constants)
    converted = Converted(model, X)
    assert "Relu" in {node.op_type for node in converted.float.program.graph}
    assert signal_to_noise(run(model, **X)[0], converted.result) > 25
    assert converted.kernels["QLinearConv"] + converted.kernels["MatMulIntegerToFloat"] == 2


@pytest.mark.parametrize(("scale", "zero"), [(1 / 64, np.int8(0)), (1 / 128, np.uint8(0))])
def test_a_hard_sigmoid_with_a_wider_range_is_clipped_in_integers(scale, zero):
    """Powers of two as scales: the kernel of a sum alone would saturate at other ends."""
    constants = {
        "w1": draw(8, 3, 3, 3),
        "w2": draw(4, 8, 1, 1, seed=1),
        "s": np.float32(scale),
        "z": zero,
    }
    nodes = [
        op("Conv", "x w1", "c"),
        op("HardSigmoid", "c", "h", alpha=0.5),
        op("QuantizeLinear", "h s z", "q"),
        op("DequantizeLinear", "q s z", "d"),
        op("Conv", "d w2", "y"),
    ]
    model = graph(nodes, {"x": ["n", 3, 12, 12]}, ["y"], constants)
    converted = Converted(model, X)
    assert converted.kernels["QLinearAdd"] == converted.kernels["Clip"] == 1
    assert "HardSigmoid" not in converted.kernels
    assert signal_to_noise(run(model, **X)[0], converted.result) > 25


def test_a_model_whose_outputs_depend_on_its_rounding_keeps_it():
    nodes = [
        op("MatMul", "x w", "a"),
        op("QuantizeLinear", "a s z", "q"),
        op("DequantizeLinear", "q s z", "d"),
        op("Sub", "a d", "e"),
        op("MatMul", "e v", "y"),
    ]
    constants = {
        "w": draw(16, 16),
        "v": draw(16, 4, seed=1),
        "s": np.float32(0.3),
        "z": np.uint8(128),
    }
    model = graph(nodes, {"x": ["n", 16]}, ["y"], constants)
    loaded = OnnxRuntimeAdaptor().load(model, example={"x": draw(4, 16, seed=2)})
    assert any("which stays" in text for text in loaded.warnings)
    assert "QuantizeLinear" in {node.op_type for node in loaded.program.graph}


def test_the_audit_of_a_quantized_model_in_its_own_precisions_holds(source):
    adaptor = OnnxRuntimeAdaptor()
    model = adaptor.load(source, example=X)
    space = adaptor.space(model, MACHINE)
    ran = adaptor.trace_kernels(model, X)
    if "int8" not in {v.name for v in source.graph.value_info}:
        assert Precision.INT8 in {trace.precision for trace in ran.values()}
    planned = list_effective_ops(space, space.resolve(PrecisionPlan()))
    audit = audit_ops(planned, ran, lambda _: False)
    assert audit.holds, audit.findings
    np.testing.assert_array_equal(adaptor.predict(model, X), run(source, **X)[0])


@pytest.mark.parametrize("converts", [False, True])
def test_the_result_for_a_quantized_model_passes_the_audit(converts, tmp_path):
    converter = MixedPrecision(model=fake_quantized(tmp_path), precisions="int8", cache=False)
    converter.calib_dataloader = [X]
    if converts:
        converter.exit_policy = {"performance_only": True}
    else:
        converter.exclude = [".*"]
    result = converter()
    assert result.audit().holds
    assert kernels(result.model)["QLinearConv"] == (2 if converts else 0)
