"""See `CorrectionContract`."""

import pytest
from contract_nets import Normed, Outliers, Residual, TwoOutputs, seeded
from ov_nets import as_openvino

from neural_mp.testing import CorrectionContract


@pytest.mark.slow
class TestOpenVinoCorrections(CorrectionContract):
    @pytest.fixture(scope="class")
    @classmethod
    def net(cls):
        return as_openvino(seeded(Outliers))

    @pytest.fixture(scope="class")
    @classmethod
    def residual(cls):
        return as_openvino(seeded(Residual))

    @pytest.fixture(scope="class")
    @classmethod
    def two_outputs(cls):
        return as_openvino(seeded(TwoOutputs))

    @pytest.fixture(scope="class")
    @classmethod
    def normed(cls):
        return as_openvino(seeded(Normed))
