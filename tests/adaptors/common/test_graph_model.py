"""Metadata of graph models, the same in ONNX Runtime and OpenVINO."""

import json

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from neural_mp.adaptors.onnxrt.files import storage as onnx_storage
from neural_mp.adaptors.openvino import files as openvino_storage
from neural_mp.adaptors.registry import get_adaptor_named
from neural_mp.errors import ModelLoadError

DETAILS = {"onnxrt": onnx_storage.DETAILS_FILE, "openvino": openvino_storage.DETAILS_FILE}


@pytest.fixture
def convolution(tmp_path) -> str:
    """A convolution of pictures of any size."""
    weight = numpy_helper.from_array(np.ones((4, 3, 3, 3), np.float32), "weight")
    sizes = ["batch", 3, "height", "width"]
    graph = helper.make_graph(
        [helper.make_node("Conv", ["image", "weight"], ["found"], "conv", pads=[1, 1, 1, 1])],
        "any_size",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, sizes)],
        [helper.make_tensor_value_info("found", TensorProto.FLOAT, [sizes[0], 4, *sizes[2:]])],
        [weight],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    onnx.save(model, tmp_path / "net.onnx")
    return str(tmp_path / "net.onnx")


@pytest.fixture(params=list(DETAILS))
def stored(request, convolution, tmp_path):
    """Adaptor, model and the folder that the model was saved to."""
    adaptor = get_adaptor_named(request.param)
    example = np.zeros((2, 3, 9, 7), np.float32)
    model = adaptor.load(convolution, example=example)
    folder = tmp_path / "saved"
    folder.mkdir()
    adaptor.save(model, folder)
    return adaptor, model, folder


def test_a_restored_model_runs_on_inputs_of_the_sizes_of_the_data(stored):
    adaptor, model, folder = stored
    restored = adaptor.restore(folder)
    (example,) = adaptor.example_inputs(restored)
    assert example.shape == (2, 3, 9, 7)
    np.testing.assert_array_equal(
        adaptor.predict(restored, example), adaptor.predict(model, example)
    )


def test_sizes_are_one_in_files_of_earlier_versions(stored):
    adaptor, _, folder = stored
    details = folder / DETAILS[adaptor.framework]
    content = json.loads(details.read_text())
    del content["example"]
    details.write_text(json.dumps(content))
    (example,) = adaptor.example_inputs(adaptor.restore(folder))
    assert example.shape == (1, 3, 1, 1)


@pytest.mark.parametrize("sizes", [[1 << 20, 3, 1 << 20, 4], [-1, 3, 4, 4], "all"])
def test_sizes_that_no_memory_holds_are_refused(stored, sizes):
    adaptor, _, folder = stored
    details = folder / DETAILS[adaptor.framework]
    content = json.loads(details.read_text())
    content["example"] = {tensor: sizes for tensor in content["example"]}
    details.write_text(json.dumps(content))
    with pytest.raises(ModelLoadError, match="example"):
        adaptor.restore(folder)
