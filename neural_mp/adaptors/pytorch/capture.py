"""Graph capture with `torch.export`: functional, with as many dynamic axes as the model allows."""

from __future__ import annotations

import inspect
import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from typing import Any

import torch
from torch import nn
from torch.export import Dim, ExportedProgram
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from neural_mp.adaptors.pytorch.call_signature import CallArgs, float_dtype, has_axes, resized
from neural_mp.adaptors.pytorch.dynamic_shapes import sizes_of, watch_sizes
from neural_mp.adaptors.pytorch.functionalize import make_functional
from neural_mp.adaptors.pytorch.recurrent import free_lengths
from neural_mp.adaptors.pytorch.versions import (
    unguarded_module,
    with_code,
    without_stack_traces,
)
from neural_mp.errors import CaptureError, DataError

logger = logging.getLogger(__name__)

#: Heights and widths tried in this order if a model comes without data: 32 is cheap, and a model
#: that requires another size raises an error.
_IMAGE_SIZES = (32, 64, 224, 28, 8, 16, 48, 96, 112, 128, 160, 192, 256, 299, 384, 512)

#: Batch size for trial runs.
_PROBE_BATCH_SIZE = 2
#: Attribute that holds the module enclosed by `Enclosed`.
ENCLOSED = "neural_mp_enclosed"

#: (dynamic axes, strict tracing), in the order tried.
_ATTEMPTS = (("all", False), ("first", False), ("first", True), ("none", False))


def capture(module: nn.Module, call: CallArgs) -> GraphModule:
    """Export a module in inference mode, with as many dynamic axes as possible.

    The graph has functional ops only and checks the sizes of its inputs.

    Raises:
        DataError: if the module does not run on these inputs.
        CaptureError: if the module runs but every export attempt fails.
    """
    errors: list[Exception] = []
    with inference_mode(module):
        call = _accepted(module, call)
        # An attribute of the module, e.g. `code`, may shadow one of `GraphModule`.
        names = {*module._modules, *module._parameters, *module._buffers}
        shown = Enclosed(module) if any(hasattr(GraphModule, name) for name in names) else module
        for axes, strict in _ATTEMPTS:
            try:
                return graph_of(export(shown, call, axes, strict))
            except Exception as error:
                # torch.export raises dozens of unrelated types, user code any type at all.
                logger.debug("export (%s axes, strict=%s) failed", axes, strict, exc_info=True)
                errors.append(error)
    raise _capture_error(module, errors[0])


class Enclosed(nn.Module):
    """Wrapper that avoids clashes of a module's attribute names with those of `GraphModule`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        setattr(self, ENCLOSED, module)

    def forward(self, *args: object, **kwargs: object) -> Any:
        """Call the wrapped module."""
        return getattr(self, ENCLOSED)(*args, **kwargs)


def run_once(module: nn.Module, call: CallArgs) -> Any:
    """Run a module on copies of the inputs, then restore its state.

    Raises:
        DataError: if the module does not run on the inputs.
    """
    kept = [(value, value.clone()) for value in _state(module)]
    copies = call.copied()
    try:
        with torch.no_grad():
            return module(*copies.args, **copies.kwargs)
    except Exception as error:
        # User code may raise any exception type.
        raise DataError(
            f"{type(module).__name__} does not run on the inputs of the first batch ({call}): "
            f"{type(error).__name__}: {error}{_given_whole(module, call)}{_limits(module, call)}"
        ) from error
    finally:
        with torch.no_grad():
            for value, before in kept:
                value.copy_(before)


def _accepted(module: nn.Module, call: CallArgs) -> CallArgs:
    """Return a call with at least two samples; that of one, if the module accepts only one.

    Raises:
        DataError: if the module does not run on these inputs.
    """
    several = at_least_two(call)
    try:
        _try_out(module, several)
    except DataError:
        if several is call:
            raise
        run_once(module, call)
        return call
    return several


def _try_out(module: nn.Module, call: CallArgs) -> None:
    """Run a module once, on few samples if possible: a batch may be large.

    State initialized in the first run then holds real tensors instead of traced ones.

    Raises:
        DataError: if the module does not run on the whole batch either.
    """
    if call.batch_size is not None and call.batch_size > _PROBE_BATCH_SIZE:
        try:
            run_once(module, resized(call, _PROBE_BATCH_SIZE))
        except DataError:
            logger.debug("the model fails on %d samples", _PROBE_BATCH_SIZE, exc_info=True)
        else:
            return
    run_once(module, call)


def _given_whole(module: nn.Module, call: CallArgs) -> str:
    """Return an explanation if a dict went to a single parameter, perhaps unintentionally."""
    if call.kwargs or len(call.args) != 1 or not isinstance(call.args[0], dict):
        return ""
    taken = ", ".join(inspect.signature(module.forward).parameters)
    keys = ", ".join(map(str, call.args[0]))
    return (
        f". The batch was passed as one argument, as none of its keys ({keys}) is a parameter of "
        f"forward ({taken})"
    )


def exceeded_limits(module: nn.Module, call: CallArgs) -> str:
    """Return the limits of a language model that token ids exceed, vocabulary and context."""
    config = getattr(module, "config", None)
    ids = next(
        (leaf for leaf in call.leaves() if getattr(leaf, "dtype", None) is torch.int64), None
    )
    if config is None or ids is None or ids.ndim != 2 or not ids.numel():
        return ""
    words, context = (
        getattr(config, name, None) for name in ("vocab_size", "max_position_embeddings")
    )
    found = []
    if isinstance(words, int) and int(ids.max()) >= words:
        found.append(f"the vocabulary has {words} words, got token id {int(ids.max())}")
    if isinstance(context, int) and ids.shape[1] > context:
        found.append(f"the context has {context} tokens, got {ids.shape[1]}")
    return "; ".join(found)


def _limits(module: nn.Module, call: CallArgs) -> str:
    exceeded = exceeded_limits(module, call)
    return f"; {exceeded}" if exceeded else ""


def _state(module: nn.Module) -> Iterator[torch.Tensor]:
    """Yield tensors that a run may modify: buffers, and embeddings with `max_norm`."""
    yield from module.buffers()
    for part in module.modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None:
            yield part.weight


def guess_call(module: nn.Module) -> CallArgs:
    """Return example inputs for a module without data, tried on fake tensors.

    Raises:
        DataError: if no candidate runs.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    for shape, dtype in _candidate_inputs(module):
        with (
            FakeTensorMode(allow_non_fake_inputs=True),
            torch.no_grad(),
            inference_mode(module),
            quiet_export(),
        ):
            try:
                module(torch.zeros(shape, dtype=dtype))
            except Exception:
                # A model may raise any exception for an unsupported size.
                logger.debug("the model fails on the shape %s", shape, exc_info=True)
                continue
        return CallArgs((torch.zeros(shape, dtype=dtype),))
    raise DataError(
        f"{type(module).__name__} requires data: no example input for its parameters "
        f"({', '.join(inspect.signature(module.forward).parameters)}) could be inferred; set "
        f"calib_dataloader or eval_dataloader, or set inputs to example tensors"
    )


def is_transposed_dense(module: nn.Module) -> bool:
    """Whether a module is a `Conv1D` of transformers: dense, with the weight [inputs, outputs]."""
    kind = type(module)
    return f"{kind.__module__}.{kind.__name__}" == "transformers.pytorch_utils.Conv1D"


def as_linear(transposed: nn.Module) -> nn.Linear:
    """Return a `Conv1D` of transformers as a linear layer that shares its parameters."""
    stored: Any = transposed
    layer = nn.Linear(*stored.weight.shape, device="meta")
    layer.weight = nn.Parameter(stored.weight.detach().t(), requires_grad=False)
    layer.bias = stored.bias
    return layer.eval()


def _candidate_inputs(module: nn.Module) -> Iterator[tuple[tuple[int, ...], torch.dtype]]:
    known = nn.Conv2d | nn.Conv1d | nn.Linear | nn.Embedding
    layers = (as_linear(m) if is_transposed_dense(m) else m for m in module.modules())
    first = next((layer for layer in layers if isinstance(layer, known)), None)
    dtype = float_dtype(module)
    match first:
        case nn.Conv2d():
            yield from (((2, first.in_channels, size, size), dtype) for size in _IMAGE_SIZES)
        case nn.Conv1d():
            yield from (((2, first.in_channels, size), dtype) for size in _IMAGE_SIZES)
        case nn.Linear():
            yield (2, first.in_features), dtype
            yield (2, 16, first.in_features), dtype
            side = int(first.in_features**0.5)
            yield from (((2, channels, side, side), dtype) for channels in (1, 3))
        case nn.Embedding():
            yield (2, 16), torch.int64


def export(module: nn.Module, call: CallArgs, axes: str, strict: bool = False) -> ExportedProgram:
    """Export with `all` axes of the inputs dynamic, the `first`, or `none`; keep the ops."""

    def free(leaf: Any) -> Any:
        if not has_axes(leaf):
            return None
        return {axis: Dim.AUTO for axis in range(leaf.ndim if axes == "all" else 1)}

    shapes: Any = None
    if axes != "none":
        signature = inspect.signature(with_code(module).forward).bind(*call.args, **call.kwargs)
        shapes = pytree.tree_map(free, dict(signature.arguments))
    with torch.no_grad(), quiet_export(), free_lengths():
        return torch.export.export(
            module, call.args, dict(call.kwargs), dynamic_shapes=shapes, strict=strict
        )


def graph_of(program: ExportedProgram) -> GraphModule:
    """Convert a program to a functional graph that checks the sizes of its inputs."""
    module: GraphModule = unguarded_module(program)
    with quiet_export():
        simple = make_functional(module)
    if not simple:
        module = unguarded_module(_functional(program))
    watch_sizes(module, sizes_of(module))
    return module


def _functional(program: ExportedProgram) -> ExportedProgram:
    """Return the program without in-place ops.

    An empty decomposition table keeps the ops but functionalizes them, including in-place updates
    visible through views, which a rewrite of single ops cannot guarantee.
    """
    with torch.no_grad(), quiet_export(), free_lengths():
        return program.run_decompositions({})


@contextmanager
def quiet_export() -> Iterator[None]:
    """Hide torch's logs of failed attempts and warnings; leave out the stack trace of each op."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        # torch.export also prints the graph on failure.
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()), without_stack_traces():
            warnings.filterwarnings("ignore", category=FutureWarning, message=".*LeafSpec.*")
            warnings.filterwarnings("ignore", message=".*were assigned during export")
            yield
    finally:
        logging.disable(before)


@contextmanager
def inference_mode(module: nn.Module) -> Iterator[None]:
    """Switch to evaluation mode; restore the flag of every submodule on exit."""
    flags = [(m, m.training) for m in module.modules()]
    # A graph of torch.export keeps the mode in which it was captured, and refuses the call.
    with suppress(NotImplementedError):
        module.eval()
    try:
        yield
    finally:
        for m, training in flags:
            m.training = training


def at_least_two(call: CallArgs) -> CallArgs:
    """Repeat a batch of one, as torch.export would specialize on size 1."""
    return resized(call, _PROBE_BATCH_SIZE) if call.batch_size == 1 else call


def _capture_error(module: nn.Module, error: Exception) -> CaptureError:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    where = next((line for line in lines if ".py" in line and "line" in line), "")
    parts = any(True for _ in module.children())
    offer = ", or convert the modules separately: capture = 'modules'" if parts else ""
    return CaptureError(
        f"the graph of {type(module).__name__} cannot be captured by torch.export: "
        f"{type(error).__name__}: {' '.join(lines[:2])}{f' (at {where})' if where else ''}. "
        f"The usual cause is a branch on a tensor's value; use torch.where or torch.cond, or give "
        f"the part without the branch as the model{offer}"
    )


def other_ways(original: nn.Module, single: CallArgs, got: list[Any] | None) -> list[str]:
    """Return a warning if a batch of one takes another path through the user's code.

    No exported bound reveals such a path: torch.export always specializes sizes 0 and 1. `got`
    are the outputs of the graph for `single`; None if the graph does not run.
    """
    expected = None if got is None else _expected(original, single)
    if got is None or expected is None:
        return []
    if len(got) == len(expected) and all(map(_alike, got, expected)):
        return []
    return [
        "the model's code takes another path for a batch of one; the path for larger batches was "
        "captured"
    ]


def result_of(module: nn.Module, call: CallArgs) -> list[Any] | None:
    """Return all outputs of a graph; None if the graph does not run."""
    try:
        with torch.no_grad():
            return list(pytree.tree_leaves(module(*call.args, **call.kwargs)))
    except Exception:
        # A graph may raise any exception for unsupported sizes or values.
        logger.debug("the graph fails on %s", call, exc_info=True)
        return None


def _expected(original: nn.Module, call: CallArgs) -> list[Any] | None:
    with inference_mode(original):
        try:
            return list(pytree.tree_leaves(run_once(original, call)))
        except DataError:
            return None


def _alike(mine: Any, theirs: object) -> bool:
    if not isinstance(theirs, torch.Tensor):
        return True
    if mine.shape != theirs.shape:
        return False
    if not theirs.is_floating_point():
        return True
    noise = (mine.double() - theirs.double()).norm()
    return bool(noise <= 1e-2 * theirs.double().norm()) or not bool(noise.isfinite())
