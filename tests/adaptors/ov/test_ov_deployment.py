"""See `DeploymentContract`."""

import pytest

from neural_mp.testing import DeploymentContract

pytestmark = pytest.mark.slow


class TestOpenVinoDeployment(DeploymentContract):
    heeds_onednn = False

    @pytest.fixture
    def net(self, net):
        return net
