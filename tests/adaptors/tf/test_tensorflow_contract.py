import numpy as np
import pytest
from keras_nets import ChannelsLast

from neural_mp.core.precision import Precision
from neural_mp.testing import AdaptorContract, uniform

INT8 = Precision.INT8


class TestTensorFlow(ChannelsLast, AdaptorContract):
    framework = "tensorflow"
    input_name = "image"

    @pytest.fixture(scope="class")
    @classmethod
    def source(cls, net):
        return net

    @pytest.fixture(scope="class")
    @classmethod
    def reference(cls, source, images) -> np.ndarray:
        return np.asarray(source(images, training=False))

    def test_an_int8_plan_runs_integer_kernels(self, space, convert):
        """Every layer the plan has in INT8 is one integer kernel, and nothing else computes."""
        converted = convert(uniform(space, INT8))
        ops = [node.op for node in converted.graph.nodes.values()]
        kernels = [op for op in ops if op.startswith(("_FusedQuantized", "_QuantizedMatMul"))]
        assert len(kernels) == len(space.tunable_ops) == 7
        assert not {"Conv2D", "MatMul", "BiasAdd", "Relu", "AddV2", "MaxPool"} & set(ops)

    def test_batch_norms_are_folded(self, space):
        assert {op.type for op in space.graph} == {
            "Conv2D",
            "BiasAdd",
            "Relu",
            "MaxPool",
            "AddV2",
            "Mean",
            "MatMul",
            "Identity",
        }
