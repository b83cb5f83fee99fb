"""Where in a model files are named, and looked for before anything is made of it."""

import onnx
import pytest
from onnx import helper

from neural_mp.adaptors.onnxrt.file_checks import check_model
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
        *("own", "F", ["x"], ["y"], [helper.make_node("Relu", ["x"], ["y"])]),
        [helper.make_opsetid("", 18)],
        attribute_protos=[helper.make_attribute("body", body)],
    )
    graph = helper.make_graph([helper.make_node("F", ["x"], ["y"], domain="own")], "g", [], [])
    model = helper.make_model(graph, functions=[function])
    with pytest.raises(ModelLoadError, match=match):
        check_model(model, tmp_path / "model.onnx")
