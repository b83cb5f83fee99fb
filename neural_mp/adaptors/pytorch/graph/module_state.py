"""State of a user's module: changes by a run, and the state before it.

A forward may store values in attributes, lists, dicts and objects of the user's classes, and in
variables that hooks and methods close over. Tracing would leave traced tensors there.
"""

from __future__ import annotations

import sys
from collections import OrderedDict, deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from neural_mp.adaptors.pytorch.versions import with_code

#: Maximum number of objects in a snapshot: more are data, not state.
_MAX_OBJECTS = 100_000
#: Types without parts, compared by value.
_ATOMS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_CONTAINERS = (dict, list, set, deque)
#: Packages whose objects keep no state of a module.
_LIBRARIES = frozenset({*sys.stdlib_module_names, "torch", "numpy"}) - {"__main__"}
_PARAMETERS, _BUFFERS, _SUBMODULES = "_parameters", "_buffers", "_modules"


@dataclass(frozen=True)
class _Container:
    """A dict, list, set, deque or closure cell with its values.

    Attributes:
        holder: the container itself.
        name: its name in the module.
        has_names: whether its keys are names of attributes or variables.
        before: its values when the snapshot was made.
        is_buffers: whether it holds the buffers of a module.
    """

    holder: Any
    name: str
    has_names: bool
    before: Any
    is_buffers: bool = False

    def list_changed_names(self) -> list[str]:
        now = _copy_container_values(self.holder)
        if not self.has_names:
            return [] if _is_same_value(self.before, now) else [self.name]
        missing = object()
        return [
            _join_path(self.name, key)
            for key in {**self.before, **now}
            if not _is_same_value(self.before.get(key, missing), now.get(key, missing))
        ]

    def restore_values(self) -> None:
        """Give the container its earlier values, if they changed."""
        if _hold_same_objects(self.before, _copy_container_values(self.holder)):
            return
        match self.holder:
            case dict():
                base = OrderedDict if isinstance(self.holder, OrderedDict) else dict
                base.clear(self.holder)
                for key, value in self.before.items():
                    base.__setitem__(self.holder, key, value)
            case list():
                list.__setitem__(self.holder, slice(None), self.before)
            case CellType() if self.before:
                self.holder.cell_contents = self.before[0]
            case CellType():
                del self.holder.cell_contents
            case _:
                self.holder.clear()
                add = self.holder.update if isinstance(self.holder, set) else self.holder.extend
                add(self.before)


@dataclass
class _Tensor:
    """A tensor or array with its values, and the places that refer to it."""

    value: Any
    name: str
    is_buffer: bool
    before: Any
    version: int | None
    places: list[tuple[Any, Any]] = field(default_factory=list)

    def is_written(self) -> bool:
        """Whether the values were written to, even with equal ones."""
        if self.version is not None:
            return bool(self.value._version != self.version)
        return self._has_changed_value()

    def _has_changed_value(self) -> bool:
        value, original = self.value, self.before
        if isinstance(value, np.ndarray):
            return not np.array_equal(value, original)
        return value.shape != original.shape or not torch.equal(value, original)

    def restore_values(self) -> None:
        """Give the tensor its earlier values, if they changed."""
        if not self._has_changed_value():
            return
        if isinstance(self.value, np.ndarray):
            self.value[...] = self.before
            return
        with torch.inference_mode(self.value.is_inference()), torch.no_grad():
            if self.value.shape == self.before.shape:
                self.value.copy_(self.before)
            else:
                self.value.data = self.before.clone()


class ModuleState:
    """Snapshot of everything that a run of a module may change, apart from its parameters.

    Embeddings with `max_norm`, which scale their weight in a run, are included.
    """

    def __init__(self, module: nn.Module) -> None:
        self._containers: list[_Container] = []
        self._tensors: dict[int, _Tensor] = {}
        self._seen: dict[int, Any] = {}
        self._pending: list[tuple[str, Any]] = [("", module)]
        while self._pending and len(self._seen) < _MAX_OBJECTS:
            self._visit_object(*self._pending.pop())

    def list_changed_names(self, of_buffers: bool = False) -> list[str]:
        """Return the names of changed attributes and variables, or those of changed buffers."""
        containers = (part for part in self._containers if part.is_buffers == of_buffers)
        tensors = (part for part in self._tensors.values() if part.is_buffer == of_buffers)
        names = [name for container in containers for name in container.list_changed_names()]
        names += [tensor.name for tensor in tensors if tensor.is_written()]
        return sorted(set(names))

    def is_changed(self) -> bool:
        """Whether any value changed."""
        return bool(self.list_changed_names() or self.list_changed_names(of_buffers=True))

    def written_tensors(self) -> list[int]:
        """Return the ids of tensors that were written to, without buffers."""
        return [
            key
            for key, tensor in self._tensors.items()
            if isinstance(tensor.value, torch.Tensor)
            and not tensor.is_buffer
            and tensor.is_written()
        ]

    def replace_by_copies(self, keys: Sequence[int]) -> None:
        """Let every reference to some of the tensors refer to a copy."""
        for tensor in (self._tensors[key] for key in keys if key in self._tensors):
            copied = tensor.value.clone()
            for holder, key in tensor.places:
                if isinstance(holder, CellType):
                    holder.cell_contents = copied
                else:
                    holder[key] = copied

    def copy_tensors(self) -> dict[int, torch.Tensor]:
        """Return the id of each tensor but parameters → a copy of its values."""
        return {
            key: tensor.before
            for key, tensor in self._tensors.items()
            if type(tensor.value) is torch.Tensor
        }

    def restore_values(self) -> None:
        """Restore all values, in the objects that held them."""
        for container in self._containers:
            container.restore_values()
        for tensor in self._tensors.values():
            tensor.restore_values()

    def _visit_object(self, name: str, value: object) -> None:
        if id(value) in self._seen:
            return
        self._seen[id(value)] = value
        match value:
            case nn.Module():
                self._visit_module(name, value)
            case dict() | list() | set() | deque():
                self._visit_container(name, value)
            case tuple() | frozenset():
                self._pending += [(name, part) for part in value]
            case FunctionType():
                self._visit_closure(value)
            case MethodType():
                self._pending += [(name, value.__self__), (name, value.__func__)]
            case partial():
                self._pending += [(name, value.func), (name, value.args), (name, value.keywords)]
            case _ if _is_stateful(value):
                self._visit_namespace(name, vars(value))

    def _visit_module(self, name: str, module: nn.Module) -> None:
        if isinstance(module, torch.jit.ScriptModule):  # its attributes are not in Python
            for key, value in module.named_buffers():
                self._keep_tensor(_join_path(name, key), value, is_buffer=True)
            return
        # Code generated in a run would need the attributes set with it, which are then removed.
        own = vars(with_code(module))
        self._visit_namespace(
            name, {**own, _PARAMETERS: None, _BUFFERS: None, _SUBMODULES: None}, own
        )
        for key in (_PARAMETERS, _BUFFERS, _SUBMODULES):
            self._visit_namespace(name, own[key], is_buffer=key == _BUFFERS)
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm:
            self._keep_tensor(_join_path(name, "weight"), module.weight, is_buffer=True)
        for kind in type(module).__mro__:
            if not _is_of_library(kind):
                for key, value in vars(kind).items():
                    if type(value) in _CONTAINERS:
                        self._pending.append((_join_path(name, key), value))
                    elif isinstance(value, FunctionType):
                        self._visit_object(key, value)
                        self._visit_globals(value)

    def _visit_namespace(
        self,
        name: str,
        values: dict[str, Any],
        holder: dict[str, Any] | None = None,
        is_buffer: bool = False,
    ) -> None:
        """Keep the values of a namespace: an object's attributes, or a dict of buffers."""
        holder = values if holder is None else holder
        self._containers.append(_Container(holder, name, True, dict(holder), is_buffer))
        for key, value in values.items():
            self._add_reference(_join_path(name, key), value, holder, key, is_buffer)

    def _visit_container(
        self, name: str, values: dict[Any, Any] | list[Any] | set[Any] | deque[Any]
    ) -> None:
        self._containers.append(_Container(values, name, False, _copy_container_values(values)))
        items = values.items() if isinstance(values, dict) else enumerate(values)
        for key, value in items:
            self._add_reference(name, value, values, key)
            if isinstance(value, FunctionType):  # a hook
                self._visit_globals(value)

    def _visit_closure(self, function: FunctionType) -> None:
        names = function.__code__.co_freevars
        for name, cell in zip(names, function.__closure__ or (), strict=True):
            if id(cell) in self._seen or name == "__class__":
                continue
            self._seen[id(cell)] = cell
            values = _copy_container_values(cell)
            self._containers.append(_Container(cell, name, False, values))
            for value in values:
                self._add_reference(name, value, cell, 0)

    def _visit_globals(self, function: FunctionType) -> None:
        """Visit the global containers that a function of the user names."""
        if function.__module__ is None or _get_root_package(function.__module__) in _LIBRARIES:
            return
        for name in _names_in_code(function.__code__):
            value = function.__globals__.get(name)
            if type(value) in _CONTAINERS or isinstance(value, torch.Tensor):
                self._add_reference(name, value, function.__globals__, name)

    def _add_reference(
        self, name: str, value: object, holder: object, key: object, is_buffer: bool = False
    ) -> None:
        if isinstance(value, torch.Tensor | np.ndarray):
            self._keep_tensor(name, value, is_buffer)
            if id(value) in self._tensors:
                self._tensors[id(value)].places.append((holder, key))
        elif not isinstance(value, _ATOMS):
            self._pending.append((name, value))

    def _keep_tensor(
        self, name: str, value: torch.Tensor | np.ndarray[Any, Any], is_buffer: bool
    ) -> None:
        if id(value) in self._tensors or (isinstance(value, nn.Parameter) and not is_buffer):
            return
        original: torch.Tensor | np.ndarray[Any, Any]
        if isinstance(value, np.ndarray):
            if value.dtype.hasobject or not value.flags.writeable:
                return
            original, version = value.copy(), None
        elif (
            type(value) in (torch.Tensor, nn.Parameter)
            and value.layout is torch.strided
            and value.device.type != "meta"
        ):
            original = value.detach().clone()
            version = None if value.is_inference() else value._version
        else:
            return
        self._tensors[id(value)] = _Tensor(value, name, is_buffer, original, version)


@contextmanager
def preserve_module_state(module: nn.Module) -> Iterator[ModuleState]:
    """Restore the state of a module on exit."""
    state = ModuleState(module)
    try:
        yield state
    finally:
        state.restore_values()


def _copy_container_values(holder: Any) -> Any:
    if isinstance(holder, CellType):
        try:
            return [holder.cell_contents]
        except ValueError:  # a variable without a value
            return []
    if isinstance(holder, dict):
        return dict(holder)
    return set(holder) if isinstance(holder, set) else list(holder)


def _hold_same_objects(original: Collection[object], current: Collection[object]) -> bool:
    if isinstance(original, set):
        return bool(original == current)
    sides = (
        [*map(id, side), *map(id, side.values() if isinstance(side, dict) else ())]
        for side in (original, current)
    )
    return len(original) == len(current) and next(sides) == next(sides)


def _is_same_value(original: object, current: object) -> bool:
    """Whether two values are the same object, or equal and without parts that may change."""
    if original is current:
        return True
    if isinstance(original, _ATOMS) or type(original) is not type(current):
        return type(original) is type(current) and bool(original == current)
    if isinstance(original, dict) and isinstance(current, dict):
        return original.keys() == current.keys() and all(
            _is_same_value(original[k], current[k]) for k in original
        )
    if isinstance(original, list | tuple) and isinstance(current, list | tuple):
        return len(original) == len(current) and all(map(_is_same_value, original, current))
    return isinstance(original, set) and original == current


def _is_stateful(value: object) -> bool:
    """Whether an object keeps attributes, and its class is not one of a library without state."""
    if isinstance(value, SimpleNamespace):
        return True
    if isinstance(value, type | ModuleType | Enum) or _is_of_library(type(value)):
        return False
    return isinstance(getattr(value, "__dict__", None), dict)


def _is_of_library(kind: type) -> bool:
    return _get_root_package(kind.__module__) in _LIBRARIES


def _get_root_package(module: str) -> str:
    return module.partition(".")[0]


def _names_in_code(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in_code(constant)


def _join_path(path: str, name: object) -> str:
    return f"{path}.{name}" if path else str(name)
