"""Records of executed kernels, for all log types."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from neural_mp.core.precision import Precision
from neural_mp.util.string_enum import StringEnum
from neural_mp.util.text import counted

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
        milliseconds: duration.
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
        calls: number of calls.
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
        calls: the kernel calls.
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
        return [
            KernelRow(name, len(durations[name]), sums[name], sums[name] / total)
            for name in longest_first
        ]

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks required to interpret the log, as sentences."""
        if not self.calls:
            return (self.empty_because,) if self.empty_because else ()
        notes = []
        if self.malformed:
            notes.append(
                f"{counted(self.malformed, 'unreadable line')} not counted: truncated, or mixed "
                f"with other output"
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
            yield f"this CPU has no BF16 ({self.isa}): {counted(count, 'call')} emulated BF16"
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
