"""Call signatures: map a batch of user data to positional and keyword tensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from neural_mp.adaptors.pytorch.graph.output_classes import (
    holds_foreign_containers,
    make_values_plain,
    register_dataclasses,
)
from neural_mp.adaptors.pytorch.versions import with_code
from neural_mp.errors import DataError, did_you_mean
from neural_mp.util.labels import without_labels
from neural_mp.util.pytree import convert_to_numpy, to_native_order
from neural_mp.util.text import format_count

#: Kinds of parameters that take further arguments.
_FURTHER = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)


@dataclass(frozen=True)
class CallArgs:
    """Positional and keyword arguments of one call, as tensors."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def map_leaves(self, change: Callable[[Any], Any]) -> CallArgs:
        """Apply `change` to every leaf."""
        args, kwargs = pytree.tree_map(change, (self.args, dict(self.kwargs)))
        return CallArgs(args, kwargs)

    @property
    def is_nested(self) -> bool:
        """Whether an argument is not a tensor."""
        return not all(isinstance(v, torch.Tensor) for v in (*self.args, *self.kwargs.values()))

    @cached_property
    def has_containers(self) -> bool:
        """Whether an argument is a container, e.g. a dict or a dataclass of tensors."""
        return not all(map(pytree.tree_is_leaf, (*self.args, *self.kwargs.values())))

    @cached_property
    def is_plain(self) -> bool:
        """Whether all containers are dicts, lists and tuples, as in files."""
        return not holds_foreign_containers((self.args, dict(self.kwargs)))

    def with_plain_containers(self) -> CallArgs:
        """Replace dataclasses, named tuples and caches by dicts, as in files."""
        return CallArgs(*make_values_plain((self.args, dict(self.kwargs))))

    def clone_tensors(self) -> CallArgs:
        """Clone every tensor, for code that may write to its inputs."""
        return self.map_leaves(copy_tensor)

    @property
    def batch_size(self) -> int | None:
        """Length of the first axis; None if the inputs differ in length."""
        sizes = {len(leaf) for leaf in self.flatten_leaves() if has_axes(leaf)}
        return sizes.pop() if len(sizes) == 1 else None

    def flatten_leaves(self) -> list[Any]:
        """Return all values, flat, in the argument order of a captured graph."""
        return list(pytree.tree_leaves((self.args, dict(self.kwargs))))

    def __str__(self) -> str:
        return ", ".join(
            f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
            if isinstance(leaf, torch.Tensor)
            else type(leaf).__name__
            for leaf in self.flatten_leaves()
        )


@dataclass(frozen=True)
class CallSignature:
    """Parameters and input dtype of a model's forward.

    Attributes:
        parameters: names of the forward parameters, without `*args` and `**kwargs`.
        names: parameters that the values of a batch go to, in order, if the user names them.
        dtype: dtype of the model's weights, which float arrays are converted to.
        open: whether the forward takes further keywords (`**kwargs`).
        needed: the parameters without a default.
        owner: name of the class that defines the forward.
        variadic: whether the forward takes further positional arguments (`*args`).
    """

    parameters: tuple[str, ...]
    names: tuple[str, ...] = ()
    dtype: torch.dtype = torch.float32
    open: bool = False
    needed: tuple[str, ...] = ()
    owner: str = "the model"
    variadic: bool = False

    def call(self, inputs: object, like: CallArgs | None = None) -> CallArgs:
        """Return the call for the inputs of one batch.

        A dict whose keys are parameters is passed by keyword, without labels that the model does
        not require; a tuple or list by position (or to the parameters the user named), unless it
        is itself the only argument that the model takes; any other value as the only argument. A
        call `like` that of the capture decides which parameters are passed by position and which by
        keyword.

        Raises:
            DataError: if a value is not numeric or all are None, the number of inputs differs from
                `names`, or only some of a dict's keys are parameters.
        """
        if all(leaf is None for leaf in pytree.tree_leaves(inputs)):
            raise DataError(f"inputs must hold arrays or tensors, got {inputs!r}")
        call = self._call_from_inputs(inputs, like)
        if like is None:
            return call
        if call.is_nested and like.is_plain:
            call = call.with_plain_containers()
        return self._arrange_arguments(call, like)

    def _arrange_arguments(self, call: CallArgs, like: CallArgs) -> CallArgs:
        if len(call.args) > len(self.parameters):
            return call
        arguments = {**dict(zip(self.parameters, call.args, strict=False)), **call.kwargs}
        positional = self.parameters[: len(like.args)]
        if set(arguments) != {*positional, *like.kwargs}:
            return call
        return CallArgs(
            tuple(arguments[n] for n in positional), {n: arguments[n] for n in like.kwargs}
        )

    def _call_from_inputs(self, inputs: object, like: CallArgs | None) -> CallArgs:
        register_dataclasses(inputs)
        if isinstance(inputs, Mapping):
            named = self._map_named_arguments(inputs, like)
            if named is not None:
                return CallArgs((), pytree.tree_map(self.convert_to_tensor, named))
            inputs = dict(inputs)  # convert a Mapping subclass, e.g. a tokenizer's result
        tensors = pytree.tree_map(self.convert_to_tensor, inputs)
        by_position = isinstance(tensors, tuple | list) and not self._takes_whole_container(
            tensors, like
        )
        values = tuple(tensors) if by_position else (tensors,)
        if not self.names:
            return CallArgs(values)
        if len(values) != len(self.names):
            raise DataError(
                f"a batch must hold {format_count(len(self.names), 'input')} "
                f"({', '.join(self.names)}), as named by inputs, got {len(values)}"
            )
        return CallArgs((), dict(zip(self.names, values, strict=True)))

    def _takes_whole_container(self, values: Sequence[Any], like: CallArgs | None) -> bool:
        """Whether a tuple or list is the only argument, not several arguments.

        So it is if the model was captured with a tuple or list as the only argument, unless a
        further one encloses that argument; before, if the model takes one argument only.
        """
        if like is None:
            only = len(self.names or self.parameters) == 1
            return only and not self.variadic and len(values) > 1
        arguments = (*like.args, *like.kwargs.values())
        if not arguments or not isinstance(arguments[0], tuple | list):
            return False
        encloses = bool(values) and isinstance(values[0], tuple | list)
        return not encloses or (len(arguments) == 1 and len(values) != 1)

    def _map_named_arguments(
        self, inputs: Mapping[Any, Any], like: CallArgs | None
    ) -> dict[str, Any] | None:
        """Return parameter → value; None if the dict is itself an argument."""
        arguments = without_labels(inputs, (*self.needed, *self.names))
        if self.names and set(self.names) <= set(arguments):
            return {name: arguments[name] for name in self.names}
        unknown = [key for key in arguments if key not in self.parameters]
        missing = [name for name in self.needed if name not in arguments]
        if not unknown or (self.open and not missing):
            return arguments
        if len(unknown) == len(arguments) and (like is None or like.has_containers):
            return None
        if self.open:
            raise DataError(
                f"a batch must hold {missing[0]!r}, which {self.owner}.forward requires, got the "
                f"keys {', '.join(map(str, arguments))}"
            )
        raise DataError(
            f"{self.owner}.forward has no parameter {unknown[0]!r}, which a batch holds"
            f"{did_you_mean(unknown[0], self.parameters)}"
        )

    def check_call(self, call: CallArgs, like: CallArgs) -> None:
        """Check a call's inputs against those that the model was captured with.

        Raises:
            DataError: if an input is missing or unexpected.
        """
        provided, names = (self._list_argument_names(item) for item in (call, like))
        for name in (name for name in provided if name not in names):
            raise DataError(
                f"a batch must hold the inputs that the model was captured with "
                f"({', '.join(names)}), got {name!r}; include {name!r} in the calibration data, or "
                f"else in the evaluation data"
            )
        for name in (name for name in names if name not in provided):
            raise DataError(
                f"a batch must hold the inputs {', '.join(names)}, but {name!r} is missing"
            )

    def _list_argument_names(self, call: CallArgs) -> list[str]:
        positions = range(len(self.parameters), len(call.args))
        names = [*self.parameters[: len(call.args)], *(f"input {i}" for i in positions)]
        return [*names, *call.kwargs]

    def convert_to_tensor(self, leaf: object) -> Any:
        """Convert a leaf of the inputs to the tensor passed to the model; float64 is narrowed.

        None stays None, as for an optional input.

        Raises:
            DataError: if the leaf is not numeric.
        """
        if isinstance(leaf, str | bytes):
            raise DataError(f"inputs must be arrays or tensors, got {leaf!r}")
        if isinstance(leaf, torch.Tensor):
            return leaf.to(self.dtype) if leaf.dtype is torch.float64 else leaf
        if not is_array(leaf):
            return leaf
        leaf = to_native_order(np.asarray(leaf))
        if leaf.dtype.kind not in "fiub":
            raise DataError(f"inputs must be numeric, got an array of {leaf.dtype}")
        # Copy: the batch may be read-only or strided, and the model may write to its input.
        tensor = torch.from_numpy(np.array(leaf, order="C"))
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor


def call_signature(module: nn.Module, names: tuple[str, ...] = ()) -> CallSignature:
    """Return the call signature of a module's forward."""
    parameters = inspect.signature(with_code(module).forward).parameters
    kinds = {parameter.kind for parameter in parameters.values()}
    named = {
        name: parameter for name, parameter in parameters.items() if parameter.kind not in _FURTHER
    }
    needed = (name for name, param in named.items() if param.default is inspect.Parameter.empty)
    return CallSignature(
        tuple(named),
        names,
        find_float_dtype(module),
        inspect.Parameter.VAR_KEYWORD in kinds,
        tuple(needed),
        type(module).__name__,
        inspect.Parameter.VAR_POSITIONAL in kinds,
    )


def find_float_dtype(module: nn.Module) -> torch.dtype:
    """Return the dtype of a module's weights; float32 if none is floating point."""
    floats = (p.dtype for p in module.parameters() if p.is_floating_point())
    return next(floats, torch.float32)


def is_array(leaf: object) -> bool:
    """Whether a value is an array or another framework's tensor, not a torch tensor."""
    return hasattr(leaf, "__array__") and not isinstance(leaf, torch.Tensor)


def view_as_tensor(array: object) -> torch.Tensor:
    """Return an array as a tensor; of the same memory, unless its byte order is foreign."""
    return torch.as_tensor(to_native_order(np.asarray(array)))


def copy_tensor(leaf: Any) -> Any:
    """Return a detached copy of a tensor; any other value as it is."""
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf


def has_axes(leaf: object) -> TypeGuard[torch.Tensor]:
    """Whether a value is a tensor with at least one axis."""
    return isinstance(leaf, torch.Tensor) and leaf.ndim > 0


def resize_batch(call: CallArgs, batch_size: int) -> CallArgs:
    """Repeat or cut the inputs to another batch size."""

    def resize_leaf(leaf: object) -> Any:
        if not has_axes(leaf) or not len(leaf):
            return leaf
        return torch.cat([leaf] * -(-batch_size // len(leaf)))[:batch_size]

    return call.map_leaves(resize_leaf)


def to_arrays(result: object) -> Any:
    """Convert tensors to arrays; bfloat16 becomes float32, as numpy has no bfloat16."""
    return pytree.tree_map(
        lambda leaf: convert_to_numpy(leaf) if isinstance(leaf, torch.Tensor) else leaf, result
    )
