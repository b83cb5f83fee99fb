"""From what a user gives to a graph: `torch.export`, functional, with a free batch size."""

from __future__ import annotations

import inspect
import itertools
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.export import Dim, ExportedProgram
from torch.utils import _pytree as pytree

from neural_mp.adaptors.pytorch.model import Call
from neural_mp.errors import CaptureError, DataError

logger = logging.getLogger(__name__)

#: Heights and widths tried, in this order, where a model is given without any data: a model that
#: takes any size takes 32, which is cheap; one that does not is found by its own complaint.
_IMAGE_SIZES = (32, 64, 224, 28, 8, 16, 48, 96, 112, 128, 160, 192, 256, 299, 384, 512)


def to_tensors(value: Any) -> Any:
    """Arrays to tensors, inside tuples, lists and dicts; float64 arrays become float32."""

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray | np.generic):
            array = np.asarray(leaf)
            array = array.astype(np.float32) if array.dtype == np.float64 else array
            return torch.from_numpy(np.array(array, order="C", copy=not array.flags.writeable))
        return leaf

    return pytree.tree_map(convert, value)


def as_call(inputs: Any, parameters: tuple[str, ...]) -> Call:
    """How a model with these parameters is called with the inputs of one batch.

    A dict whose keys are parameters is passed by keyword, a tuple or list by position, anything
    else as the only argument.
    """
    tensors = to_tensors(inputs)
    if isinstance(tensors, Mapping) and set(tensors) <= set(parameters):
        return Call((), dict(tensors))
    if isinstance(tensors, tuple | list):
        return Call(tuple(tensors))
    return Call((tensors,))


def parameters_of(module: nn.Module) -> tuple[str, ...]:
    """The names of a module's forward parameters."""
    return tuple(inspect.signature(module.forward).parameters)


def capture(module: nn.Module, call: Call) -> tuple[ExportedProgram, list[str]]:
    """Export a module, in inference mode, with a free batch size where that can be had.

    Returns:
        The program with functional ops only, and warnings.

    Raises:
        CaptureError: no way of exporting works.
    """
    call = _at_least_two(call)
    errors: list[Exception] = []
    with _inference_mode(module):
        for free_batch, strict in ((True, False), (True, True), (False, False)):
            try:
                program = export(module, call, free_batch, strict)
            except Exception as error:
                # torch.export raises dozens of unrelated types, user code any type at all.
                logger.debug("export (strict=%s) failed", strict, exc_info=True)
                errors.append(error)
                continue
            return program, _batch_warnings(program, free_batch)
    raise _capture_error(module, errors[0])


def guess_call(module: nn.Module) -> Call:
    """Example inputs for a module that came without data, tried out on fake tensors.

    Raises:
        DataError: nothing that was tried runs.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    names = parameters_of(module)
    for shape, dtype in _candidate_inputs(module):
        with (
            FakeTensorMode(allow_non_fake_inputs=True),
            torch.no_grad(),
            _inference_mode(module),
        ):
            try:
                module(torch.zeros(shape, dtype=dtype))
            except Exception:
                logger.debug("shape %s does not fit", shape, exc_info=True)
                continue
        return Call((torch.zeros(shape, dtype=dtype),))
    raise DataError(
        f"{type(module).__name__} was given without data, and no example input for its parameters "
        f"({', '.join(names)}) could be inferred; set calib_dataloader or eval_dataloader, or set "
        f"inputs to example tensors"
    )


def _candidate_inputs(module: nn.Module) -> Iterator[tuple[tuple[int, ...], torch.dtype]]:
    first = next(
        (m for m in module.modules() if isinstance(m, nn.Conv2d | nn.Conv1d | nn.Linear | nn.Embedding)),
        None,
    )
    dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
    match first:
        case nn.Conv2d():
            yield from (((2, first.in_channels, size, size), dtype) for size in _IMAGE_SIZES)
        case nn.Conv1d():
            yield from (((2, first.in_channels, size), dtype) for size in _IMAGE_SIZES)
        case nn.Linear():
            yield (2, first.in_features), dtype
            yield (2, 16, first.in_features), dtype
            side = int(first.in_features**0.5)
            yield from (((2, c, side, side), dtype) for c in (1, 3))
        case nn.Embedding():
            yield (2, 16), torch.int64


def export(module: nn.Module, call: Call, free_batch: bool, strict: bool) -> ExportedProgram:
    shapes: Any = None
    if free_batch:
        signature = inspect.signature(module.forward).bind(*call.args, **call.kwargs)
        shapes = pytree.tree_map(_free_first_axis, dict(signature.arguments))
    with torch.no_grad(), quiet_export():
        return functional(
            torch.export.export(
                module, call.args, dict(call.kwargs), dynamic_shapes=shapes, strict=strict
            )
        )


def functional(program: ExportedProgram) -> ExportedProgram:
    """The program without in-place ops.

    An empty table decomposes nothing that matters but makes every op functional: in-place updates
    seen through views come out right, which no local rewrite can promise.
    """
    with quiet_export():
        return program.run_decompositions({})


@contextmanager
def quiet_export() -> Iterator[None]:
    """Hide torch's warnings of its own use of its own deprecated classes."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning, message=".*LeafSpec.*")
        yield


def _free_first_axis(leaf: Any) -> Any:
    return {0: Dim.AUTO} if isinstance(leaf, torch.Tensor) and leaf.ndim else None


def _at_least_two(call: Call) -> Call:
    """A batch of one would be taken for a constant: show it twice."""
    leaves = [x for x in pytree.tree_leaves((call.args, dict(call.kwargs))) if _has_axes(x)]
    if not leaves or any(leaf.shape[0] != 1 for leaf in leaves):
        return call
    args, kwargs = pytree.tree_map(
        lambda x: torch.cat([x, x]) if _has_axes(x) else x, (call.args, dict(call.kwargs))
    )
    return Call(args, kwargs)


def _has_axes(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.ndim > 0


def _batch_warnings(program: ExportedProgram, free_batch: bool) -> list[str]:
    inputs = set(program.graph_signature.user_inputs)
    sizes = [
        node.meta["val"].shape[0]
        for node in program.graph.nodes
        if node.op == "placeholder" and node.name in inputs and _has_axes(node.meta.get("val"))
    ]
    if free_batch and all(isinstance(size, torch.SymInt) for size in sizes):
        return []
    return [f"the model's own code fixes the batch size to {', '.join(map(str, sizes))}"]


@contextmanager
def _inference_mode(module: nn.Module) -> Iterator[None]:
    """Evaluation mode for a while; every submodule's own flag is put back afterwards."""
    flags = [(m, m.training) for m in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for m, training in flags:
            m.training = training


def _capture_error(module: nn.Module, error: Exception) -> CaptureError:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    where = next((line for line in lines if ".py" in line and "line" in line), "")
    return CaptureError(
        f"the graph of {type(module).__name__} cannot be captured by torch.export: "
        f"{type(error).__name__}: {' '.join(itertools.islice(lines, 2))}"
        f"{f' (at {where})' if where else ''}. A branch on a tensor's value is the usual cause; "
        f"write it with torch.where or torch.cond, or give the part without it as the model"
    )


def resized(call: Call, batch_size: int) -> Call:
    """The same inputs, repeated or cut to a batch of another size."""

    def resize(leaf: Any) -> Any:
        if not _has_axes(leaf):
            return leaf
        return torch.cat([leaf] * -(-batch_size // leaf.shape[0]))[:batch_size]

    args, kwargs = pytree.tree_map(resize, (call.args, dict(call.kwargs)))
    return Call(args, kwargs)
