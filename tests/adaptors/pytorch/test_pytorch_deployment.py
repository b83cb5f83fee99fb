"""See `DeploymentContract`."""

import pytest

from neural_mp.testing import DeploymentContract

pytestmark = pytest.mark.slow


class TestPyTorchDeployment(DeploymentContract):
    @pytest.fixture(scope="class")
    @classmethod
    def net(cls, net):
        return net
