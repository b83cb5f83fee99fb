"""Module names of INC, each mapped to the module here with the same names."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from neural_mp.compat.inc.user_objects import conf
from neural_mp.errors import NeuralMPError, did_you_mean

HERE = "neural_mp.compat.inc"
THEIRS = "neural_compressor"

_UTILS = f"{HERE}.utils"
_DATA = f"{HERE}.data"
#: INC module, without the package's name → module here.
ALIASES: Mapping[str, str] = {
    "experimental": f"{HERE}.experimental",
    "experimental.common": f"{HERE}.experimental",
    "experimental.common.criterion": f"{HERE}.experimental",
    "experimental.scheduler": f"{HERE}.experimental",
    "experimental.metric": f"{HERE}.metric",
    "experimental.metric.metric": f"{HERE}.metric",
    "experimental.data": _DATA,
    "experimental.compression": f"{HERE}.experimental",
    "config": f"{HERE}.config",
    "quantization": f"{HERE}.quantization",
    "mix_precision": f"{HERE}.mix_precision",
    "benchmark": f"{HERE}.benchmark",
    "training": f"{HERE}.config",
    "model": f"{HERE}.model",
    "model.model": f"{HERE}.model",
    "metric": f"{HERE}.metric",
    "metric.metric": f"{HERE}.metric",
    "data": _DATA,
    **{
        f"{package}{part}": _DATA
        for package in ("data.", "experimental.data.")
        for part in (
            *("datasets", "datasets.dataset", "datasets.dummy_dataset", "datasets.coco_dataset"),
            *("datasets.bert_dataset", "dataloaders", "dataloaders.dataloader"),
            *("dataloaders.default_dataloader", "dataloaders.onnxrt_dataloader"),
            *("dataloaders.tensorflow_dataloader", "transforms", "transforms.transform"),
            *("transforms.imagenet_transform", "filters"),
        )
    },
    "utils": _UTILS,
    "utils.logger": _UTILS,
    "utils.options": _UTILS,
    "utils.pytorch": _UTILS,
    "utils.utility": _UTILS,
    "utils.constant": _UTILS,
    "utils.load_huggingface": _UTILS,
    "utils.create_obj_from_config": _DATA,
    "adaptor": _UTILS,
    "adaptor.pytorch": _UTILS,
    "adaptor.tf_utils.util": _UTILS,
    "adaptor.mxnet_utils.util": _UTILS,
    "objective": _UTILS,
    "experimental.metric.coco_label_map": _UTILS,
    "model.nets_factory": _UTILS,
    "model.tensorflow_model": _UTILS,
    "compression.pruner": _UTILS,
    "adaptor.tf_utils": _UTILS,
    "adaptor.mxnet_utils": _UTILS,
    "compression": _UTILS,
    "conf.config": _UTILS,
    "conf.dotdict": _UTILS,
}


class _Alias(ModuleType):
    """An INC module: its submodules, and the names of the module here."""

    def __init__(self, name: str, target: object) -> None:
        super().__init__(name)
        vars(self)["_target"] = target
        vars(self)["__path__"] = []

    def __getattr__(self, name: str) -> Any:
        if name in ("__file__", "__all__"):  # read by code that scans all modules
            raise AttributeError(name)
        # `conf` is both a name and a submodule in INC; scripts import the name.
        part = sys.modules.get(f"{self.__name__}.{name}")
        return part if part is not None and name != "conf" else getattr(self._target, name)


def register(package: str) -> None:
    """Make `import package.x.y` work for the modules of INC.

    Args:
        package: `neural_compressor`, or this package.
    """
    here = importlib.import_module(HERE)
    if package != HERE:
        sys.modules.setdefault(package, _Alias(package, here))
    for theirs, ours in ALIASES.items():
        name = f"{package}.{theirs}"
        if name != ours:  # otherwise the real module
            sys.modules.setdefault(name, _Alias(name, importlib.import_module(ours)))
    sys.modules.setdefault(f"{package}.conf", _Alias(f"{package}.conf", conf))


_TRAINED = "this package converts models that are trained; it does not train, prune or distil"
_QAT = "training in INT8 is not here; tune the trained model with post-training quantization"

_MXNET = "there is no adaptor for MXNet"
_INSIDE = "it belongs to the inside of that package"

#: Name → replacement.
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
    """A feature of Intel Neural Compressor was used that this package lacks."""


class Absent:
    """Placeholder of a missing class or function; raises on use.

    Args:
        name: the name in INC.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *arguments: object, **options: object) -> Any:
        """Raise NotHereError.

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
    """Return the object for a name that the module does not define.

    Raises:
        AttributeError: the name is unknown.
    """
    if name in ABSENT:
        return Absent(name)
    raise AttributeError(f"module {module!r} has no attribute {name!r}{did_you_mean(name, here)}")
