"""How a model is called: from a batch of the user's to positional and keyword tensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from neural_mp.errors import DataError, did_you_mean
from neural_mp.util.labels import without_labels
from neural_mp.util.pytree import as_numpy
from neural_mp.util.text import counted


@dataclass(frozen=True)
class CallArgs:
    """The inputs of one call, as tensors: positional and keyword arguments."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def map(self, change: Callable[[Any], Any]) -> CallArgs:
        """The call with every leaf changed."""
        args, kwargs = pytree.tree_map(change, (self.args, dict(self.kwargs)))
        return CallArgs(args, kwargs)

    def copied(self) -> CallArgs:
        """The same values in memory of their own, for code that may write to them."""
        return self.map(
            lambda leaf: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf
        )

    @property
    def batch_size(self) -> int | None:
        """The length of the first axis; None where it is not one for all inputs."""
        sizes = {len(leaf) for leaf in self.leaves() if has_axes(leaf)}
        return sizes.pop() if len(sizes) == 1 else None

    def leaves(self) -> list[Any]:
        """All values, flat, in the order a captured graph takes them."""
        return list(pytree.tree_leaves((self.args, dict(self.kwargs))))

    def __str__(self) -> str:
        return ", ".join(
            f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
            if isinstance(leaf, torch.Tensor)
            else type(leaf).__name__
            for leaf in self.leaves()
        )


@dataclass(frozen=True)
class CallSignature:
    """What is known of how a model is called.

    Attributes:
        parameters: names of the forward parameters.
        names: the parameters that the values of a batch go to, in order, where the user says so.
        dtype: what arrays of floats become: the dtype of the model's weights.
        open: whether the forward takes keywords of any name, and nothing else.
        needed: the parameters without a default.
        owner: the class whose forward it is.
    """

    parameters: tuple[str, ...]
    names: tuple[str, ...] = ()
    dtype: torch.dtype = torch.float32
    open: bool = False
    needed: tuple[str, ...] = ()
    owner: str = "the model"

    def call(self, inputs: object, like: CallArgs | None = None) -> CallArgs:
        """How the model is called with the inputs of one batch.

        A dict whose keys are parameters is passed by keyword, without labels that the model need
        not be given; a tuple or list by position (or to the parameters the user named); anything
        else as the only argument.

        Args:
            inputs: the inputs.
            like: a call that the model was captured with; the same parameters are then passed by
                position or by keyword as they are there, however they were given.

        Raises:
            DataError: the inputs hold something that is no number, are not as many as named, or
                only some of a dict's keys are parameters.
        """
        call = self._as_given(inputs)
        return call if like is None or self.open else self._arranged(call, like)

    def _arranged(self, call: CallArgs, like: CallArgs) -> CallArgs:
        if len(call.args) > len(self.parameters):
            return call
        given = {**dict(zip(self.parameters, call.args, strict=False)), **call.kwargs}
        positional = self.parameters[: len(like.args)]
        if set(given) != {*positional, *like.kwargs}:
            return call
        return CallArgs(tuple(given[n] for n in positional), {n: given[n] for n in like.kwargs})

    def _as_given(self, inputs: object) -> CallArgs:
        if isinstance(inputs, Mapping):
            named = self._named(inputs)
            if named is not None:
                return CallArgs((), pytree.tree_map(self.tensor_of, named))
            inputs = dict(inputs)  # of a class of its own, such as a tokenizer returns
        tensors = pytree.tree_map(self.tensor_of, inputs)
        values = tuple(tensors) if isinstance(tensors, tuple | list) else (tensors,)
        if not self.names:
            return CallArgs(values)
        if len(values) != len(self.names):
            raise DataError(
                f"a batch holds {counted(len(values), 'input')}, but inputs names "
                f"{len(self.names)}: {', '.join(self.names)}"
            )
        return CallArgs((), dict(zip(self.names, values, strict=True)))

    def _named(self, inputs: Mapping[Any, Any]) -> dict[str, Any] | None:
        """What goes to which parameter; None for a dict that is an argument by itself."""
        given = without_labels(inputs, (*self.needed, *self.names))
        if self.names and set(self.names) <= set(given):
            return {name: given[name] for name in self.names}
        unknown = [key for key in given if key not in self.parameters]
        if self.open or not unknown:
            return given
        if len(unknown) < len(given):
            raise DataError(
                f"a batch holds an input {unknown[0]!r}, which {self.owner}.forward does not take"
                f"{did_you_mean(unknown[0], self.parameters)}"
            )
        return None

    def check(self, call: CallArgs, like: CallArgs) -> None:
        """Refuse inputs other than those that the model was captured with.

        Raises:
            DataError: one is missing, or one is there that was not then.
        """
        given, known = (self._names_of(one) for one in (call, like))
        for name in (name for name in given if name not in known):
            raise DataError(
                f"a batch holds the input {name!r}, which the model was captured without; it takes "
                f"{', '.join(known)}, as its calibration data had them, or else the evaluation data"
            )
        for name in (name for name in known if name not in given):
            raise DataError(f"a batch lacks the input {name!r}; the model takes {', '.join(known)}")

    def _names_of(self, call: CallArgs) -> list[str]:
        positions = range(len(self.parameters), len(call.args))
        names = [*self.parameters[: len(call.args)], *(f"input {i}" for i in positions)]
        return [*names, *call.kwargs]

    def tensor_of(self, leaf: object) -> Any:
        """Return the tensor that a model is handed for a leaf of the inputs.

        Raises:
            DataError: it is no number.
        """
        if leaf is None or isinstance(leaf, str | bytes):
            raise DataError(f"a batch's inputs hold {leaf!r}; expected arrays or tensors")
        if not is_array(leaf):
            return leaf
        leaf = np.asarray(leaf)
        if leaf.dtype.kind not in "fiub":
            raise DataError(f"a batch's inputs hold an array of {leaf.dtype}; expected numbers")
        # A copy: the model may be handed read-only or strided memory, and may write to its input.
        tensor = torch.from_numpy(np.array(leaf, order="C"))
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor


def call_signature(module: nn.Module, names: tuple[str, ...] = ()) -> CallSignature:
    """The convention of a module's forward."""
    taken = inspect.signature(module.forward).parameters
    kinds = {parameter.kind for parameter in taken.values()}
    only_keywords = kinds == {inspect.Parameter.VAR_KEYWORD}
    variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    needed = (
        name
        for name, parameter in taken.items()
        if parameter.default is inspect.Parameter.empty and parameter.kind not in variable
    )
    return CallSignature(
        tuple(taken),
        names,
        float_dtype(module),
        only_keywords,
        tuple(needed),
        type(module).__name__,
    )


def float_dtype(module: nn.Module) -> torch.dtype:
    """What the weights of a module are in."""
    floats = (p.dtype for p in module.parameters() if p.is_floating_point())
    return next(floats, torch.float32)


def is_array(leaf: object) -> bool:
    """Whether a value is an array, or another framework's tensor, but none of torch's."""
    return hasattr(leaf, "__array__") and not isinstance(leaf, torch.Tensor)


def has_axes(leaf: object) -> bool:
    """Whether a value is a tensor with at least one axis."""
    return isinstance(leaf, torch.Tensor) and leaf.ndim > 0


def resized(call: CallArgs, batch_size: int) -> CallArgs:
    """The same inputs, repeated or cut to a batch of another size."""

    def resize(leaf: Any) -> Any:
        if not has_axes(leaf) or not len(leaf):
            return leaf
        return torch.cat([leaf] * -(-batch_size // len(leaf)))[:batch_size]

    return call.map(resize)


def to_arrays(result: object) -> Any:
    """Tensors to arrays; numpy has no bfloat16, so that becomes float32."""
    return pytree.tree_map(
        lambda leaf: as_numpy(leaf) if isinstance(leaf, torch.Tensor) else leaf, result
    )
