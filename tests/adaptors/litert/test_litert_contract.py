"""See `AdaptorContract`."""

from types import MappingProxyType

import numpy as np
import pytest
from keras_nets import ChannelsLast
from litert_nets import run_litert

from neural_mp.core.precision import Precision
from neural_mp.testing import AdaptorContract, uniform


class TestLiteRt(ChannelsLast, AdaptorContract):
    framework = "litert"
    input_name = "serving_default_image:0"
    least_decibels = MappingProxyType({Precision.INT8: 25})
    casts_in_16_bits = None

    @pytest.fixture(scope="class")
    @classmethod
    def source(cls, net) -> bytes:
        return net

    @pytest.fixture(scope="class")
    @classmethod
    def reference(cls, source, images) -> np.ndarray:
        return run_litert(source, images)[0]

    def test_an_int8_plan_runs_integer_kernels_of_xnnpack(self, space, audit_of):
        audit = audit_of(uniform(space, Precision.INT8))
        layers = [op for op in audit.ops if op.planned.type in ("CONV_2D", "FULLY_CONNECTED")]
        assert len(layers) >= 7
        kernels = {kernel for op in layers for kernel in op.kernels}
        assert all("QS8" in kernel or "QC8" in kernel for kernel in kernels), kernels
