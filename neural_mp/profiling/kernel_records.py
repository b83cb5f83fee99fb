"""Records of executed kernels, for all log types, and the comparison of two logs."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from neural_mp.core.precision import Precision
from neural_mp.util.string_enum import StringEnum
from neural_mp.util.text import format_count

#: Placeholder for an unnamed instruction set or type.
UNNAMED = "unnamed"
#: Instruction sets in kernel names: `brg_conv_fwd:avx512_core_bf16`, `jit:sve_256` (oneDNN,
#: src/cpu/x64/cpu_isa_traits.hpp and src/cpu/aarch64/cpu_isa_traits.hpp).
_ISA = re.compile(r"avx10_\w+|avx512_\w+|avx2\w*|avx|sse4\w*|amx\w*|sve_\d+|sve|asimd|acl|neon")
#: Type in oneDNN or ONNX Runtime → precision; other types keep their names.
_PRECISIONS: Mapping[str, str] = {
    **dict.fromkeys(("f32", "float"), Precision.FP32.value),
    **dict.fromkeys(("bf16", "bfloat16"), Precision.BF16.value),
    **dict.fromkeys(("f16", "float16"), Precision.FP16.value),
    **dict.fromkeys(("s8", "u8", "int8", "uint8"), Precision.INT8.value),
}


class KernelKey(StringEnum):
    """Key to group the calls of a log by."""

    IMPLEMENTATION = "implementation"
    PRIMITIVE = "primitive"
    ISA = "isa"
    PRECISION = "precision"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class KernelCall:
    """One kernel call.

    Attributes:
        primitive: operation, e.g. `convolution`; for ONNX Runtime, the op.
        implementation: kernel, e.g. `brg_conv_fwd:avx512_core`; empty if not logged. For ONNX
            Runtime, the op and the provider.
        prop_kind: `forward_training`, `forward_inference`, `backward_data`, `backward_weights` or
            `undef`; empty for ONNX Runtime.
        dtypes: tensor, e.g. `src`, `wei` or `dst` → type name in the runtime.
        problem: sizes in the runtime's notation.
        engine: `cpu`, `gpu`, or ONNX Runtime's provider.
    """

    primitive: str
    implementation: str
    prop_kind: str
    dtypes: Mapping[str, str] = field(hash=False)
    problem: str
    milliseconds: float
    engine: str = "cpu"

    @property
    def isa(self) -> str:
        """Instruction set in the kernel name; empty if none."""
        return _find_instruction_sets(self.implementation)

    @property
    def precision(self) -> str:
        """Input precision: `int8`, `bf16`, `fp16`, `fp32`, or the runtime's type name."""
        first = next(iter(self.dtypes.values()), UNNAMED)
        return _PRECISIONS.get(first, first)

    @property
    def work(self) -> str:
        """Operation with its sizes."""
        kind = "" if self.prop_kind in ("", "undef") else self.prop_kind
        return " ".join(part for part in (self.primitive, kind, self.problem) if part)


@dataclass(frozen=True)
class KernelRow:
    """Group of calls with an equal key.

    Attributes:
        name: the key.
        milliseconds: total time.
        share: fraction of the log's total time, 0…1.
    """

    name: str
    calls: int
    milliseconds: float
    share: float


@dataclass(frozen=True)
class KernelLog:
    """Executed kernels in their order.

    Attributes:
        malformed: number of unreadable kernel lines, e.g. of two interleaved writes; their time is
            missing from the total.
        isa: instruction set detected by the library, in its notation; empty if not logged.
        library: library and version; empty if not logged.
        empty_because: reason for a log without calls.
    """

    calls: tuple[KernelCall, ...] = ()
    malformed: int = 0
    isa: str = ""
    library: str = ""
    empty_because: str = ""

    @property
    def total(self) -> float:
        """Total time of all calls in milliseconds."""
        return math.fsum(call.milliseconds for call in self.calls)

    def by(self, key: str = KernelKey.IMPLEMENTATION) -> list[KernelRow]:
        """Group the calls, longest total time first.

        Args:
            key: `implementation`, `primitive`, `isa`, `precision` or `problem`. An unnamed kernel
                is listed under its primitive; a problem includes its primitive.

        Raises:
            ConfigurationError: the key is unknown.
        """
        named = _NAMES[KernelKey.parse(key, "grouping key of kernels")]
        durations: dict[str, list[float]] = defaultdict(list)
        for call in self.calls:
            durations[named(call)].append(call.milliseconds)
        sums = {name: math.fsum(times) for name, times in durations.items()}
        total = self.total or 1.0
        longest_first = sorted(sums, key=lambda name: -sums[name])
        return [KernelRow(n, len(durations[n]), sums[n], sums[n] / total) for n in longest_first]

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks required to interpret the log, as sentences."""
        if not self.calls:
            return (self.empty_because,) if self.empty_because else ()
        notes = []
        if self.malformed:
            notes.append(
                f"{format_count(self.malformed, 'unreadable line')} not counted: truncated, or "
                "mixed with other output"
            )
        if not any(call.implementation for call in self.calls):
            notes.append(
                f"only {self.calls[0].primitive}, which is logged without kernel names: the "
                f"framework used oneDNN for matrix products only, as TensorFlow does without "
                f"TF_ENABLE_ONEDNN_OPTS=1"
            )
        notes.extend(self._notes_on_bf16())
        return tuple(notes)

    def _notes_on_bf16(self) -> Iterator[str]:
        """Yield a note on BF16 for x86 CPUs without BF16; other ISA names do not reveal support."""
        if not re.search("AVX|SSE", self.isa) or "bfloat16" in self.isa:
            return
        count = sum(call.precision == Precision.BF16.value for call in self.calls)
        if count:
            yield f"this CPU has no BF16 ({self.isa}): {format_count(count, 'call')} emulated BF16"
        else:
            yield f"this CPU has no BF16 ({self.isa}): no kernel ran in BF16"


@lru_cache(maxsize=4096)
def _find_instruction_sets(implementation: str) -> str:
    return "+".join(dict.fromkeys(_ISA.findall(implementation)))


_NAMES = {
    KernelKey.IMPLEMENTATION: lambda call: call.implementation or call.primitive,
    KernelKey.PRIMITIVE: lambda call: call.primitive,
    KernelKey.ISA: lambda call: call.isa or UNNAMED,
    KernelKey.PRECISION: lambda call: call.precision,
    KernelKey.PROBLEM: lambda call: call.work,
}


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
        before, after: kernels and precisions in each log; empty if the log lacks the work.
        problems: number of problem sizes with this change.
        calls_before, calls_after: calls in each log.
        milliseconds_before, milliseconds_after: total time in each log.
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
    return sorted(
        pairs,
        key=lambda pair: max(r.milliseconds for r in (pair.before, pair.after) if r is not None),
        reverse=True,
    )


def changed_kernels(before: KernelLog, after: KernelLog) -> list[KernelChange]:
    """Return the work computed by other kernels in the second log, longest time first.

    Work is identified by primitive, direction and sizes. Sizes with an equal change are merged.
    """
    first, second = _group_by_work(before.calls), _group_by_work(after.calls)
    alike = defaultdict[tuple[str, tuple[str, ...], tuple[str, ...]], list[tuple[str, str]]](list)
    for work in first | second:
        old, new = _list_kernel_names(first.get(work, ())), _list_kernel_names(second.get(work, ()))
        if old != new:
            alike[work[0], old, new].append(work)
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


def _group_by_work(calls: Iterable[KernelCall]) -> dict[tuple[str, str], list[KernelCall]]:
    groups: dict[tuple[str, str], list[KernelCall]] = defaultdict(list)
    for call in calls:
        groups[_make_work_key(call)].append(call)
    return groups


def _make_work_key(call: KernelCall) -> tuple[str, str]:
    primitive = _SAME_WORK.get(call.primitive, call.primitive)
    # Training and inference share their forward kernels.
    direction = "forward" if call.prop_kind.startswith("forward") else call.prop_kind
    dense = _DENSE.fullmatch(call.problem)
    if dense and (primitive, direction) == ("inner_product", "forward"):
        rows, inner, columns = dense.groups()
        return "matmul", f"{rows}x{inner}:{inner}x{columns}"
    return primitive if direction in ("", "undef") else f"{primitive} {direction}", call.problem


def _list_kernel_names(calls: Iterable[KernelCall]) -> tuple[str, ...]:
    named = (f"{call.implementation or call.primitive} {call.precision}" for call in calls)
    return tuple(sorted(set(named)))
