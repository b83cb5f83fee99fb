"""Module names of INC, each mapped to the module here with the same names."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from neural_mp.compat.inc.user_objects import conf
from neural_mp.errors import NeuralMPError, did_you_mean

HERE = "neural_mp.compat.inc"
THEIRS = "neural_compressor"

_DATA_PARTS = (
    *("datasets", "datasets.dataset", "datasets.dummy_dataset", "datasets.coco_dataset"),
    *("datasets.bert_dataset", "dataloaders", "dataloaders.dataloader"),
    *("dataloaders.default_dataloader", "dataloaders.onnxrt_dataloader"),
    *("dataloaders.tensorflow_dataloader", "transforms", "transforms.transform"),
    *("transforms.imagenet_transform", "filters"),
)
#: Module here → modules of INC with these names.
_MODULES: Mapping[str, Sequence[str]] = {
    "experimental": (
        *("experimental", "experimental.common", "experimental.common.criterion"),
        *("experimental.scheduler", "experimental.compression"),
    ),
    "metric": ("experimental.metric", "experimental.metric.metric", "metric", "metric.metric"),
    "config": ("config", "training"),
    "quantization": ("quantization",),
    "mix_precision": ("mix_precision",),
    "benchmark": ("benchmark",),
    "model": ("model", "model.model"),
    "data": (
        *("data", "experimental.data", "utils.create_obj_from_config"),
        *(f"{package}.{part}" for package in ("data", "experimental.data") for part in _DATA_PARTS),
    ),
    "utils": (
        *("utils", "utils.logger", "utils.options", "utils.pytorch", "utils.utility"),
        *("utils.constant", "utils.load_huggingface", "adaptor", "adaptor.pytorch"),
        *("adaptor.tf_utils", "adaptor.tf_utils.util", "adaptor.mxnet_utils"),
        *("adaptor.mxnet_utils.util", "objective", "experimental.metric.coco_label_map"),
        *("model.nets_factory", "model.tensorflow_model", "compression", "compression.pruner"),
        *("conf.config", "conf.dotdict"),
    ),
}
#: INC module, without the package's name → module here.
ALIASES: Mapping[str, str] = {
    theirs: f"{HERE}.{ours}" for ours, modules in _MODULES.items() for theirs in modules
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


_INTERNAL = "internal to Intel Neural Compressor"
#: Reason or replacement → missing names.
_REASONS: Mapping[str, Sequence[str]] = {
    "trained models are converted; nothing is trained, pruned or distilled": (
        *("Pruning", "Distillation", "Scheduler", "Component", "NAS", "DyNAS", "NASConfig"),
        *("prepare_pruning", "prepare_compression", "WeightPruningConfig", "DistillationConfig"),
        *("KnowledgeDistillationLossConfig", "SelfKnowledgeDistillationLossConfig"),
        *("IntermediateLayersKnowledgeDistillationLossConfig", "PyTorchKnowledgeDistillationLoss"),
        *("model_slim", "parse_auto_slim_config"),
    ),
    "nothing is trained; use post-training quantization of the trained model": (
        *("QuantizationAwareTrainingConfig", "TensorflowQATModel"),
    ),
    "QAT models of TensorFlow are read directly; pass the model to Quantization": (
        *("ModelConversion",),
    ),
    "there is no adaptor for MXNet": ("check_mx_version", "get_backend_name"),
    _INTERNAL: ("FRAMEWORKS", "Objective", "_parse_ckpt_bn_input"),
    "TensorFlow has removed estimators; export a SavedModel": ("get_estimator_graph",),
    "freeze the slim checkpoint into a .pb file first": ("TFSlimNetsFactory",),
}
#: Missing name → reason or replacement.
ABSENT: Mapping[str, str] = {name: why for why, names in _REASONS.items() for name in names}


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
            f"{self._name} of Intel Neural Compressor is not supported: {ABSENT[self._name]}"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self()


def absent_names(module: dict[str, Any]) -> Callable[[str], Any]:
    """Return a module's `__getattr__`: a placeholder for missing names, AttributeError for others.

    Args:
        module: the names that the module defines.
    """

    def missing(name: str) -> Any:
        if name in ABSENT:
            return Absent(name)
        raise AttributeError(
            f"module {module['__name__']!r} has no attribute {name!r}{did_you_mean(name, module)}"
        )

    return missing
