"""See `DeploymentContract`."""

import pytest
from keras_nets import ChannelsLast

from neural_mp.adaptors.tensorflow.kernels.integer_kernels import ZERO_POINT
from neural_mp.errors import ConversionError
from neural_mp.testing import DeploymentContract
from neural_mp.testing.deployment_contract import make

pytestmark = pytest.mark.slow


class TestTensorFlowDeployment(ChannelsLast, DeploymentContract):
    @pytest.fixture(scope="class")
    @classmethod
    def net(cls, net):
        return net

    def test_kernels_of_an_earlier_version_are_refused_by_name(self, net, digits):
        result = make(net, digits, "vnni").result
        for node in result.held.graph.nodes.values():
            node.attr.pop(ZERO_POINT, None)
        with pytest.raises(ConversionError, match="does not record the zero point"):
            result.adaptor.portability.with_reduced_range(result.held)
