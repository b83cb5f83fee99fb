"""The contracts as classes of tests: a plug-in subclasses them, gives its models, and runs pytest.

They need pytest, which the extra `testing` installs.
"""

from neural_mp.testing.adaptor_contract import AdaptorContract
from neural_mp.testing.amp_contract import AmpContract
from neural_mp.testing.api_contract import FaceContract
from neural_mp.testing.correction_contract import FACTOR, RepairCase, RepairContract
from neural_mp.testing.fixtures import Accuracy, Split, digits, machine, signal_to_noise, uniform

__all__ = [
    "FACTOR",
    "Accuracy",
    "AdaptorContract",
    "AmpContract",
    "FaceContract",
    "RepairCase",
    "RepairContract",
    "Split",
    "digits",
    "machine",
    "signal_to_noise",
    "uniform",
]
