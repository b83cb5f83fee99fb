"""Settings of Intel Neural Compressor 1.x with other names, or without effect, here.

Source: the schema in `neural_compressor/conf/config.py` and the templates in
`neural_compressor/template/` of Intel Neural Compressor 1.14 (Apache License 2.0).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from neural_mp.config.source import KeyPath
from neural_mp.core.enums import Dialect
from neural_mp.core.hardware import HOST_TARGET
from neural_mp.core.quant_spec import QUANT_CHOICES
from neural_mp.data.registry import normalize_registered_name
from neural_mp.errors import ConfigurationError, error_path

Found = TypeVar("Found")
#: Receives a setting without effect: its key path, and the behavior instead.
Ignored = Callable[[KeyPath, str], None]

_DATALOADERS = (
    "quantization.calibration.dataloader",
    "quantization.train.dataloader",
    "evaluation.accuracy.dataloader",
    "evaluation.performance.dataloader",
)
_LIMITS = (
    "quantization.model_wise",
    "quantization.optype_wise.*",
    "quantization.op_wise.*",
    "mixed_precision.op_wise.*",
    "graph_optimization.op_wise.*",
)
_TENSORS = ("weight", "activation")
_STATIC = "INT8 products are accumulated in 32 bits"
_FITTED = "INT8 ops are chosen by measurement, not by a fixed rule"
_SIGOPT = "SigOpt is not used; trials are stored in an Optuna storage"
_SEARCHED = "the strategy chooses these values itself"
_TRAINING = "only trained models are tuned; nothing is trained from this file"
_ONE_TRAINER = "training runs in one process"
_ONE_PROCESS = "measurements run in one process; only cores_per_instance sets its threads"

#: Key path, with `*` for any single key → behavior instead of the setting.
IGNORED: Mapping[str, str] = {
    "optimization_level": _FITTED,
    "reduce_range": "the INT8 range follows from the kernels of this machine",
    "model_conversion": "a model is read in its own format; its framework converts other formats",
    "automixedprecision": "16-bit ops are configured in mixed_precision",
    "pruning": _TRAINING,
    "distillation": _TRAINING,
    "auto_distillation": _TRAINING,
    "nas": _TRAINING,
    "train": _TRAINING,
    "model.backend": "the framework chooses its own backend",
    "model.quant_format": "the adaptor chooses the format",
    "quantization.train.frequency": "the learning rate decays along half a cosine",
    "quantization.train.execution_mode": "the framework chooses how a step runs",
    "quantization.train.hostfile": _ONE_TRAINER,
    "quantization.train.hostconfig": _ONE_TRAINER,
    "quantization.advance": "corrections are chosen by the strategy",
    "quantization.recipes": _FITTED,
    "quantization.optimization_level": _FITTED,
    "quantization.op_wise.default_qconfig": "the key names no op; model_wise constrains all ops",
    "tuning.strategy.sigopt_api_token": _SIGOPT,
    "tuning.strategy.sigopt_project_id": _SIGOPT,
    "tuning.strategy.sigopt_experiment_name": _SIGOPT,
    "tuning.strategy.accuracy_weight": _SEARCHED,
    "tuning.strategy.latency_weight": _SEARCHED,
    "tuning.strategy.confidence_batches": _SEARCHED,
    "tuning.strategy.hawq_v2_loss": _SEARCHED,
    "tuning.multi_objectives": "tuning.objective accepts several objectives with weights",
    "tuning.tensorboard": "results are shown as tables and stored in an Optuna storage",
    "tuning.diagnosis": "results are shown as tables and stored in an Optuna storage",
    "evaluation.accuracy.configs": _ONE_PROCESS,
    "evaluation.accuracy.iteration": "accuracy is measured on all data",
    "evaluation.accuracy.multi_metrics.higher_is_better": (
        "tuning.accuracy_criterion.higher_is_better sets the direction of a weighted sum"
    ),
    "evaluation.performance.postprocess": "postprocessing is not timed",
    "evaluation.performance.configs.inter_num_of_threads": _ONE_PROCESS,
    "evaluation.performance.configs.intra_num_of_threads": _ONE_PROCESS,
    "evaluation.performance.configs.kmp_blocktime": _ONE_PROCESS,
    "evaluation.performance.configs.kmp_affinity": _ONE_PROCESS,
    **{f"{path}.filter": "all samples of the dataset are used" for path in _DATALOADERS},
    **{f"{path}.distributed": _ONE_PROCESS for path in _DATALOADERS},
    **{f"{path}.num_workers": _ONE_PROCESS for path in _DATALOADERS},
    **{f"{path}.pin_memory": "batches stay in main memory" for path in _DATALOADERS},
    **{f"{path}.sampler": "set shuffle: true for a random order" for path in _DATALOADERS},
    **{f"{path}.collate_fn": "set a function in Python" for path in _DATALOADERS},
    **{f"{path}.weight.bit": "INT8 has eight bits" for path in _LIMITS},
    **{f"{path}.activation.compute_dtype": _STATIC for path in _LIMITS},
}

#: INC's name of a framework → ours; None detects it from the model.
FRAMEWORKS: Mapping[str, str | None] = {
    "litert": "litert",
    "openvino": "openvino",
    "pytorch": "pytorch",
    "pytorch_fx": "pytorch",
    "pytorch_ipex": "pytorch",
    "tensorflow": "tensorflow",
    "tensorflow_itex": "tensorflow",
    "inteltensorflow": "tensorflow",
    "keras": "tensorflow",
    "onnxrt": "onnxrt",
    "onnxruntime": "onnxrt",
    "onnxrt_qlinear": "onnxrt",
    "onnxrt_qlinearops": "onnxrt",
    "onnxrt_integer": "onnxrt",
    "onnxrt_integerops": "onnxrt",
    "onnxrt_qdq": "onnxrt",
    "onnxrt_qoperator": "onnxrt",
    "na": None,
}

#: Framework names that only INC has: they identify a file of INC.
ONLY_THEIRS = frozenset(FRAMEWORKS) - {"pytorch", "tensorflow", "onnxrt", "openvino", "litert"}

_NAMES = """
    cifar10 cifar100 mnist fashionmnist tfrecorddataset imagerecord imagenet imagenetraw dummyv2
    sparsedummyv2 bert mzbert vocrecord cocorecord cocoraw coconpy styletransfer glue
    resizewithratio resizewithaspectratio resizecropimagenet bilinearimagenet croptoboundingbox
    cropresize paddedcentercrop alignimagechannel quantizedinput randomverticalflip toarray
    tondarray topilimage totensor parsedecodeimagenet parsedecodecoco parsedecodevoc kerasrescale
    labelshift collect squadv1 squadv1modelzoo
    cocomap cocomapv2 vocmap squadf1
"""
#: Datasets, transforms and metrics that only INC has, lower case without `_`: they identify a file
#: of INC.
ONLY_THEIR_NAMES = frozenset(_NAMES.split())

#: INC's execution provider of ONNX Runtime → our target.
_TARGETS: Mapping[str, str] = {
    "default": HOST_TARGET,
    "onnxrt_dnnl_ep": HOST_TARGET,
    "onnxrt_trt_ep": "tensorrt",
}
#: INC's execution providers with kernels of a GPU.
_GPU_PROVIDERS = ("onnxrt_cuda_ep", "onnxrt_dml_ep")
_BACKEND: KeyPath = ("model", "backend")

#: INC's name of a strategy → ours, if different; None uses the default.
STRATEGIES: Mapping[str, str | None] = {
    "auto": None,
    "automixedprecision": "auto_mixed_precision",
    "sigopt": "bayesian",
}

#: Unsupported strategies → behavior instead.
OTHER_STRATEGIES: Mapping[str, str] = {"sigopt": f"{_SIGOPT}; the strategy is bayesian"}

#: INC's INT8 approach → ours; None allows all.
INT8_APPROACHES: Mapping[str, str | None] = {
    "post_training_static_quant": "static",
    "post_training_dynamic_quant": "dynamic",
    "post_training_weight_only": "weight_only",
    "post_training_auto_quant": None,
}

#: Unsupported INT8 approaches → reason.
IGNORED_APPROACHES: Mapping[str, str] = {
    "quant_aware_training": "there is no section quantization.train; set train_func in Python",
}

#: INC's words for the quantization of a tensor → ours.
QUANT_WORDS: Mapping[str, str] = {
    "sym": "symmetric",
    "asym": "asymmetric",
    "placeholder": "dynamic",
}

#: Unsupported schemes of a tensor → reason.
_IGNORED_SCHEMES: Mapping[str, str] = {"asym_float": "zero points are integers"}

#: Unsupported objectives → reason.
IGNORED_OBJECTIVES: Mapping[str, str] = {
    "accuracy": "accuracy is the criterion; of the plans that meet it, the fastest is chosen",
}

#: Key path, as in `IGNORED` → unsupported words of the value → reason.
_IGNORED_WORDS: Mapping[str, Mapping[str, str]] = {
    "quantization.approach": IGNORED_APPROACHES,
    "tuning.objective": IGNORED_OBJECTIVES,
    **{f"{path}.{tensor}.scheme": _IGNORED_SCHEMES for path in _LIMITS for tensor in _TENSORS},
}
#: Directions of metrics, without effect in a weighted sum alone.
METRIC_DIRECTIONS = ("evaluation", "accuracy", "multi_metrics", "higher_is_better")
#: Sections that limit the whole model if they have the keys of limits instead of op names.
_WHOLE_MODEL = (("mixed_precision", "op_wise"), ("graph_optimization", "op_wise"))


def target_of_backend(backend: object) -> str | None:
    """Return the target that a backend of INC means; None for a backend without effect here.

    Raises:
        ConfigurationError: the backend runs kernels of a GPU.
    """
    if backend in _GPU_PROVIDERS:
        raise ConfigurationError(
            f"backend must be one of {', '.join(_TARGETS)}, got {backend!r}: there are no plans "
            f"for a GPU's own kernels; set onnxrt_trt_ep for TensorRT, or convert with "
            f"neural_mp.MixedPrecision and target='qdq', for a file with Q/DQ that other runtimes "
            f"read"
        )
    return _TARGETS.get(backend) if isinstance(backend, str) else None


def with_target(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the content of a file with the target that its backend means, if it means one.

    Raises:
        ConfigurationError: as for `target_of_backend`.
    """
    with error_path(*_BACKEND):
        target = target_of_backend(get_value_at(content, _BACKEND))
    if target is None:
        return content
    model = {key: value for key, value in content["model"].items() if key != "backend"}
    return {"target": target, **content, "model": model}


def explain_ignored_setting(path: KeyPath) -> str | None:
    """Return the behavior instead of a setting of INC; None if the setting is not ignored."""
    return _first_matching_entry(_PATTERNS, path)


def without_ignored(data: object, ignored: Ignored, path: KeyPath = ()) -> Any:
    """Return settings without those of INC that have no effect, and report these.

    Limits on the whole model, as INC's schema allows them in `op_wise`, get the op pattern `.*`.
    """
    reasons = _first_matching_entry(_WORD_PATTERNS, path)
    if reasons is not None:
        return _without_words(data, reasons, ignored, path)
    if path in _WHOLE_MODEL and _is_op_limits(data):
        data = {".*": data}
    if not isinstance(data, Mapping):
        return data
    retained = {}
    for key, value in data.items():
        location = (*path, key)
        why = explain_ignored_setting(location)
        if why is None or location == METRIC_DIRECTIONS:
            retained[key] = without_ignored(value, ignored, location)
        else:
            ignored(location, why)
    return retained


def _without_words(
    value: object, reasons: Mapping[str, str], ignored: Ignored, path: KeyPath
) -> Any:
    items = value.replace(",", " ").split() if isinstance(value, str) else value
    if not isinstance(items, list):
        return value
    remaining = [item for item in items if str(item).lower() not in reasons]
    for item in items:
        if item not in remaining:
            ignored((*path, item), reasons[item.lower()])
    return value if len(remaining) == len(items) else remaining or None


def _is_op_limits(data: object) -> bool:
    """Whether the limits of one op stand in place of a mapping of ops."""
    if not isinstance(data, dict):
        return False
    tensors = [value for key, value in data.items() if key in _TENSORS]
    plain = all(value is None or isinstance(value, dict) for value in tensors)
    named = {key for value in tensors if plain and value for key in value}
    return len(tensors) == len(data) and bool(named & set(QUANT_CHOICES))


_PATTERNS = tuple((tuple(key.split(".")), why) for key, why in IGNORED.items())
_WORD_PATTERNS = tuple((tuple(key.split(".")), words) for key, words in _IGNORED_WORDS.items())


def _first_matching_entry(
    patterns: Sequence[tuple[Sequence[str], Found]], path: KeyPath
) -> Found | None:
    for keys, entry in patterns:
        if len(keys) == len(path) and all(
            key in ("*", name) for key, name in zip(keys, path, strict=True)
        ):
            return entry
    return None


#: Paths in a file with names of datasets, transforms and metrics.
_NAME_PATHS: tuple[KeyPath, ...] = (
    *((*path.split("."), key) for path in _DATALOADERS for key in ("dataset", "transform")),
    ("evaluation", "accuracy", "postprocess", "transform"),
    ("evaluation", "accuracy", "metric"),
    ("evaluation", "accuracy", "multi_metrics"),
)


def detect_file_dialect(data: Mapping[str, Any]) -> Dialect:
    """Detect the dialect of a file.

    A file is INC's if it has a `version`, as INC's templates do, or anything else that only INC
    has: a framework, an INT8 approach, a key, a dataset, a transform or a metric.

    Args:
        data: content of the file, not validated.
    """
    values = [get_value_at(data, path) for path in _NAME_PATHS]
    names = [name for v in values for name in (v if isinstance(v, Mapping) else [v])]
    theirs = (
        "version" in data
        or _string_at_path(data, ("model", "framework")).lower() in ONLY_THEIRS
        or _string_at_path(data, ("quantization", "approach"))
        in {*INT8_APPROACHES, *IGNORED_APPROACHES}
        or any(explain_ignored_setting(path) for path in _walk_key_paths(data))
        or any(normalize_registered_name(str(name)) in ONLY_THEIR_NAMES for name in names)
    )
    return Dialect.INC if theirs else Dialect.OWN


def get_value_at(data: object, path: KeyPath) -> Any:
    """Return the value at a key path; None if there is none."""
    for key in path:
        data = data.get(key) if isinstance(data, Mapping) else None
    return data


def _string_at_path(data: Mapping[str, Any], path: KeyPath) -> str:
    value = get_value_at(data, path)
    return value if isinstance(value, str) else ""


def _walk_key_paths(data: object, path: KeyPath = ()) -> Iterator[KeyPath]:
    """Yield the paths of all keys, each section before its keys."""
    if isinstance(data, Mapping):
        for key, value in data.items():
            yield (*path, key)
            yield from _walk_key_paths(value, (*path, key))
