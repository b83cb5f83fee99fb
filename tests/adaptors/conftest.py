"""What several tests of the adaptors start from."""

import pytest
from integers import MACHINE

from neural_mp import MixedPrecision


@pytest.fixture(scope="module")
def tuned(net, digits, tmp_path_factory):
    """The small trained net, all of it in INT8; must not be changed."""
    converter = MixedPrecision()
    converter.model = net
    converter.precisions = "int8"
    converter.hardware = MACHINE
    converter.workspace = tmp_path_factory.mktemp("workspace")
    converter.calib_dataloader = digits[0].loader()
    return converter.fit()
