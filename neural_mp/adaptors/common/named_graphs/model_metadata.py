"""The metadata of a saved model: a JSON file next to the framework's own files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from neural_mp.adaptors.common.op_outputs import OutputLocation
from neural_mp.adaptors.common.signatures.input_spec import make_synthetic_example
from neural_mp.adaptors.common.signatures.signature import (
    Array,
    Shape,
    Signature,
    parse_tensor_shape,
)
from neural_mp.adaptors.contract import ConversionCounts
from neural_mp.errors import ModelLoadError
from neural_mp.io.readers import read_json
from neural_mp.util.validators import Validator, mapping_of, string

T = TypeVar("T")

#: Common entries of converted graphs, whatever the framework.
CONVERTED: Mapping[str, Validator[Any]] = {
    "counts": ConversionCounts.from_dict,
    "ops": mapping_of(string),
}
#: Optional entries, absent from files of earlier versions.
LATER: Mapping[str, Validator[Any]] = {
    "results": mapping_of(OutputLocation.from_list),
    "example": mapping_of(parse_tensor_shape),
}


def collect_model_details(
    signature: Signature,
    example: Mapping[str, Array],
    ops: Mapping[str, str],
    results: Mapping[str, OutputLocation],
    counts: ConversionCounts,
) -> dict[str, Any]:
    """Return the signature and the entries of `CONVERTED` and `LATER` for JSON."""
    tensors = [port.tensor for port in signature.inputs if port.dtype is not None]
    return {
        **signature.to_dict(),
        "counts": vars(counts),
        "ops": dict(ops),
        "results": {op: result.to_list() for op, result in results.items()},
        # Sizes of the example inputs, not their values, which are the user's data.
        "example": {tensor: list(np.shape(example[tensor])) for tensor in tensors},
    }


def restore_example_inputs(signature: Signature, details: Mapping[str, Any]) -> dict[str, Array]:
    """Return synthetic inputs with the sizes of the example before saving, if stored."""
    shapes: Mapping[str, Shape] = details.get("example", {})
    inputs = (replace(port, shape=shapes.get(port.tensor, port.shape)) for port in signature.inputs)
    return make_synthetic_example(replace(signature, inputs=tuple(inputs)))


def write_details(file: Path, details: Mapping[str, Any]) -> None:
    """Write dicts, lists, strings and numbers as JSON."""
    file.write_text(json.dumps(details, indent=1), encoding="utf-8")


def read_details(file: Path, schema: Validator[T]) -> T:
    """Return the metadata in a file; raise `ModelLoadError` if missing or invalid."""
    return read_json(file, schema, ModelLoadError)
