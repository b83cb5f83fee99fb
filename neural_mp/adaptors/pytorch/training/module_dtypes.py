"""Execution of single modules in 16 bits or float32, within a torch model."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized
from torch.utils import _pytree as pytree

#: Modules whose children never run, but supply weights to one op. Children of parametrized modules
#: compute weights, not outputs.
_FUSED = (nn.MultiheadAttention, nn.RNNBase)


def list_unit_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return name → module for all modules that can switch to 16 bits alone: leaf modules."""
    units: dict[str, nn.Module] = {}
    visited: set[nn.Module] = set()  # a shared module is one unit

    def collect_units(module: nn.Module, name: str) -> None:
        if module in visited:
            return
        visited.add(module)
        parts = dict(module.named_children())
        if isinstance(module, _FUSED) or is_parametrized(module) or not parts:
            units[name] = module
            return
        for part, child in parts.items():
            collect_units(child, f"{name}.{part}" if name else part)

    collect_units(model, "")
    return units


@dataclass(frozen=True)
class RunsIn:
    """Wrapper that runs calls of a module in 16 bits or float32, regardless of its surroundings.

    Attributes:
        dtype: bfloat16, float16 or float32.
        cast_inputs: whether to cast inputs to `dtype`; else autocast decides.
        cast_outputs: whether to cast outputs to float32.
    """

    dtype: torch.dtype
    cast_inputs: bool = True
    cast_outputs: bool = False

    def cast_call_inputs(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Any, Any]:
        """Cast the inputs if requested; a hook, so that later hooks see the cast inputs."""
        # Registered even without a cast: torch's fused encoders, which would bypass their
        # submodules, check for hooks.
        return cast_floats((args, dict(kwargs)), self.dtype) if self.cast_inputs else (args, kwargs)

    def wrap_module(self, module: nn.Module) -> Callable[[], None]:
        """Wrap a module; return a function that unwraps."""
        hook = module.register_forward_pre_hook(self.cast_call_inputs, with_kwargs=True)
        own = vars(module)
        originals = {name: own[name] for name in _REPLACED if name in own}
        around = _Forward(self, module, originals.get("forward"))
        own.update(zip(_REPLACED, (around, around.make_replica), strict=True))

        def restore_module() -> None:
            hook.remove()
            for name in _REPLACED:
                own.pop(name, None)
            own.update(originals)

        return restore_module


#: Attributes of a module that `RunsIn` overrides.
_REPLACED = ("forward", "_replicate_for_data_parallel")


class _Forward:
    """Forward of a module within or without autocast.

    Hooks would leave autocast on if the user interrupts the module, and `torch.compile` cannot
    trace hooks that enter autocast. A class, not a closure, so that the module can be copied and
    pickled.
    """

    def __init__(self, way: RunsIn, module: nn.Module, earlier: Callable[..., Any] | None) -> None:
        self.way, self.module, self.earlier = way, module, earlier

    def __call__(self, *args: object, **kwargs: object) -> Any:
        low = self.way.dtype is not torch.float32
        dtype = self.way.dtype if low else None
        with torch.autocast(get_device_type(self.module), dtype, enabled=low):
            if self.earlier is None:
                outputs = type(self.module).forward(self.module, *args, **kwargs)
            else:
                outputs = self.earlier(*args, **kwargs)
        return cast_floats(outputs, torch.float32) if self.way.cast_outputs else outputs

    @property
    def __wrapped__(self) -> Any:
        """The original forward, for `inspect.signature`."""
        return self.earlier or MethodType(type(self.module).forward, self.module)

    @property
    def __code__(self) -> Any:
        """Code object, for source locations of `torch.export`."""
        return self.__wrapped__.__code__

    def make_replica(self) -> nn.Module:
        """Return the replica that `nn.DataParallel` makes for another device."""
        copied = type(self.module)._replicate_for_data_parallel(self.module)
        vars(copied)["forward"] = self._bind_module(copied)
        return copied

    def _bind_module(self, module: nn.Module) -> _Forward:
        earlier = self.earlier
        if isinstance(earlier, _Forward):
            earlier = earlier._bind_module(module)
        return _Forward(self.way, module, earlier)


def remove_plan(module: nn.Module) -> Callable[[], None]:
    """Remove the wrappers of `RunsIn` from a module; return a function that restores them."""
    own = vars(module)
    tables: list[Any] = [module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs]
    originals = [(table, dict(table)) for table in tables]
    replaced = {name: own[name] for name in _REPLACED if name in own}
    while isinstance(own.get("forward"), _Forward):
        earlier = own.pop("forward").earlier
        own.pop("_replicate_for_data_parallel", None)
        if earlier is not None:
            own["forward"] = earlier
    for key, hook in list(module._forward_pre_hooks.items()):
        if isinstance(getattr(hook, "__self__", None), RunsIn):
            for table in tables:
                table.pop(key, None)

    def restore_plan() -> None:
        for table, entries in originals:
            table.clear()
            table.update(entries)
        for name in _REPLACED:
            own.pop(name, None)
        own.update(replaced)

    return restore_plan


def get_planned_dtype(module: nn.Module) -> torch.dtype | None:
    """Return the dtype set by a wrapper; None if not wrapped."""
    forward = vars(module).get("forward")
    return forward.way.dtype if isinstance(forward, _Forward) else None


def get_device_type(module: nn.Module) -> str:
    """Return the device type of a module's weights; `cpu` without weights."""
    # A loop: the compiler of torch 2.6 cannot trace `next` with a default.
    for tensor in chain(module.parameters(), module.buffers()):
        return str(tensor.device.type)
    return "cpu"


def cast_floats(values: object, dtype: torch.dtype) -> Any:
    """Cast 16- and 32-bit float tensors in nested values."""
    floats = (torch.float32, torch.bfloat16, torch.float16)

    def cast_leaf(leaf: Any) -> Any:
        if _is_dataclass_instance(leaf):
            copied = copy.copy(leaf)
            for part in dataclasses.fields(leaf):
                value = getattr(leaf, part.name, None)
                object.__setattr__(copied, part.name, pytree.tree_map(cast_leaf, value))
            return copied
        return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.dtype in floats else leaf

    return pytree.tree_map(cast_leaf, values)


def tree_leaves(values: object) -> list[Any]:
    """Return the leaves of nested values, including fields of dataclasses."""
    leaves: list[Any] = []
    for leaf in pytree.tree_leaves(values):
        if _is_dataclass_instance(leaf):
            parts = [getattr(leaf, part.name, None) for part in dataclasses.fields(leaf)]
            leaves.extend(tree_leaves(parts))
        else:
            leaves.append(leaf)
    return leaves


def _is_dataclass_instance(value: object) -> bool:
    """Whether a value is a dataclass instance that torch's pytree treats as a leaf."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)
