"""See `DeploymentContract`."""

import pytest
from deployment_contract import DeploymentContract

pytestmark = pytest.mark.slow


class TestPyTorchDeployment(DeploymentContract):
    pass
