"""See `DeploymentContract`."""

from deployment_contract import DeploymentContract


class TestPyTorchDeployment(DeploymentContract):
    pass
