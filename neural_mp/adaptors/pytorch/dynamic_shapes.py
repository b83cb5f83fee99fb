"""Input sizes for which a captured graph is valid, checked before every run.

A graph holds the branches and numbers that the model's code derives from some sizes. torch.export
determines for which other sizes the graph is valid; these bounds are kept through rewrites and in
files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

import torch
from torch.export._tree_utils import reorder_kwargs
from torch.fx import GraphModule
from torch.utils import _pytree as pytree
from torch.utils._sympy.numbers import IntInfinity

from neural_mp.adaptors.pytorch.call_signature import CallArgs
from neural_mp.adaptors.pytorch.versions import child_specs, is_being_traced
from neural_mp.errors import DataError
from neural_mp.util.text import counted
from neural_mp.util.validators import (
    boolean,
    list_of,
    non_negative_integer,
    optional,
    string,
    tuple_of,
)

#: Key of `GraphModule.meta` for the sizes.
SIZES = "neural_mp_sizes"
#: torch.export always specializes sizes 0 and 1, so a bound up to 2 means no bound.
_UNASKED = 2


@dataclass(frozen=True)
class Axis:
    """Valid sizes of one input axis.

    Attributes:
        symbol: axes with equal symbols have equal sizes; empty for an independent axis.
        least, largest: inclusive bounds; None for no bound.
        exported: whether the bounds are those of a program that the user exported.
    """

    symbol: str = ""
    least: int = 0
    largest: int | None = None
    exported: bool = False


#: Axes of each input; None for an input that is not a tensor.
Sizes = tuple[tuple[Axis, ...] | None, ...]


def watch_sizes(module: GraphModule, sizes: Sizes) -> None:
    """Make a graph check its inputs for `sizes` only, instead of earlier checks."""
    module.meta[SIZES] = sizes
    module._forward_pre_hooks.clear()
    module._forward_pre_hooks_with_kwargs.clear()
    module.register_forward_pre_hook(check_inputs, with_kwargs=True)


def sizes_of(module: GraphModule) -> Sizes:
    """Return the size bounds that torch.export found for a module's inputs."""
    found: list[tuple[Axis, ...] | None] = []
    for node in module.graph.nodes:
        if node.op == "placeholder":
            value = node.meta.get("val")
            tensor = isinstance(value, torch.Tensor)
            found.append(tuple(_axis(module, size) for size in value.shape) if tensor else None)
    return tuple(found)


def _axis(module: GraphModule, size: int | torch.SymInt) -> Axis:
    if not isinstance(size, torch.SymInt) or size.node.maybe_as_int() is not None:
        return Axis("", int(size), int(size))
    expression = size.node.expr
    known = module.range_constraints.get(expression)
    if known is None:
        return Axis()
    least = int(known.lower)
    largest = None if isinstance(known.upper, IntInfinity) else int(known.upper)
    return Axis(str(expression), 0 if least <= _UNASKED else least, largest)


def check_inputs(
    module: GraphModule, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> None:
    """Check the input sizes of a graph.

    Raises:
        DataError: if an axis is too short or too long, or two axes that must agree differ.
    """
    if is_being_traced():
        return
    seen: dict[str, int] = {}
    leaves = flat_inputs(module, args, kwargs)
    for position, (leaf, axes) in enumerate(zip(leaves, module.meta[SIZES], strict=False)):
        if axes is None or not isinstance(leaf, torch.Tensor):
            continue
        if leaf.ndim != len(axes):
            raise DataError(
                f"input {position} must have {counted(len(axes), 'axis', 'axes')}, as at capture, "
                f"got {leaf.ndim}"
            )
        for number, (size, axis) in enumerate(zip(leaf.shape, axes, strict=True)):
            expected = _complaint(size, axis, seen)
            if expected:
                if axis.exported:
                    open_axis = how_to_export_open(number)
                    expected += f", as in the exported program; for a dynamic axis, {open_axis}"
                raise DataError(
                    f"axis {number} of input {position} has {counted(size, 'value')}; {expected}"
                )


def _complaint(size: int, axis: Axis, seen: dict[str, int]) -> str:
    if axis.least == axis.largest and size != axis.least:
        return f"expected {axis.least}"
    if size < axis.least:
        return f"expected at least {axis.least}"
    if axis.largest is not None and size > axis.largest:
        return f"expected at most {axis.largest}"
    if axis.symbol and seen.setdefault(axis.symbol, size) != size:
        return f"expected {seen[axis.symbol]}, the size of another axis"
    return ""


def how_to_export_open(axis: int = 0, parameter: str = "x") -> str:
    """Return instructions for exporting a program with a dynamic axis."""
    name = "batch" if axis == 0 else "size"
    return (
        f"export the model with torch.export.export(…, dynamic_shapes="
        f"{{{parameter!r}: {{{axis}: torch.export.Dim({name!r})}}}})"
    )


def as_exported(sizes: Sizes) -> Sizes:
    """Mark the sizes as those of a program that the user exported."""
    return tuple(
        None if axes is None else tuple(replace(axis, exported=True) for axis in axes)
        for axes in sizes
    )


def flat_inputs(
    module: GraphModule, args: Sequence[object], kwargs: Mapping[str, object]
) -> list[Any]:
    """Return the values of a call in the argument order of a graph."""
    spec = module.graph._codegen.pytree_info.in_spec
    ordered = reorder_kwargs(dict(kwargs), spec) if kwargs else {}
    return list(pytree.tree_leaves((tuple(args), ordered)))


def keywords(module: GraphModule) -> tuple[str, ...]:
    """Return the keyword names of a graph's inputs."""
    _, named = child_specs(module.graph._codegen.pytree_info.in_spec)
    return tuple(named.context)


def fixed_axes(module: GraphModule, call: CallArgs, sizes: Sizes) -> dict[int, set[int]]:
    """Return id of an input of a call → its axes with one valid size."""
    leaves = flat_inputs(module, call.args, call.kwargs)
    return {
        id(leaf): {number for number, axis in enumerate(axes) if axis.least == axis.largest}
        for leaf, axes in zip(leaves, sizes, strict=True)
        if isinstance(axes, tuple)
    }


def fixed_batch_sizes(sizes: Sizes) -> list[int]:
    """Return the fixed lengths of the inputs' first axes."""
    firsts = [axes[0] for axes in sizes if axes]
    return [axis.least for axis in firsts if axis.least == axis.largest]


def to_plain(sizes: Sizes) -> list[Any]:
    """Convert to nested lists for JSON."""
    return [None if axes is None else [list(astuple(axis)) for axis in axes] for axes in sizes]


def from_plain(data: object) -> Sizes:
    """Read the output of `to_plain`.

    Raises:
        NeuralMPError: if the data does not match the schema.
    """
    return list_of(optional(list_of(_axis_of)))(data)


def _axis_of(value: object) -> Axis:
    if isinstance(value, list) and len(value) == len(_EARLIER):
        return Axis(*tuple_of(*_EARLIER)(value))
    return Axis(*tuple_of(*_EARLIER, boolean)(value))


#: Axis schema of earlier versions, without the flag `exported`.
_EARLIER = (string, non_negative_integer, optional(non_negative_integer))
