"""Options of a run from a model and data files alone, and the tuning file that sets them."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from neural_mp.adaptors.detect import FRAMEWORKS
from neural_mp.adaptors.loaded_model import AnyModel
from neural_mp.api.mixed_precision import MixedPrecision
from neural_mp.config import load_settings
from neural_mp.config.options import DEFAULT_PRECISIONS, parse_criterion_mapping
from neural_mp.config.source import TUNING_FILES
from neural_mp.core import hardware
from neural_mp.core.criterion import AccuracyCriterion
from neural_mp.core.precision import CPU_PRECISIONS, Precision
from neural_mp.data.numpy_files import iterate_plain_arrays
from neural_mp.data.text import DEFAULT_LENGTH, read_context_length
from neural_mp.errors import ConfigurationError, DataError, did_you_mean
from neural_mp.io.files import describe_working_directory
from neural_mp.space import TuningSpace
from neural_mp.util.labels import NAMES
from neural_mp.util.pytree import tree_leaves
from neural_mp.util.validators import file_path, validate_option

#: Names of label arrays, besides those in batches.
_LABELS = (*NAMES, "targets", "target", "y", "y_test", "y_val")
_KINDS = ("relative", "absolute")


def is_model(source: str) -> bool:
    """Whether a name is `module:attribute`, or the path of a model, rather than a tuning file."""
    path = validate_option("model", file_path, source)
    if path.suffix in TUNING_FILES:
        return False
    return any(entry.rule.matches_source(source) for entry in FRAMEWORKS.values()) or (
        ":" in source and not path.exists()
    )


def open_tuning_source(source: str, trust: Collection[str]) -> MixedPrecision:
    """Return the options of a tuning file, or of a model without a tuning file.

    Raises:
        ConfigurationError: there is no such file, or the tuning file is invalid.
    """
    if is_model(source):
        if ":" not in source and not Path(source).exists():
            raise ConfigurationError(
                f"there is no model {source!r} in {describe_working_directory()}"
            )
        return MixedPrecision(model=source, trust=trust)
    path = Path(source)
    if path.is_dir() or (path.is_file() and path.suffix not in (*TUNING_FILES, "")):
        raise ConfigurationError(
            f"{source!r} is neither a tuning file (.yaml, .yml) nor a model of a supported "
            f"framework ({', '.join(FRAMEWORKS)}); give one of these"
        )
    return MixedPrecision(load_settings(source, trust=trust), trust=trust)


def parse_criterion_option(text: str, before: AccuracyCriterion) -> AccuracyCriterion:
    """Return a criterion as `1%`, `0.01`, `relative:0.01` or `absolute:0.02`, in place of another.

    Raises:
        ConfigurationError: the text is not a tolerance, or out of range.
    """
    kind, _, amount = text.rpartition(":")
    kind = kind or _KINDS[0]
    if kind not in _KINDS:
        raise ConfigurationError(
            f"--tolerance must be a fraction of the baseline, e.g. 1% or relative:0.01, or "
            f"absolute:0.02 in the unit of the metric, got {text!r}{did_you_mean(kind, _KINDS)}"
        )
    value: Any = amount.strip()
    with suppress(ValueError):  # a percentage, or a mistake that the validator names
        value = float(value)
    return replace(
        parse_criterion_mapping({kind: value}, "--tolerance"),
        higher_is_better=before.higher_is_better,
        any_tolerance=before.any_tolerance,
        any_baseline=before.any_baseline,
    )


def is_text(data: Path) -> bool:
    """Whether a data file is a text for a language model."""
    return data.suffix in (".txt", ".jsonl")


def set_text_defaults(converter: MixedPrecision) -> None:
    """Set the defaults of runs of language models: bits of weights, for the smallest footprint."""
    # Times of a workload would not count for the footprint.
    mixed = {"performance": 0.5, "footprint": 0.5}
    converter.set_default("capture", "layers")
    converter.set_default("precisions", "int4,int8")
    has_workload = converter.workload is not None
    converter.set_default("objective", mixed if has_workload else "footprint")


def make_file_dataset(data: Path, label: str | None = None, model: object = None) -> dict[str, Any]:
    """Return the dataset of a data file, as in a tuning file.

    The labels are found by name, in a `.csv` file in the last column. A text is read with the
    tokenizer in the folder of the model.

    Raises:
        DataError: the file does not exist, is of another type, or has no such labels; or the
            tokenizer is missing.
    """
    if data.suffix not in (".npz", ".csv") and not is_text(data):
        raise DataError(
            f"the data must be an .npz or a .csv file with inputs and labels, or a .txt or .jsonl "
            f"file with a text, got {str(data)!r}; describe other data in a tuning file"
        )
    if not data.is_file():
        raise DataError(f"there is no file {str(data)!r} in {describe_working_directory()}")
    if is_text(data):
        return _make_text_dataset(data, label, model)
    if data.suffix == ".csv":
        return {"csv": {"path": str(data), **({} if label is None else {"label": label})}}
    with iterate_plain_arrays(data, mapped=True) as arrays:
        names = ["inputs"] if isinstance(arrays, np.ndarray) else list(arrays.files)
    inputs, labels = _input_and_label_names(data, names, label)
    return {"numpy": {"path": str(data), "inputs_key": inputs, "labels_key": labels}}


def _make_text_dataset(data: Path, label: str | None, model: object) -> dict[str, Any]:
    if label is not None:
        raise DataError(f"the labels of the text {str(data)!r} are its tokens; remove --label")
    folder = Path(str(model))
    if not folder.is_dir():
        raise DataError(
            f"the text {str(data)!r} requires the tokenizer of a model folder, got the model "
            f"{str(model)!r}; give the folder, or token ids in a tuning file (dataset 'text')"
        )
    length = read_context_length(folder)
    options = {} if length is None else {"length": min(length, DEFAULT_LENGTH)}
    return {"text": {"path": str(data), "tokenizer": str(folder), **options}}


def _input_and_label_names(data: Path, names: list[str], label: str | None) -> tuple[str, str]:
    labels = [name for name in _LABELS if name in names] if label is None else [label]
    if label is not None and label not in names:
        raise DataError(f"{str(data)!r} has no array {label!r}{did_you_mean(label, names)}")
    rest = [name for name in names if name not in labels[:1]]
    if not labels or (len(rest) != 1 and "inputs" not in rest):
        raise DataError(
            f"{str(data)!r} must have one array of inputs and one of labels, got "
            f"{', '.join(names)}; name the labels by --label, or both in a tuning file"
        )
    return "inputs" if "inputs" in rest else rest[0], labels[0]


#: Strings that YAML reads unchanged without quotes.
_PLAIN = re.compile(r"[A-Za-z_./][\w./-]*")
#: Number of op types listed.
_SHOWN_TYPES = 6
#: Data file of the template if none is given.
_DATA = "data.npz"

_TEMPLATE = """\
# {summary}
# Run: neural-mp tune {file} --output tuned

model:
  name: {name}
  framework: {framework}

mixed_precision:
  precisions: [{precisions}]  # searched besides fp32, which every op may use

# quantization:
#   op_wise:  # limits of single ops, by name or pattern
#     {op}: {{precisions: fp32}}

tuning:
  accuracy_criterion:
    relative: 0.01  # tolerated loss: 1 % of the FP32 value; or absolute, in the metric's unit
  exit_policy:
    timeout: 3600  # seconds; 0 sets no limit
    max_trials: 100

evaluation:
  accuracy:
    metric: {metric}  # {reason}
    dataloader:
      batch_size: {batch}
      dataset:
        {dataset}{note}
"""


def write_tuning_template(
    model: AnyModel,
    name: str,
    file: Path,
    metric: str | None = None,
    data: Path | None = None,
    label: str | None = None,
) -> str:
    """Return the text of a tuning file, with comments.

    The default metric depends on the shape of the first output; the default data is a file name to
    replace.

    Raises:
        DataError: the data file does not exist, or has no labels.
    """
    space = model.adaptor.space(model.held, hardware.detect())
    inputs = model.example_inputs()
    outputs = model(inputs)
    guess, reason = _suggest_metric(outputs)
    dataset = {"numpy": {"path": _DATA, "inputs_key": "inputs", "labels_key": "labels"}}
    if data is not None:
        dataset = make_file_dataset(data, label)
    floats_or_bytes = [p for p in CPU_PRECISIONS if p is not Precision.FP32 and not p.is_low_bit]
    usable = [p.value for p in floats_or_bytes if _has_unemulated_op(space, p)]
    contractions = [op.name for op in space.contractions]
    ((kind, options),) = dataset.items()
    entries = ", ".join(f"{key}: {_to_yaml_string(str(value))}" for key, value in options.items())
    return _TEMPLATE.format(
        summary="\n# ".join(_summarize_model(model, name, space, inputs, outputs)),
        file=_to_yaml_string(str(file)),
        name=_to_yaml_string(name),
        framework=model.adaptor.framework,
        precisions=", ".join(usable or map(str, DEFAULT_PRECISIONS)),
        op=_to_yaml_string(contractions[-1] if contractions else "name"),
        metric=_to_yaml_string(metric or guess),
        reason="set by --metric" if metric else reason,
        batch=32,
        dataset=f"{kind}: {{{entries}}}",
        note="" if data is not None else "  # replace by your data: [N, ...] and labels [N]",
    )


def _has_unemulated_op(space: TuningSpace, precision: Precision) -> bool:
    return any(
        precision in capability.precisions and precision not in capability.emulated
        for capability in space.capabilities.values()
    )


def _summarize_model(
    model: AnyModel, name: str, space: TuningSpace, inputs: object, outputs: object
) -> list[str]:
    kinds = Counter(op.type for op in space.graph).most_common(_SHOWN_TYPES)
    ops = ", ".join(f"{count} {kind}" for kind, count in kinds)
    able = {
        precision: sum(
            precision in space.capabilities[op.name].precisions
            and precision not in space.capabilities[op.name].emulated
            for op in space.contractions
        )
        for precision in CPU_PRECISIONS
        if precision is not Precision.FP32
    }
    of_all = f"of {len(space.contractions)} convolutions and matrix products"
    more = ", …" if len({op.type for op in space.graph}) > len(kinds) else ""
    return [
        f"Tuning file of {name}",
        f"Inputs: {_describe_shapes(inputs)}; outputs: {_describe_shapes(outputs)}",
        f"Ops: {ops}{more}",
        f"Precisions on this machine, {of_all}: "
        + ", ".join(f"{p} {count}" for p, count in able.items() if count or not p.is_low_bit),
    ]


def _suggest_metric(outputs: object) -> tuple[str, str]:
    """Return a metric for the shape of the first output, and the reason."""
    shape = next((tuple(leaf.shape) for leaf in tree_leaves(outputs) if hasattr(leaf, "shape")), ())
    if len(shape) == 2 and shape[1] > 1:
        return "accuracy", f"{shape[1]} scores per sample; for a regression: rmse"
    if len(shape) <= 2:
        return "rmse", "one value per sample; for two classes: accuracy"
    return "accuracy", f"check: the output has shape {list(shape)}"


def _describe_shapes(values: object) -> str:
    leaves = [leaf for leaf in tree_leaves(values) if hasattr(leaf, "shape")]
    shapes = [f"{str(leaf.dtype).removeprefix('torch.')} {list(leaf.shape)}" for leaf in leaves]
    return ", ".join(shapes) or "none"


def _to_yaml_string(text: str) -> str:
    return text if _PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=False)
