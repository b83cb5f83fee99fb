"""Comparison of two kernel logs, e.g. in FP32 and BF16."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from neural_mp.profiling.kernel_records import KernelCall, KernelKey, KernelLog, KernelRow

#: Primitive name that oneDNN logs for GEMM calls outside its primitive API.
_SAME_WORK = {"gemm_api": "matmul"}
#: Sizes of a dense layer, which other frameworks and precisions compute as a matrix product.
_DENSE = re.compile(r"mb(\d+)ic(\d+)oc(\d+)")


@dataclass(frozen=True)
class RowPair:
    """Rows of one name in two logs; None if a log lacks the name."""

    name: str
    before: KernelRow | None
    after: KernelRow | None


@dataclass(frozen=True)
class KernelChange:
    """Work whose kernels or precisions differ between two logs.

    Attributes:
        work: the primitive and its direction, e.g. `convolution backward_data`.
        before: kernels and precisions in the first log; empty if the log lacks the work.
        after: likewise in the second log.
        problems: number of problem sizes with this change.
        calls_before: calls in the first log.
        calls_after: calls in the second log.
        milliseconds_before: total time in the first log.
        milliseconds_after: total time in the second log.
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
    """Return the rows of two logs, joined by name, longest time first; `key` as for `KernelLog.by`.

    Raises:
        ConfigurationError: the key is unknown.
    """
    first, second = ({row.name: row for row in log.by(key)} for log in (before, after))
    pairs = [RowPair(name, first.get(name), second.get(name)) for name in first | second]
    return sorted(pairs, key=_longest_time, reverse=True)


def changed_kernels(before: KernelLog, after: KernelLog) -> list[KernelChange]:
    """Return the work computed by other kernels in the second log, longest time first.

    Work is identified by primitive, direction and sizes. Sizes with an equal change are merged.
    """
    first, second = _group_by_work(before.calls), _group_by_work(after.calls)
    alike: dict[tuple[str, tuple[str, ...], tuple[str, ...]], list[tuple[str, str]]]
    alike = defaultdict(list)
    for work in first | second:
        names = _kernel_names(first.get(work, ())), _kernel_names(second.get(work, ()))
        if names[0] != names[1]:
            alike[(work[0], *names)].append(work)
    changes: list[KernelChange] = []
    for (primitive, old, new), works in alike.items():
        logs = [[call for work in works for call in log.get(work, [])] for log in (first, second)]
        times = [math.fsum(call.milliseconds for call in calls) for calls in logs]
        changes.append(KernelChange(primitive, old, new, len(works), *map(len, logs), *times))
    return sorted(
        changes,
        key=lambda change: max(change.milliseconds_before, change.milliseconds_after),
        reverse=True,
    )


def _longest_time(pair: RowPair) -> float:
    return max(row.milliseconds for row in (pair.before, pair.after) if row is not None)


def _group_by_work(calls: Iterable[KernelCall]) -> dict[tuple[str, str], list[KernelCall]]:
    groups: dict[tuple[str, str], list[KernelCall]] = defaultdict(list)
    for call in calls:
        groups[_work_key(call)].append(call)
    return groups


def _work_key(call: KernelCall) -> tuple[str, str]:
    primitive = _SAME_WORK.get(call.primitive, call.primitive)
    # Training and inference share their forward kernels.
    direction = "forward" if call.prop_kind.startswith("forward") else call.prop_kind
    dense = _DENSE.fullmatch(call.problem)
    if dense and (primitive, direction) == ("inner_product", "forward"):
        rows, inner, columns = dense.groups()
        return "matmul", f"{rows}x{inner}:{inner}x{columns}"
    return primitive if direction in ("", "undef") else f"{primitive} {direction}", call.problem


def _kernel_names(calls: Iterable[KernelCall]) -> tuple[str, ...]:
    named = (f"{call.implementation or call.primitive} {call.precision}" for call in calls)
    return tuple(sorted(set(named)))
