"""`autocast` by the four lists, for training or inference of torch models."""

from __future__ import annotations

import logging
import re
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ContextDecorator, ExitStack
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode

from neural_mp.adaptors.pytorch.graph.casts import DTYPES
from neural_mp.adaptors.pytorch.graph.op_types import TYPES
from neural_mp.adaptors.pytorch.training.function_types import (
    Function,
    Handling,
    all_op_types,
    classify_torch_function,
)
from neural_mp.adaptors.pytorch.versions import AUTOCAST_DEVICES, disable_compilation
from neural_mp.amp import (
    AmpList,
    AutoMixedPrecisionOptions,
    FourLists,
    ListEdit,
    build_canonical_lists,
    keep_known_edits,
    resolve_precision,
)
from neural_mp.core.hardware import detect
from neural_mp.core.precision import Precision
from neural_mp.errors import ConfigurationError
from neural_mp.io.files import create_writable_folder
from neural_mp.util.system.environment import restore_users_environment

_Result = TypeVar("_Result")
logger = logging.getLogger(__name__)

#: A device absent in practice: `nn.LSTM` accepts inputs whose dtype differs from its weights only
#: if autocast is on for some device.
_NO_DEVICE = "ipu"

_lock = threading.Lock()
#: File → decisions counted since its first use.
_logs: dict[Path, Counts] = {}


class autocast(ContextDecorator):  # noqa: N801  # the word that torch users know
    """Context manager or decorator in which torch computes in 16 bits by the four lists.

    Behaves the same on every device. Weights and their gradients keep their dtype, usually FP32.
    Use it like `torch.autocast`, around the forward pass and the loss:

    >>> with autocast("bf16"):
    ...     loss = cross_entropy(model(inputs), labels)
    >>> loss.backward()

    Inputs of a torch function in float32, bfloat16 or float16 are cast by the function's list:

    - ALLOW: to 16 bits;
    - DENY: to float32; the result is marked dangerous;
    - INFER: to 16 bits if an input is 16-bit and none is dangerous, else to float32. The mark
      passes through functions of the INFER and the CLEAR list;
    - CLEAR: not at all; mixed dtypes are handled as for INFER. Later readers of the result are
      unknown, so unlike in a converted model, only the inputs decide;
    - no list: to float32.

    Tensors written to by `add_`, `x[0] = y` or `out=` keep their dtype. Functions with a float64 or
    complex input are left alone. A mask of the lowest float32 becomes the lowest 16-bit number, not
    minus infinity. An op without a 16-bit kernel on a device runs in float32, as does an op with a
    number beyond the 16-bit range. A function composed in Python is one op: all of
    `F.multi_head_attention_forward`, which `nn.MultiheadAttention` calls, has the type
    `scaled_dot_product_attention`. Casts of weights are cached until the outermost context ends, so
    run the optimizer step after the context. The innermost context applies; torch's own autocast is
    off inside. A context affects only the thread that entered it.

    While a context is open, code from `torch.compile` runs uncompiled in all threads. Functions of
    `torch.jit` are opaque. A block recomputed by `torch.utils.checkpoint` must be decorated:
    `checkpoint(autocast("bf16")(block), x)`.

    Args:
        precision: `bf16` or `fp16`; default: `amp.data_type`, else BF16. Precisions without kernels
            on this machine are allowed, but slow.
        amp: edits of the lists, by op types of torch's dispatcher, e.g. `softmax`, and the log
            folder. Missing options are read from the environment. `unsafe_force_all` moves all but
            the CLEAR list to the ALLOW list. `log_path` is a folder: its `autocast_bf16.tsv` lists
            op types, the list of each, the dtype of the result and the number of runs.

    Raises:
        UnknownPrecisionError: if there is no such precision.
        UnknownOperatorError: if an edit names an op type that torch does not have.
        ConfigurationError: if the precision is not 16-bit, an edit does not fit the lists, an
            option is invalid, or the folder is not writable.
    """

    @disable_compilation
    def __init__(
        self, precision: str | Precision | None = None, amp: AutoMixedPrecisionOptions | None = None
    ) -> None:
        chosen, settings = resolve_precision(
            "autocast", precision, amp, restore_users_environment()
        )
        if not chosen.is_16_bit:
            raise ConfigurationError(
                f"precision of autocast must be bf16 or fp16, got {str(chosen)!r}"
            )
        _warn_of_emulation(chosen)
        self.precision = chosen
        self._given = (precision, amp)
        self.lists, rules = _edit_lists(chosen, settings.edits, settings.force_all)
        folder = create_writable_folder(settings.log_path)
        self._log = None if folder is None else folder.resolve() / f"autocast_{chosen}.tsv"
        with _lock:
            counts = None if self._log is None else _logs.setdefault(self._log, Counter())
        self._policy = Policy(DTYPES[chosen], self.lists, rules, counts)

    @disable_compilation
    def __enter__(self) -> autocast:
        """Activate the lists."""
        if _thread.mode is None:
            with ExitStack() as undone:
                _torchs_own_off(undone)
                _thread.mode = undone.enter_context(FourListsMode())
                _thread.leave = undone.pop_all()
        _thread.mode.policies.append(self._policy)
        return self

    @disable_compilation
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Restore the enclosing context, and write the log."""
        mode = _thread.mode
        assert mode is not None  # set by __enter__
        mode.policies.pop()
        if not mode.policies:
            _thread.mode = None
            _thread.leave.close()
        if self._log is not None and self._policy.counts:
            try:
                with _lock:
                    self._log.write_text(format_counts(self._policy.counts), encoding="utf-8")
            except OSError as problem:
                logger.warning("cannot write the log of autocast to %s: %s", self._log, problem)

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        """Copy or pickle by the constructor arguments."""
        return type(self), self._given


class _Thread(threading.local):
    """Active mode of a thread."""

    mode: FourListsMode | None = None
    leave: ExitStack


_thread = _Thread()


def is_open() -> bool:
    """Whether an `autocast` is active in this thread."""
    return _thread.mode is not None


def _torchs_own_off(undone: ExitStack) -> None:
    """Disable torch's autocast and compiled code, which would bypass the lists."""
    for device in AUTOCAST_DEVICES:
        if torch.is_autocast_enabled(device):
            torch.set_autocast_enabled(device, False)
            undone.callback(torch.set_autocast_enabled, device, True)
    torch.set_autocast_enabled(_NO_DEVICE, True)
    undone.callback(torch.set_autocast_enabled, _NO_DEVICE, False)
    if "torch._dynamo" in sys.modules:  # Importing the compiler costs seconds.
        undone.enter_context(torch.compiler.set_stance("force_eager"))


@cache
def _warn_of_emulation(precision: Precision) -> None:
    """Log once that a precision without kernels on this machine is slow, with the reason."""
    support = detect().support(precision)
    if not support.native and not torch.accelerator.is_available():
        logger.warning(
            "autocast in %s is slower than float32 on this CPU: %s", precision, support.reason
        )


@cache
def _edit_lists(
    precision: Precision, edits: tuple[ListEdit, ...], force_all: bool
) -> tuple[FourLists, dict[Any, Rule]]:
    """Return the edited lists of a precision, and an empty cache of rules."""
    accepted, warnings = keep_known_edits(edits, "pytorch", all_op_types)
    for warning in warnings:
        logger.warning(warning)
    lists = build_canonical_lists(precision).translated(TYPES).edited(accepted)
    if force_all:
        lists = lists.allowing(all_op_types() - lists.clear)
    return lists, {}


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

    def find_rule(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Rule:
        """Return the rule for a call."""
        result = self.rules.get(func)
        if result is None:
            result = self.rules[func] = self._make_rule(classify_torch_function(func))
        if result.function.variant is None:
            return result
        op_type = result.function.variant(args, kwargs)
        if op_type not in self.rules:
            self.rules[op_type] = self._make_rule(Function(op_type))
        return self.rules[op_type]

    def _make_rule(self, function: Function) -> Rule:
        return Rule(function, self.lists.of(function.op_type))

    def cast_target(self, rule: Rule, floats: list[Any], dangerous: bool) -> torch.dtype | None:
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

    def count_run(self, rule: Rule, result: object) -> None:
        """Count a run of an op."""
        if self.counts is not None:
            tensor = next(_iterate_nested_tensors(result), None)
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
            rule = policy.find_rule(func, args, kwargs)
        function = rule.function
        passes = function.handling is Handling.PASSES
        if function.handling is Handling.NONE or (passes and not self._dangerous):
            return func(*args, **kwargs)
        floats: list[Any] = []
        if not _gather_castable(function.deciding_arguments(args, kwargs), floats) or not floats:
            return func(*args, **kwargs)
        dangerous = bool(self._dangerous) and any(id(t) in self._dangerous for t in floats)
        if passes:
            result = func(*args, **kwargs)
            if dangerous:
                self._mark_dangerous(result)
            return result
        written = function.written_tensors(args, kwargs)
        if function.numbers_differ and len(floats) > 1:
            floats = [t for t in floats if t.dim()]  # a 0-d tensor takes the dtype of the others
        if written is None:
            target = policy.cast_target(rule, floats, dangerous)
        else:
            target = getattr(next(_iterate_nested_tensors(written), None), "dtype", None)
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
                t for t in _iterate_nested_tensors((args, *kwargs.values())) if t.dtype in _CASTABLE
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
            policy.count_run(rule, outcome)
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
            ids.difference_update(id(tensor) for tensor in _iterate_nested_tensors(written))
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
        if not tensor.requires_grad and finite and dtype is not torch.float32:
            # Finite values stay finite: masks often contain the lowest float32, which 16 bits round
            # to minus infinity; softmax then returns NaN for a fully masked row.
            bounds = torch.finfo(dtype)
            narrow = torch.where(tensor.isinf(), tensor, tensor.clamp(bounds.min, bounds.max))
            return narrow.to(dtype)
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
        for tensor in _iterate_nested_tensors(result):
            key = id(tensor)
            if key not in self._dangerous and tensor.is_floating_point():
                self._dangerous[key] = weakref.ref(tensor, partial(self._dangerous.pop, key))


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


def _iterate_nested_tensors(value: object) -> Iterator[Any]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _iterate_nested_tensors(item)


def format_counts(counts: Counts) -> str:
    """Return the counts as a table, one line per op type, list and dtype, most frequent first."""
    rows = [("op type", "list", "dtype of the result", "times")]
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    rows += [(*key, str(times)) for key, times in ordered]
    return "".join("\t".join(row) + "\n" for row in rows)
