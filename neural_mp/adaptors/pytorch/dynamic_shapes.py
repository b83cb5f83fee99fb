"""The sizes of inputs that a captured graph is right for, checked before every run.

A graph holds what the model's code does for some sizes: the branch it took, the numbers it worked
out of them. torch.export finds out for which other sizes that is the same; we keep what it found
and carry it along, through every rewrite and into files.
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

from neural_mp.adaptors.pytorch.versions import is_being_traced
from neural_mp.errors import DataError
from neural_mp.util.text import counted
from neural_mp.util.validators import count, list_of, optional, text, truth, tuple_of

#: Key of `GraphModule.meta` under which the sizes are kept.
SIZES = "neural_mp_sizes"
#: torch.export takes 0 and 1 for special without asking, so that this bound says nothing.
_UNASKED = 2


@dataclass(frozen=True)
class Axis:
    """The sizes one axis of one input may have.

    Attributes:
        symbol: axes with the same symbol have the same size; empty for an axis of its own.
        least, largest: bounds, both allowed; None for no bound.
        exported: whether the bounds are those of a program that the user exported.
    """

    symbol: str = ""
    least: int = 0
    largest: int | None = None
    exported: bool = False


#: Input → its axes; None for an input that is no tensor.
Sizes = tuple[tuple[Axis, ...] | None, ...]


def watch_sizes(module: GraphModule, sizes: Sizes) -> None:
    """Let a graph check its inputs for these sizes, and for nothing else, from now on."""
    module.meta[SIZES] = sizes
    module._forward_pre_hooks.clear()
    module._forward_pre_hooks_with_kwargs.clear()
    module.register_forward_pre_hook(check_inputs, with_kwargs=True)


def sizes_of(module: GraphModule) -> Sizes:
    """What torch.export found out about the inputs of a module that it made."""
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
    """Refuse inputs of sizes that a graph is not right for.

    Raises:
        DataError: an axis of an input is too short or too long, or two that must agree do not.
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
                f"input {position} has {counted(leaf.ndim, 'axis', 'axes')}; the model "
                f"was captured with {len(axes)}"
            )
        for number, (size, axis) in enumerate(zip(leaf.shape, axes, strict=True)):
            expected = _complaint(size, axis, seen)
            if expected:
                raise DataError(
                    f"axis {number} of input {position} has {counted(size, 'value')}; {expected}"
                    f"{_as_exported(axis, number)}"
                )


def _complaint(size: int, axis: Axis, seen: dict[str, int]) -> str:
    if axis.least == axis.largest and size != axis.least:
        return f"expected {axis.least}"
    if size < axis.least:
        return f"expected at least {axis.least}"
    if axis.largest is not None and size > axis.largest:
        return f"expected at most {axis.largest}"
    if axis.symbol and seen.setdefault(axis.symbol, size) != size:
        return f"expected {seen[axis.symbol]}, as another axis has"
    return ""


def _as_exported(axis: Axis, number: int) -> str:
    """The words on an axis that the user's own export has fixed."""
    if not axis.exported:
        return ""
    return f", as the program was exported so; to leave it open, {how_to_export_open(number)}"


def how_to_export_open(axis: int = 0, parameter: str = "x") -> str:
    """What to do for a program whose axis is open."""
    name = "batch" if axis == 0 else "size"
    return (
        f"export the model with torch.export.export(…, dynamic_shapes="
        f"{{{parameter!r}: {{{axis}: torch.export.Dim({name!r})}}}})"
    )


def as_exported(sizes: Sizes) -> Sizes:
    """The same sizes, said to be those of a program that the user exported."""
    return tuple(
        None if axes is None else tuple(replace(axis, exported=True) for axis in axes)
        for axes in sizes
    )


def flat_inputs(
    module: GraphModule, args: Sequence[object], kwargs: Mapping[str, object]
) -> list[Any]:
    """The values of a call in the order in which a graph takes them."""
    spec = module.graph._codegen.pytree_info.in_spec
    ordered = reorder_kwargs(dict(kwargs), spec) if kwargs else {}
    return list(pytree.tree_leaves((tuple(args), ordered)))


def keywords(module: GraphModule) -> tuple[str, ...]:
    """The names of what a graph takes by keyword."""
    _, named = module.graph._codegen.pytree_info.in_spec.children()
    return tuple(named.context)


def fixed_batch_sizes(sizes: Sizes) -> list[int]:
    """The lengths of the inputs' first axes, those only that are fixed."""
    firsts = [axes[0] for axes in sizes if axes]
    return [axis.least for axis in firsts if axis.least == axis.largest]


def to_plain(sizes: Sizes) -> list[Any]:
    """Plain lists, as written to JSON."""
    return [None if axes is None else [list(astuple(axis)) for axis in axes] for axes in sizes]


def from_plain(data: object) -> Sizes:
    """Read back what `to_plain` wrote.

    Raises:
        NeuralMPError: it was not written so.
    """
    return list_of(optional(list_of(_axis_of)))(data)


def _axis_of(value: object) -> Axis:
    if isinstance(value, list) and len(value) == len(_EARLIER):
        return Axis(*tuple_of(*_EARLIER)(value))
    return Axis(*tuple_of(*_EARLIER, truth)(value))


#: What earlier versions wrote of an axis, before they told whether it is of an exported program.
_EARLIER = (text, count, optional(count))
