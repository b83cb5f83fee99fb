"""What several tests of the adaptors start from."""

import pytest
from integers import MACHINE

from neural_mp import MixedPrecision


@pytest.fixture
def tuned(net, digits):
    """The small trained net, all of it in INT8."""
    converter = MixedPrecision()
    converter.model = net
    converter.precisions = "int8"
    converter.hardware = MACHINE
    converter.calib_dataloader = digits[0].loader()
    return converter.fit()
