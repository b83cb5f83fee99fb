"""Inputs of the calls that the user's own code makes to a module."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from neural_mp.adaptors.pytorch.versions import with_code

_VARIABLE = inspect.Parameter.VAR_POSITIONAL


@contextmanager
def recording(model: nn.Module, record: Callable[[Any], None]) -> Iterator[None]:
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


def _copy_tensors(value: Any) -> Any:
    return pytree.tree_map(
        lambda leaf: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf, value
    )
