"""Paths of the model's code that a captured graph does not hold: other sizes of its inputs."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from neural_mp.adaptors.pytorch.capture.trial_run import run_once, switch_to_inference
from neural_mp.adaptors.pytorch.graph.call_signature import CallArgs
from neural_mp.adaptors.pytorch.graph.dynamic_shapes import (
    SIZES,
    Axis,
    Expression,
    Sizes,
    condition_holds,
    list_expression_symbols,
    list_flat_inputs,
    map_axes,
    watch_sizes,
)
from neural_mp.errors import DataError

logger = logging.getLogger(__name__)

#: Largest difference from the captured size for which a condition is tried.
_MAX_STEP = 256
#: Number of calls with other sizes for one condition, per size in it, below and above the captured
#: size: some may take the captured path by a second condition.
_MAX_TRIALS = 4
#: Runs of the model for all conditions together: a model may have a condition in each block.
MAX_RUNS = 64
#: torch.export specializes smaller sizes.
_LEAST_SIZE = 2


def require_needed_conditions(graph: GraphModule, original: nn.Module, call: CallArgs) -> None:
    """Make a graph check only those conditions on sizes without which its results are wrong.

    A model may pad only if the padding is not empty, where a graph that always pads computes the
    same. A condition is dropped if the graph agrees with the model on sizes that violate it; those
    that remain after `MAX_RUNS` of the model stay.
    """
    sizes: Sizes = graph.meta[SIZES]
    tensors = (axes for axes in sizes if isinstance(axes, tuple))
    conditions = dict.fromkeys(c for axes in tensors for axis in axes for c in axis.conditions)
    if not conditions:
        return
    watch_sizes(graph, _filter_conditions(sizes, set()))
    runs = iter(range(MAX_RUNS))
    needed = {c for c in conditions if not _is_needless_condition(c, graph, original, call, runs)}
    watch_sizes(graph, _filter_conditions(sizes, needed))


def _filter_conditions(sizes: Sizes, conditions: set[Expression]) -> Sizes:
    return map_axes(
        sizes,
        lambda axis: replace(axis, conditions=tuple(c for c in axis.conditions if c in conditions)),
    )


def _is_needless_condition(
    condition: Expression,
    graph: GraphModule,
    original: nn.Module,
    call: CallArgs,
    runs: Iterator[int],
) -> bool:
    """Whether the graph agrees with the model on sizes that violate a condition.

    Each comparison takes one of the remaining `runs`; without any, the model is not asked.
    """
    compared = 0
    for candidate in _iterate_violating_calls(condition, graph, call):
        if next(runs, None) is None:
            return False
        expected = _run_expected_outputs(original, candidate)
        if expected is None:
            continue
        results = run_graph_outputs(graph, candidate)
        if results is None or not _outputs_agree(results, expected):
            return False
        compared += 1
    return compared > 0


def _iterate_violating_calls(
    condition: Expression, graph: GraphModule, call: CallArgs
) -> Iterator[CallArgs]:
    """Yield calls of sizes that violate a condition, close to those of a call."""
    symbols = _symbols_of_inputs(graph, call)
    lengths = {name: symbol.length for name, symbol in symbols.items()}
    for name, direction in itertools.product(sorted(list_expression_symbols(condition)), (-1, 1)):
        symbol, trials = symbols[name], 0
        for step in range(1, _MAX_STEP + 1):
            size, largest = symbol.length + direction * step, symbol.bounds.largest
            too_large = largest is not None and size > largest
            if too_large or size < max(symbol.bounds.least, _LEAST_SIZE):
                continue
            if not condition_holds(condition, {**lengths, name: size}):
                yield _resize_axes(call, symbol.axes, size)
                trials += 1
                if trials == _MAX_TRIALS:
                    break


@dataclass(frozen=True)
class _Symbol:
    """Size that one or more axes of a call have.

    Attributes:
        length: the size.
        bounds: an axis of this size.
        axes: id of an input → its axes of this size.
    """

    length: int
    bounds: Axis
    axes: dict[int, list[int]] = field(default_factory=dict)


def _symbols_of_inputs(graph: GraphModule, call: CallArgs) -> dict[str, _Symbol]:
    symbols: dict[str, _Symbol] = {}
    leaves = list_flat_inputs(graph, call.args, call.kwargs)
    for leaf, axes in zip(leaves, graph.meta[SIZES], strict=True):
        for number, axis in enumerate(axes if isinstance(axes, tuple) else ()):
            if axis.symbol:
                symbol = symbols.setdefault(axis.symbol, _Symbol(leaf.shape[number], axis))
                symbol.axes.setdefault(id(leaf), []).append(number)
    return symbols


def _resize_axes(call: CallArgs, axes: Mapping[int, list[int]], size: int) -> CallArgs:
    """Repeat or cut the inputs, id of an input → axes, to another length of some axes."""

    def resize_leaf(leaf: Any) -> Any:
        for axis in axes.get(id(leaf), ()):
            leaf = leaf.index_select(axis, torch.arange(size) % leaf.shape[axis])
        return leaf

    return call.map_leaves(resize_leaf)


def warn_of_other_paths(original: nn.Module, single: CallArgs, got: list[Any] | None) -> list[str]:
    """Return a warning if a batch of one takes another path through the user's code.

    No exported bound reveals such a path: torch.export always specializes sizes 0 and 1. `got`
    are the outputs of the graph for `single`; None if the graph does not run.
    """
    expected = None if got is None else _run_expected_outputs(original, single)
    if got is None or expected is None or _outputs_agree(got, expected):
        return []
    return [
        "the model's code takes another path for a batch of one; the path for larger batches was "
        "captured"
    ]


def run_graph_outputs(module: nn.Module, call: CallArgs) -> list[Any] | None:
    """Return all outputs of a graph; None if the graph does not run."""
    try:
        with torch.no_grad():
            return list(pytree.tree_leaves(module(*call.args, **call.kwargs)))
    except Exception:
        # A graph may raise any exception for unsupported sizes or values.
        logger.debug("the graph fails on %s", call, exc_info=True)
        return None


def _run_expected_outputs(original: nn.Module, call: CallArgs) -> list[Any] | None:
    with switch_to_inference(original):
        try:
            return list(pytree.tree_leaves(run_once(original, call)))
        except DataError:
            return None


def _outputs_agree(results: list[Any], expected: list[Any]) -> bool:
    return len(results) == len(expected) and all(map(_values_agree, results, expected))


def _values_agree(mine: Any, theirs: object) -> bool:
    if not isinstance(theirs, torch.Tensor):
        return True
    if mine.shape != theirs.shape:
        return False
    if not theirs.is_floating_point():
        return True
    noise = (mine.double() - theirs.double()).norm()
    return bool(noise <= 1e-2 * theirs.double().norm()) or not bool(noise.isfinite())
