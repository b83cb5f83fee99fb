"""The metadata of a saved model: a JSON file next to the framework's own files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from neural_mp.adaptors.common.op_outputs import OutputLocation
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
LATER: Mapping[str, Validator[Any]] = {"results": mapping_of(OutputLocation.from_list)}


def write_details(file: Path, details: Mapping[str, Any]) -> None:
    """Write dicts, lists, strings and numbers as JSON."""
    file.write_text(json.dumps(details, indent=1), encoding="utf-8")


def read_details(file: Path, schema: Validator[T]) -> T:
    """Return the metadata in a file; raise `ModelLoadError` if missing or invalid."""
    return read_json(file, schema, ModelLoadError)
