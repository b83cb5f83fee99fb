"""The models people have: converted right, or left alone with a reason; never changed."""

import subprocess
import sys

import numpy as np
import onnx
import pytest
from nets import small_net
from onnx import TensorProto, helper
from onnx_bodies import draw
from onnx_nets import MACHINE, Converted, as_onnx, graph, kernels, op, run

from neural_mp import MixedPrecision
from neural_mp.adaptors.onnxrt.adaptor import OnnxRuntimeAdaptor
from neural_mp.adaptors.onnxrt.canonicalize import infer_shapes
from neural_mp.adaptors.onnxrt.graph.protos import parse_program_message
from neural_mp.core.precision import Precision
from neural_mp.errors import ConfigurationError, DataError, ModelLoadError
from neural_mp.testing import signal_to_noise

INT8 = Precision.INT8


def two_convolutions(**settings):
    return graph(
        [op("Conv", "x w", "a"), op("Relu", "a", "r"), op("Conv", "r v", "y")],
        {"x": ["n", 3, 8, 8]},
        ["y"],
        {"w": draw(4, 3, 3, 3), "v": draw(5, 4, 3, 3, seed=1)},
        **settings,
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


@pytest.mark.slow
def test_torch_models_of_an_older_opset(digits):
    model = as_onnx(small_net(), opset=18)
    images = digits[1].images[:20]
    converted = Converted(model, {"image": images})
    assert converted.kernels["QLinearConv"] == 6


def test_initializers_that_are_inputs_too_are_constants():
    """As files of IR version 3 have them."""
    model = two_convolutions(opset=8, ir_version=3)
    for tensor in model.graph.initializer:
        value_info = helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
        model.graph.input.append(value_info)
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
    assert converted.integer_convolutions == 3
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
    loaded = adaptor.load(path)
    assert list(loaded.origin.files) == ["model.onnx"]
    np.testing.assert_array_equal(
        loaded.program.graph.initializers["w"].const_value.numpy(), draw(64, 32)
    )
    path.write_bytes(path.read_bytes() + b" ")
    with refused("changed after the model was loaded"):
        adaptor.predict(loaded, {"x": draw(2, 64)})


def test_a_model_given_as_an_object_stays_as_it_is():
    model = two_convolutions()
    original = model.SerializeToString(deterministic=True)
    Converted(model, X)
    Converted(model, X, Precision.BF16)
    assert model.SerializeToString(deterministic=True) == original


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
    for output, reference in zip(converted.result, converted.reference, strict=True):
        assert signal_to_noise(reference, output) > 30


def test_outputs_and_inputs_are_chosen_by_name():
    model = graph(
        [op("MatMul", "p w", "a"), op("Add", "a q", "b"), op("Relu", "b", "c")],
        {"p": ["n", 8], "q": ["n", 4]},
        ["a", "b", "c"],
        {"w": draw(8, 4)},
    )
    adaptor = OnnxRuntimeAdaptor()
    loaded = adaptor.load(model, inputs=["q", "p"], outputs="c")
    p, q = draw(2, 8), draw(2, 4, seed=1)
    expected = run(model, p=p, q=q)[2]
    for feeds in ((q, p), {"p": p, "q": q}):
        np.testing.assert_array_equal(adaptor.predict(loaded, feeds), expected)
    assert len(loaded.program.graph.outputs) == 1
    with pytest.raises(ConfigurationError, match="did you mean 'c'"):
        adaptor.load(model, outputs="cc")
    with pytest.raises(DataError, match="must hold the input p"):
        adaptor.predict(loaded, {"q": q})
    with pytest.raises(DataError, match="of shape"):
        adaptor.predict(loaded, {"p": p[:, None], "q": q})


def test_a_result_that_is_converted_again_stays_the_same():
    first = Converted(two_convolutions(), X)
    stored = first.adaptor.native(first.model)
    again = Converted(stored, X)
    assert again.kernels == kernels(stored)
    assert signal_to_noise(first.result, again.result) > 60


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
        "assert FRAMEWORKS['onnxrt'].rule.matches_source('x.onnx')\n"
        "print([m for m in ('onnx', 'onnxruntime', 'onnx_ir', 'torch', 'tensorflow') "
        "if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def classifier(case: str) -> tuple[onnx.ModelProto, dict]:
    """A classifier as scikit-learn's converter writes it, and inputs."""
    number = helper.make_tensor_type_proto(TensorProto.FLOAT, [])
    kind = TensorProto.STRING if case == "words" else TensorProto.INT64
    maps = helper.make_sequence_type_proto(helper.make_map_type_proto(kind, number))
    labels = {"classlabels_strings": ["a", "b", "c"]} if case == "words" else {}
    labels = labels or {"classlabels_int64s": [0, 1, 2]}
    nodes = [
        op("MatMul", "x w", "h"),
        op("Softmax", "h", "p", axis=1),
        op("ArgMax", "p", "label", axis=1, keepdims=0),
        op("ZipMap", "p", "z", domain="ai.onnx.ml", **labels),
    ]
    feeds = {"x": draw(4, 16, seed=3)}
    if case == "map as input":
        nodes.insert(0, op("CastMap", "m", "x", domain="ai.onnx.ml", max_map=16, map_form="DENSE"))
        feeds = {"m": {index: float(value) for index, value in enumerate(draw(16, seed=3))}}
    model = graph(nodes, {"x": ["n", 16]}, [], {"w": draw(16, 3)})
    model.graph.output.append(helper.make_tensor_value_info("label", TensorProto.INT64, None))
    if case == "map as input":
        map_type = helper.make_map_type_proto(TensorProto.INT64, number)
        model.graph.input[0].CopyFrom(helper.make_value_info("m", map_type))
    if case == "map alone":
        del model.graph.output[:]
    model.graph.output.append(helper.make_value_info("z", maps))
    model.opset_import.append(helper.make_opsetid("ai.onnx.ml", 3))
    return model, feeds


def probabilities(outputs) -> np.ndarray:
    """The probabilities in the sequence of maps among the outputs, or in the only output."""
    maps = next((output for output in outputs if isinstance(output, list)), outputs)
    return np.array([list(item.values()) for item in maps])


@pytest.mark.parametrize("case", ["numbers", "words", "map as input", "map alone"])
def test_maps_pass_through_in_float(case, tmp_path):
    model, feeds = classifier(case)
    converted = Converted(model, feeds)
    assert converted.kernels["MatMulIntegerToFloat"] == 1
    expected, actual = probabilities(run(model, **feeds)), probabilities(converted.result)
    assert signal_to_noise(expected, actual) > 30
    adaptor = converted.adaptor
    adaptor.save(converted.model, tmp_path)
    again = adaptor.predict(adaptor.restore(tmp_path), feeds)
    np.testing.assert_array_equal(probabilities(again), actual)
    written = onnx.load(tmp_path / "model.onnx").graph
    assert written.input[0].type == model.graph.input[0].type
    assert written.output[-1].type == model.graph.output[-1].type


def test_shapes_of_a_model_that_returns_maps_are_inferred():
    model, _ = classifier("numbers")
    del model.graph.value_info[:]
    program = parse_program_message(model)
    infer_shapes(program)
    (product,) = (node for node in program.graph if node.op_type == "MatMul")
    assert [str(size) for size in product.outputs[0].shape or ()] == ["n", "3"]
    (zipped,) = (node for node in program.graph if node.op_type == "ZipMap")
    assert zipped.domain == "ai.onnx.ml"


def test_the_probabilities_in_maps_count_towards_the_noise_of_the_output():
    model, feeds = classifier("map alone")
    converter = MixedPrecision(model=model, precisions="int8", cache=False)
    converter.calib_dataloader = [feeds]
    converter.exit_policy = {"performance_only": True}
    assert 30 < converter().report.output_sqnr_db < 80
