"""Calls of a captured model: inputs of each signature are checked and arranged once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from neural_mp.adaptors.common.signatures.signature import (
    get_layout_key,
    list_flat_leaves,
    remember_layout,
)
from neural_mp.adaptors.pytorch.capture.graph_capture import KEPT_STATE
from neural_mp.adaptors.pytorch.capture.module_capture import (
    copy_module,
    is_accepted,
    mark_accepted,
    run_call,
)
from neural_mp.adaptors.pytorch.graph.call_signature import CallArgs, is_array, to_arrays
from neural_mp.adaptors.pytorch.graph.dynamic_shapes import check_inputs, input_keywords
from neural_mp.adaptors.pytorch.graph.graph_edit import copy_graph_shallowly, get_attribute
from neural_mp.adaptors.pytorch.graph.model import TorchModel
from neural_mp.adaptors.pytorch.graph.module_state import ModuleState, preserve_module_state
from neural_mp.adaptors.pytorch.graph.stand_ins import StandIn
from neural_mp.adaptors.pytorch.kernels.batch_parts import BatchParts, keep_freed_memory
from neural_mp.adaptors.pytorch.kernels.programs import call_programs
from neural_mp.errors import ConversionError

logger = logging.getLogger(__name__)

T = TypeVar("T")
_NOTHING = nullcontext()

#: Dtype and shape of every tensor, in order.
_InputKey = tuple[Hashable, ...]


class DirectGraph:
    """A captured graph as a function of its inputs.

    The first call for a combination of dtypes and shapes checks the inputs; later calls run the
    code of the graph directly. Large batches are computed in parts, if the graph allows that.

    Args:
        module: the graph.
        portable: the graph without integer kernels, for empty inputs: some kernels drop their axes.
    """

    def __init__(self, module: GraphModule, portable: GraphModule | None = None) -> None:
        keep_freed_memory()
        self._module = module
        self._for_empty = portable or module
        self._parts = BatchParts(module)
        self._keywords = input_keywords(module)
        self._known: dict[_InputKey, None] = {}
        self._returns = module.graph._codegen.pytree_info.out_spec
        self._returns_one = self._returns.is_leaf()

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Return the module's result."""
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self._compute_outputs(args, kwargs)
        return self._compute_outputs(args, kwargs)

    def _compute_outputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.jit.is_tracing():
            raise ConversionError(
                "a converted model cannot be traced for TorchScript, which has no form for its "
                "packed weights; use OptimizedModel.save and neural_mp.load, or "
                "OptimizedModel.export_onnx"
            )
        if kwargs:
            if set(kwargs) != set(self._keywords):
                return self._run_module(args, kwargs)
            leaves = (*args, *self.order_keywords(kwargs))
        else:
            leaves = args
        for leaf in leaves:
            if type(leaf) is not torch.Tensor:
                return self._run_module(args, kwargs)
        key = (len(args), *[(leaf.dtype, leaf.shape) for leaf in leaves])
        if key not in self._known:
            if any(map(is_empty, leaves)):
                return self._for_empty(*args, **kwargs)
            if not self._parts.can_split(leaves):
                result = self._module(*args, **kwargs)
                remember_layout(self._known, key, None)
                return result
            check_inputs(self._module, args, kwargs)
            remember_layout(self._known, key, None)
        return self.run_known(leaves)

    def _run_module(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result for inputs of any structure."""
        has_empty = any(map(is_empty, pytree.tree_leaves((args, kwargs))))
        return (self._for_empty if has_empty else self._module)(*args, **kwargs)

    @cached_property
    def _generated_code(self) -> tuple[Callable[..., Any], SimpleNamespace]:
        return _extract_graph_code(self._module)

    def run_known(self, leaves: Sequence[Any]) -> Any:
        """Return the module's result for flat inputs of a checked signature."""
        forward, constants = self._generated_code
        parts = self._parts.split_leaves(leaves) if self._parts.is_splitting else ()
        if len(parts) < 2:
            outputs = forward(constants, *leaves)
        else:
            results = [forward(constants, *part) for part in parts]
            outputs = [torch.cat(pieces) for pieces in zip(*results, strict=True)]
        return outputs[0] if self._returns_one else pytree.tree_unflatten(outputs, self._returns)

    def order_keywords(self, kwargs: Mapping[str, T]) -> tuple[T, ...]:
        """Return the keyword values in the order of the graph."""
        return tuple(kwargs[name] for name in self._keywords)


def is_empty(leaf: object) -> bool:
    """Whether an input is a tensor or an array without values."""
    return isinstance(leaf, torch.Tensor | np.ndarray) and 0 in leaf.shape


def _extract_graph_code(module: GraphModule) -> tuple[Callable[..., Any], SimpleNamespace]:
    """Return the graph's code, from flat inputs to flat outputs, and the holder of its constants.

    A module looks up an attribute in several dicts, which costs as long as a small op; and an op
    of torch is looked up by its path, and called through a Python function.
    """
    module = copy_graph_shallowly(module)
    call_programs(module)
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    for node in graph.nodes:
        if type(node.target) is torch._ops.OpOverload:
            node.target = _find_dispatcher_function(node.target)
    flat = GraphModule(module, graph)
    constants = SimpleNamespace()
    for node in graph.nodes:
        if node.op in ("get_attr", "call_module"):
            path = str(node.target)
            _set_nested_attribute(constants, path.split("."), get_attribute(module, path))
    return type(flat).forward, constants


def _find_dispatcher_function(op: torch._ops.OpOverload) -> Callable[..., Any]:
    """Return the dispatcher's function of an op, with a name for the code of a graph."""
    function = partial(op._op)
    name = f"op_{op.name().replace('::', '_').replace('.', '_')}"
    vars(function).update(__name__=name, __qualname__=name, __module__=__name__)
    return function


def _set_nested_attribute(holder: SimpleNamespace, path: list[str], value: object) -> None:
    for name in path[:-1]:
        if not hasattr(holder, name):
            setattr(holder, name, SimpleNamespace())
        holder = getattr(holder, name)
    setattr(holder, path[-1], value)


@dataclass(frozen=True)
class _Recipe:
    """Mapping from the leaves of a batch to the arguments of a call, as leaf indices.

    Attributes:
        arrays: whether the leaves are arrays, so that arrays are returned.
    """

    target: Callable[..., Any]
    args: tuple[int, ...]
    kwargs: Mapping[str, int]
    arrays: bool

    @cached_property
    def leaf_runner(self) -> Callable[[list[Any]], Any]:
        """Return a function that runs the model on leaves."""
        target, args = self.target, self.args
        if isinstance(target, DirectGraph):
            order = (*args, *target.order_keywords(self.kwargs))
            if order == (0,):
                return target.run_known
            return lambda leaves: target.run_known([leaves[index] for index in order])
        return lambda leaves: target(
            *[leaves[index] for index in args],
            **{name: leaves[index] for name, index in self.kwargs.items()},
        )


class DirectCalls:
    """A model as a function of the inputs of a batch; see `Adaptor.predict`.

    An untouched model runs the user's own module if that module keeps no state, unless compiled.
    """

    def __init__(self, model: TorchModel, compiled: nn.Module | None = None) -> None:
        self._model = model
        self._recipes: dict[_InputKey, _Recipe | None] = {}
        self._target: Callable[..., Any] | None = compiled
        if compiled is None and model.original is not None:
            self._target = _copy_user_module(model)
        if self._target is None and model.shell is None:
            self._target = DirectGraph(model.runnable_graph, model.portable_graph)

    def __call__(self, inputs: object) -> Any:
        """Return the outputs, as arrays if the inputs are arrays.

        Raises:
            DataError: if the inputs do not fit the model.
        """
        leaves = list_flat_leaves(inputs)
        for leaf in leaves:
            if type(leaf) is not torch.Tensor and type(leaf) is not np.ndarray:
                return self._run_with_checks(inputs)
        key = get_layout_key(inputs, leaves)
        recipe = self._recipes.get(key)
        if recipe is None:
            result = self._run_with_checks(inputs)
            is_new = self._target is not None and key not in self._recipes
            if is_new and not any(map(is_empty, leaves)):
                remember_layout(self._recipes, key, self._build_recipe(inputs, leaves))
            return result
        if recipe.arrays:
            tensor_of = self._model.signature.convert_to_tensor
            leaves = [tensor_of(leaf) for leaf in leaves]
        if torch.is_grad_enabled():
            with torch.no_grad():
                result = recipe.leaf_runner(leaves)
        else:
            result = recipe.leaf_runner(leaves)
        return to_arrays(result) if recipe.arrays else result

    def _run_with_checks(self, inputs: object) -> Any:
        result = self._compute_outputs(self._model.call(inputs))
        plain = dict(inputs) if isinstance(inputs, Mapping) else inputs
        arrays = any(is_array(leaf) for leaf in pytree.tree_leaves(plain))
        return to_arrays(result) if arrays else result

    def _compute_outputs(self, call: CallArgs) -> Any:
        """Return the outputs of one call; check inputs of a new signature with the graph.

        The user's own module, if any, computes the result in either case: folded batch norms of the
        graph change the last digits, which must not depend on the type of the inputs.
        """
        model, target = self._model, self._target
        if target is None or isinstance(target, DirectGraph):
            form = target or model.cached_result(_make_direct_form)
            # Calls of the toolkit, e.g. to measure times, must not change results of later calls.
            with (
                preserve_module_state(form)
                if isinstance(form, nn.Module) and model.keeps_state
                else _NOTHING
            ):
                return run_call(model, form, call)
        if not is_accepted(model, call):
            run_call(model, model.module, call)
            mark_accepted(model, call)
        with torch.no_grad():
            return target(*call.args, **call.kwargs)

    def _build_recipe(self, inputs: object, leaves: list[Any]) -> _Recipe | None:
        """Return the recipe for such batches; None if a call needs values other than the leaves."""
        signature = self._model.signature
        arrays = any(map(is_array, leaves))
        # Detached copies have distinct ids even if the batch holds a tensor twice.
        tensors = [signature.convert_to_tensor(leaf) for leaf in leaves]
        if not arrays and any(x is not y for x, y in zip(tensors, leaves, strict=True)):
            return None
        copies = [tensor.detach() for tensor in tensors]
        batch: Any = copies[0]
        if isinstance(inputs, dict):
            batch = dict(zip(inputs, copies, strict=True))
        elif isinstance(inputs, tuple | list):
            batch = type(inputs)(copies)
        call = self._model.call(batch)
        indices = {id(leaf): index for index, leaf in enumerate(copies)}
        values = (*call.args, *call.kwargs.values())
        if not all(id(value) in indices for value in values):
            return None
        assert self._target is not None
        return _Recipe(
            self._target,
            tuple(indices[id(value)] for value in call.args),
            {name: indices[id(value)] for name, value in call.kwargs.items()},
            arrays,
        )


class _DirectPart(StandIn):
    """A graph within the user's code; see `DirectGraph`."""

    def __init__(self, graph: GraphModule, portable: GraphModule) -> None:
        super().__init__()
        self._direct = DirectGraph(graph, portable)

    def forward(self, *args: object, **kwargs: object) -> Any:
        return self._direct(*args, **kwargs)


def _make_direct_form(model: TorchModel) -> nn.Module:
    """Return the user's code with graphs that check inputs of a known signature once.

    A decoder calls hundreds of graphs per token, and each check costs as long as a small product.
    """
    return model.assemble_parts(
        lambda part: _DirectPart(part.runnable, part.portable), model.converted_parts
    )


def keeps_state(model: TorchModel) -> bool:
    """Whether runs of the user's own module fail, or change the module or the inputs."""
    return _copy_user_module(model) is None


def _copy_user_module(model: TorchModel) -> nn.Module | None:
    """Return a copy of the user's module; None if runs fail or change module or inputs.

    The first run may fill caches and install hooks, which must not change again in a second run.
    """
    assert model.original is not None
    graphs = (part.portable for part in model.parts.values())
    if model.keeps_state or any(graph.meta.get(KEPT_STATE) for graph in graphs):
        return None
    try:
        module, call = copy_module(model.original), model.example.clone_tensors()
        versions = list(_read_input_versions(call))
        # Weights and the variables of classes and modules are those of the user.
        with preserve_module_state(module) as state, torch.no_grad():
            module(*call.args, **call.kwargs)
            is_changed = state.is_changed()
            if is_changed:
                filled = ModuleState(module)
                module(*call.args, **call.kwargs)
                is_changed = filled.is_changed()
        is_changed = is_changed or list(_read_input_versions(call)) != versions
    except Exception:
        # User code may refuse to be copied or run, with any exception type.
        logger.debug("the user's own module cannot be called directly", exc_info=True)
        return None
    return None if is_changed else module


def _read_input_versions(call: CallArgs) -> Iterator[int]:
    """Return the version counters of the inputs, which reveal writes."""
    return (leaf._version for leaf in call.flatten_leaves() if isinstance(leaf, torch.Tensor))
