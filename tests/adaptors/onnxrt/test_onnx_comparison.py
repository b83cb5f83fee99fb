"""ONNX models compared op by op."""

import copy

import onnx
import pytest
from onnx_nets import as_onnx, run

from neural_mp.adaptors.onnxrt.adaptor import OnnxRuntimeAdaptor
from neural_mp.testing import ComparisonContract


def constants(model: onnx.ModelProto, index: int) -> list[onnx.TensorProto]:
    """The weight and bias of a convolution."""
    node = [node for node in model.graph.node if node.op_type == "Conv"][index]
    by_name = {tensor.name: tensor for tensor in model.graph.initializer}
    return [by_name[name] for name in node.input[1:]]


class TestOnnx(ComparisonContract):
    framework = "onnxrt"
    convolution = "Conv"

    @pytest.fixture(scope="class")
    @classmethod
    def source(cls, _trained):
        return as_onnx(_trained[1])

    @pytest.fixture(scope="class")
    @classmethod
    def planted(cls, source, images):
        def load(factor: float):
            model = copy.deepcopy(source)
            for tensor in constants(model, 5):
                array = onnx.numpy_helper.to_array(tensor)
                changed = (array * factor).astype(array.dtype)
                tensor.CopyFrom(onnx.numpy_helper.from_array(changed, tensor.name))
            return OnnxRuntimeAdaptor().load(model, example=images)

        return load

    @staticmethod
    def own(source, images):
        model = copy.deepcopy(source)
        result = [node for node in model.graph.node if node.op_type == "Conv"][5].output[0]
        del model.graph.output[:]
        model.graph.output.append(onnx.ValueInfoProto(name=result))
        return run(model, image=images)[0]

    @staticmethod
    def first_layer(source):
        weight, bias = map(onnx.numpy_helper.to_array, constants(source, 0))
        return weight, bias
