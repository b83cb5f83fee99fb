"""See `ComparisonContract`."""

import numpy as np
import pytest
from ov_nets import run

from neural_mp.adaptors.openvino.adaptor import OpenVinoAdaptor
from neural_mp.adaptors.openvino.runtime import ops
from neural_mp.testing import ComparisonContract


def convolution(model, index: int):
    """A convolution of a net."""
    return [node for node in model.get_ordered_ops() if node.get_type_name() == "Convolution"][
        index
    ]


def weight(node) -> np.ndarray:
    """The weight of a convolution."""
    return np.array(node.input_value(1).get_node().get_data())


def bias(node) -> np.ndarray:
    """The bias of a convolution."""
    (reader,) = node.output(0).get_target_inputs()
    (constant,) = [
        value.get_node()
        for value in reader.get_node().input_values()
        if value.get_node().get_type_name() == "Constant"
    ]
    return np.array(constant.get_data()).reshape(-1)


@pytest.mark.slow
class TestOpenVino(ComparisonContract):
    framework = "openvino"
    convolution = "Convolution"
    sqnr_tolerance_db = 1e-4

    @pytest.fixture(scope="class")
    @classmethod
    def source(cls, _taken_in):
        return _taken_in["deep"]

    @pytest.fixture(scope="class")
    @classmethod
    def planted(cls, source, images):
        def load(factor: float):
            model = source.clone()
            node = convolution(model, 5)
            for reader, index in ((node, 1), *_additions(node)):
                values = np.array(reader.input_value(index).get_node().get_data()) * factor
                reader.input(index).replace_source_output(
                    ops.constant(values.astype(np.float32)).output(0)
                )
            return OpenVinoAdaptor().load(model, example=images)

        return load

    @staticmethod
    def own(source, images):
        model = source.clone()
        (addition,) = convolution(model, 5).output(0).get_target_inputs()
        result = addition.get_node().output(0)
        for existing in model.get_results():
            model.remove_result(existing)
        model.add_results([ops.result(result)])
        return run(model, images)[0]

    @staticmethod
    def first_layer(source):
        node = convolution(source, 0)
        return weight(node), bias(node)


def _additions(node):
    """The addition of the bias, with the position of the constant."""
    (reader,) = node.output(0).get_target_inputs()
    addition = reader.get_node()
    for index, value in enumerate(addition.input_values()):
        if value.get_node().get_type_name() == "Constant":
            yield addition, index
