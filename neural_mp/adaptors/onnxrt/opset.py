"""Writing a graph in a later version of ONNX's operators."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import onnx_ir as ir
from onnxscript import version_converter

from neural_mp.adaptors.onnxrt.kernel_registry import quantizes
from neural_mp.adaptors.onnxrt.schemas import same_but_for_types
from neural_mp.errors import ConversionError, in_one_line

logger = logging.getLogger(__name__)

#: The first opset with quantization per channel and with bfloat16.
LEAST_OPSET = 13
#: The first version of the file format that holds opset 13.
_LEAST_IR_VERSION = 8
#: The last opset in which what is resized is sampled without shifting it by half a pixel.
_UNSHIFTED = 10


def opset_of(program: ir.Model) -> int:
    """The version of the operators of ai.onnx; 0 if the graph uses none."""
    imports = program.graph.opset_imports
    return imports.get("", imports.get("ai.onnx", 0))


def raise_opset(program: ir.Model) -> None:
    """Write a graph in the least opset that conversions need, in place.

    Raises:
        ConversionError: the converter cannot do it.
    """
    before = opset_of(program)
    refused = f"opset {before} cannot be raised to {LEAST_OPSET}"
    try:
        with _quiet("onnxscript.version_converter"):
            version_converter.convert_version(program, LEAST_OPSET, fallback=True)
    except Exception as error:
        # The converter asserts, and raises whatever its C++ half throws.
        logger.debug("the opset cannot be raised", exc_info=True)
        raise ConversionError(f"{refused}: {in_one_line(error)}") from error
    if opset_of(program) != LEAST_OPSET:
        raise ConversionError(f"{refused}: the model uses what changed")
    program.ir_version = max(program.ir_version, _LEAST_IR_VERSION)
    if before <= _UNSHIFTED:
        for node in program.graph.all_nodes():
            if node.op_type == "Resize" and "coordinate_transformation_mode" not in node.attributes:
                # The converter leaves it out, and the default is another one since opset 11.
                mode = ir.AttrString("coordinate_transformation_mode", "asymmetric")
                node.attributes.add(mode)
                node.attributes.add(ir.AttrString("nearest_mode", "floor"))


def lower_opset(program: ir.Model) -> None:
    """Write a graph in the newest opset in which ONNX Runtime quantizes tensors, in place.

    ONNX may be ahead of the kernels of ONNX Runtime. Often an op changed in the element types alone
    that it takes.

    Raises:
        ConversionError: an op of the graph is another one before its opset.
    """
    before = opset_of(program)
    fitting = (opset for opset in range(before, LEAST_OPSET - 1, -1) if quantizes(opset))
    newest = next(fitting, LEAST_OPSET)
    for node in program.graph.all_nodes():
        if not same_but_for_types(node, before, newest):
            raise ConversionError(
                f"ONNX Runtime has no kernels yet that quantize in opset {before}, and "
                f"{node.op_type} is another op in opset {newest}"
            )
    program.graph.opset_imports[""] = newest


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Keep a library's words on how it works from the user."""
    log = logging.getLogger(name)
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)
