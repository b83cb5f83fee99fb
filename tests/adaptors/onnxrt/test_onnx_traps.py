"""What went wrong once, each on the smallest model that shows it."""

import numpy as np
import onnx
import onnx_ir
import pytest
from onnx import TensorProto, helper
from onnx_nets import MACHINE, Converted, graph, op, run

from neural_mp.adaptors.onnxrt.adaptor import OnnxRuntimeAdaptor
from neural_mp.adaptors.onnxrt.canonicalize import canonicalize_graph
from neural_mp.adaptors.onnxrt.files import loading
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import OpConfig, Precision
from neural_mp.errors import PlanError
from neural_mp.testing import signal_to_noise

BF16, FP32, INT8 = Precision.BF16, Precision.FP32, Precision.INT8


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


X = {"x": draw(2, 4, 8, 8, seed=9)}
W, W3, W1 = draw(8, 4, 3, 3), draw(5, 8, 3, 3, seed=1), draw(6, 4, 1, 1, seed=2)


def conv_and(*nodes, outputs=("y",), constants=None, **settings):
    constants = {"w": W, **(constants or {})}
    return graph(
        [op("Conv", "x w", "c"), *nodes],
        {"x": ["n", 4, 8, 8]},
        list(outputs),
        constants,
        **settings,
    )


@pytest.mark.parametrize(("mode", "scale"), [("linear", 2.0), ("nearest", 1.6)])
def test_resizing_of_an_old_opset_is_not_shifted_by_half_a_pixel(mode, scale):
    constants = {"s": np.array([1, 1, scale, scale], np.float32)}
    model = conv_and(op("Resize", "c s", "y", mode=mode), constants=constants, opset=10)
    converted = Converted(model, X, BF16)
    assert converted.float.obstacle is None
    assert signal_to_noise(converted.reference, converted.result) > 40


def test_an_op_that_means_something_else_in_a_later_opset_is_left_alone():
    model = conv_and(op("Hardmax", "c", "y", axis=1), opset=12)
    converted = Converted(model, X, BF16)
    assert "the outputs differ" in converted.float.obstacle
    np.testing.assert_array_equal(converted.result, converted.reference)


def test_what_raising_the_opset_puts_in_has_names_and_its_constants_count_as_such():
    """Softmax of opset 12 becomes several ops; the limits of a Clip were attributes."""
    softmax = Converted(conv_and(op("Softmax", "c", "y", axis=1), opset=11), X)
    assert "" not in softmax.float.structure.nodes
    assert softmax.kernels["QLinearConv"] == 1
    nodes = (op("Clip", "c", "r", min=0.0, max=6.0), op("Conv", "r v", "y"))
    clip = Converted(conv_and(*nodes, constants={"v": W3}, opset=10), X)
    assert clip.kernels["QLinearConv"] == 2
    assert clip.kernels["QuantizeLinear"] == clip.kernels["DequantizeLinear"] == 1


@pytest.mark.parametrize("rest", [[op("Sin", "b", "z")], [op("Identity", "b", "z")]])
def test_one_half_of_a_split_is_read_in_floats(rest):
    nodes = (op("Split", "c", "a b", axis=1, num_outputs=2), op("Conv", "a v", "y"), *rest)
    model = conv_and(*nodes, outputs=("y", "z"), constants={"v": W1})
    converted = Converted(model, X)
    assert converted.integer_convolutions == 2
    for reference, output in zip(converted.reference, converted.result, strict=True):
        assert signal_to_noise(reference, output) > 20


def test_a_first_axis_that_is_not_that_of_samples_is_not_cut():
    """Time comes first, and a convolution over it takes more than one step."""
    model = graph(
        [
            op("Transpose", "x", "t", perm=[1, 0]),
            op("Unsqueeze", "t axis", "u"),
            op("Conv", "u w", "c"),
            op("Squeeze", "c axis", "s"),
            op("Transpose", "s", "y", perm=[1, 0]),
        ],
        {"x": ["time", 8]},
        ["y"],
        {"axis": np.array([0]), "w": draw(5, 8, 3)},
    )
    converted = Converted(model, {"x": draw(20, 8)})
    assert signal_to_noise(converted.reference, converted.result) > 30


def test_samples_that_have_to_do_with_each_other_are_calibrated_together():
    model = graph(
        [
            op("MatMul", "x w", "h"),
            op("Transpose", "h", "t", perm=[1, 0]),
            op("MatMul", "h t", "k"),
            op("ReduceSum", "k axis", "r", keepdims=1),
            op("MatMul", "r v", "y"),
        ],
        {"x": ["b", 8]},
        ["y"],
        {"axis": np.array([1]), "w": draw(8, 5), "v": draw(1, 5)},
    )
    converted = Converted(model, {"x": draw(20, 8)})
    assert signal_to_noise(converted.reference, converted.result) > 30


def test_constants_that_are_no_numbers_are_not_computed():
    nodes = [
        op("Cast", "numbers", "words", to=TensorProto.STRING),
        op("SequenceConstruct", "k l", "s"),
        op("SequenceAt", "s place", "e"),
        op("ReduceSum", "e", "f", keepdims=0),
        op("MatMul", "x w", "m"),
        op("Add", "m f", "y"),
    ]
    constants = {
        "numbers": np.arange(3, dtype=np.float32),
        "k": draw(2),
        "l": draw(3),
        "place": np.array(1),
        "w": draw(4, 5),
    }
    model = graph(nodes, {"x": ["n", 4]}, ["y"], constants)
    strings = helper.make_tensor_value_info("words", TensorProto.STRING, [3])
    model.graph.output.append(strings)
    converted = Converted(model, {"x": draw(3, 4)})
    assert converted.float.obstacle is None
    assert signal_to_noise(converted.reference[0], converted.result[0]) > 30
    assert list(converted.result[1]) == list(converted.reference[1])


def test_a_function_written_in_another_opset_leaves_the_model_alone():
    inner = [helper.make_node("MatMul", ["a", "b"], ["c"])]
    function = helper.make_function(
        "mine", "block", ["a", "b"], ["c"], inner, [helper.make_opsetid("", 18)]
    )
    model = graph([op("MatMul", "x w", "y")], {"x": ["n", 4]}, ["y"], {"w": draw(4, 5)})
    model.graph.node[0].CopyFrom(
        helper.make_node("block", ["x", "w"], ["y"], domain="mine", name="block")
    )
    model.functions.append(function)
    model.opset_import.append(helper.make_opsetid("mine", 1))
    x = {"x": draw(3, 4)}
    converted = Converted(model, x)
    np.testing.assert_array_equal(converted.result, run(model, **x)[0])
    assert converted.float.obstacle


@pytest.mark.parametrize(
    "kind", ["Pad", "Resize scales", "Resize sizes", "Resize region", "Resize ignored region"]
)
def test_axes_that_are_named_stay_those(kind):
    """ONNX Runtime's integer convolutions have channels last, and it forgets to move the axes."""
    nodes = {
        "Pad": op("Pad", "c p - ax", "d"),
        "Resize scales": op("Resize", "c - s", "d", mode="nearest", axes=[2, 3]),
        "Resize sizes": op("Resize", "c - - z", "d", mode="nearest", axes=[2, 3]),
        "Resize region": op(
            "Resize",
            "c roi s",
            "d",
            mode="linear",
            axes=[-2, 3],
            coordinate_transformation_mode="tf_crop_and_resize",
        ),
        "Resize ignored region": op("Resize", "c roi s", "d", mode="linear", axes=[2, 3]),
    }
    constants = {
        "p": np.array([1, 2]),
        "ax": np.array([3]),
        "s": np.array([2, 1.5], np.float32),
        "z": np.array([9, 7]),
        "roi": np.array([0.1, 0.2, 0.8, 0.9], np.float32),
        "v": W3,
    }
    used = {*nodes[kind].input, "v"}
    model = conv_and(
        nodes[kind],
        op("Conv", "d v", "y"),
        constants={name: array for name, array in constants.items() if name in used},
    )
    converted = Converted(model, X)
    assert signal_to_noise(converted.reference, converted.result) > 25
    assert converted.kernels["QLinearConv"] == 2


def test_a_plan_that_cuts_a_kernel_apart_says_so():
    model = conv_and(op("Relu", "c", "r"), op("Conv", "r v", "y"), constants={"v": W3})
    with pytest.raises(
        PlanError, match="'c' and 'r' run in one integer kernel .*, got int8 and fp32"
    ):
        Converted(model, X, r=Precision.FP32)


@pytest.mark.parametrize(
    ("layer", "weight", "plan"),
    [
        (op("Conv", "p u", "m", group=2), draw(6, 4, 1, 1), {"m": FP32, "r": FP32}),
        (op("ConvTranspose", "p u", "m"), draw(8, 6, 2, 2), {}),
    ],
)
def test_a_float_layer_between_integer_ones_stays_one_with_its_weights(layer, weight, plan):
    """ONNX Runtime rounds them by itself where it finds such a layer, and runs it in integers."""
    nodes = (op("Relu", "c", "p"), layer, op("Relu", "m", "r"), op("Conv", "r v", "y"))
    constants = {"u": weight, "v": draw(5, 6, 3, 3, seed=4)}
    converted = Converted(conv_and(*nodes, constants=constants), X, **plan)
    assert converted.kernels["QLinearConv"] == 2
    assert converted.kernels[layer.op_type] == 1
    # Of what the layer reads and of the result, and not of its weight.
    assert converted.kernels["DequantizeLinear"] == 2
    assert signal_to_noise(converted.reference, converted.result) > 30


@pytest.mark.parametrize("first", ["int8", "fp32"])
def test_the_order_of_an_integer_and_a_float_reader_does_not_matter(first):
    """Both read one tensor in INT8; the weight of the reader in float is rounded in no order."""
    readers = (op("Conv", "p u", "m"), op("Conv", "p w2", "n"))
    nodes = (
        op("Relu", "c", "p"),
        *(readers if first == "int8" else readers[::-1]),
        op("Relu", "n", "r"),
        op("Add", "m r", "s"),
        op("Conv", "s v", "y"),
    )
    constants = {"u": draw(6, 8, 1, 1), "w2": draw(6, 8, 1, 1, seed=5), "v": draw(5, 6, 3, 3)}
    converted = Converted(conv_and(*nodes, constants=constants), X, n=FP32, r=FP32)
    assert converted.kernels["QLinearConv"] == 3
    assert converted.kernels["Conv"] == 1


_MOVERS = {
    "MaxPool": (op("MaxPool", "p", "q", kernel_shape=[2, 2]), [6, 8, 2, 2]),
    "Transpose": (op("Transpose", "p", "q", perm=[0, 1, 3, 2]), [6, 8, 2, 2]),
    "Reshape": (op("Reshape", "p s", "q"), [6, 4, 2, 2]),
    "Slice": (op("Slice", "p b e", "q"), [6, 8, 2, 2]),
    "of one channel": (op("Slice", "p b e", "q"), [6, 1, 2, 2]),
}


@pytest.mark.parametrize("mover", _MOVERS)
def test_what_moves_values_ahead_of_a_float_layer_keeps_its_weight_unrounded(mover):
    """ONNX Runtime moves a DequantizeLinear past it, and rounds the weight behind that."""
    moving, sizes = _MOVERS[mover]
    sliced = [5, 1] if mover == "of one channel" else [5, 8]
    constants = {
        "s": np.array([0, 4, 6, 12]),
        "b": np.array([0, 0]),
        "e": np.array(sliced),
        "u": draw(*sizes),
        "v": draw(5, 6, 3, 3, seed=4),
    }
    used = {*moving.input, "u", "v"}
    nodes = (op("Relu", "c", "p"), moving, op("Conv", "q u", "m"), op("Relu", "m", "r"))
    model = conv_and(
        *nodes,
        op("Conv", "r v", "y"),
        constants={name: array for name, array in constants.items() if name in used},
    )
    converted = Converted(model, X, m=FP32, r=FP32)
    assert converted.kernels["QLinearConv"] == 2
    assert signal_to_noise(converted.reference, converted.result) > 30


def test_an_average_over_a_dilated_window_stays_in_floats():
    nodes = (
        op("AveragePool", "c", "a", kernel_shape=[2, 2], dilations=[2, 2]),
        op("Conv", "a v", "y"),
    )
    converted = Converted(conv_and(*nodes, constants={"v": W3[..., :1, :1]}), X)
    assert converted.kernels["AveragePool"] == 1
    assert signal_to_noise(converted.reference, converted.result) > 25
    assert converted.kernels["QLinearConv"] == converted.kernels["MatMulIntegerToFloat"] == 1
    assert "cannot load it" in converted.space.capabilities["a"].reasons[INT8]


def test_names_that_we_would_give_may_be_taken():
    for name in ("x/scale", "mm.weight/int8", "x/uint8", "h/dequantized", "h/bf16"):
        model = graph(
            [op("MatMul", "x w", "h"), op("Sin", "h", name), op("MatMul", f"{name} v", "y")],
            {"x": ["n", 4]},
            ["y"],
            {"w": draw(4, 5), "v": draw(5, 3)},
        )
        model.graph.node[0].name = "mm"
        for precision in (INT8, BF16):
            converted = Converted(model, {"x": draw(3, 4)}, precision)
            assert signal_to_noise(converted.reference, converted.result) > 25


def test_nan_is_traced_in_a_model_in_bf16():
    model = graph(
        [op("MatMul", "x w", "h"), op("Relu", "h", "y")], {"x": ["n", 4]}, ["y"], {"w": draw(4, 5)}
    )
    converted = Converted(model, {"x": draw(3, 4)}, BF16)
    batch = np.full((1, 4), np.nan, np.float32)
    assert converted.adaptor.op_outputs.first_non_finite(converted.model, batch) == "h"


def test_an_output_in_bf16_comes_as_one():
    model = graph([op("MatMul", "x w", "m")], {"x": ["n", 4]}, ["m"], {"w": draw(4, 5)})
    model.graph.node.append(op("Cast", "m", "y", to=TensorProto.BFLOAT16))
    model.graph.output[0].CopyFrom(
        helper.make_tensor_value_info("y", TensorProto.BFLOAT16, ["n", 5])
    )
    x = draw(3, 4)
    converted = Converted(model, {"x": x})
    assert converted.result.dtype == np.dtype("bfloat16")
    assert signal_to_noise(x @ draw(4, 5), converted.result.astype(np.float32)) > 25


@pytest.mark.parametrize("precision", [INT8, BF16])
def test_one_tensor_as_two_outputs_keeps_its_name(precision):
    model = conv_and(op("Relu", "c", "y"), outputs=("y", "y"))
    converted = Converted(model, X, precision)
    stored = converted.adaptor.native(converted.model)
    assert [value.name for value in stored.graph.output] == ["y", "y"]


def test_an_output_of_unknown_rank_can_be_saved(tmp_path):
    model = graph(
        [op("MatMul", "x w", "m"), op("Reshape", "m s", "y")],
        {"x": ["n", 4], "s": [2]},
        ["y"],
        {"w": draw(4, 6)},
    )
    model.graph.input[1].type.tensor_type.elem_type = TensorProto.INT64
    model.graph.input[1].type.tensor_type.shape.dim[0].dim_param = "rank"
    data = {"x": draw(3, 4), "s": np.array([9, 2])}
    converted = Converted(model, data)
    for variant in (converted.float, converted.model):
        converted.adaptor.single_file.save_file(variant, tmp_path / "model.onnx", {})
        (output,) = run(str(tmp_path / "model.onnx"), **data)
        np.testing.assert_array_equal(output, converted.adaptor.predict(variant, data))


def test_a_model_of_onnx_ir_keeps_its_weights_in_files(tmp_path):
    model = conv_and(op("Relu", "c", "y"))
    (expected,) = run(model, **X)  # before `save_model` takes the weights out of the message
    onnx.save_model(
        model, tmp_path / "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=0
    )
    loaded = OnnxRuntimeAdaptor().load(onnx_ir.load(tmp_path / "m.onnx"))
    np.testing.assert_array_equal(OnnxRuntimeAdaptor().predict(loaded, X), expected)


def test_the_long_name_of_the_plain_domain():
    model = conv_and(op("Relu", "c", "y"))
    model.opset_import[0].domain = "ai.onnx"
    assert Converted(model, X).kernels["QLinearConv"] == 1


def test_every_float_reader_of_an_integer_tensor_dequantizes_it():
    model = conv_and(
        op("Sin", "c", "s"), op("Cos", "c", "t"), op("Tanh", "c", "u"), outputs=("s", "t", "u")
    )
    converted = Converted(model, X)
    counts = converted.model.counts
    assert counts.dequantize == converted.kernels["DequantizeLinear"] == 3


def test_infinite_masks_do_not_stand_in_the_way():
    """Attention as exporters write it: a mask of -inf is added to what nothing quantizes."""
    model = graph(
        [
            op("MatMul", "x w", "q"),
            op("Transpose", "q", "t", perm=[0, 2, 1]),
            op("MatMul", "q t", "scores"),
            op("Add", "scores mask", "masked"),
            op("Softmax", "masked", "p"),
            op("MatMul", "p q", "mixed"),
            op("MatMul", "mixed v", "y"),
        ],
        {"x": ["n", 3, 4], "mask": [3, 3]},
        ["y"],
        {"w": draw(4, 4), "v": draw(4, 4, seed=1)},
    )
    mask = np.triu(np.full((3, 3), -np.inf, np.float32), 1)
    converted = Converted(model, {"x": draw(2, 3, 4), "mask": mask})
    assert converted.kernels["MatMulIntegerToFloat"] == 2
    assert signal_to_noise(converted.reference, converted.result) > 25


def test_a_mask_of_the_lowest_float32_stays_finite_in_fp16():
    model = graph(
        [op("MatMul", "x w", "scores"), op("Add", "scores mask", "m"), op("Softmax", "m", "y")],
        {"x": ["n", 4]},
        ["y"],
        {"w": draw(4, 3), "mask": np.array([0, np.finfo(np.float32).min, 0], np.float32)},
    )
    converted = Converted(model, {"x": draw(5, 4)}, Precision.FP16)
    stored = converted.adaptor.native(converted.model).graph.initializer
    halves = [onnx.numpy_helper.to_array(t) for t in stored if t.data_type == TensorProto.FLOAT16]
    assert all(np.isfinite(half).all() for half in halves)
    assert signal_to_noise(converted.reference, converted.result) > 50


def test_a_plan_of_which_nothing_comes_is_the_fp32_plan():
    """ONNX Runtime multiplies integers only where what comes before and behind is stored so."""
    model = graph([op("Sigmoid", "x", "s"), op("Mul", "s x", "y")], {"x": ["n", 4]}, ["y"], {})
    adaptor = OnnxRuntimeAdaptor()
    space = adaptor.space(adaptor.load(model), MACHINE)
    (name,) = (node.name for node in space.graph if node.type == "Mul")
    plan = PrecisionPlan({name: OpConfig(Precision.INT8)})
    assert set(space.resolve(plan).effective.values()) == {Precision.FP32}
    assert space.resolve(plan).plan == space.fp32_plan()


def test_a_rewritten_graph_that_yields_something_else_is_discarded(monkeypatch):
    """With the opset unchanged: the rewritten graph is run next to the original."""

    def wrong(program, folder):
        notes = canonicalize_graph(program, folder)
        weight = program.graph.initializers["w"]
        weight.const_value = onnx_ir.tensor(weight.const_value.numpy() * 1.01, name="w")
        return notes

    monkeypatch.setattr(loading, "canonicalize_graph", wrong)
    converted = Converted(conv_and(op("Relu", "c", "y")), X)
    assert "not equal to the original: the outputs differ" in converted.float.obstacle
    np.testing.assert_array_equal(converted.result, converted.reference)
    assert any("the outputs differ" in warning for warning in converted.float.warnings)


@pytest.mark.parametrize("kind", ["random", "rounded apart"])
def test_an_output_that_differs_from_run_to_run_or_by_rounding_refuses_nothing(kind, monkeypatch):
    """The original yields something else itself, so the outputs cannot be compared."""

    def rounded(program, folder):
        notes = canonicalize_graph(program, folder)
        weight = program.graph.initializers["w"]
        weight.const_value = onnx_ir.tensor(
            weight.const_value.numpy() * np.float32(1 + 1e-6), name="w"
        )
        return notes

    monkeypatch.setattr(loading, "canonicalize_graph", rounded)
    nodes, constants = [op("RandomNormalLike", "c", "y")], {}
    if kind == "rounded apart":
        nodes = [op("Mul", "c big", "m"), op("Sin", "m", "y")]
        constants["big"] = np.float32(1e9)
    model = conv_and(*nodes, outputs=("c", "y"), constants=constants)
    assert OnnxRuntimeAdaptor().load(model, example=X).obstacle is None
