"""Models with pairs of Q/DQ ops for accelerators: numbers, forms, and predicted noise."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import numpy_helper
from onnx_nets import as_onnx, graph, op, run
from torch import nn
from torch.nn import functional as F

from neural_mp import targets
from neural_mp.adaptors.onnxrt.targets import switch_model
from neural_mp.adaptors.onnxrt.targets.adaptor import TargetAdaptor
from neural_mp.adaptors.onnxrt.targets.audit.structural_audit import check_structure
from neural_mp.adaptors.onnxrt.targets.quantization import make_activation_grid, make_weight_grid
from neural_mp.core.enums import QuantDType, Scheme
from neural_mp.core.hardware import Hardware
from neural_mp.core.precision import FP32, Precision
from neural_mp.core.trial import Outcome, Trial
from neural_mp.errors import PlanError
from neural_mp.search.widening import trace_widening_path
from neural_mp.strategies.base import Probe, TuningProblem
from neural_mp.strategies.widening import Widening
from neural_mp.targets import Widths, load_profile, profile_names
from neural_mp.targets.profile import TargetCosts


class Mixed(nn.Module):
    """Convolutions, attention, normalization and gates; [batch, 1, 8, 8] → 10 logits."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 16, 3, 2, 1)
        self.norm = nn.BatchNorm2d(16)
        self.inner_norm = nn.LayerNorm(16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.wide, self.narrow = nn.Linear(16, 32), nn.Linear(32, 16)
        self.head = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.silu(self.norm(self.stem(x))).flatten(2).transpose(1, 2)
        y = self.inner_norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        x = x + self.narrow(F.gelu(self.wide(x)))
        return self.head(x.mean(1))


@pytest.fixture(scope="module")
def mixed():
    torch.manual_seed(0)
    return as_onnx(Mixed())


def batches(count=3):
    draw = np.random.default_rng(0)
    return [draw.standard_normal((4, 1, 8, 8)).astype(np.float32) for _ in range(count)]


class Planned:
    """A model for a target, calibrated."""

    def __init__(self, model, target, data):
        self.adaptor = TargetAdaptor(load_profile(target))
        self.held = self.adaptor.load(model, example=(data[0],))
        self.space = self.adaptor.space(self.held, Hardware())
        self.observed = self.adaptor.observe(self.held, data, self.space)

    def converted(self, configs=None):
        plan = self.space.fastest_plan().replacing(configs or {})
        resolved = self.space.resolve(plan)
        return self.adaptor.convert(self.held, resolved, self.observed, self.space)

    def sqnr(self, configs, x):
        expected = self.adaptor.predict(self.held, x)
        noise = self.adaptor.predict(self.converted(configs), x) - expected
        return 10 * np.log10(np.square(expected).sum() / np.square(noise).sum())


def saved(planned, held, tmp_path):
    path = tmp_path / "model.onnx"
    planned.adaptor.single_file.save_file(held, path, {})
    return onnx.load(path)


def test_product_equals_integer_arithmetic():
    """A layer computes what its integers say, by a computation of the test's own."""
    draw = np.random.default_rng(1)
    weight = draw.normal(size=(6, 5)).astype(np.float32)
    bias = draw.normal(size=5).astype(np.float32)
    x = draw.normal(size=(8, 6)).astype(np.float32)
    net = graph(
        [op("Gemm", "x w b", "y")], {"x": ["batch", 6]}, ["y"], {"w": weight, "b": bias}, opset=21
    )
    planned = Planned(net, "qnn", [x])
    y = planned.adaptor.predict(planned.converted(), x)

    sx = (x.max() - x.min()) / 255
    zx = np.rint(-x.min() / sx)
    qx = np.clip(np.rint(x / sx) + zx, 0, 255) - zx
    sw = np.abs(weight).max(0) / 127
    qw = np.rint(weight / sw)
    accumulated = qx @ qw + np.rint(bias / (sx * sw))
    real = accumulated * sx * sw
    exact = x @ weight + bias
    sy = (exact.max() - min(exact.min(), 0)) / 255
    zy = np.rint(-exact.min() / sy)
    expected = (np.clip(np.rint(real / sy) + zy, 0, 255) - zy) * sy
    assert np.abs(y - expected).max() <= sy * 1.01  # a step, where a tie rounds the other way
    assert np.mean(np.abs(y - expected) < sy / 100) > 0.95


def test_constants_are_shared_and_files_hold_onnx_alone(mixed, tmp_path):
    planned = Planned(mixed, "qnn", batches())
    model = saved(planned, planned.converted(), tmp_path)
    assert {node.domain for node in model.graph.node} == {""}
    assert [item.version for item in model.opset_import] == [21]
    sizes = [d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim]
    assert sizes == [1, 1, 8, 8]
    kinds = Counter(node.op_type for node in model.graph.node)
    assert not kinds["Shape"]
    assert kinds["Gelu"] == 1
    assert not kinds["Erf"]
    names = [tensor.name for tensor in model.graph.initializer]
    assert len(names) == len(set(names))


def test_saved_file_computes_what_was_simulated(mixed, tmp_path):
    """In ONNX Runtime alone, with pairs of Q/DQ ops computed as written."""
    planned = Planned(mixed, "qnn", batches())
    held = planned.converted()
    model = saved(planned, held, tmp_path)
    options = ort.SessionOptions()
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    session = ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    x = batches(1)[0]
    alone = [session.run(None, {"image": x[i : i + 1]})[0] for i in range(len(x))]
    np.testing.assert_allclose(
        np.concatenate(alone), planned.adaptor.predict(held, x), rtol=1e-3, atol=1e-4
    )


def residual_net():
    """Two convolutions with a connection around the second."""
    draw = np.random.default_rng(0)
    weights = {n: 0.1 * draw.normal(size=(8, 8, 3, 3)).astype(np.float32) for n in ("v", "w")}
    nodes = [
        op("Conv", "x v", "first", pads=[1, 1, 1, 1]),
        op("Relu", "first", "shown"),
        op("Conv", "shown w", "second", pads=[1, 1, 1, 1]),
        op("Add", "second shown", "sum"),
    ]
    return graph(nodes, {"x": ["batch", 8, 6, 6]}, ["sum"], weights, opset=21)


def test_sum_is_fused_into_the_convolution_that_computes_one_operand(tmp_path):
    """TensorRT: the other operand alone is quantized, and the audit asks for that pair."""
    data = [np.random.default_rng(1).standard_normal((2, 8, 6, 6)).astype(np.float32)]
    planned = Planned(residual_net(), "tensorrt", data)
    model = saved(planned, planned.converted(), tmp_path)
    writers = {name: node for node in model.graph.node for name in node.output}
    (add,) = (node for node in model.graph.node if node.op_type == "Add")
    assert [writers[name].op_type for name in add.input] == ["Conv", "DequantizeLinear"]
    ops = frozenset(node.name for node in model.graph.node if node.op_type in ("Conv", "Add"))
    assert check_structure(model, planned.adaptor.profile, ops) == []
    add.input[1] = "shown"
    (finding,) = check_structure(model, planned.adaptor.profile, ops)
    assert (finding.op, finding.rule) == (add.name, "ring")


@pytest.fixture
def quantized_io(tmp_path):
    """A profile like `qnn`, with integers at inputs and outputs."""
    text = (Path(targets.__file__).parent / "qnn.yaml").read_text()
    path = tmp_path / "board.yaml"
    path.write_text(text.replace("io: float", "io: quantized"))
    return str(path)


def test_file_with_quantized_io_takes_and_returns_the_integers(mixed, quantized_io, tmp_path):
    """The same numbers as with floats, and the audit of the structure finds nothing."""
    planned = Planned(mixed, quantized_io, batches())
    held = planned.converted()
    model = saved(planned, held, tmp_path)
    assert check_structure(model, planned.adaptor.profile) == []
    grids = {p.key.removeprefix("neural_mp.io."): p.value.split() for p in model.metadata_props}
    (source,), (result,) = model.graph.input, model.graph.output
    assert {source.name, result.name} == set(grids)
    x = batches(1)[0][:1]
    kind, scale, zero = grids[source.name]
    info = np.iinfo(kind)
    steps = np.clip(np.rint(x / float(scale)) + int(zero), info.min, info.max).astype(kind)
    options = ort.SessionOptions()
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    session = ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    (integers,) = session.run(None, {source.name: steps})
    kind, scale, zero = grids[result.name]
    assert integers.dtype == kind
    actual = (integers.astype(np.float32) - int(zero)) * float(scale)
    np.testing.assert_allclose(
        actual, planned.adaptor.predict(held, x), rtol=1e-3, atol=float(scale) * 1.01
    )


def test_sum_of_single_noises_predicts_plans(mixed):
    """Within 3 dB along the whole path, from 8 bits to plans near float."""
    data = batches()
    planned = Planned(mixed, "qnn", data)
    figures = planned.adaptor.width_figures(planned.held, data[0], planned.observed)
    costs = TargetCosts(planned.adaptor.profile, figures.macs, figures.elements)
    choices = {name: planned.space.choices(name) for name in planned.space.tunable_ops}
    path = trace_widening_path(choices, figures, costs.of_op)
    for plan in path[:: max(1, len(path) // 6)]:
        predicted = -10 * np.log10(max(plan.noise, 1e-12))
        if predicted < 65:  # above, int32 biases and float32 rounding add their own
            assert planned.sqnr(plan.configs, data[0]) == pytest.approx(predicted, abs=3)


@pytest.mark.parametrize(("least", "samples"), [(np.inf, 1), (0.0, 4)])
def test_small_noise_is_measured_on_the_median_sample(mixed, monkeypatch, least, samples):
    """As if the batch had no other; large noise on all samples of the batch."""
    data = batches()
    planned = Planned(mixed, "qnn", data)

    def noise(x):
        figures = planned.adaptor.width_figures(planned.held, x, planned.observed)
        return {t.tensor: t.noise_at_bits(8) for t in figures.tensors}, figures.weights

    monkeypatch.setattr(switch_model, "_LEAST_NSR", least)
    x = data[0]
    assert len(x) == 4
    order = np.argsort([np.abs(sample).mean() for sample in x])
    median = order[len(x) // 2]
    assert noise(x) == noise(x[[median]] if samples == 1 else x)
    other = x.copy()
    for index, factor in zip(order, (0.5, 0.5, 1, 2), strict=True):
        other[index] *= factor
    assert (noise(x) == noise(other)) == (samples == 1)


def test_wider_activations_are_more_precise(mixed):
    data = batches()
    planned = Planned(mixed, "qnn", data)
    wide = {
        name: next((c for c in planned.space.choices(name) if c.precision is Precision.INT16), FP32)
        for name in planned.space.tunable_ops
    }
    assert planned.sqnr(wide, data[0]) > planned.sqnr({}, data[0]) + 5


def test_ops_that_move_integers_count_as_these_integers():
    """A pooling of floats, one of 16 bits, and an op that has 8 bits, as the file has them."""
    nodes = [
        op("MaxPool", "x", "floats", kernel_shape=[2, 2]),
        op("Relu", "floats", "narrow"),
        op("Sigmoid", "floats", "wide"),
        op("MaxPool", "wide", "pooled", kernel_shape=[1, 1]),
        op("Add", "narrow pooled", "y"),
    ]
    net = graph(nodes, {"x": ["batch", 1, 8, 8]}, ["y"], {}, opset=21)
    planned = Planned(net, "qnn", batches(1))
    configs = planned.space.capabilities["wide"].configs
    wide = next(c for c in configs if str(Widths.from_config(c)) == "a16")
    resolved = planned.space.resolve(planned.space.fastest_plan().replacing({"wide": wide}))
    executed = planned.space.graph.executed(resolved.effective)
    expected = {"floats": "fp32", "narrow": "int8", "wide": "int16", "pooled": "int16"}
    assert executed == {**expected, "y": "int8"}
    written = planned.converted({"wide": wide}).program.graph
    types = {node.name: node.outputs[0] for node in written if node.name in executed}
    stored = {
        name: next((u.node.inputs[2].dtype.name for u in value.uses() if "Q" in u.node.op_type), "")
        for name, value in types.items()
    }
    assert stored == {"floats": "UINT8", "narrow": "UINT8", "wide": "UINT16"} | {
        "pooled": "UINT16",
        "y": "UINT8",
    }


def test_range_of_a_tensor_is_that_of_the_op_which_writes_it():
    """A graph input has the range of its first reader, also past an op that moves integers."""
    nodes = [
        op("MaxPool", "x", "pooled", kernel_shape=[2, 2]),
        op("Relu", "pooled", "first"),
        op("Sigmoid", "first", "y"),
    ]
    net = graph(nodes, {"x": ["batch", 1, 8, 8]}, ["y"], {}, opset=21)
    planned = Planned(net, "qnn", batches())
    for algorithms in (("kl", "mse"), ("minmax", "percentile")):
        configs = {
            name: next(
                c
                for c in planned.space.capabilities[name].configs
                if c.activation.algorithm == algorithm and c.activation.dtype.bits == 8
            )
            for name, algorithm in zip(("first", "y"), algorithms, strict=True)
        }
        written = planned.adaptor.native(planned.converted(configs))
        scales = {
            tensor.name: float(numpy_helper.to_array(tensor))
            for tensor in written.graph.initializer
            if tensor.name.endswith("/scale")
        }
        for tensor, observed in (("pooled", "x"), ("first", "first")):
            low, high = planned.observed.ranges[observed][algorithms[0]]
            assert scales[f"{tensor}/uint8/scale"] == pytest.approx((high - low) / 255)


@pytest.fixture
def shifting():
    """Positive channels of different sizes, and a convolution whose rounded weight shifts means."""
    draw = np.random.default_rng(2)
    constants = {
        "w": draw.normal(size=(6, 2, 3, 3)).astype(np.float32),
        "b": draw.normal(size=6).astype(np.float32),
    }
    constants["w"][0, 0, 0, 0] = 40.0  # one scale for the whole weight: the others lose digits
    nodes = [
        op("Relu", "x", "positive"),
        op("Conv", "positive w b", "grouped", group=2),
    ]
    net = graph(nodes, {"x": ["batch", 4, 8, 8]}, ["grouped"], constants, opset=21)
    sizes = np.array([1, 2, 3, 0.01])[:, None, None]
    data = [(sizes * draw.uniform(0, 1, (8, 4, 8, 8))).astype(np.float32) for _ in range(2)]
    return Planned(net, "vitisai-a8w8", data), data


def test_corrected_bias_removes_the_mean_error_of_a_rounded_weight(shifting):
    planned, data = shifting
    assert planned.observed.channels.keys() >= {"positive"}
    plain = planned.space.fastest_plan()["grouped"]
    expected = planned.adaptor.predict(planned.held, data[0])
    before, after = (
        np.abs(
            (planned.adaptor.predict(planned.converted(configs), data[0]) - expected).mean(
                (0, 2, 3)
            )
        )
        for configs in ({}, {"grouped": replace(plain, corrections=("bias_correction",))})
    )
    assert after.max() < 0.3 * before.max()


def test_correction_without_statistics_is_one_error(shifting):
    planned, _ = shifting
    plain = planned.space.fastest_plan()
    config = replace(plain["grouped"], corrections=("bias_correction",))
    planned.observed = replace(planned.observed, channels={})
    with pytest.raises(PlanError, match="requires channel statistics"):
        planned.converted({"grouped": config})


@pytest.mark.parametrize(("noise", "corrected"), [(0.5, True), (0.95, False)])
def test_biases_are_corrected_if_the_noise_falls_by_a_tenth(shifting, noise, corrected):
    planned, data = shifting

    class Measured(Probe):
        def width_figures(self):
            return planned.adaptor.width_figures(planned.held, (data[0],), planned.observed)

        def output_noise(self, plan, unit=None):
            return noise if any(config.corrections for config in plan.values()) else 1.0

    profile = load_profile("vitisai-a8w8")
    problem = TuningProblem(
        planned.space, planned.observed, (Precision.INT8,), probe=Measured(), target=profile
    )
    search = Widening().search(problem)
    (first,) = next(search)
    (second,) = search.send([Trial(first, Outcome.MISSED, 0.5, 0.5)])
    names = {name for config in second.values() for name in config.corrections}
    assert names == ({"bias_correction"} if corrected else set())


def normalization(square, axis=2, opset=17, doubled=False):
    """A layer normalization over 16 channels of [batch, 5, 16], as exporters wrote before."""
    draw = np.random.default_rng(3)
    constants = {
        "gain": draw.normal(1, 0.3, 16).astype(np.float32),
        "shift": draw.normal(size=16).astype(np.float32),
        "eps": np.float32(1e-5),
        "two": np.float32(2),
    }
    nodes = [
        op("ReduceMean", "x", "mean", axes=[axis]),
        op("Sub", "x mean", "centered"),
        op("Sub", "x mean", "again"),
        op(*square, "squares"),
        op("ReduceMean", "squares", "variance", axes=[axis]),
        op("Add", "variance eps", "safe"),
        op("Sqrt", "safe", "root"),
        op("Div", "again root" if doubled else "centered root", "quotient"),
        op("Mul", "gain quotient", "scaled"),
        op("Add", "scaled shift", "y"),
    ]
    return graph(nodes, {"x": ["batch", 5, 16]}, ["y"], constants, opset=opset)


SQUARES = {"power": ("Pow", "centered two"), "product": ("Mul", "centered centered")}


@pytest.mark.parametrize("square", SQUARES)
@pytest.mark.parametrize("settings", [{}, {"axis": -1, "doubled": True}])
def test_layer_normalization_of_single_ops_is_one_op(square, settings):
    """In integers less noisy than the single ops, which reach 37 dB."""
    draw = np.random.default_rng(0)
    data = [draw.normal(3, 2, (4, 5, 16)).astype(np.float32) for _ in range(2)]
    net = normalization(SQUARES[square], **settings)
    planned = Planned(net, "qnn", data)
    kinds = [node.op_type for node in planned.held.program.graph]
    assert kinds == ["LayerNormalization"]
    planned.held = replace(planned.held, given=None, _runners={})
    (expected,) = run(net, x=data[0])
    actual = planned.adaptor.predict(planned.held, data[0])
    np.testing.assert_allclose(actual, expected, atol=1e-5)
    assert planned.sqnr({}, data[0]) > 39


def test_normalization_over_another_axis_stays():
    data = [np.random.default_rng(0).normal(size=(4, 16, 16)).astype(np.float32)]
    net = normalization(SQUARES["power"], axis=1)
    net.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 16
    kinds = {node.op_type for node in Planned(net, "qnn", data).held.program.graph}
    assert "LayerNormalization" not in kinds


def test_large_bias_of_a_tiny_channel_stays_within_int32(tmp_path):
    """Activations of 16 bits and a channel of tiny weights: the scale of the weights gives way."""
    weight = np.ones((4, 2), np.float32)
    weight[:, 1] = 1e-7
    bias = np.array([0.5, 40.0], np.float32)
    x = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
    net = graph(
        [op("Gemm", "x w b", "y")], {"x": ["batch", 4]}, ["y"], {"w": weight, "b": bias}, opset=21
    )
    planned = Planned(net, "qnn", [x])
    (name,) = planned.space.tunable_ops
    widths = {Widths.from_config(config): config for config in planned.space.choices(name)}
    held = planned.converted({name: widths[Widths.W8A16]})
    y = planned.adaptor.predict(held, x)
    np.testing.assert_allclose(y, x @ weight + bias, atol=0.05)
    stored = saved(planned, held, tmp_path).graph.initializer
    (integers,) = [numpy_helper.to_array(t) for t in stored if t.name.endswith("int32")]
    assert np.abs(integers.astype(np.int64)).max() <= 2**30


@pytest.mark.parametrize("target", profile_names())
def test_masks_are_clipped_and_said(target):
    draw = np.random.default_rng(0)
    mask = np.where(np.arange(6) < 4, 0.0, -3.4e38).astype(np.float32)
    weight = draw.normal(size=(6, 6)).astype(np.float32)
    nodes = [op("MatMul", "x w", "a"), op("Add", "a mask", "b"), op("Softmax", "b", "y")]
    net = graph(nodes, {"x": ["batch", 6]}, ["y"], {"w": weight, "mask": mask}, opset=21)
    x = draw.normal(size=(4, 6)).astype(np.float32)
    planned, (expected,) = Planned(net, target, [x]), run(net, x=x)
    assert any("mask" in warning for warning in planned.held.warnings)
    y = planned.adaptor.predict(planned.converted(), x)
    # A step of the 8-bit sums is 0.4, or 1 as a power of two, for a range down to the mask.
    np.testing.assert_allclose(y, expected, atol=0.2)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint16", "int16"])
def test_grids_cover_their_range_with_an_exact_zero(dtype, symmetric, power_of_two):
    scheme = Scheme.SYMMETRIC if symmetric else Scheme.ASYMMETRIC
    for low, high in ((-1.5, 3.0), (0.0, 6.0), (-2.0, -1.0), (0.0, 0.0)):
        grid = make_activation_grid(low, high, QuantDType(dtype), scheme, power_of_two)
        values = np.linspace(min(low, 0), max(high, 0), 101, dtype=np.float32)
        rounded = grid.dequantize_integers(grid.quantize_values(values))
        assert np.abs(rounded - values).max() <= float(grid.scale) * 1.01
        assert grid.dequantize_integers(grid.quantize_values(np.zeros(1, np.float32))) == 0
        if power_of_two:
            assert np.log2(float(grid.scale)) == round(np.log2(float(grid.scale)))
        if symmetric:
            assert int(grid.zero_point) in (0, 128, 32768)


def test_weights_have_a_scale_for_each_channel():
    weight = np.array([[1.0, -100.0], [0.5, 50.0]], np.float32)
    grid = make_weight_grid(weight, QuantDType.INT8, 1, power_of_two=False)
    np.testing.assert_allclose(grid.scale, [1 / 127, 100 / 127], rtol=1e-6)
    np.testing.assert_array_equal(grid.quantize_values(weight), [[127, -127], [64, 64]])


def branches():
    """Two convolutions of different ranges, concatenated, pooled, scaled and summed."""
    draw = np.random.default_rng(2)
    constants = {
        "w1": draw.normal(size=(4, 1, 3, 3)).astype(np.float32),
        "w2": (9 * draw.normal(size=(4, 1, 3, 3))).astype(np.float32),
        "w3": draw.normal(size=(8, 8, 1, 1)).astype(np.float32),
        "b3": draw.normal(size=8).astype(np.float32),
    }
    nodes = [
        op("Conv", "image w1", "left", pads=[1, 1, 1, 1]),
        op("Conv", "image w2", "right", pads=[1, 1, 1, 1]),
        op("Relu", "right", "positive"),
        op("Concat", "left positive", "both", axis=1),
        op("MaxPool", "both", "pooled", kernel_shape=[2, 2], strides=[2, 2]),
        op("Conv", "pooled w3 b3", "mixed"),
        op("Sigmoid", "mixed", "gate"),
        op("Mul", "mixed gate", "gated"),
        op("Add", "gated pooled", "sum"),
    ]
    return graph(nodes, {"image": ["batch", 1, 8, 8]}, ["sum"], constants, opset=21)


@pytest.mark.parametrize("target", profile_names())
@pytest.mark.parametrize("width", [0, 1])
@pytest.mark.parametrize("net", ["branches", "mixed"])
def test_written_files_hold_by_the_structural_audit(net, target, width, mixed, tmp_path):
    """The narrowest plan, and the next wider one, of every shipped profile."""
    planned = Planned(branches() if net == "branches" else mixed, target, batches())
    configs = {}
    for name in planned.space.tunable_ops:
        choices = [config for config in planned.space.choices(name) if config.activation]
        configs[name] = choices[min(width, len(choices) - 1)]
    if not configs:
        pytest.skip(f"{target} has no integer kernel for this net")
    held = planned.converted(configs)
    model = saved(planned, held, tmp_path)
    assert check_structure(model, planned.adaptor.profile, frozenset(configs)) == []
    assert planned.sqnr(configs, batches(1)[0]) > 10


def layer(kind, constants, shape, inputs="x w b", **attributes):
    """A net of one layer, with data for it."""
    net = graph([op(kind, inputs, "y", **attributes)], {"x": shape}, ["y"], constants, opset=21)
    sizes = [4 if isinstance(size, str) else size for size in shape]
    return net, np.random.default_rng(3).standard_normal(sizes).astype(np.float32)


def drawn(*shape):
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


LAYERS = {
    "transposed in groups": lambda: layer(
        "ConvTranspose", {"w": drawn(4, 3, 3, 3), "b": drawn(6)}, ["batch", 4, 5, 5], group=2
    ),
    "transposed": lambda: layer(
        "ConvTranspose", {"w": drawn(4, 3, 3, 3), "b": drawn(3)}, ["batch", 4, 5, 5]
    ),
    "depthwise": lambda: layer(
        "Conv", {"w": drawn(4, 1, 3, 3), "b": drawn(4)}, ["batch", 4, 6, 6], group=4
    ),
    "bias of one row": lambda: layer("Gemm", {"w": drawn(6, 5), "b": drawn(1, 5)}, ["batch", 6]),
    "bias of one number": lambda: layer("Gemm", {"w": drawn(6, 5), "b": drawn(1)}, ["batch", 6]),
    "bias of a matrix": lambda: layer("Gemm", {"w": drawn(6, 5), "b": drawn(4, 5)}, [4, 6]),
    "both transposed": lambda: layer(
        "Gemm", {"w": drawn(5, 6), "b": drawn(5)}, [6, 4], transA=1, transB=1
    ),
    "vector": lambda: layer("MatMul", {"w": drawn(6)}, ["batch", 6], "x w"),
    "constant first": lambda: layer("MatMul", {"w": drawn(5, 6)}, [6, 4], "w x"),
}


@pytest.mark.parametrize("target", ["qnn", "vitisai", "tensorrt"])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_every_form_are_written_or_stay_in_float(name, target, tmp_path):
    net, x = LAYERS[name]()
    planned = Planned(net, target, [x])
    held = planned.converted()
    y = planned.adaptor.predict(held, x)
    (expected,) = run(net, x=x)
    noise = np.square(y - expected).sum() / np.square(expected).sum()
    assert noise < 10**-2.0  # 20 dB
    model = saved(planned, held, tmp_path)
    configs = frozenset(op for op, c in planned.space.fastest_plan().items() if c.activation)
    assert check_structure(model, planned.adaptor.profile, configs) == []


def test_classic_masks_are_clipped():
    """A mask of -10000, as BERT's exports have."""
    mask = np.where(np.arange(6) < 4, 0.0, -10000.0).astype(np.float32)
    nodes = [op("Add", "x mask", "b"), op("Softmax", "b", "y")]
    net = graph(nodes, {"x": ["batch", 6]}, ["y"], {"mask": mask}, opset=21)
    planned = Planned(net, "qnn", [drawn(4, 6)])
    (stored,) = [v for v in planned.held.program.graph.initializers.values() if v.shape == [6]]
    assert stored.const_value.numpy().min() == -100


def test_constants_that_are_not_finite_keep_their_op_in_float():
    fill = np.array([0.0, -np.inf], np.float32)
    nodes = [op("Add", "x fill", "a"), op("ReduceMax", "a axes", "y")]
    constants = {"fill": fill, "axes": np.array([1])}
    net = graph(nodes, {"x": ["batch", 2]}, ["y"], constants, opset=21)
    planned = Planned(net, "qdq", [drawn(4, 2)])
    assert "a" not in planned.space.tunable_ops
    assert "not finite" in str(planned.space.capabilities["a"].reasons)
