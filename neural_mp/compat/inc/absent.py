"""What their package has and this one has not, and what one gets who asks for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from neural_mp.errors import NeuralMPError, did_you_mean

_TRAINED = "this package converts models that are trained; it does not train, prune or distil"
_QAT = "training in INT8 is not here; tune the trained model with post-training quantization"

_MXNET = "there is no adaptor for MXNet"
_INSIDE = "it belongs to the inside of that package"

#: Name → what to do instead.
ABSENT: Mapping[str, str] = {
    "Pruning": _TRAINED,
    "Distillation": _TRAINED,
    "Scheduler": _TRAINED,
    "Component": _TRAINED,
    "NAS": _TRAINED,
    "DyNAS": _TRAINED,
    "prepare_pruning": _TRAINED,
    "prepare_compression": _TRAINED,
    "WeightPruningConfig": _TRAINED,
    "DistillationConfig": _TRAINED,
    "KnowledgeDistillationLossConfig": _TRAINED,
    "IntermediateLayersKnowledgeDistillationLossConfig": _TRAINED,
    "SelfKnowledgeDistillationLossConfig": _TRAINED,
    "PyTorchKnowledgeDistillationLoss": _TRAINED,
    "QuantizationAwareTrainingConfig": _QAT,
    "TensorflowQATModel": _QAT,
    "ModelConversion": "a QAT model of TensorFlow is read as it is; give it to Quantization",
    "NASConfig": _TRAINED,
    "model_slim": _TRAINED,
    "parse_auto_slim_config": _TRAINED,
    "check_mx_version": _MXNET,
    "get_backend_name": _MXNET,
    "FRAMEWORKS": _INSIDE,
    "Objective": _INSIDE,
    "get_estimator_graph": "estimators are gone from TensorFlow; export a SavedModel",
    "_parse_ckpt_bn_input": _INSIDE,
    "TFSlimNetsFactory": "freeze a slim checkpoint into a .pb file first",
}


class NotHereError(NeuralMPError):
    """Something of Intel Neural Compressor's that this package does not have was used."""


class Absent:
    """Stands for a class or function that is not here, and says so when it is used.

    Args:
        name: what it is called there.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Refused.

        Raises:
            NotHereError: always.
        """
        raise NotHereError(
            f"{self._name} of Intel Neural Compressor is not here: {ABSENT[self._name]}"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self()


def looked_up(module: str, name: str, here: Mapping[str, Any]) -> Any:
    """What a name of a module stands for, that is not defined in it.

    Raises:
        AttributeError: nothing.
    """
    if name in ABSENT:
        return Absent(name)
    raise AttributeError(f"module {module!r} has no attribute {name!r}{did_you_mean(name, here)}")
