"""`TorchFunctionMode` that casts the inputs of torch functions by the four lists."""

from __future__ import annotations

import re
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from neural_mp.adaptors.pytorch.training.function_types import Function, Handling, function_of
from neural_mp.amp import AmpList, FourLists

#: Dtypes that may be cast; float64 and complex are deliberate choices of the user.
_CASTABLE = frozenset({torch.float32, torch.bfloat16, torch.float16})
#: Torch's messages for an op without a kernel for a dtype.
_NO_KERNEL = re.compile(r"not implemented for|unsupported dtype|does(n't| not) support", re.I)
#: Torch's message for a Python number beyond a dtype's range, e.g. -1e9 in float16 masks.
_TOO_LARGE = "cannot be converted to type"
#: (op type, list, dtype of the result) → number of runs.
Counts = Counter[tuple[str, str, str]]


@dataclass(eq=False, slots=True)
class Rule:
    """Rule of the lists for one function.

    Attributes:
        function: the function.
        list: list of its op type; None for none.
        without_kernel: device types found to have no 16-bit kernel for the function.
    """

    function: Function
    list: AmpList | None
    without_kernel: set[str] = field(default_factory=set)


class Policy:
    """One precision with its lists, a cache of rules, and counts of the ops that run, if any."""

    def __init__(
        self, dtype: torch.dtype, lists: FourLists, rules: dict[Any, Rule], counts: Counts | None
    ) -> None:
        self.dtype, self.lists, self.rules, self.counts = dtype, lists, rules, counts

    def rule(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Rule:
        """Return the rule for a call."""
        result = self.rules.get(func)
        if result is None:
            result = self.rules[func] = self._make_rule(function_of(func))
        if result.function.variant is None:
            return result
        op_type = result.function.variant(args, kwargs)
        if op_type not in self.rules:
            self.rules[op_type] = self._make_rule(Function(op_type))
        return self.rules[op_type]

    def _make_rule(self, function: Function) -> Rule:
        return Rule(function, self.lists.of(function.op_type))

    def target(self, rule: Rule, floats: list[Any], dangerous: bool) -> torch.dtype | None:
        """Return the dtype to cast an op's inputs to, by the inputs that decide; None for no cast.

        `dangerous` is True if one of the inputs is dangerous.
        """
        if not floats:
            return None
        if rule.list is None or rule.list is AmpList.DENY:
            return torch.float32
        if rule.without_kernel and floats[0].device.type in rule.without_kernel:
            return torch.float32
        if rule.list is not AmpList.ALLOW:
            dtypes = {tensor.dtype for tensor in floats}
            if rule.list is AmpList.CLEAR and len(dtypes) == 1:
                return None
            if dangerous or dtypes == {torch.float32}:
                return torch.float32
        return self.dtype

    def count(self, rule: Rule, result: object) -> None:
        """Count a run of an op."""
        if self.counts is not None:
            tensor = next(_nested_tensors(result), None)
            dtype = "" if tensor is None else str(tensor.dtype).removeprefix("torch.")
            self.counts[rule.function.op_type, str(rule.list or "none"), dtype] += 1


class FourListsMode(TorchFunctionMode):
    """Mode that casts the inputs of every function by the last of `policies`.

    While active, caches casts of weights and tracks dangerous tensors.
    """

    def __init__(self) -> None:
        super().__init__()
        self.policies: list[Policy] = []
        self._casts: dict[tuple[int, torch.dtype, bool], tuple[Any, int, Any]] = {}
        self._dangerous: dict[int, Any] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run a function with inputs cast by its rule."""
        kwargs = kwargs or {}
        policy = self.policies[-1]
        rule = policy.rules.get(func)
        if rule is None or rule.function.variant is not None:
            rule = policy.rule(func, args, kwargs)
        function = rule.function
        passes = function.handling is Handling.PASSES
        if function.handling is Handling.NONE or (passes and not self._dangerous):
            return func(*args, **kwargs)
        floats: list[Any] = []
        if not _gather_castable(function.deciding(args, kwargs), floats) or not floats:
            return func(*args, **kwargs)
        dangerous = bool(self._dangerous) and any(id(t) in self._dangerous for t in floats)
        if passes:
            result = func(*args, **kwargs)
            if dangerous:
                self._mark_dangerous(result)
            return result
        written = function.written(args, kwargs)
        if function.numbers_differ and len(floats) > 1:
            floats = [t for t in floats if t.dim()]  # a 0-d tensor takes the dtype of the others
        if written is None:
            target = policy.target(rule, floats, dangerous)
        else:
            target = getattr(next(_nested_tensors(written), None), "dtype", None)
        moved = [t for t in floats if t.dtype is not target] if target in _CASTABLE else []
        try:
            if moved:
                result = self._cast_and_run(rule, func, args, kwargs, target, moved, written)
            else:
                result = func(*args, **kwargs)
        except RuntimeError as error:
            lacks_kernel = _NO_KERNEL.search(str(error)) is not None
            if written is not None or not (lacks_kernel or _TOO_LARGE in str(error)):
                raise
            everything = [
                t for t in _nested_tensors((args, *kwargs.values())) if t.dtype in _CASTABLE
            ]
            result = self._cast_and_run(rule, func, args, kwargs, torch.float32, everything, None)
            if lacks_kernel:
                rule.without_kernel.add(everything[0].device.type)
        outcome = result if written is None else written
        if rule.list is AmpList.DENY or (
            dangerous and (rule.list is AmpList.INFER or rule.list is AmpList.CLEAR)
        ):
            self._mark_dangerous(outcome)
        if policy.counts is not None:
            policy.count(rule, outcome)
        return result

    def __exit__(self, *raised: object) -> None:
        """Leave the mode, and clear its caches."""
        super().__exit__(*raised)
        self._casts.clear()
        self._dangerous.clear()

    def _cast_and_run(
        self,
        rule: Rule,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        dtype: torch.dtype,
        moved: list[Any],
        written: object,
    ) -> Any:
        """Run a function with some inputs cast, except tensors that it writes to."""
        ids = {id(tensor) for tensor in moved}
        if written is not None:
            ids.difference_update(id(tensor) for tensor in _nested_tensors(written))
        finite = rule.list is not AmpList.ALLOW or rule.function.takes_masks
        inputs = self._cast_tensors(args, dtype, ids, finite)
        if not kwargs:
            return func(*inputs)
        named = self._cast_tensors(kwargs.values(), dtype, ids, finite)
        return func(*inputs, **dict(zip(kwargs, named, strict=True)))

    def _cast_tensors(
        self, values: Iterable[Any], dtype: torch.dtype, ids: set[int], finite: bool
    ) -> list[Any]:
        result: list[Any] = []
        for value in values:
            if id(value) in ids:
                value = self._cast(value, dtype, finite)
            elif isinstance(value, list | tuple):
                items = self._cast_tensors(value, dtype, ids, finite)
                value = items if isinstance(value, list) else tuple(items)
            result.append(value)
        return result

    def _cast(self, tensor: torch.Tensor, dtype: torch.dtype, finite: bool) -> Any:
        """Cast a tensor; reuse cached casts of weights."""
        if not tensor.requires_grad and finite and dtype is not torch.float32:
            return _kept_finite(tensor, dtype)
        if not (tensor.requires_grad and tensor.is_leaf) or tensor.is_inference():
            return tensor.to(dtype)
        # Separate casts without gradients: they would detach the weight.
        key = (id(tensor), dtype, torch.is_grad_enabled())
        cached = self._casts.get(key)
        if cached is not None and cached[1] == tensor._version:
            return cached[2]
        cast = tensor.to(dtype)
        # Keep the weight alive too, so that its id is not reused.
        self._casts[key] = (tensor, tensor._version, cast)
        return cast

    def _mark_dangerous(self, result: object) -> None:
        """Mark a result as dangerous during its lifetime."""
        for tensor in _nested_tensors(result):
            key = id(tensor)
            if key not in self._dangerous and tensor.is_floating_point():
                self._dangerous[key] = weakref.ref(tensor, partial(self._forget_tensor, key))

    def _forget_tensor(self, key: int, _: weakref.ref[torch.Tensor]) -> None:
        self._dangerous.pop(key, None)


def _gather_castable(values: Iterable[Any], floats: list[Any]) -> bool:
    """Append castable tensors in nested values to `floats`; return False if one is not castable."""
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.dtype in _CASTABLE:
                floats.append(value)
            elif value.is_floating_point() or value.is_complex():
                return False
        elif isinstance(value, list | tuple) and not _gather_castable(value, floats):
            return False
    return True


def _kept_finite(tensor: torch.Tensor, dtype: torch.dtype) -> Any:
    """Cast a tensor to 16 bits, keeping finite values finite.

    Masks often contain the lowest float32, which 16 bits round to minus infinity; softmax then
    returns NaN for a fully masked row.
    """
    bounds = torch.finfo(dtype)
    return torch.where(tensor.isinf(), tensor, tensor.clamp(bounds.min, bounds.max)).to(dtype)


def _nested_tensors(value: object) -> Iterator[Any]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _nested_tensors(item)


def table(counts: Counts) -> str:
    """Return the counts as a table, one line per op type, list and dtype, most frequent first."""
    rows = [("op type", "list", "dtype of the result", "times")]
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    rows += [(*key, str(times)) for key, times in ordered]
    return "".join("\t".join(row) + "\n" for row in rows)
