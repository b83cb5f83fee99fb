"""Element types and shapes of what ONNX knows no schema of, asked of ONNX Runtime."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import onnx_ir as ir

from neural_mp.adaptors.onnxrt.sessions import PLAIN, Runner
from neural_mp.adaptors.onnxrt.subgraph_outputs import with_outputs
from neural_mp.errors import ConversionError

logger = logging.getLogger(__name__)

#: Words of ONNX Runtime for element types that ONNX calls otherwise.
_CALLED = {"float": "FLOAT", "double": "DOUBLE"}
_TENSOR = re.compile(r"tensor\((\w+)\)")


def note_runtime_types(program: ir.Model, folder: Path | None, provider: str) -> None:
    """Note types and shapes that ONNX could not infer, in place: of the runtime's own ops, mostly.

    Args:
        program: the graph; ONNX Runtime takes it.
        folder: where its external data lies.
        provider: the execution provider.
    """
    unknown = {
        str(value.name): value
        for node in program.graph
        for value in node.outputs
        if value.name and value.type is None
    }
    if not unknown:
        return
    try:
        asked = Runner(with_outputs(program, unknown), folder, provider, level=PLAIN)
    except (ConversionError, ValueError):
        logger.debug("ONNX Runtime does not say the types", exc_info=True)
        return
    for found in asked.session.get_outputs():
        kind = _TENSOR.fullmatch(found.type)
        value = unknown.get(found.name)
        if value is None or kind is None:
            continue
        word = _CALLED.get(kind[1], kind[1].upper())
        if word in ir.DataType.__members__:
            value.dtype = ir.DataType[word]
            if found.shape:  # unknown sizes are shown as none, as those of a single number
                value.shape = ir.Shape(found.shape)
