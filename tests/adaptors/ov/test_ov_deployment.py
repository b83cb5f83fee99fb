"""See `DeploymentContract`."""

import pytest

from neural_mp.testing import DeploymentContract

pytestmark = pytest.mark.slow


class TestOpenVinoDeployment(DeploymentContract):
    heeds_onednn = False

    @pytest.fixture(scope="class")
    @classmethod
    def net(cls, _taken_in):
        return _taken_in["small"]
