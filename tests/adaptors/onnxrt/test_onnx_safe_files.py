"""Where in a model files are named, and looked for before anything is made of it."""

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx_nets import Converted, graph, op

from neural_mp.adaptors.onnxrt.adaptor import OnnxRuntimeAdaptor
from neural_mp.adaptors.onnxrt.graph.file_checks import check_model
from neural_mp.errors import ModelLoadError


def _elsewhere():
    tensor = onnx.TensorProto(name="w", data_type=onnx.TensorProto.FLOAT, dims=[4])
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="../secret.bin")
    return tensor


@pytest.mark.parametrize(
    ("inner", "match"),
    [
        (([helper.make_node("Identity", ["w"], ["o"])], [_elsewhere()]), "secret.bin"),
        (([helper.make_node("PyOp", ["x"], ["o"])], []), "PyOp"),
    ],
)
def test_a_graph_that_a_function_takes_by_default_is_looked_at(inner, match, tmp_path):
    nodes, weights = inner
    result = helper.make_tensor_value_info("o", onnx.TensorProto.FLOAT, [4])
    body = helper.make_graph(nodes, "body", [], [result], weights)
    function = helper.make_function(
        "own",
        "F",
        ["x"],
        ["y"],
        [helper.make_node("Relu", ["x"], ["y"])],
        [helper.make_opsetid("", 18)],
        attribute_protos=[helper.make_attribute("body", body)],
    )
    graph = helper.make_graph([helper.make_node("F", ["x"], ["y"], domain="own")], "g", [], [])
    model = helper.make_model(graph, functions=[function])
    with pytest.raises(ModelLoadError, match=match):
        check_model(model, tmp_path / "model.onnx")


def _tensor(data_type):
    return onnx.TensorProto(name="w", dims=[2], raw_data=bytes(8), data_type=data_type)


def _of_initializer(tensor):
    return helper.make_graph([], "g", [], [], [tensor])


def _of_constant(tensor):
    return helper.make_graph([helper.make_node("Constant", [], ["c"], value=tensor)], "g", [], [])


def _of_external(tensor):
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="weights.bin")
    return _of_initializer(tensor)


def _of_branch(tensor):
    return helper.make_graph(
        [helper.make_node("If", ["x"], ["y"], then_branch=_of_constant(tensor))], "g", [], []
    )


@pytest.mark.parametrize("make", [_of_initializer, _of_constant, _of_external, _of_branch])
@pytest.mark.parametrize("data_type", [0, 99, -1])
def test_a_tensor_must_have_a_type_of_onnx(make, data_type, tmp_path):
    model = helper.make_model(make(_tensor(data_type)))
    with pytest.raises(
        ModelLoadError, match=f"'w' must have a type of ONNX, got number {data_type}"
    ):
        check_model(model, tmp_path / "net.onnx")


def test_every_type_of_onnx_is_taken(tmp_path):
    for data_type in sorted(onnx.TensorProto.DataType.values()):
        if data_type:
            model = helper.make_model(_of_constant(onnx.TensorProto(name="w", data_type=data_type)))
            check_model(model, tmp_path / "net.onnx")


def test_a_false_declaration_of_a_constant_is_ignored():
    """ONNX Runtime runs a model that declares its weight as a scalar."""
    weight = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
    model = graph([op("Gemm", "x w", "y")], {"x": ["n", 3]}, ["y"], {"w": weight})
    feeds = {"x": np.linspace(-1, 1, 24, dtype=np.float32).reshape(8, 3)}
    expected = Converted(model, feeds).result
    model.graph.value_info.append(helper.make_tensor_value_info("w", onnx.TensorProto.INT64, []))
    np.testing.assert_array_equal(Converted(model, feeds).result, expected)


@pytest.mark.parametrize("port", ["input", "output"])
@pytest.mark.parametrize("elem_type", [0, 99])
def test_an_input_or_output_without_a_type_of_onnx_is_one_error(port, elem_type, tmp_path):
    x, y = (helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, [2]) for n in "xy")
    graph_proto = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", [x], [y])
    model = helper.make_model(graph_proto, opset_imports=[helper.make_opsetid("", 18)])
    getattr(model.graph, port)[0].type.tensor_type.elem_type = elem_type
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ModelLoadError):
        OnnxRuntimeAdaptor().load(path)
