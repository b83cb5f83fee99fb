"""See `DeploymentContract`."""

import pytest
from keras_nets import ChannelsLast

from neural_mp.adaptors.tensorflow.integer_kernels import ZERO_POINT
from neural_mp.errors import ConversionError
from neural_mp.testing import DeploymentContract

pytestmark = pytest.mark.slow


class TestTensorFlowDeployment(ChannelsLast, DeploymentContract):
    @pytest.fixture
    def net(self, net):
        return net

    def test_kernels_of_an_earlier_version_are_refused_by_name(self, made_for):
        held = made_for("vnni").result.held
        for node in held.graph.nodes.values():
            node.attr.pop(ZERO_POINT, None)
        with pytest.raises(ConversionError, match="how its input is stored"):
            made_for("vnni").result.adaptor.portability.with_reduced_range(held)
