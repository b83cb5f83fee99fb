"""See `AdaptorContract`."""

from types import MappingProxyType

import numpy as np
import pytest
from keras_nets import ChannelsLast
from litert_nets import run_litert

from neural_mp.core.precision import Precision
from neural_mp.testing import AdaptorContract


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
