"""Names that people can read for the open axes of an ONNX model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

#: What torch.export calls an open axis: a letter or two, and a number.
_SYMBOL = re.compile(r"[su]\d+")


def name_axes(model: Any) -> None:
    """Rename the open axes of an `onnx_ir.Model` in place, in all shapes.

    The first axis that inputs have in common is `batch`; any other is named after the first input
    that has it and its place there: `input_ids_axis1`.
    """
    names = _names(model.graph.inputs)
    for value in _values(model):
        if value.shape is None:
            continue
        # A shape that nodes share is frozen, so that each value gets one of its own.
        value.shape = type(value.shape)([_renamed(size, names) for size in value.shape])


def _renamed(size: Any, names: Mapping[str, str]) -> Any:
    word = getattr(size, "value", None)
    if not isinstance(word, str):
        return size
    return type(size)(_SYMBOL.sub(lambda found: names.get(found[0], found[0]), word))


def _names(inputs: Any) -> Mapping[str, str]:
    """Symbol → name."""
    axes = [
        (value.name, number, str(size.value))
        for value in inputs
        for number, size in enumerate(value.shape or ())
        if isinstance(getattr(size, "value", None), str)
    ]
    firsts = {symbol for _, number, symbol in axes if number == 0}
    names = {symbol: "batch" for symbol in firsts if len(firsts) == 1}
    for name, number, symbol in axes:
        names.setdefault(symbol, re.sub(r"\W", "_", f"{name}_axis{number}"))
    return names


def _values(model: Any) -> Iterator[Any]:
    yield from model.graph.inputs
    for node in model.graph.all_nodes():
        yield from node.outputs
