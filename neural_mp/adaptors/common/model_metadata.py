"""The details of a saved model: a JSON file beside the framework's own, in the same folder."""

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

#: What the details of a converted graph hold in several frameworks alike.
CONVERTED: Mapping[str, Validator[Any]] = {
    "counts": ConversionCounts.from_dict,
    "ops": mapping_of(string),
}
#: What earlier versions did not write.
LATER: Mapping[str, Validator[Any]] = {"results": mapping_of(OutputLocation.from_list)}


def write_details(file: Path, details: Mapping[str, Any]) -> None:
    """Write plain dicts, lists, texts and numbers."""
    file.write_text(json.dumps(details, indent=1), encoding="utf-8")


def read_details(file: Path, kind: Validator[T]) -> T:
    """The details.

    Args:
        file: theirs.
        kind: what the adaptor expects in it.

    Raises:
        ModelLoadError: there is no such file, or it holds something else.
    """
    return read_json(file, kind, ModelLoadError)
