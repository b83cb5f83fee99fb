"""Capture of a model in parts or layers: graphs of modules, called by the user's own code.

A model whose graph can be captured has one part, the whole model. Any other model, e.g. with a
branch on a tensor's value, is split into the largest modules that can be captured; the model's own
code, the shell, calls their replacements.

Layer by layer, a decoder of `transformers` keeps its code, with `generate`, its key-value cache and
`config`; dense layers and embeddings are graphs of their own. Layers of equal form are exported
once.

`record_calls` passes on the inputs of the calls that the user's own code makes to a module.
"""

from __future__ import annotations

import inspect
import logging
import operator
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Interpreter, Node
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from neural_mp.adaptors.common.signatures.signature import remember_layout
from neural_mp.adaptors.pytorch.capture import graph_capture
from neural_mp.adaptors.pytorch.capture.trial_run import run_in_place, run_once, switch_to_inference
from neural_mp.adaptors.pytorch.graph import graph_edit as fx
from neural_mp.adaptors.pytorch.graph import tracing
from neural_mp.adaptors.pytorch.graph.call_signature import CallArgs, copy_tensor
from neural_mp.adaptors.pytorch.graph.dynamic_shapes import check_inputs, list_flat_inputs
from neural_mp.adaptors.pytorch.graph.model import TorchModel, assemble_module
from neural_mp.adaptors.pytorch.graph.module_state import preserve_module_state
from neural_mp.adaptors.pytorch.graph.stand_ins import StandIn, is_table, is_transposed_dense
from neural_mp.adaptors.pytorch.versions import with_code
from neural_mp.errors import CaptureError, DataError, NeuralMPError
from neural_mp.util.text import format_count

logger = logging.getLogger(__name__)

#: Times for the export of the whole model that all modules may take together: a module that cannot
#: be captured takes all attempts before each of its children takes them, too.
MAX_EXPORTS = 10.0
#: Layer types that make a module worth capturing.
_LAYERS = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.Linear,
    nn.Embedding,
    nn.RNNBase,
    nn.MultiheadAttention,
)


#: Called with a node and a function that runs the node; returns the result for other nodes.
Visit = Callable[[Node, Callable[[], Any]], Any]


class _Visited(Interpreter):
    """Interpreter that calls `visit` for every node."""

    def __init__(self, module: GraphModule, visit: Visit) -> None:
        super().__init__(module)
        self.visit = visit

    def run_node(self, n: Node) -> Any:
        return self.visit(n, partial(super().run_node, n))


class _Interpreted(StandIn):
    """A graph called like the module it was captured from, but run by an interpreter."""

    def __init__(self, interpreter: Interpreter) -> None:
        super().__init__()
        self.interpreter = interpreter

    def forward(self, *args: object, **kwargs: object) -> Any:
        module = self.interpreter.module
        check_inputs(module, args, kwargs)
        flat = self.interpreter.run(
            *list_flat_inputs(module, args, kwargs), enable_io_processing=False
        )
        self.interpreter.env.clear()  # else the results of all modules stay until their next call
        return module.graph.process_outputs(flat)


def visit_nodes(
    model: TorchModel, visit: Visit, portable: bool = False
) -> Callable[[CallArgs], Any]:
    """Return the model, or its portable graphs, as a function of its call, run node by node."""
    module = model.assemble_parts(
        lambda part: _Interpreted(_Visited(part.portable if portable else part.runnable, visit))
    )
    return lambda call: run_call(model, module, call)


def run_call(model: TorchModel, module: Callable[..., Any], call: CallArgs) -> Any:
    """Run `module`, a form of a model.

    Raises:
        DataError: if inputs or their sizes differ from those that the model was captured for.
    """
    if model.shell is not None:
        call = call.clone_tensors()  # user code may write to its inputs
    else:
        model.signature.check_call(call, model.example)
    with torch.no_grad():
        try:
            return module(*call.args, **call.kwargs)
        except DataError as error:
            raise DataError(
                f"the model was captured for inputs like {model.example}, got {call}: "
                f"{error}{_said_by_original(model, call)}"
            ) from None


def mark_accepted(model: TorchModel, call: CallArgs) -> None:
    """Keep that the graph accepts calls with these dtypes and shapes, as it just ran one."""
    remember_layout(model.cached_result(_accepted_layouts), _call_layout(call), None)


def is_accepted(model: TorchModel, call: CallArgs) -> bool:
    """Whether the graph ran on inputs of these dtypes and shapes."""
    return _call_layout(call) in model.cached_result(_accepted_layouts)


def _accepted_layouts(_: TorchModel) -> dict[Hashable, None]:
    return {}


def _call_layout(call: CallArgs) -> Hashable:
    leaves, structure = pytree.tree_flatten((call.args, dict(call.kwargs)))
    layouts = (
        (leaf.dtype, leaf.shape) if isinstance(leaf, torch.Tensor) else repr(leaf)
        for leaf in leaves
    )
    return repr(structure), *layouts


def _said_by_original(model: TorchModel, call: CallArgs) -> str:
    """Return a note on whether the user's own module runs on inputs that its graph rejects."""
    if model.original is None:
        return ""
    with switch_to_inference(model.original):
        try:
            run_once(model.original, call)
        except DataError:
            return "; the module itself fails on these inputs, too"
    return "; the module itself accepts these inputs, but not its graph from torch.export"


@dataclass
class RecordedCall:
    """First call of a module while its model ran.

    `is_alike` if a graph can stand for the module: all calls match, and none changes an object that
    the caller passes, such as a cache.
    """

    call: CallArgs
    is_alike: bool = True


def copy_module(module: nn.Module) -> nn.Module:
    """Copy a user's module for running: weights are shared, other state is not."""
    return assemble_module(module, {}).eval()


@dataclass(frozen=True)
class CapturedParts:
    """The captured graphs of a model.

    Attributes:
        graphs: path → graph of a module, and its example call.
        warnings: what was not captured.
    """

    graphs: Mapping[str, tuple[GraphModule, CallArgs]]
    warnings: tuple[str, ...] = ()


def capture_modules(shell: nn.Module, call: CallArgs) -> CapturedParts:
    """Capture the largest modules of a private copy of a model that can be captured.

    Modules that do not run in this call are left unchanged, and so are those that remain after the
    time limit.

    Raises:
        CaptureError: if no module can be captured.
    """
    limit = MAX_EXPORTS * tracing.max_symbolic_seconds(shell)
    end = time.thread_time() + limit
    capturer = _ModuleCapturer(shell, call, watch_calls(shell, call), end)
    capturer.capture_children(shell, "")
    late = ""
    if capturer.left:
        late = (
            f"{format_count(len(capturer.left), 'module')} from {capturer.left[0]!r} on stayed as "
            f"in the model, as torch.export took more than {limit:.0f} CPU seconds for all modules"
        )
    if not capturer.found:
        raise CaptureError(
            f"no module of {type(shell).__name__} with layers can be captured separately"
            f"{late and f': {late}'}"
        )
    return CapturedParts(capturer.found, (late,) if late else ())


def watch_calls(
    module: nn.Module, call: CallArgs, predicate: Callable[[nn.Module], bool] = lambda _: True
) -> dict[nn.Module, RecordedCall]:
    """Run a model once; return submodule → its recorded call, for submodules that are wanted."""
    calls: dict[nn.Module, RecordedCall] = {}
    # A stack for each module, which may call itself.
    inputs: dict[nn.Module, list[tuple[list[Any], Any]]] = defaultdict(list)

    def record_call(part: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        arguments = CallArgs(args, kwargs)
        if part not in calls:
            calls[part] = RecordedCall(arguments.clone_tensors())
        elif _list_fixed_properties(arguments) != _list_fixed_properties(calls[part].call):
            calls[part].is_alike = False
        inputs[part].append(pytree.tree_flatten((args, kwargs)))

    def compare_inputs(
        part: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], _: object
    ) -> None:
        leaves, structure = inputs[part].pop()
        later, later_structure = pytree.tree_flatten((args, kwargs))
        if structure != later_structure or any(map(operator.is_not, leaves, later)):
            calls[part].is_alike = False

    with preserve_module_state(module):  # also without the hooks, which are not the user's
        for part in module.modules():
            is_scripted = isinstance(part, torch.jit.ScriptModule)
            if part is not module and not is_scripted and predicate(part):
                part.register_forward_pre_hook(record_call, with_kwargs=True)
                part.register_forward_hook(compare_inputs, with_kwargs=True)
        run_in_place(module, call)
    return calls


def _list_fixed_properties(call: CallArgs) -> Any:
    """Return all properties of a call that a graph fixes: everything but tensor sizes."""
    leaves, structure = pytree.tree_flatten((call.args, dict(call.kwargs)))
    kinds = [(x.dtype, x.ndim) if isinstance(x, torch.Tensor) else x for x in leaves]
    return kinds, structure


@dataclass
class _ModuleCapturer:
    """Recursive capture of the modules of a model."""

    shell: nn.Module
    call: CallArgs
    seen: Mapping[nn.Module, RecordedCall]
    #: CPU seconds of the thread at which the last capture begins.
    end: float
    #: Paths of modules that were not tried, as the time had passed.
    left: list[str] = field(default_factory=list)
    found: dict[str, tuple[GraphModule, CallArgs]] = field(default_factory=dict)
    known: set[nn.Module] = field(default_factory=set)

    def capture_children(self, module: nn.Module, path: str) -> None:
        """Capture each child module whole if possible, else descend into its children."""
        for name, child in module.named_children():
            if child in self.known or not any(isinstance(m, _LAYERS) for m in child.modules()):
                continue
            self.known.add(child)
            child_path = f"{path}.{name}" if path else name
            if time.thread_time() > self.end:
                self.left.append(child_path)
                continue
            captured = self.capture_module_alone(child, child_path)
            if captured is None:
                self.capture_children(child, child_path)
            else:
                self.found[child_path] = captured

    def capture_module_alone(
        self, child: nn.Module, path: str
    ) -> tuple[GraphModule, CallArgs] | None:
        """Return the graph of one module, if the model runs with the graph in its place."""
        recorded = self.seen.get(child)
        if recorded is None or not recorded.is_alike:
            return None
        arguments = (recorded.call.args, dict(recorded.call.kwargs))
        leaves = pytree.tree_leaves(arguments, is_leaf=lambda x: isinstance(x, PackedSequence))
        if any(isinstance(leaf, PackedSequence) for leaf in leaves):
            return None  # torch.export would fix all lengths
        try:
            graph = graph_capture.capture_module(child, recorded.call)
            stand_in = assemble_module(self.shell, {path: _Interpreted(Interpreter(graph))})
            run_once(stand_in, self.call)
        except NeuralMPError:
            # The user's code may do more than call the module, e.g. iterate over its layers.
            logger.debug("the module %s cannot be captured", path, exc_info=True)
            return None
        return graph, recorded.call


def capture_layers(shell: nn.Module, call: CallArgs) -> CapturedParts:
    """Capture the dense layers and embeddings of a private copy of a model.

    Layers that do not run in this call are left unchanged, and so are layers whose replacement the
    model's own code refuses.

    Raises:
        CaptureError: if no layer runs, or all are refused.
        DataError: if the module does not run on these inputs.
    """
    watched = watch_calls(shell, call, lambda part: _as_dense_or_embedding(part) is not None)
    graphs: dict[Hashable, GraphModule] = {}
    calls: dict[Hashable, CallArgs] = {}
    captured = {}
    for path, module in shell.named_modules():
        layer, recorded = _as_dense_or_embedding(module), watched.get(module)
        if layer is None or recorded is None or not recorded.is_alike:
            continue
        args = recorded.call.args
        # Tables of positions may take the shape of the inputs.
        if recorded.call.kwargs or len(args) != 1 or not isinstance(args[0], torch.Tensor):
            continue
        key = _describe_layer_form(layer, recorded.call)
        if key not in graphs:
            graphs[key] = graph_capture.capture_module(layer, recorded.call)
        # One example for equal layers: those of all layers take more memory than a block.
        example = calls.setdefault((key, args[0].shape), recorded.call)
        captured[path] = _copy_with_parameters(graphs[key], layer), example
    if not captured:
        raise CaptureError(
            f"{type(shell).__name__} must run a dense layer or an embedding on the inputs, found "
            f"none; set capture = 'whole' or 'modules'"
        )
    refused = _find_refused_layers(shell, call, captured)
    if not refused:
        return CapturedParts(captured)
    accepted = {path: part for path, part in captured.items() if path not in refused}
    named = ", ".join(sorted({path.rpartition(".")[2] for path in refused}))
    if not accepted:
        raise CaptureError(
            f"{type(shell).__name__} must accept other modules in place of its dense layers and "
            f"embeddings, but its code refuses them ({named}); set capture = 'whole' or 'modules'"
        )
    left = (
        f"{format_count(len(refused), 'layer')} ({named}) stayed as in the model, whose code "
        f"refuses other modules in their place"
    )
    return CapturedParts(accepted, (left,))


def _find_refused_layers(
    shell: nn.Module, call: CallArgs, captured: Mapping[str, tuple[GraphModule, CallArgs]]
) -> set[str]:
    """Return the paths of layers whose graphs the model's code does not run with.

    Layers of one name, as in all blocks of a decoder, are tried together.
    """

    def runs_with_graphs(paths: Iterable[str]) -> bool:
        stand_ins = {
            path: _Interpreted(Interpreter(captured[path][0])).stand_for(
                shell.get_submodule(path), None
            )
            for path in paths
        }
        try:
            run_once(assemble_module(shell, stand_ins), call)
        except NeuralMPError:
            logger.debug("the model refuses graphs of %s", list(stand_ins), exc_info=True)
            return False
        return True

    if runs_with_graphs(captured):
        return set()
    named: dict[str, list[str]] = defaultdict(list)
    for path in captured:
        named[path.rpartition(".")[2]].append(path)
    refused = {path for paths in named.values() if not runs_with_graphs(paths) for path in paths}
    accepted = [path for path in captured if path not in refused]
    return refused if accepted and runs_with_graphs(accepted) else set(captured)


def _as_dense_or_embedding(module: nn.Module) -> nn.Module | None:
    if type(module) is nn.Linear or (is_table(module) and module.max_norm is None):
        return module
    return graph_capture.convert_to_linear(module) if is_transposed_dense(module) else None


def _describe_layer_form(layer: nn.Module, call: CallArgs) -> Hashable:
    """Return the properties of a layer that decide on its graph."""
    (tensor,) = call.args
    if type(layer) not in (nn.Linear, nn.Embedding):
        return id(layer)  # its code may use any attribute
    options = getattr(layer, "padding_idx", None)
    shapes = ((name, value.shape, value.dtype) for name, value in layer.named_parameters())
    return type(layer), options, *shapes, tensor.dtype, tensor.ndim


def _copy_with_parameters(graph: GraphModule, layer: nn.Module) -> GraphModule:
    """Return a copy of the graph of a layer of the same form, with the parameters of `layer`."""
    copied = fx.copy_graph_shallowly(graph)
    for name in ("weight", "bias"):
        value = getattr(layer, name, None)
        if isinstance(value, torch.Tensor):
            copied.register_parameter(name, value)
    return copied


_VARIABLE = inspect.Parameter.VAR_POSITIONAL


@contextmanager
def record_calls(model: nn.Module, record: Callable[[Any], None]) -> Iterator[None]:
    """Pass the inputs of every call of a module within this context to `record`, as copies.

    A call that continues an earlier one, with a filled key-value cache, is not recorded: its inputs
    are not those of a batch.
    """

    def record_inputs(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        lengths = (getattr(x, "get_seq_length", None) for x in (*args, *kwargs.values()))
        if not any(callable(length) and length() for length in lengths):
            record(inputs_of_call(model, args, kwargs))

    handle = model.register_forward_pre_hook(record_inputs, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def inputs_of_call(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the inputs of a call as a batch: the only one, a dict, or a tuple without names."""
    parameters = inspect.signature(with_code(module).forward).parameters
    by_position = [name for name, p in parameters.items() if p.kind is not _VARIABLE]
    has_variable = any(p.kind is _VARIABLE for p in parameters.values())
    if has_variable and not kwargs:
        return tuple(map(_copy_tensors, args)) if len(args) > 1 else _copy_tensors(args[0])
    named = {**dict(zip(by_position, args, strict=False)), **kwargs}
    inputs = {name: _copy_tensors(value) for name, value in named.items() if _is_data(value)}
    if len(inputs) == 1 and len(args) == 1 and not kwargs:
        (only,) = inputs.values()
        return only
    return inputs


def _is_data(value: object) -> bool:
    leaves = pytree.tree_leaves(value)
    return bool(leaves) and all(isinstance(leaf, torch.Tensor) for leaf in leaves)


def _copy_tensors(value: object) -> Any:
    return pytree.tree_map(copy_tensor, value)
