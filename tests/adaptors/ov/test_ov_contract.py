"""See `AdaptorContract`."""

import numpy as np
import pytest
from ov_nets import run

from neural_mp.core.precision import Precision
from neural_mp.testing import AdaptorContract, uniform

BF16, INT8 = Precision.BF16, Precision.INT8


class TestOpenVino(AdaptorContract):
    framework = "openvino"
    input_name = "image"
    casts_in_16_bits = (BF16, 2)

    @pytest.fixture(scope="class")
    @classmethod
    def source(cls, _taken_in):
        return _taken_in["small"]

    @pytest.fixture(scope="class")
    @classmethod
    def reference(cls, source, images) -> np.ndarray:
        return run(source, images)[0]

    def test_an_int8_plan_runs_integer_kernels(self, space, audit_of):
        audit = audit_of(uniform(space, INT8))
        layers = [op for op in audit.ops if op.planned.approach is not None]
        assert len(layers) >= 7
        assert all(kernel.endswith("_I8") for op in layers for kernel in op.kernels)
