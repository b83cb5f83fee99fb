"""Module names of INC, each mapped to the module here with the same names."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from types import FunctionType, ModuleType
from typing import Any

from neural_mp.compat.inc.user_objects import conf
from neural_mp.errors import NeuralMPError, did_you_mean

HERE = "neural_mp.compat.inc"
THEIRS = "neural_compressor"

_DATA_PARTS = (
    "datasets",
    "datasets.dataset",
    "datasets.dummy_dataset",
    "datasets.coco_dataset",
    "datasets.bert_dataset",
    "dataloaders",
    "dataloaders.dataloader",
    "dataloaders.default_dataloader",
    "dataloaders.onnxrt_dataloader",
    "dataloaders.tensorflow_dataloader",
    "transforms",
    "transforms.transform",
    "transforms.imagenet_transform",
    "filters",
)
#: Module here → modules of INC with these names.
_MODULES: Mapping[str, Sequence[str]] = {
    "experimental": (
        "experimental",
        "experimental.common",
        "experimental.common.criterion",
        "experimental.scheduler",
        "experimental.compression",
    ),
    "metric": ("experimental.metric", "experimental.metric.metric", "metric", "metric.metric"),
    "config": ("config",),
    "training": ("training",),
    "quantization": ("quantization",),
    "mix_precision": ("mix_precision",),
    "benchmark": ("benchmark",),
    "model": ("model", "model.model"),
    "data": (
        "data",
        "experimental.data",
        "utils.create_obj_from_config",
        *(f"{package}.{part}" for package in ("data", "experimental.data") for part in _DATA_PARTS),
    ),
    "utils": (
        "utils",
        "utils.logger",
        "utils.options",
        "utils.pytorch",
        "utils.utility",
        "utils.constant",
        "utils.load_huggingface",
        "adaptor",
        "adaptor.pytorch",
        "adaptor.tf_utils",
        "adaptor.tf_utils.util",
        "adaptor.mxnet_utils",
        "adaptor.mxnet_utils.util",
        "objective",
        "experimental.metric.coco_label_map",
        "model.nets_factory",
        "model.tensorflow_model",
        "compression",
        "compression.pruner",
        "conf.config",
        "conf.dotdict",
    ),
    "v3.torch_quantization": (
        "torch",
        "torch.quantization",
        "torch.quantization.quantize",
        "torch.quantization.config",
        "torch.quantization.autotune",
        "torch.quantization.save_load_entry",
        "torch.quantization.algorithm_entry",
    ),
    "v3.torch_helpers": (
        "torch.utils",
        "torch.utils.utility",
        "torch.utils.auto_accelerator",
        "torch.utils.block_wise",
        "torch.utils.llm_utility",
        "torch.utils.constants",
        "torch.utils.environ",
        "torch.export",
        "torch.export.pt2e_export",
        "torch.algorithms",
        "torch.algorithms.smooth_quant",
        "torch.algorithms.layer_wise",
        "torch.algorithms.layer_wise.utils",
        "torch.algorithms.autoround",
        "torch.algorithms.pt2e_quant",
        "torch.algorithms.weight_only",
        "torch.algorithms.weight_only.autoround",
        "torch.algorithms.weight_only.utility",
        "torch.algorithms.weight_only.modules",
        "torch.algorithms.weight_only.save_load",
    ),
    "v3.common_names": (
        "common",
        "common.utils",
        "common.utils.logger",
        "common.utils.utility",
        "common.utils.constants",
        "common.base_config",
        "common.tuning_param",
    ),
    "v3.base_tuning": ("common.base_tuning",),
    "v3.tensorflow_names": (
        "tensorflow",
        "tensorflow.keras",
        "tensorflow.quantization",
        "tensorflow.utils",
        "tensorflow.quantization.config",
        "tensorflow.quantization.quantize",
        "tensorflow.quantization.autotune",
        "tensorflow.quantization.utils",
        "tensorflow.quantization.utils.utility",
        "tensorflow.utils.data",
        "tensorflow.utils.model",
        "tensorflow.utils.model_wrappers",
        "tensorflow.utils.utility",
        "tensorflow.utils.constants",
    ),
    "v3.transformers_names": (
        "transformers",
        "transformers.quantization",
        "transformers.quantization.utils",
        "transformers.generation",
        "transformers.utils",
        "transformers.models",
        "evaluation",
        "evaluation.lm_eval",
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
        # A name that is also that of a submodule, such as `autotune` and `conf`, means the object.
        part = sys.modules.get(f"{self.__name__}.{name}")
        own = vars(self._target).get(name) if isinstance(self._target, ModuleType) else None
        if part is None or name == "conf" or isinstance(own, FunctionType):
            return getattr(self._target, name)
        return part


#: Package of INC without counterpart → reason.
_ABSENT_MODULES: Mapping[str, str] = {
    "jax": "there is no adaptor for JAX; with the TensorFlow backend of Keras, use "
    "neural_compressor.tensorflow",
    "onnxrt": "ONNX models are quantized by neural_compressor.quantization.fit of version 2",
}


class _Hints(MetaPathFinder):
    """The last finder: unknown modules of INC are reported with the nearest known ones."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        """Raise ModuleNotFoundError for a module of INC, which no other finder knows."""
        package, _, name = fullname.partition(".")
        if package != THEIRS or not name:
            return
        why = _ABSENT_MODULES.get(name.partition(".")[0])
        hint = f": {why}" if why else did_you_mean(name, ALIASES)
        raise ModuleNotFoundError(f"No module named {fullname!r}{hint}", name=fullname)


def register(package: str) -> None:
    """Make `import package.x.y` work for the modules of INC.

    Args:
        package: `neural_compressor`, or this package.
    """
    if package == THEIRS and not any(isinstance(finder, _Hints) for finder in sys.meta_path):
        sys.meta_path.append(_Hints())
    root = importlib.import_module(HERE)
    if package != HERE:
        sys.modules.setdefault(package, _Alias(package, root))
    for theirs, ours in ALIASES.items():
        name = f"{package}.{theirs}"
        if name != ours:  # otherwise the real module
            sys.modules.setdefault(name, _Alias(name, importlib.import_module(ours)))
    sys.modules.setdefault(f"{package}.conf", _Alias(f"{package}.conf", conf))


_INTERNAL = "internal to Intel Neural Compressor"
#: Reason or replacement → missing names.
_REASONS: Mapping[str, Sequence[str]] = {
    "nothing is pruned or distilled; only the rounding of a plan is trained": (
        "Pruning",
        "Distillation",
        "Scheduler",
        "Component",
        "NAS",
        "DyNAS",
        "NASConfig",
        "prepare_pruning",
        "WeightPruningConfig",
        "DistillationConfig",
        "KnowledgeDistillationLossConfig",
        "SelfKnowledgeDistillationLossConfig",
        "IntermediateLayersKnowledgeDistillationLossConfig",
        "PyTorchKnowledgeDistillationLoss",
        "model_slim",
        "parse_auto_slim_config",
    ),
    "use prepare_compression, or neural_mp.training.quantization_aware and finish": (
        "TensorflowQATModel",
    ),
    "QAT models of TensorFlow are read directly; pass the model to Quantization": (
        "ModelConversion",
    ),
    "no CPU kernel computes in float8; use INT8StaticQuantConfig or MixedPrecisionConfig": (
        "HybridGPTQConfig",
        "get_default_qat_module_mappings",
    ),
    "no CPU kernel computes in microscaling types; use INT8StaticQuantConfig, or RTNConfig and "
    "GPTQConfig with groups of 32": ("MXQuantConfig", "get_default_mx_config"),
    "there is no adaptor for MXNet": ("check_mx_version", "get_backend_name"),
    _INTERNAL: (
        "FRAMEWORKS",
        "Objective",
        "_parse_ckpt_bn_input",
        "modified_pickle",
        "get_path",
        "recover_model_from_json",
        "MulLinear",
        "WOQModelLoader",
        "pt2e_compat",
        "WeightOnlyLinear",
        "INCWeightOnlyLinear",
        "_AutoRoundModelReference",
        "_is_autoround_model_free_string_case",
        "get_layer_names_in_block",
        "get_multimodal_block_names",
        "register_algo",
        "log_process",
    ),
    "calibration text is the user's: call the prepared model on it before convert": (
        "get_dataloader",
        "get_mllm_dataloader",
        "get_default_llm_dataloader",
        "block_wise_calibration",
    ),
    "load the model with transformers; layers are converted in place of its weights": (
        "initialize_model_and_tokenizer",
        "load_first_layer_only",
    ),
    "generate of the converted model is that of transformers": ("_beam_search", "_greedy_search"),
    "pass a torch.dtype": ("convert_dtype_str2torch",),
    "load the model with transformers, then call prepare and convert": (
        "Qwen2VLForConditionalGeneration",
    ),
    "measure with neural_mp.benchmark, or neural-mp benchmark": ("llm_benchmark",),
    "TensorFlow has removed estimators; export a SavedModel": ("get_estimator_graph",),
    "freeze the slim checkpoint into a .pb file first": ("TFSlimNetsFactory",),
}
#: Missing name → reason or replacement.
ABSENT: Mapping[str, str] = {name: why for why, names in _REASONS.items() for name in names}


class NotHereError(NeuralMPError):
    """A feature of Intel Neural Compressor was used that this package lacks."""


class Absent:
    """Placeholder of a missing class or function, by its name in INC; raises on use."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *arguments: object, **options: object) -> Any:
        """Raise NotHereError."""
        raise NotHereError(
            f"{self._name} of Intel Neural Compressor is not supported: {ABSENT[self._name]}"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self()


def make_absent_getter(module: dict[str, Any]) -> Callable[[str], Any]:
    """Return a module's `__getattr__`: a placeholder for missing names, AttributeError for others.

    `module` holds the names that the module defines.
    """

    def get_absent_attribute(name: str) -> Any:
        if name in ABSENT:
            return Absent(name)
        raise AttributeError(
            f"module {module['__name__']!r} has no attribute {name!r}{did_you_mean(name, module)}"
        )

    return get_absent_attribute
