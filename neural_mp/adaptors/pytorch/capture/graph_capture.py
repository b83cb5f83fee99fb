"""Graph capture with `torch.export`: functional, with as many dynamic axes as the model allows.

In inference, `nn.TransformerEncoder` packs padded batches into nested tensors, which torch.export
does not trace, and returns zeros in padded places: captured without nested tensors, with the zeros.
"""

from __future__ import annotations

import inspect
import io
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stderr
from typing import Any, TypeVar

import torch
from torch import nn
from torch.export import Dim, ExportedProgram
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from neural_mp.adaptors.pytorch.capture.functionalize import is_expandable, make_functional
from neural_mp.adaptors.pytorch.capture.taken_paths import require_needed_conditions
from neural_mp.adaptors.pytorch.capture.trial_run import (
    TrialRun,
    run_in_place,
    switch_to_inference,
    try_out,
)
from neural_mp.adaptors.pytorch.graph import tracing
from neural_mp.adaptors.pytorch.graph.call_signature import CallArgs, find_float_dtype, has_axes
from neural_mp.adaptors.pytorch.graph.dynamic_shapes import (
    SIZES,
    Sizes,
    collect_size_bounds,
    find_fixed_axes,
    list_flat_inputs,
    watch_sizes,
    with_fixed_axes,
)
from neural_mp.adaptors.pytorch.graph.module_state import preserve_module_state
from neural_mp.adaptors.pytorch.graph.output_classes import register_caches, register_dataclasses
from neural_mp.adaptors.pytorch.graph.recurrent import free_lengths
from neural_mp.adaptors.pytorch.graph.stand_ins import is_transposed_dense
from neural_mp.adaptors.pytorch.graph.tracing import TRACING
from neural_mp.adaptors.pytorch.versions import (
    allow_tensor_attributes,
    make_unguarded_module,
    release_trace,
    with_code,
    without_stack_traces,
)
from neural_mp.errors import CaptureError, ConversionError, DataError
from neural_mp.util.system.watched_thread import TimeLimitError
from neural_mp.util.text import with_article

logger = logging.getLogger(__name__)

#: Heights and widths tried in this order if a model comes without data: 32 is cheap, and a model
#: that requires another size raises an error.
_IMAGE_SIZES = (32, 64, 224, 28, 8, 16, 48, 96, 112, 128, 160, 192, 256, 299, 384, 512)

_Result = TypeVar("_Result")
#: Attribute that holds the module enclosed by `Enclosed`.
ENCLOSED = "neural_mp_enclosed"
#: Package of modules with packed integer weights.
_QUANTIZED = "torch.ao.nn.quantized"
#: Key of `GraphModule.meta` for the names of attributes whose changes a graph leaves out.
KEPT_STATE = "neural_mp_kept_state"

#: Key of `GraphModule.meta` for warnings about the capture.
NOTES = "neural_mp_capture_notes"

#: Axes that took too long → the decision.
_DECISIONS = {
    "all": "only the first axis of the inputs is dynamic, as torch.export took more than {:.0f} "
    "CPU seconds with all axes dynamic; give inputs of the sizes of the first batch",
    "first": "all sizes are those of the first batch, as torch.export took more than {:.0f} CPU "
    "seconds with the first axis dynamic",
}

#: (dynamic axes, strict tracing), in the order tried.
_ATTEMPTS = (("all", False), ("first", False), ("first", True), ("none", False))


def capture_module(module: nn.Module, call: CallArgs) -> GraphModule:
    """Export a module in inference mode, with as many dynamic axes as possible.

    The graph has functional ops only and checks the sizes of its inputs.

    Raises:
        DataError: if the module does not run on these inputs.
        CaptureError: if the module runs but every export attempt fails.
    """
    with switch_to_inference(module):
        # Not under the lock, which a module that never returns would keep for ever.
        run = try_out(module, call)
        with TRACING:
            return _export_run(module, run)


def _export_run(module: nn.Module, run: TrialRun) -> GraphModule:
    """Return the graph of a module that ran; `CaptureError` if every export attempt fails."""
    errors: list[Exception] = []
    slow: dict[str, str] = {}
    register_dataclasses(run.outputs)
    register_caches(run.outputs)
    # An attribute of the module, e.g. `code`, may shadow one of `GraphModule`.
    names = {*module._modules, *module._parameters, *module._buffers}
    shown = Enclosed(module) if any(hasattr(GraphModule, name) for name in names) else module
    for axes, strict in _ATTEMPTS:
        if axes in slow:
            continue
        for is_filled in (False, True)[: 1 + run.fills_caches]:
            try:
                with (
                    _prepare_for_export(module, run, is_filled),
                    _limit_export_time(module, axes),
                ):
                    graph = convert_to_graph(export_program(shown, run.call, axes, strict))
            except TimeLimitError as error:
                logger.debug("export (%s, strict=%s) took too long", axes, strict)
                slow[axes] = _DECISIONS[axes].format(error.seconds)
                break
            except Exception as error:
                # torch.export raises dozens of unrelated types, user code any type at all.
                logger.debug("export (%s, strict=%s) failed", axes, strict, exc_info=True)
                errors.append(error)
            else:
                require_needed_conditions(graph, module, run.call)
                graph.meta[KEPT_STATE] = run.kept
                graph.meta[NOTES] = tuple(slow.values())[-1:]
                return graph
    raise _make_capture_error(module, run, errors[0])


@contextmanager
def _prepare_for_export(module: nn.Module, run: TrialRun, is_filled: bool) -> Iterator[None]:
    """Prepare the state of a module for export, and restore it on exit.

    torch.export accepts no writes to tensors other than buffers, so the module writes to copies.
    """
    with preserve_module_state(module) as state:
        if is_filled:
            run_in_place(module, run.call)
        if run.written:
            module.register_forward_pre_hook(
                lambda *_: state.replace_by_copies(run.written), prepend=True
            )
        yield


def _limit_export_time(module: nn.Module, axes: str) -> AbstractContextManager[None]:
    """Limit the time of an export, except for the last attempt, without dynamic axes."""
    return nullcontext() if axes == "none" else tracing.limit_symbolic_time(module)


class Enclosed(nn.Module):
    """Wrapper that avoids clashes of a module's attribute names with those of `GraphModule`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        setattr(self, ENCLOSED, module)

    def forward(self, *args: object, **kwargs: object) -> Any:
        """Call the wrapped module."""
        return getattr(self, ENCLOSED)(*args, **kwargs)


def guess_example_call(module: nn.Module) -> CallArgs:
    """Return example inputs for a module without data, tried on fake tensors.

    Raises:
        DataError: if no candidate runs.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    for shape, dtype in _iterate_candidate_inputs(module):
        with (
            preserve_module_state(
                module
            ),  # outside of the fake mode, in which values cannot be compared
            FakeTensorMode(allow_non_fake_inputs=True),
            torch.no_grad(),
            switch_to_inference(module),
            silence_export_logs(),
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


def convert_to_linear(transposed: nn.Module) -> nn.Linear:
    """Return a `Conv1D` of transformers as a linear layer that shares its parameters."""
    stored: Any = transposed
    layer = nn.Linear(*stored.weight.shape, device="meta")
    layer.weight = nn.Parameter(stored.weight.detach().t(), requires_grad=False)
    layer.bias = stored.bias
    return layer.eval()


def _iterate_candidate_inputs(module: nn.Module) -> Iterator[tuple[tuple[int, ...], torch.dtype]]:
    layer_types = nn.Conv2d | nn.Conv1d | nn.Linear | nn.Embedding
    layers = (convert_to_linear(m) if is_transposed_dense(m) else m for m in module.modules())
    first = next((layer for layer in layers if isinstance(layer, layer_types)), None)
    dtype = find_float_dtype(module)
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


def export_program(
    module: nn.Module, call: CallArgs, axes: str | Sizes, strict: bool = False
) -> ExportedProgram:
    """Export with some axes of the inputs dynamic; keep the ops.

    Args:
        module: the module, in inference mode.
        call: example inputs.
        axes: `all`, the `first` or `none`; or known sizes of a graph, whose fixed axes stay fixed:
            torch.export would take long to derive them again.
        strict: whether to trace the code of Python.
    """
    # torch.export marks dynamic axes on the tensors; an attempt that ends early leaves the marks.
    call = call.map_leaves(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf)
    fixed: dict[int, set[int]] = {}
    if isinstance(module, GraphModule) and not isinstance(axes, str):
        fixed = find_fixed_axes(module, call.args, call.kwargs, axes)

    def free_axes(leaf: object) -> Any:
        if not has_axes(leaf):
            return None
        numbers = range(1 if axes == "first" else leaf.ndim)
        return {n: Dim.AUTO for n in numbers if n not in fixed.get(id(leaf), ())}

    shapes: Any = None
    if axes != "none":
        signature = inspect.signature(with_code(module).forward).bind(*call.args, **call.kwargs)
        shapes = _map_leaves(free_axes, dict(signature.arguments))
    with (
        torch.no_grad(),
        silence_export_logs(),
        free_lengths(),
        zero_encoder_padding(),
        allow_tensor_attributes(),
    ):
        return torch.export.export(
            module, call.args, dict(call.kwargs), dynamic_shapes=shapes, strict=strict
        )


def use_export(
    graph: GraphModule, call: CallArgs, use: Callable[[ExportedProgram, Sizes], _Result]
) -> _Result:
    """Export a captured graph for a file; return what `use` makes of the program and its sizes.

    The sizes are those of the graph. If the export, or a part of `use` with a limit, takes too long
    with them, all axes of the inputs but the first, then all, are fixed to the sizes of the call,
    with a warning.

    Raises:
        ConversionError: `use` takes too long also with fixed sizes.
    """
    all_sizes, leaves = graph.meta[SIZES], list_flat_inputs(graph, call.args, call.kwargs)
    for axes, first_fixed in (("all", None), ("first", 1), ("none", 0)):
        sizes = (
            all_sizes if first_fixed is None else with_fixed_axes(all_sizes, leaves, first_fixed)
        )
        try:
            with _limit_export_time(graph, axes):
                program = export_program(graph, call, sizes)
            try:
                return use(program, sizes)
            finally:
                release_trace(program)
        except TimeLimitError as error:
            seconds = f"torch.export took more than {error.seconds:.0f} CPU seconds"
            if axes == "none":
                raise ConversionError(f"the model cannot be written: {seconds}") from None
            accepted = "with any size of the first axes" if axes == "all" else "of these sizes only"
            logger.warning("the file takes inputs like %s, %s, as %s", call, accepted, seconds)
    raise AssertionError("the last attempt returns or raises")


def _map_leaves(change: Callable[[object], Any], value: object) -> Any:
    """Apply `change` to every leaf, with a list of the parts of an object of another class.

    torch.export takes the shapes of a dataclass or cache in this form.
    """
    kind = pytree._get_node_type(value)
    if kind not in pytree.SUPPORTED_NODES:
        return change(value)
    node = pytree.SUPPORTED_NODES[kind]
    parts, context = node.flatten_fn(value)
    changed = [_map_leaves(change, part) for part in parts]
    return node.unflatten_fn(changed, context) if kind in pytree.BUILTIN_TYPES else changed


def graph_of_given(program: ExportedProgram) -> GraphModule:
    """Convert a user's program as `convert_to_graph`.

    Raises:
        CaptureError: the sizes of the program are too complex.
    """
    try:
        with tracing.limit_symbolic_time(program.graph_module):
            return convert_to_graph(program)
    except TimeLimitError as error:
        raise CaptureError(
            f"the sizes of the program must be simple enough to convert it within "
            f"{error.seconds:.0f} CPU seconds; export the program with fewer dynamic axes"
        ) from None


def convert_to_graph(program: ExportedProgram) -> GraphModule:
    """Convert a program to a functional graph that checks the sizes of its inputs."""
    module: GraphModule = make_unguarded_module(program)
    with silence_export_logs():
        simple = make_functional(module)
    if not simple:
        module = make_unguarded_module(_remove_in_place_ops(program))
    watch_sizes(module, collect_size_bounds(module))
    release_trace(program)
    return module


def _remove_in_place_ops(program: ExportedProgram) -> ExportedProgram:
    """Return the program without in-place ops.

    A decomposition table without an op keeps the op but functionalizes it, including in-place
    updates visible through views, which a rewrite of single ops cannot guarantee.
    """
    expanded = {n.target for n in program.graph.nodes if is_expandable(n.target)}
    table: dict[Any, Any] = {op: op.decompose for op in expanded}
    with torch.no_grad(), silence_export_logs(), free_lengths():
        return program.run_decompositions(table)


@contextmanager
def silence_export_logs() -> Iterator[None]:
    """Hide torch's logs of failed attempts and warnings; leave out the stack trace of each op.

    One thread at a time.
    """
    with TRACING:
        previous = logging.root.manager.disable
        logging.disable(logging.CRITICAL)
        try:
            # torch.export also prints the graph on failure.
            with warnings.catch_warnings(), redirect_stderr(io.StringIO()), without_stack_traces():
                warnings.filterwarnings("ignore", category=FutureWarning, message=".*LeafSpec.*")
                warnings.filterwarnings("ignore", message=".*were assigned during export")
                yield
        finally:
            logging.disable(previous)


def _make_capture_error(module: nn.Module, run: TrialRun, error: Exception) -> CaptureError:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    where = next((line for line in lines if ".py" in line and "line" in line), "")
    parts = any(True for _ in module.children())
    offer = ", or convert the modules separately: capture = 'modules'" if parts else ""
    return CaptureError(
        f"the graph of {type(module).__name__} cannot be captured by torch.export: "
        f"{type(error).__name__}: {' '.join(lines[:2])}{f' (at {where})' if where else ''}. "
        f"{_explain_failed_export(module, run)}{offer}"
    )


def _explain_failed_export(module: nn.Module, run: TrialRun) -> str:
    for name, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            return f"The module {name!r} is TorchScript; use the nn.Module of its source"
        if type(part).__module__.startswith(_QUANTIZED):
            return f"The module {name!r} is already quantized by torch.ao; use the float model"
    for leaf in pytree.tree_leaves(run.outputs):
        if not isinstance(leaf, torch.Tensor | int | float | str | None):
            return (
                f"The outputs must be tensors, or tuples, lists, dicts, named tuples or "
                f"dataclasses of tensors, got {with_article(type(leaf).__name__)}"
            )
    return (
        "The usual cause is a branch on a tensor's value; use torch.where or torch.cond, or give "
        "the part without the branch as the model"
    )


_forward: Any = nn.TransformerEncoder.forward


@contextmanager
def zero_encoder_padding() -> Iterator[None]:
    """Trace encoders with zeros in padded places, where inference returns zeros."""
    nn.TransformerEncoder.forward = _run_padded_encoder
    try:
        yield
    finally:
        nn.TransformerEncoder.forward = _forward


def _run_padded_encoder(
    encoder: nn.TransformerEncoder,
    src: torch.Tensor,
    mask: torch.Tensor | None = None,
    src_key_padding_mask: torch.Tensor | None = None,
    is_causal: bool | None = None,
) -> Any:
    """Return the outputs of an encoder, with zeros before its last norm where it packs a batch."""
    if (
        mask is not None
        or src_key_padding_mask is None
        or not torch.backends.mha.get_fastpath_enabled()
        or encoder.layers[0].training
        or not getattr(encoder, "use_nested_tensor", False)
        or src.dim() != 3
    ):  # torch's conditions of packing, negated
        return _forward(encoder, src, mask, src_key_padding_mask, is_causal)
    norm, encoder.norm = encoder.norm, None
    try:
        outputs = _forward(encoder, src, mask, src_key_padding_mask, is_causal)
    finally:
        encoder.norm = norm
    padded = src_key_padding_mask != 0
    if getattr(encoder, "mask_check", True):
        # Only batches with all padding at the end are packed.
        padded = padded & ~(padded[:, :-1] & ~padded[:, 1:]).any()
    outputs = outputs.masked_fill(padded.unsqueeze(-1), 0.0)
    return outputs if norm is None else norm(outputs)
