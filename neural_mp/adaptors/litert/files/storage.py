"""Storage of models in folders and single files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ai_edge_litert import schema_py_generated as schema

from neural_mp.adaptors.common.named_graphs import (
    CONVERTED,
    LATER,
    collect_graph_details,
    read_details,
    restore_example_inputs,
    write_details,
)
from neural_mp.adaptors.common.signatures.signature import Signature
from neural_mp.adaptors.litert.files.checks import read_flatbuffer
from neural_mp.adaptors.litert.graph.program import Program
from neural_mp.adaptors.litert.model import LiteRtModel
from neural_mp.errors import ModelLoadError
from neural_mp.util.validators import boolean, record

MODEL_FILE, DETAILS_FILE = "model.tflite", "neural_mp_litert.json"
#: The recipe of a result and its ranges, as the API of AI Edge Quantizer takes them.
RECIPE_FILE, CALIBRATION_FILE = "recipe.json", "calibration.json"


def save_model(model: LiteRtModel, folder: Path) -> None:
    """Write the model and its metadata."""
    save_file(model, folder / MODEL_FILE, {})
    write_details(folder / DETAILS_FILE, collect_graph_details(model))
    if model.recipe is not None:
        calibration = {
            name: {end: values.tolist() for end, values in statistics.items()}
            for name, statistics in model.recipe.statistics.items()
        }
        (folder / RECIPE_FILE).write_text(json.dumps(model.recipe.entries), encoding="utf-8")
        (folder / CALIBRATION_FILE).write_text(json.dumps(calibration), encoding="utf-8")


def restore_model(folder: Path) -> LiteRtModel:
    """Read back the files of `save_model`.

    Raises:
        ModelLoadError: the files are missing, truncated or tampered with.
    """
    signature, details = read_details(folder / DETAILS_FILE, _parse_details)
    path = folder / MODEL_FILE
    program = Program.parse(read_flatbuffer(path))
    names = {program.tensor_name(index) for index in range(len(program.main.tensors))}
    ports = (*signature.inputs, *signature.outputs)
    missing = [port.tensor for port in ports if port.tensor not in names]
    if missing:
        raise ModelLoadError(f"{str(path)!r} lacks {missing[0]!r}, which {DETAILS_FILE} names")
    return LiteRtModel(
        program,
        signature,
        restore_example_inputs(signature, details),
        None if details["converted"] else program,
        details["ops"],
        details.get("results", {}),
        counts=details["counts"],
    )


def _parse_details(value: object) -> tuple[Signature, dict[str, Any]]:
    return Signature.from_dict(value), _DETAILS(value)


_DETAILS = record({**CONVERTED, "converted": boolean}, LATER)


def save_file(model: LiteRtModel, path: Path, metadata: Mapping[str, str]) -> None:
    """Write the model alone, with metadata as named buffers; existing files stay until then."""
    program = model.active_graph
    if metadata:
        program = program.copy()
        for key, value in metadata.items():
            _add_metadata(program.tree, key, value)
    scratch = path.with_name(f"{path.name}.part")
    scratch.write_bytes(program.content)
    scratch.replace(path)


def _add_metadata(tree: Any, name: str, text: str) -> None:
    buffer, entry = schema.BufferT(), schema.MetadataT()
    buffer.data = text.encode()
    tree.buffers.append(buffer)
    entry.name, entry.buffer = name, len(tree.buffers) - 1
    tree.metadata = [*(tree.metadata or []), entry]


def dump_graph(model: LiteRtModel, path: Path) -> tuple[Path, ...]:
    """Write the graph as a file."""
    file = path.with_suffix(".tflite")
    save_file(model, file, {})
    return (file,)
