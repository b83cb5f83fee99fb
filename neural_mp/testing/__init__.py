"""Contracts as test classes: a plug-in subclasses them with its models and runs pytest.

They require pytest (extra `testing`).
"""

from neural_mp.testing.adaptor_contract import AdaptorContract
from neural_mp.testing.amp_contract import AmpContract
from neural_mp.testing.api_contract import ApiContract, ModelFormContract
from neural_mp.testing.comparison_contract import ComparisonContract
from neural_mp.testing.correction_contract import FACTOR, CorrectionCase, CorrectionContract
from neural_mp.testing.deployment_contract import DeploymentContract
from neural_mp.testing.fixtures import Accuracy, Split, digits, machine, signal_to_noise, uniform
from neural_mp.testing.products_contract import AccumulationContract
from neural_mp.testing.training_contract import TrainingContract

__all__ = [
    "FACTOR",
    "AccumulationContract",
    "Accuracy",
    "AdaptorContract",
    "AmpContract",
    "ApiContract",
    "ComparisonContract",
    "CorrectionCase",
    "CorrectionContract",
    "DeploymentContract",
    "ModelFormContract",
    "Split",
    "TrainingContract",
    "digits",
    "machine",
    "signal_to_noise",
    "uniform",
]
