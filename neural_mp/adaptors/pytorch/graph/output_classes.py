"""Classes of inputs and outputs, registered with torch as containers of their tensors.

Dataclasses of the user, and caches among the outputs of `transformers` models.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

#: Package whose objects are taken apart; other objects are values as a whole.
_PACKAGE = "transformers"
_VALUES = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)
#: Classes registered with torch.
_registered: set[type] = set()


@dataclass(frozen=True)
class _Value:
    """Place of a tensor or a symbolic number, which torch passes on."""

    index: int


@dataclass(frozen=True)
class _Holder:
    """An object, dict, list or tuple, with its attributes or items."""

    kind: type
    names: tuple[object, ...]
    items: tuple[object, ...]


def register_dataclasses(values: object) -> None:
    """Register the classes of dataclass instances among values with torch, as containers."""
    for leaf in pytree.tree_leaves(values):
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            if type(leaf) not in pytree.SUPPORTED_NODES:
                pytree.register_dataclass(type(leaf))
            fields = dataclasses.fields(leaf)
            register_dataclasses([getattr(leaf, field.name) for field in fields])


def register_caches(outputs: object) -> None:
    """Register the classes of caches among outputs as containers of their tensors.

    A graph returns tensors only; `DynamicCache` and others are then assembled from them. Classes
    that other code has registered keep their registration.
    """
    for leaf in pytree.tree_leaves(outputs):
        kind = type(leaf)
        if is_cache(leaf) and kind not in pytree.SUPPORTED_NODES:
            _registered.add(kind)
            pytree.register_pytree_node(
                kind,
                _flatten_cache,
                lambda values, context: _assemble_value(context[1], list(values)),
                serialized_type_name=f"{kind.__module__}.{kind.__qualname__}",
                flatten_with_keys_fn=_flattened_with_keys,
            )


def is_cache(value: object) -> bool:
    """Whether a value is an object of `transformers` that holds tensors."""
    values: list[object] = []
    if _can_decompose(value):
        _decompose_value(value, "", [], values)
    return bool(values)


def is_registered(kind: object) -> bool:
    """Whether a class was registered by `register_caches`."""
    return kind in _registered


def _can_decompose(value: object) -> bool:
    return type(value).__module__.partition(".")[0] == _PACKAGE and hasattr(value, "__dict__")


def _flatten_cache(cache: object) -> tuple[list[object], list[object]]:
    """Return the tensors of a cache, and their names with the form of the rest."""
    names: list[str] = []
    values: list[object] = []
    form = _decompose_value(cache, "", names, values)
    return values, [names, form]


def _flattened_with_keys(
    cache: object,
) -> tuple[list[tuple[pytree.KeyEntry, object]], list[object]]:
    names: list[str] = []
    values: list[object] = []
    form = _decompose_value(cache, "", names, values)
    keyed = zip(map(pytree.MappingKey, names), values, strict=True)
    return list(keyed), [names, form]


def _decompose_value(value: object, path: str, names: list[str], values: list[object]) -> object:
    """Return the form of a value, after appending its tensors and their names."""
    if isinstance(value, _VALUES):
        names.append(path)
        values.append(value)
        return _Value(len(values) - 1)
    keys: tuple[object, ...]
    items: tuple[object, ...]
    if isinstance(value, dict):
        keys, items = tuple(value), tuple(value.values())
    elif isinstance(value, list | tuple) and type(value) in (list, tuple):
        keys, items = tuple(range(len(value))), tuple(value)
    elif _can_decompose(value):
        keys, items = tuple(vars(value)), tuple(vars(value).values())
    else:
        return value
    paths = (f"{path}.{key}" if path else str(key) for key in keys)
    parts = (
        _decompose_value(item, deeper, names, values)
        for item, deeper in zip(items, paths, strict=True)
    )
    return _Holder(type(value), keys, tuple(parts))


def _assemble_value(form: object, values: list[object]) -> object:
    if isinstance(form, _Value):
        return values[form.index]
    if not isinstance(form, _Holder):
        return form
    items = [_assemble_value(item, values) for item in form.items]
    if form.kind in (list, tuple):
        return tuple(items) if form.kind is tuple else items
    content: dict[Any, object] = dict(zip(form.names, items, strict=True))
    if issubclass(form.kind, dict):
        return form.kind(content)
    instance: object = form.kind.__new__(form.kind)
    vars(instance).update(content)
    return instance
