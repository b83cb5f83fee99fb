"""Storage of models in folders and single files."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from neural_mp.adaptors.common.named_graphs.graph_model import graph_details
from neural_mp.adaptors.common.named_graphs.model_metadata import (
    CONVERTED,
    LATER,
    read_details,
    restored_example,
    write_details,
)
from neural_mp.adaptors.common.signatures.signature import Signature
from neural_mp.adaptors.openvino.file_checks import check_xml, weights_file
from neural_mp.adaptors.openvino.graph_edit import name_of, type_of
from neural_mp.adaptors.openvino.model import OpenVinoModel
from neural_mp.adaptors.openvino.ops import Role, has_role
from neural_mp.adaptors.openvino.runtime import core, ov
from neural_mp.errors import ModelLoadError, one_line
from neural_mp.util.validators import MOST_STREAMS, boolean, integer_between, optional, record

MODEL_FILE, DETAILS_FILE = "model.xml", "neural_mp_openvino.json"


def save(model: OpenVinoModel, folder: Path) -> None:
    """Write the model and its metadata."""
    save_file(model, folder / MODEL_FILE, {})
    write_details(folder / DETAILS_FILE, {**graph_details(model), "streams": model.streams})


def restore(folder: Path) -> OpenVinoModel:
    """Read back the files of `save`.

    Raises:
        ModelLoadError: the files are missing, truncated or tampered with.
    """
    signature, details = read_details(folder / DETAILS_FILE, _parse_details)
    path = folder / MODEL_FILE
    check_xml(path)
    try:
        program = core().read_model(path)
    except (RuntimeError, ValueError) as error:
        raise ModelLoadError(f"{str(path)!r} is damaged: {one_line(error)}") from error
    _check_ports(program, signature, path)
    return OpenVinoModel(
        program,
        signature,
        restored_example(signature, details),
        None if details["converted"] else program,
        details["ops"],
        details.get("results", {}),
        counts=details["counts"],
        streams=details.get("streams"),
    )


def _parse_details(value: object) -> tuple[Signature, dict[str, Any]]:
    return Signature.from_dict(value), _DETAILS(value)


_STREAMS = {"streams": optional(integer_between(1, MOST_STREAMS))}
_DETAILS = record({**CONVERTED, "converted": boolean}, {**LATER, **_STREAMS})


def _check_ports(program: Any, signature: Signature, path: Path) -> None:
    names = {name_of(port.get_node()) for port in (*program.inputs, *program.outputs)}
    missing = [
        port.tensor for port in (*signature.inputs, *signature.outputs) if port.tensor not in names
    ]
    if missing:
        raise ModelLoadError(f"{str(path)!r} lacks {missing[0]!r}, which {DETAILS_FILE} names")


def save_file(model: OpenVinoModel, path: Path, metadata: Mapping[str, str]) -> None:
    """Write the model alone, as `.xml` and `.bin`; existing files stay until both are complete."""
    program = model.runs
    if metadata:
        program = program.clone()
        for key, value in metadata.items():
            program.set_rt_info(value, ["neural_mp", key])
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        complete = Path(scratch) / path.name
        ov.save_model(program, complete, compress_to_fp16=False)
        weights_file(complete).replace(weights_file(path))
        complete.replace(path)


def dump_graph(model: OpenVinoModel, path: Path) -> tuple[Path, ...]:
    """Write the model; its `.xml` is text."""
    file = path.with_suffix(".xml")
    save_file(model, file, {})
    return weights_file(file), file


def digest(program: Any) -> str:
    """Return a digest of all nodes and weights."""
    running = hashlib.sha256()
    constants: dict[str, str] = {}
    for node in sorted(program.get_ops(), key=name_of):
        if has_role(node, Role.CONSTANT):
            continue
        inputs = [_output_identity(port.get_source_output(), constants) for port in node.inputs()]
        attributes = sorted((key, str(value)) for key, value in node.get_attributes().items())
        running.update(repr((name_of(node), type_of(node), attributes, inputs)).encode())
    return running.hexdigest()


def _output_identity(output: Any, constants: dict[str, str]) -> tuple[str, int]:
    """Return the name of a computed result, or the digest of a constant, whose name may vary."""
    node = output.get_node()
    if not has_role(node, Role.CONSTANT):
        return name_of(node), output.get_index()
    name = name_of(node)
    if name not in constants:
        kind = f"{node.get_element_type()} {list(node.get_output_shape(0))}"
        content = np.ascontiguousarray(node.get_data()).view(np.uint8)
        constants[name] = hashlib.sha256(kind.encode() + content.tobytes()).hexdigest()
    return constants[name], 0
