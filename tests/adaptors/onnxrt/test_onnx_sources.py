"""The models people have: converted right, or left alone with a reason; never changed."""

import subprocess
import sys

import numpy as np
import onnx
import pytest
from nets import small_net
from onnx import TensorProto, helper
from onnx_nets import MACHINE, Converted, as_onnx, graph, kernels, op, run

from neural_mp.adaptors.onnxrt.adaptor import OnnxRuntimeAdaptor
from neural_mp.adaptors.onnxrt.sessions import RUNS_LAYERS_BEFORE_BRANCHES
from neural_mp.core.precision import Precision
from neural_mp.errors import ConfigurationError, DataError, ModelLoadError
from neural_mp.testing import signal_to_noise

INT8 = Precision.INT8


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def two_convolutions(**other):
    return graph(
        [op("Conv", "x w", "a"), op("Relu", "a", "r"), op("Conv", "r v", "y")],
        {"x": ["n", 3, 8, 8]},
        ["y"],
        {"w": draw(4, 3, 3, 3), "v": draw(5, 4, 1, 1, seed=1)},
        **other,
    )


X = {"x": draw(2, 3, 8, 8, seed=2)}


def refused(match):
    return pytest.raises(ModelLoadError, match=match)


@pytest.mark.parametrize("opset", [7, 9, 11, 12])
def test_an_older_opset_is_raised_and_that_is_said(opset):
    model = two_convolutions(opset=opset, ir_version=4)
    converted = Converted(model, X)
    assert converted.kernels["QLinearConv"] == 2
    assert signal_to_noise(converted.reference, converted.result) > 30
    (warning,) = converted.float.warnings
    assert f"opset {opset} was raised to 13" in warning
    np.testing.assert_array_equal(converted.reference, run(model, **X)[0])


def test_torch_models_of_an_older_opset(digits):
    model = as_onnx(small_net(), opset=18)
    images = digits[1].images[:20]
    converted = Converted(model, {"image": images})
    assert converted.kernels["QLinearConv"] == 6


def test_initializers_that_are_inputs_too_are_constants():
    """As files of IR version 3 have them."""
    model = two_convolutions(opset=8, ir_version=3)
    for tensor in model.graph.initializer:
        given = helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
        model.graph.input.append(given)
    converted = Converted(model, X)
    assert [port.name for port in converted.float.signature.inputs] == ["x"]
    assert converted.kernels["QLinearConv"] == 2


@pytest.mark.parametrize("newer", [0, 1])
def test_a_model_in_the_newest_version_of_the_format_runs(newer):
    """The `onnx` package writes a version that ONNX Runtime does not know yet."""
    model = two_convolutions(ir_version=onnx.IR_VERSION + newer)
    converted = Converted(model, X)
    assert converted.kernels["QLinearConv"] == 2
    (plain,) = run(two_convolutions(), **X)
    np.testing.assert_array_equal(converted.reference, plain)
    assert model.ir_version == onnx.IR_VERSION + newer  # the user's own stays as it is


def test_nodes_without_names():
    model = two_convolutions()
    for node in model.graph.node:
        node.name = ""
    converted = Converted(model, X)
    assert len(set(converted.float.structure.nodes)) == 3
    assert converted.kernels["QLinearConv"] == 2


def test_a_node_with_the_name_of_an_input_and_of_a_tensor():
    model = two_convolutions()
    for node, name in zip(model.graph.node, ("x", "r", "y"), strict=True):
        node.name = name
    converted = Converted(model, X)
    assert converted.kernels["QLinearConv"] == 2


def test_two_nodes_of_one_name_are_refused_as_onnx_runtime_does():
    model = two_convolutions()
    for node in model.graph.node:
        node.name = "same"
    with refused("two nodes with same node name"):
        OnnxRuntimeAdaptor().load(model)


def test_one_weight_of_two_layers_and_two_weights_of_one_content():
    weight = draw(3, 3, 1, 1)
    model = graph(
        [op("Conv", "x w", "a"), op("Conv", "a w", "b"), op("Conv", "b v", "y")],
        {"x": ["n", 3, 8, 8]},
        ["y"],
        {"w": weight, "v": weight},
    )
    converted = Converted(model, X)
    assert converted.kernels["QLinearConv"] == 3
    assert signal_to_noise(converted.reference, converted.result) > 25


def test_a_weight_that_is_data_as_well():
    model = graph(
        [op("Conv", "x w", "a"), op("ReduceSum", "w", "s", keepdims=0), op("Mul", "a s", "y")],
        {"x": ["n", 3, 8, 8]},
        ["y"],
        {"w": draw(4, 3, 3, 3)},
    )
    converted = Converted(model, X)
    assert signal_to_noise(converted.reference, converted.result) > 30


def test_weights_in_files_beside_the_model(tmp_path):
    model = two_convolutions()
    expected = run(model, **X)[0]
    (tmp_path / "data").mkdir()
    onnx.save_model(
        model,
        tmp_path / "model.onnx",
        save_as_external_data=True,
        all_tensors_to_one_file=False,
        size_threshold=0,
    )
    converted = Converted(str(tmp_path / "model.onnx"), X)
    np.testing.assert_array_equal(converted.reference, expected)
    assert converted.kernels["QLinearConv"] == 2
    whole = converted.adaptor.native(converted.float)
    np.testing.assert_array_equal(run(whole, **X)[0], expected)
    (tmp_path / "w").unlink()
    with refused("weight file '.*w' does not exist"):
        OnnxRuntimeAdaptor().load(str(tmp_path / "model.onnx"))


def test_large_weights_stay_in_the_file_and_a_changed_file_is_noticed(tmp_path):
    path = tmp_path / "model.onnx"
    model = graph([op("MatMul", "x w", "y")], {"x": ["n", 64]}, ["y"], {"w": draw(64, 32)})
    onnx.save(model, path)
    adaptor = OnnxRuntimeAdaptor()
    held = adaptor.load(path)
    assert list(held.origin.files) == ["model.onnx"]
    np.testing.assert_array_equal(
        held.program.graph.initializers["w"].const_value.numpy(), draw(64, 32)
    )
    path.write_bytes(path.read_bytes() + b" ")
    with refused("changed after the model was loaded"):
        adaptor.predict(held, {"x": draw(2, 64)})


def test_a_model_given_as_an_object_stays_as_it_is():
    model = two_convolutions()
    before = model.SerializeToString(deterministic=True)
    Converted(model, X)
    Converted(model, X, Precision.BF16)
    assert model.SerializeToString(deterministic=True) == before


def with_branches() -> onnx.ModelProto:
    """A convolution whose result is read within both branches of an If, and behind it."""

    def branch(name, kind):
        return helper.make_graph(
            [helper.make_node(kind, ["a"], [name], name=name)],
            name,
            [],
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, None)],
        )

    nodes = [
        op("Conv", "x w", "a"),
        op("ReduceSum", "x", "s", keepdims=0),
        op("Greater", "s zero", "c"),
        op("If", "c", "i", then_branch=branch("t", "Relu"), else_branch=branch("e", "Neg")),
        op("Conv", "i v", "y"),
    ]
    constants = {"w": draw(4, 3, 3, 3), "v": draw(5, 4, 1, 1, seed=1), "zero": np.float32(0)}
    return graph(
        nodes, {"x": ["n", 3, 8, 8]}, ["y"], {n: np.asarray(a) for n, a in constants.items()}
    )


@pytest.mark.skipif(
    not RUNS_LAYERS_BEFORE_BRANCHES,
    reason="this ONNX Runtime ends the process at a convolution that a branch reads",
)
@pytest.mark.parametrize("precision", list(Precision))
def test_branches_read_what_is_converted_around_them(precision):
    model = with_branches()
    for sign in (1, -1):
        x = {"x": sign * np.abs(X["x"])}
        converted = Converted(model, x, precision)
        np.testing.assert_array_equal(converted.reference, run(model, **x)[0])
        assert signal_to_noise(converted.reference, converted.result) > 25
    if precision is INT8:
        assert converted.kernels["QLinearConv"] == 2
    reasons = converted.space.capabilities["i"].reasons
    assert set(reasons) == {INT8, Precision.BF16, Precision.FP16}


def test_a_loop_around_what_is_converted():
    body = helper.make_graph(
        [
            helper.make_node("Add", ["state", "a"], ["next"], name="inner add"),
            helper.make_node("Identity", ["go"], ["still"], name="inner identity"),
        ],
        "body",
        [
            helper.make_tensor_value_info("turn", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            helper.make_tensor_value_info("state", TensorProto.FLOAT, None),
        ],
        [
            helper.make_tensor_value_info("still", TensorProto.BOOL, []),
            helper.make_tensor_value_info("next", TensorProto.FLOAT, None),
        ],
    )
    model = graph(
        [
            op("Conv", "x w", "a"),
            op("Loop", "turns - a", "l", body=body),
            op("Conv", "l v", "y"),
        ],
        {"x": ["n", 3, 8, 8]},
        ["y"],
        {"w": draw(4, 3, 3, 3), "v": draw(5, 4, 1, 1, seed=1), "turns": np.array(3)},
    )
    converted = Converted(model, X)
    assert converted.kernels["QLinearConv"] == 2
    assert signal_to_noise(converted.reference, converted.result) > 25


def test_sequences_pass_through():
    model = graph(
        [
            op("Conv", "x w", "a"),
            op("SequenceConstruct", "a x", "s"),
            op("SequenceAt", "s place", "e"),
            op("Conv", "e v", "y"),
        ],
        {"x": ["n", 3, 8, 8]},
        ["y"],
        {"w": draw(3, 3, 1, 1), "v": draw(5, 3, 1, 1, seed=1), "place": np.array(0)},
    )
    converted = Converted(model, X)
    assert signal_to_noise(converted.reference, converted.result) > 25
    sixteen = Converted(model, X, Precision.BF16)
    assert signal_to_noise(sixteen.reference, sixteen.result) > 35


def test_functions_of_the_model_are_opened():
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("mine", 1)]
    function = helper.make_function(
        "mine",
        "block",
        ["data", "weight"],
        ["out"],
        [
            helper.make_node("Conv", ["data", "weight"], ["inner"]),
            helper.make_node("Relu", ["inner"], ["out"]),
        ],
        opsets[:1],
    )
    made = helper.make_graph(
        [helper.make_node("block", ["x", "w"], ["y"], domain="mine")],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, 8, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [onnx.numpy_helper.from_array(draw(4, 3, 3, 3), "w")],
    )
    model = helper.make_model(made, opset_imports=opsets, functions=[function], ir_version=10)
    converted = Converted(model, X)
    assert converted.kernels["QLinearConv"] == 1


def test_batch_norms_and_constants_are_folded():
    ones = np.ones(4, np.float32)
    model = graph(
        [
            op("Transpose", "flipped", "w", perm=[3, 2, 0, 1]),
            op("Conv", "x w", "a"),
            op("BatchNormalization", "a scale shift mean variance", "n"),
            op("Relu", "n", "y"),
        ],
        {"x": ["n", 3, 8, 8]},
        ["y"],
        {
            "flipped": draw(3, 3, 3, 4),
            "scale": draw(4, seed=3),
            "shift": draw(4, seed=4),
            "mean": draw(4, seed=5),
            "variance": ones * 2,
        },
    )
    converted = Converted(model, X)
    assert set(converted.space.graph.types) == {"Conv", "Relu"}
    assert converted.kernels["QLinearConv"] == 1
    assert signal_to_noise(converted.reference, converted.result) > 30


def test_an_output_that_is_read_inside_too_and_an_input_that_is_an_output():
    model = graph(
        [
            op("Conv", "x w", "a"),
            op("Conv", "a v", "y"),
            op("Identity", "x", "same"),
        ],
        {"x": ["n", 3, 8, 8]},
        ["a", "y", "same"],
        {"w": draw(4, 3, 3, 3), "v": draw(5, 4, 1, 1, seed=1)},
    )
    converted = Converted(model, X)
    saved = converted.adaptor.native(converted.model)
    assert [value.name for value in saved.graph.output] == ["a", "y", "same"]
    for given, reference in zip(converted.result, converted.reference, strict=True):
        assert signal_to_noise(reference, given) > 30


def test_outputs_and_inputs_are_chosen_by_name():
    model = graph(
        [op("MatMul", "p w", "a"), op("Add", "a q", "b"), op("Relu", "b", "c")],
        {"p": ["n", 8], "q": ["n", 4]},
        ["a", "b", "c"],
        {"w": draw(8, 4)},
    )
    adaptor = OnnxRuntimeAdaptor()
    held = adaptor.load(model, inputs=["q", "p"], outputs="c")
    p, q = draw(2, 8), draw(2, 4, seed=1)
    expected = run(model, p=p, q=q)[2]
    for given in ((q, p), {"p": p, "q": q}):
        np.testing.assert_array_equal(adaptor.predict(held, given), expected)
    assert len(held.program.graph.outputs) == 1
    with pytest.raises(ConfigurationError, match="did you mean 'c'"):
        adaptor.load(model, outputs="cc")
    with pytest.raises(DataError, match="must hold the input p"):
        adaptor.predict(held, {"q": q})
    with pytest.raises(DataError, match="of shape"):
        adaptor.predict(held, {"p": p[:, None], "q": q})


def test_a_model_that_is_quantized_already_is_left_alone():
    first = Converted(two_convolutions(), X)
    stored = first.adaptor.native(first.model)
    again = Converted(stored, X, quantized=("a", "y"))
    assert again.kernels == kernels(stored)
    np.testing.assert_array_equal(again.result, first.result)


def test_a_model_in_fp16_or_double_is_left_alone_with_a_reason():
    model = two_convolutions()
    for tensor in model.graph.initializer:
        half = onnx.numpy_helper.to_array(tensor).astype(np.float16)
        tensor.CopyFrom(onnx.numpy_helper.from_array(half, tensor.name))
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = TensorProto.FLOAT16
    adaptor = OnnxRuntimeAdaptor()
    space = adaptor.space(adaptor.load(model), MACHINE)
    assert not space.tunable_ops
    reasons = space.capabilities["a"].reasons
    assert "float32" in reasons[INT8]
    assert "float32" in reasons[Precision.BF16]


BROKEN = {
    "cut": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "text": lambda data: b"this is no model\n" * 10,
    "zeros": lambda data: bytes(1000),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_files_are_refused_by_name(kind, tmp_path):
    path = tmp_path / f"{kind}.onnx"
    path.write_bytes(BROKEN[kind](two_convolutions().SerializeToString()))
    with refused(f"{kind}.onnx"):
        OnnxRuntimeAdaptor().load(path)
    with pytest.raises(ModelLoadError):
        OnnxRuntimeAdaptor().load(path.read_bytes())


def test_a_missing_file_and_an_unknown_op_are_named(tmp_path):
    with refused("model file '.*absent.onnx' does not exist"):
        OnnxRuntimeAdaptor().load(tmp_path / "absent.onnx")
    model = graph([op("Cnov", "x", "y")], {"x": [2]}, ["y"])
    with refused("Cnov"):
        OnnxRuntimeAdaptor().load(model)


def test_a_graph_reads_no_file_outside_of_its_folder(tmp_path):
    """External data that points elsewhere is refused, not read."""
    (tmp_path / "secret").write_bytes(draw(4, 3, 3, 3).tobytes())
    inner = tmp_path / "inner"
    inner.mkdir()
    model = two_convolutions()
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="../secret")
    (inner / "model.onnx").write_bytes(model.SerializeToString())
    with refused("ONNX Runtime rejects|outside"):
        OnnxRuntimeAdaptor().load(inner / "model.onnx")


def test_a_model_is_recognised_without_importing_a_framework():
    code = (
        "import sys, neural_mp.adaptors.onnxrt.int8_accumulation\n"
        "from neural_mp.adaptors.detect import FRAMEWORKS\n"
        "assert FRAMEWORKS['onnxrt'].rule.fit('x.onnx')\n"
        "print([m for m in ('onnx', 'onnxruntime', 'onnx_ir', 'torch', 'tensorflow') "
        "if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
