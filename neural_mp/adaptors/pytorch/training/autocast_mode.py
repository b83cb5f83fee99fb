"""What stands between a program and torch while the four lists count: it casts what ops read."""

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

#: What may be cast. Whoever uses float64 or complex numbers wants them.
_CASTABLE = frozenset({torch.float32, torch.bfloat16, torch.float16})
#: What torch says of an op that has no kernel for a type.
_NO_KERNEL = re.compile(r"not implemented for|unsupported dtype|does(n't| not) support", re.I)
#: What torch says of a number in Python that a type cannot hold, such as -1e9 for float16 in masks.
_TOO_LARGE = "cannot be converted to type"
#: How often an op ran: its type, its list and the dtype of its result → times.
Counts = Counter[tuple[str, str, str]]


@dataclass(eq=False, slots=True)
class Rule:
    """What the lists say of one function.

    Attributes:
        function: the function.
        list: the list its op type is on; None for none.
        without_kernel: types of device that turned out to have no 16-bit kernel for it.
    """

    function: Function
    list: AmpList | None
    without_kernel: set[str] = field(default_factory=set)


class Policy:
    """One precision with its lists.

    Args:
        dtype: the 16-bit type.
        lists: op types by what 16 bits do to them.
        rules: function → what the lists say of it, as far as it was called before.
        counts: is told of every op that runs; None if nobody wants to know.
    """

    def __init__(
        self, dtype: torch.dtype, lists: FourLists, rules: dict[Any, Rule], counts: Counts | None
    ) -> None:
        self.dtype, self.lists, self.rules, self.counts = dtype, lists, rules, counts

    def rule(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Rule:
        """What the lists say of a call."""
        found = self.rules.get(func)
        if found is None:
            found = self.rules[func] = self._made(function_of(func))
        if found.function.variant is None:
            return found
        op_type = found.function.variant(args, kwargs)
        if op_type not in self.rules:
            self.rules[op_type] = self._made(Function(op_type))
        return self.rules[op_type]

    def _made(self, function: Function) -> Rule:
        return Rule(function, self.lists.of(function.op_type))

    def target(self, rule: Rule, floats: list[Any], dangerous: bool) -> torch.dtype | None:
        """What the inputs of an op are cast to; None for what they are.

        Args:
            rule: what the lists say of it.
            floats: its inputs, as far as they decide.
            dangerous: whether one of them is.
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
        """Put down that an op ran."""
        if self.counts is not None:
            found = next(_tensors(result), None)
            dtype = "" if found is None else str(found.dtype).removeprefix("torch.")
            self.counts[rule.function.op_type, str(rule.list or "none"), dtype] += 1


class FourListsMode(TorchFunctionMode):
    """Casts what every function reads, by the policy that counts: the last of `policies`.

    While it is on, it remembers casts of weights, and which tensors are dangerous.
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
        """Run a function as the lists want it."""
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
        if not _gather(function.deciding(args, kwargs), floats) or not floats:
            return func(*args, **kwargs)
        dangerous = bool(self._dangerous) and any(id(t) in self._dangerous for t in floats)
        if passes:
            result = func(*args, **kwargs)
            if dangerous:
                self._mark(result)
            return result
        written = function.written(args, kwargs)
        if function.numbers_differ and len(floats) > 1:
            floats = [t for t in floats if t.dim()]  # a number takes the type of a tensor
        if written is None:
            target = policy.target(rule, floats, dangerous)
        else:
            target = getattr(next(_tensors(written), None), "dtype", None)
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
            everything = [t for t in _tensors((args, *kwargs.values())) if t.dtype in _CASTABLE]
            result = self._cast_and_run(rule, func, args, kwargs, torch.float32, everything, None)
            if lacks_kernel:
                rule.without_kernel.add(everything[0].device.type)
        outcome = result if written is None else written
        if rule.list is AmpList.DENY or (
            dangerous and (rule.list is AmpList.INFER or rule.list is AmpList.CLEAR)
        ):
            self._mark(outcome)
        if policy.counts is not None:
            policy.count(rule, outcome)
        return result

    def __exit__(self, *raised: object) -> None:
        """Forget all."""
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
        """Run a function with some of its inputs cast, but not what it writes into."""
        ids = {id(tensor) for tensor in moved}
        if written is not None:
            ids.difference_update(id(tensor) for tensor in _tensors(written))
        finite = rule.list is not AmpList.ALLOW or rule.function.takes_masks
        read = self._recast(args, dtype, ids, finite)
        if not kwargs:
            return func(*read)
        named = self._recast(kwargs.values(), dtype, ids, finite)
        return func(*read, **dict(zip(kwargs, named, strict=True)))

    def _recast(
        self, values: Iterable[Any], dtype: torch.dtype, ids: set[int], finite: bool
    ) -> list[Any]:
        """Values, and what is in lists of them, with the tensors of these ids cast."""
        made: list[Any] = []
        for value in values:
            if id(value) in ids:
                value = self._cast(value, dtype, finite)
            elif isinstance(value, list | tuple):
                items = self._recast(value, dtype, ids, finite)
                value = items if isinstance(value, list) else tuple(items)
            made.append(value)
        return made

    def _cast(self, tensor: torch.Tensor, dtype: torch.dtype, finite: bool) -> Any:
        """A tensor in another type; of a weight, the cast that was made before."""
        if not tensor.requires_grad and finite and dtype is not torch.float32:
            return _kept_finite(tensor, dtype)
        if not (tensor.requires_grad and tensor.is_leaf) or tensor.is_inference():
            return tensor.to(dtype)
        # A cast that was made without gradients would cut the weight off: it is kept apart.
        key = (id(tensor), dtype, torch.is_grad_enabled())
        kept = self._casts.get(key)
        if kept is not None and kept[1] == tensor._version:
            return kept[2]
        made = tensor.to(dtype)
        # The weight itself is kept, too: while it lives, nothing else has its id.
        self._casts[key] = (tensor, tensor._version, made)
        return made

    def _mark(self, result: object) -> None:
        """Remember that a result is dangerous, while it lives."""
        for tensor in _tensors(result):
            key = id(tensor)
            if key not in self._dangerous and tensor.is_floating_point():
                self._dangerous[key] = weakref.ref(tensor, partial(self._forget, key))

    def _forget(self, key: int, _: weakref.ref[torch.Tensor]) -> None:
        self._dangerous.pop(key, None)


def _gather(values: Iterable[Any], floats: list[Any]) -> bool:
    """Add what may be cast among values, and in lists of them, to `floats`.

    Returns:
        False if there is a tensor of numbers that must be left alone with all beside it.
    """
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.dtype in _CASTABLE:
                floats.append(value)
            elif value.is_floating_point() or value.is_complex():
                return False
        elif isinstance(value, list | tuple) and not _gather(value, floats):
            return False
    return True


def _kept_finite(tensor: torch.Tensor, dtype: torch.dtype) -> Any:
    """A tensor in 16 bits, where what was finite is finite.

    Masks are often made of the lowest float32, which 16 bits round to minus infinity; softmax then
    makes NaN of a row that is masked altogether.
    """
    bounds = torch.finfo(dtype)
    return torch.where(tensor.isinf(), tensor, tensor.clamp(bounds.min, bounds.max)).to(dtype)


def _tensors(value: object) -> Iterator[Any]:
    """A tensor, or those in a list."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def table(counts: Counts) -> str:
    """What was decided: a line for each op type, list and dtype, the most frequent first."""
    rows = [("op type", "list", "dtype of the result", "times")]
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    rows += [(*key, str(times)) for key, times in ordered]
    return "".join("\t".join(row) + "\n" for row in rows)
