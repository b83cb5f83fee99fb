"""Two logs side by side, such as one in FP32 and one in BF16."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from neural_mp.profiling.kernel_records import KernelCall, KernelKey, KernelLog, KernelRow

#: oneDNN writes a product of matrices that was not asked for as a primitive under another name.
_SAME_WORK = {"gemm_api": "matmul"}
#: The sizes of a dense layer, which other frameworks and precisions compute as such a product.
_DENSE = re.compile(r"mb(\d+)ic(\d+)oc(\d+)")


@dataclass(frozen=True)
class RowPair:
    """One name in two logs; None where a log lacks it."""

    name: str
    before: KernelRow | None
    after: KernelRow | None


@dataclass(frozen=True)
class KernelChange:
    """Work that other kernels do in the second log, or the same kernels in another precision.

    Attributes:
        work: the primitive and its direction, such as `convolution backward_data`.
        before: the kernels of the first log with their precision; none where it lacks the work.
        after: those of the second.
        problems: how many sizes this is so for.
        calls_before: how often they ran in the first log.
        calls_after: how often in the second.
        milliseconds_before: how long they took in the first log.
        milliseconds_after: how long in the second.
    """

    work: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    problems: int
    calls_before: int
    calls_after: int
    milliseconds_before: float
    milliseconds_after: float


def side_by_side(
    before: KernelLog, after: KernelLog, key: str = KernelKey.IMPLEMENTATION
) -> list[RowPair]:
    """The rows of two logs by their names, what takes longest in either first.

    Args:
        before: one log.
        after: the other.
        key: as for `KernelLog.by`.

    Raises:
        ConfigurationError: there is no such key.
    """
    first, second = ({row.name: row for row in log.by(key)} for log in (before, after))
    pairs = [RowPair(name, first.get(name), second.get(name)) for name in first | second]
    return sorted(pairs, key=_longest, reverse=True)


def changed_kernels(before: KernelLog, after: KernelLog) -> list[KernelChange]:
    """What is computed by other kernels in the second log; what took longest first.

    Work is the same where primitive, direction and sizes are. Sizes whose kernels changed alike
    are put together.
    """
    first, second = _by_work(before.calls), _by_work(after.calls)
    alike: dict[tuple[str, tuple[str, ...], tuple[str, ...]], list[tuple[str, str]]]
    alike = defaultdict(list)
    for work in first | second:
        names = _kernels(first.get(work, ())), _kernels(second.get(work, ()))
        if names[0] != names[1]:
            alike[(work[0], *names)].append(work)
    changes = [
        _change(words, old, new, [[log.get(work, []) for work in works] for log in (first, second)])
        for (words, old, new), works in alike.items()
    ]
    return sorted(
        changes, key=lambda one: max(one.milliseconds_before, one.milliseconds_after), reverse=True
    )


def _longest(pair: RowPair) -> float:
    return max(row.milliseconds for row in (pair.before, pair.after) if row is not None)


def _by_work(calls: Iterable[KernelCall]) -> dict[tuple[str, str], list[KernelCall]]:
    """Primitive with its direction, and sizes → calls."""
    found: dict[tuple[str, str], list[KernelCall]] = defaultdict(list)
    for call in calls:
        found[_work(call)].append(call)
    return found


def _work(call: KernelCall) -> tuple[str, str]:
    primitive = _SAME_WORK.get(call.primitive, call.primitive)
    # Training and inference run the same kernels forward.
    direction = "forward" if call.prop_kind.startswith("forward") else call.prop_kind
    dense = _DENSE.fullmatch(call.problem)
    if dense and (primitive, direction) == ("inner_product", "forward"):
        rows, inner, columns = dense.groups()
        return "matmul", f"{rows}x{inner}:{inner}x{columns}"
    return primitive if direction in ("", "undef") else f"{primitive} {direction}", call.problem


def _kernels(calls: Iterable[KernelCall]) -> tuple[str, ...]:
    named = (f"{call.implementation or call.primitive} {call.precision}" for call in calls)
    return tuple(sorted(set(named)))


def _change(
    words: str,
    old: tuple[str, ...],
    new: tuple[str, ...],
    logs: Sequence[Sequence[Sequence[KernelCall]]],
) -> KernelChange:
    """The change of some sizes; their calls in the first log, and in the second."""
    counts = [sum(map(len, works)) for works in logs]
    times = [math.fsum(call.milliseconds for calls in works for call in calls) for works in logs]
    return KernelChange(words, old, new, len(logs[0]), *counts, *times)
