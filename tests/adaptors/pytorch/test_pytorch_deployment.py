"""See `DeploymentContract`."""

import pytest

from neural_mp.testing import DeploymentContract

pytestmark = pytest.mark.slow


class TestPyTorchDeployment(DeploymentContract):
    @pytest.fixture
    def net(self, net):
        return net
