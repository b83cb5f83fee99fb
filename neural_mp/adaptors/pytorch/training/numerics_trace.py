"""Numerics trace of a torch model, module by module; the model stays unchanged."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from neural_mp.adaptors.pytorch.graph.call_signature import (
    CallArgs,
    call_signature,
    is_array,
    view_as_tensor,
)
from neural_mp.adaptors.pytorch.training.module_dtypes import get_planned_dtype, tree_leaves
from neural_mp.core.training_numerics import LayerTrace, ModelTrace, ValueStats
from neural_mp.errors import ConfigurationError, DataError, one_line


@dataclass
class _ModuleCall:
    """One call of a module, possibly incomplete."""

    name: str
    module: nn.Module
    inputs: ValueStats
    dtype: torch.dtype
    outputs: ValueStats = field(default_factory=ValueStats)
    #: Gradients of outputs and inputs, in order of arrival.
    above: list[torch.Tensor] = field(default_factory=list)
    below: list[torch.Tensor] = field(default_factory=list)


def trace_numerics(
    model: nn.Module, batch: object, loss: object = None, loss_scale: float = 1.0
) -> ModelTrace:
    """Run a training pass of a batch, and record the values at each module.

    Under `torch.autocast`, the pass uses autocast. Without a loss, no gradients are computed.
    """
    check_module(model)
    call, targets = call_of(model, batch)
    calls: list[_ModuleCall] = []
    with (
        disable_compilation(),
        preserve_state(model),
        torch.enable_grad(),
        _record_calls(model, calls),
    ):
        outputs = run_model(model, call)
        value = None if loss is None else compute_loss_value(loss, outputs, targets)
        grads = {} if value is None else compute_gradients(model, value * loss_scale)
    traces = [_make_layer_trace(call, grads, value is not None) for call in calls]
    number = None if value is None else float(value.detach())
    return ModelTrace(
        ValueStats.from_values(call.flatten_leaves()),
        ValueStats.from_values(tree_leaves(outputs)),
        traces,
        number,
    )


def check_module(model: object) -> None:
    """Raise `ConfigurationError` unless a model is a torch module with initialized weights."""
    if not isinstance(model, nn.Module):
        raise ConfigurationError(f"model must be a torch module, got {model!r}")
    lazy = next((name for name, p in model.named_parameters() if is_lazy(p)), None)
    if lazy is not None:
        raise ConfigurationError(
            f"weights must have a shape, but {lazy!r} has none yet; run a batch through the model "
            f"before"
        )


def call_of(model: nn.Module, batch: Any) -> tuple[CallArgs, Any]:
    """Return the call of a model for a batch, and the targets; None without targets."""
    pair = isinstance(batch, tuple | list) and len(batch) == 2
    inputs, targets = batch if pair else (batch, None)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    call = call_signature(model).call(inputs)

    def copy_to_device(leaf: object) -> Any:
        if is_array(leaf):
            leaf = view_as_tensor(leaf)
        # Copy: the model may write to its inputs, and the batch is used again.
        return leaf.to(device, copy=True) if isinstance(leaf, torch.Tensor) else leaf

    return call.map_leaves(copy_to_device), pytree.tree_map(copy_to_device, targets)


def run_model(model: nn.Module, call: CallArgs) -> Any:
    """Return the outputs of the model; raise `DataError` if the model rejects the inputs."""
    try:
        return model(*call.args, **call.kwargs)
    except (RuntimeError, TypeError, ValueError, IndexError, AssertionError) as error:
        raise DataError(
            f"the model does not accept the inputs of the batch ({call}): {one_line(error)}"
        ) from error


def compute_loss_value(loss: object, outputs: object, targets: object) -> torch.Tensor:
    """Return the scalar loss of a batch; raise `ConfigurationError` if the loss is invalid."""
    if not callable(loss):
        raise ConfigurationError(
            f"loss must be a function of outputs and targets, e.g. "
            f"torch.nn.functional.cross_entropy, got {loss!r}"
        )
    try:
        result = loss(outputs, targets)
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise ConfigurationError(f"the loss {loss!r} fails: {one_line(error)}") from error
    if not isinstance(result, torch.Tensor) or result.numel() != 1:
        shape = tuple(result.shape) if isinstance(result, torch.Tensor) else type(result).__name__
        raise ConfigurationError(
            f"the loss must return a tensor with one number, got {shape}; take its mean"
        )
    if not result.requires_grad:
        raise ConfigurationError(
            "the loss must depend on a trained weight (requires_grad=True), but depends on none"
        )
    return result.float().reshape(())


def compute_gradients(model: nn.Module, loss: torch.Tensor) -> dict[nn.Parameter, torch.Tensor]:
    """Return parameter → gradient, if the loss depends on it; keep `grad` unchanged."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    grads = torch.autograd.grad(loss, trained, allow_unused=True)
    return {p: grad for p, grad in zip(trained, grads, strict=True) if grad is not None}


@contextmanager
def disable_compilation() -> Iterator[None]:
    """Run modules uncompiled: compiled code ignores hooks registered later."""
    if "torch._dynamo" in sys.modules:  # Importing the compiler costs seconds.
        with torch.compiler.set_stance("force_eager"):
            yield
    else:
        yield


@contextmanager
def preserve_state(model: nn.Module) -> Iterator[None]:
    """Switch to training mode; restore weights, statistics, modes and the random state on exit."""
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    originals = {name: tensor.detach().clone() for name, tensor in state.items()}
    modes = {module: module.training for module in model.modules()}
    buffers = {module: dict(module._buffers) for module in modes}
    if not model.training:
        model.train()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        for module, contents in buffers.items():  # a forward may have replaced buffers
            module._buffers.clear()
            module._buffers.update(contents)
        with torch.no_grad():
            for name, tensor in state.items():
                tensor.copy_(originals[name])
        for module, mode in modes.items():
            module.training = mode


@contextmanager
def _record_calls(model: nn.Module, calls: list[_ModuleCall]) -> Iterator[None]:
    started: list[_ModuleCall] = []

    def make_input_recorder(name: str) -> Callable[..., None]:
        def record_inputs(
            module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
        ) -> None:
            tensors = floating_tensors((args, dict(kwargs)))
            dtype = tensors[0].dtype if tensors else torch.float32
            call = _ModuleCall(name, module, ValueStats.from_values(tensors), dtype)
            _record_gradients(tensors, call.below)
            started.append(call)

        return record_inputs

    def record_outputs(
        module: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object], outputs: object
    ) -> None:
        call = started.pop()
        tensors = floating_tensors(outputs)
        call.outputs = ValueStats.from_values(tensors)
        output_dtype = tensors[0].dtype if tensors else call.dtype
        call.dtype = get_planned_dtype(module) or output_dtype
        if call.inputs.peak > torch.finfo(call.dtype).max:  # autocast casts in the module
            call.inputs = replace(call.inputs, inf=True)
        _record_gradients(tensors, call.above)
        calls.append(call)

    handles: list[Any] = []
    try:
        for name, module in model.named_modules():
            if name:
                handles.append(
                    module.register_forward_pre_hook(make_input_recorder(name), with_kwargs=True)
                )
                handles.append(module.register_forward_hook(record_outputs, with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _record_gradients(tensors: Sequence[torch.Tensor], grads: list[torch.Tensor]) -> None:
    for tensor in tensors:
        if tensor.requires_grad:
            tensor.register_hook(lambda grad: grads.append(grad.detach()))


def floating_tensors(values: object) -> list[torch.Tensor]:
    """Return the floating-point tensors in nested values."""
    return [
        leaf
        for leaf in tree_leaves(values)
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
    ]


def _make_layer_trace(
    call: _ModuleCall, grads: Mapping[nn.Parameter, torch.Tensor], backwards: bool
) -> LayerTrace:
    parameters = list(call.module.parameters())
    below = [*call.below, *(grads[p] for p in parameters if p in grads)]
    return LayerTrace(
        name=call.name,
        kind=type(call.module).__name__,
        dtype=str(call.dtype).removeprefix("torch."),
        inputs=call.inputs,
        outputs=call.outputs,
        weights=ValueStats.from_values([*parameters, *call.module.buffers()]),
        gradients_above=ValueStats.from_values(call.above) if backwards else None,
        gradients_below=ValueStats.from_values(below) if backwards else None,
        holds_layers=any(True for _ in call.module.children()),
    )
