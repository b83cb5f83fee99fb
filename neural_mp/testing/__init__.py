"""Contracts as test classes: a plug-in subclasses them with its models and runs pytest.

They require pytest (extra `testing`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from neural_mp.util.lazy_exports import make_lazy_getter

if TYPE_CHECKING:
    from neural_mp.testing.adaptor_contract import AdaptorContract
    from neural_mp.testing.amp_contract import AmpContract
    from neural_mp.testing.api_contract import ApiContract, ModelFormContract
    from neural_mp.testing.comparison_contract import ComparisonContract
    from neural_mp.testing.correction_contract import FACTOR, CorrectionCase, CorrectionContract
    from neural_mp.testing.deployment_contract import DeploymentContract
    from neural_mp.testing.fixtures import (
        Accuracy,
        Split,
        digits,
        machine,
        signal_to_noise,
        uniform,
    )
    from neural_mp.testing.products_contract import AccumulationContract
    from neural_mp.testing.training_contract import (
        SimulatedCase,
        SimulationContract,
        TrainingContract,
    )

#: Public name → its module, imported on first access: nets and data need no contract.
_LAZY = {
    "AdaptorContract": "neural_mp.testing.adaptor_contract",
    "AmpContract": "neural_mp.testing.amp_contract",
    "ApiContract": "neural_mp.testing.api_contract",
    "ModelFormContract": "neural_mp.testing.api_contract",
    "ComparisonContract": "neural_mp.testing.comparison_contract",
    "FACTOR": "neural_mp.testing.correction_contract",
    "CorrectionCase": "neural_mp.testing.correction_contract",
    "CorrectionContract": "neural_mp.testing.correction_contract",
    "DeploymentContract": "neural_mp.testing.deployment_contract",
    "Accuracy": "neural_mp.testing.fixtures",
    "Split": "neural_mp.testing.fixtures",
    "digits": "neural_mp.testing.fixtures",
    "machine": "neural_mp.testing.fixtures",
    "signal_to_noise": "neural_mp.testing.fixtures",
    "uniform": "neural_mp.testing.fixtures",
    "AccumulationContract": "neural_mp.testing.products_contract",
    "SimulatedCase": "neural_mp.testing.training_contract",
    "SimulationContract": "neural_mp.testing.training_contract",
    "TrainingContract": "neural_mp.testing.training_contract",
}

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
    "SimulatedCase",
    "SimulationContract",
    "Split",
    "TrainingContract",
    "digits",
    "machine",
    "signal_to_noise",
    "uniform",
]


__getattr__ = make_lazy_getter(__name__, _LAZY)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
