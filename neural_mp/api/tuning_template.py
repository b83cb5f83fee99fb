"""A commented tuning file for a model, from the properties of the model on this machine."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from neural_mp.adaptors.loaded_model import AnyModel
from neural_mp.api.tuning_source import dataset_of
from neural_mp.config.options import DEFAULT_PRECISIONS
from neural_mp.core import hardware
from neural_mp.core.precision import Precision
from neural_mp.space import TuningSpace
from neural_mp.util.pytree import tree_leaves

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


def tuning_template(
    model: AnyModel,
    name: str,
    file: Path,
    metric: str | None = None,
    data: Path | None = None,
    label: str | None = None,
) -> str:
    """Return the text of a tuning file, with comments.

    Args:
        model: the loaded model.
        name: path of the model, or `module:attribute`.
        file: path of the tuning file, for a comment.
        metric: name of the metric; default: by the shape of the first output.
        data: data file; default: a file name to replace.
        label: array or column of the labels in `data`.

    Raises:
        DataError: the data file does not exist, or has no labels.
    """
    space = model.adaptor.space(model.held, hardware.detect())
    inputs = model.example_inputs()
    outputs = model(inputs)
    guess, reason = _metric(outputs)
    dataset = {"numpy": {"path": _DATA, "inputs_key": "inputs", "labels_key": "labels"}}
    if data is not None:
        dataset = dataset_of(data, label)
    floats_or_bytes = [p for p in Precision if p is not Precision.FP32 and not p.is_low_bit]
    usable = [p.value for p in floats_or_bytes if _native(space, p)]
    contractions = [op.name for op in space.contractions]
    return _TEMPLATE.format(
        summary="\n# ".join(_summary(model, name, space, inputs, outputs)),
        file=_word(str(file)),
        name=_word(name),
        framework=model.adaptor.framework,
        precisions=", ".join(usable or map(str, DEFAULT_PRECISIONS)),
        op=_word(contractions[-1] if contractions else "name"),
        metric=_word(metric or guess),
        reason="set by --metric" if metric else reason,
        batch=32,
        dataset=_flow(dataset),
        note="" if data is not None else "  # replace by your data: [N, ...] and labels [N]",
    )


def _native(space: TuningSpace, precision: Precision) -> bool:
    """Whether some op runs in a precision without emulation."""
    return any(
        precision in capability.precisions and precision not in capability.emulated
        for capability in space.capabilities.values()
    )


def _summary(
    model: AnyModel, name: str, space: TuningSpace, inputs: Any, outputs: Any
) -> list[str]:
    kinds = Counter(op.type for op in space.graph).most_common(_SHOWN_TYPES)
    ops = ", ".join(f"{count} {kind}" for kind, count in kinds)
    able = {
        precision: sum(
            precision in space.capabilities[op.name].precisions
            and precision not in space.capabilities[op.name].emulated
            for op in space.contractions
        )
        for precision in Precision
        if precision is not Precision.FP32
    }
    of_all = f"of {len(space.contractions)} convolutions and matrix products"
    more = ", …" if len({op.type for op in space.graph}) > len(kinds) else ""
    return [
        f"Tuning file of {name}",
        f"Inputs: {_shapes(inputs)}; outputs: {_shapes(outputs)}",
        f"Ops: {ops}{more}",
        f"Precisions on this machine, {of_all}: "
        + ", ".join(f"{p} {count}" for p, count in able.items() if count or not p.is_low_bit),
    ]


def _metric(outputs: Any) -> tuple[str, str]:
    """Return a metric for the shape of the first output, and the reason."""
    shape = next((tuple(leaf.shape) for leaf in tree_leaves(outputs) if hasattr(leaf, "shape")), ())
    if len(shape) == 2 and shape[1] > 1:
        return "accuracy", f"{shape[1]} scores per sample; for a regression: rmse"
    if len(shape) <= 2:
        return "rmse", "one value per sample; for two classes: accuracy"
    return "accuracy", f"check: the output has shape {list(shape)}"


def _shapes(values: Any) -> str:
    leaves = [leaf for leaf in tree_leaves(values) if hasattr(leaf, "shape")]
    shapes = [f"{str(leaf.dtype).removeprefix('torch.')} {list(leaf.shape)}" for leaf in leaves]
    return ", ".join(shapes) or "none"


def _word(text: str) -> str:
    """Return a string in YAML, quoted if required."""
    return text if _PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=False)


def _flow(dataset: dict[str, Any]) -> str:
    ((kind, options),) = dataset.items()
    entries = (f"{key}: {_word(str(value))}" for key, value in options.items())
    return f"{kind}: {{{', '.join(entries)}}}"
