"""What a log says of one kernel that ran, and of all of them."""

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

#: What stands for an instruction set, or a type, that a log does not name.
UNNAMED = "unnamed"
#: Instruction sets within names of kernels: `brg_conv_fwd:avx512_core_bf16`, `jit:sve_256`
#: (oneDNN, src/cpu/x64/cpu_isa_traits.hpp and src/cpu/aarch64/cpu_isa_traits.hpp).
_ISA = re.compile(r"avx10_\w+|avx512_\w+|avx2\w*|avx|sse4\w*|amx\w*|sve_\d+|sve|asimd|acl|neon")
#: Types of oneDNN and of ONNX Runtime → what we call them; others keep their names.
_PRECISIONS: Mapping[str, str] = {
    **dict.fromkeys(("f32", "float"), Precision.FP32.value),
    **dict.fromkeys(("bf16", "bfloat16"), Precision.BF16.value),
    **dict.fromkeys(("f16", "float16"), Precision.FP16.value),
    **dict.fromkeys(("s8", "u8", "int8", "uint8"), Precision.INT8.value),
}


class KernelKey(StringEnum):
    """What the calls of a log can be put together by."""

    IMPLEMENTATION = "implementation"
    PRIMITIVE = "primitive"
    ISA = "isa"
    PRECISION = "precision"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class KernelCall:
    """One run of a kernel.

    Attributes:
        primitive: what it computes, such as `convolution`; of ONNX Runtime, the op.
        implementation: the kernel, such as `brg_conv_fwd:avx512_core`; empty where the log names
            none. Of ONNX Runtime, the op and the provider.
        prop_kind: `forward_training`, `forward_inference`, `backward_data`, `backward_weights` or
            `undef`; empty of ONNX Runtime.
        dtypes: tensor, such as `src`, `wei` or `dst` → its type in the runtime's own words.
        problem: the sizes, in the runtime's own words.
        milliseconds: how long it took.
        engine: what it ran on: `cpu`, `gpu`, or ONNX Runtime's provider.
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
        """The instructions that the kernel was made for; empty where its name does not say."""
        return _isa(self.implementation)

    @property
    def precision(self) -> str:
        """What it reads: `int8`, `bf16`, `fp16`, `fp32`, or the runtime's own word for a type."""
        first = next(iter(self.dtypes.values()), UNNAMED)
        return _PRECISIONS.get(first, first)

    @property
    def work(self) -> str:
        """What it computes, with the sizes."""
        kind = "" if self.prop_kind in ("", "undef") else self.prop_kind
        return " ".join(word for word in (self.primitive, kind, self.problem) if word)


@dataclass(frozen=True)
class KernelRow:
    """The calls that have one thing in common.

    Attributes:
        name: what they have in common.
        calls: how many there are.
        milliseconds: how long they took together.
        share: which share that is of the whole log, 0…1.
    """

    name: str
    calls: int
    milliseconds: float
    share: float


@dataclass(frozen=True)
class KernelLog:
    """The kernels that ran, in their order.

    Attributes:
        calls: the runs.
        malformed: lines that say that a kernel ran, and cannot be read, such as two that were
            written into each other; what they took is missing from the total.
        isa: the instructions that the library found, in its own words; empty where the log does
            not say.
        library: the library and its version; empty where the log does not say.
        empty_because: where there are no calls, why.
    """

    calls: tuple[KernelCall, ...] = ()
    malformed: int = 0
    isa: str = ""
    library: str = ""
    empty_because: str = ""

    @property
    def total(self) -> float:
        """Milliseconds of all calls."""
        return math.fsum(call.milliseconds for call in self.calls)

    def by(self, key: str = KernelKey.IMPLEMENTATION) -> list[KernelRow]:
        """The calls put together, what took longest first.

        Args:
            key: `implementation`, `primitive`, `isa`, `precision` or `problem`. A kernel that the
                log does not name stands under its primitive; a problem stands with its primitive.

        Raises:
            ConfigurationError: there is no such key.
        """
        named = _NAMES[KernelKey.parse(key, "what kernels are put together by")]
        taken: dict[str, list[float]] = defaultdict(list)
        for call in self.calls:
            taken[named(call)].append(call.milliseconds)
        sums = {name: math.fsum(times) for name, times in taken.items()}
        total = self.total or 1.0
        longest_first = sorted(sums, key=lambda name: -sums[name])
        return [
            KernelRow(name, len(taken[name]), sums[name], sums[name] / total)
            for name in longest_first
        ]

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of the figures must know, in sentences."""
        if not self.calls:
            return (self.empty_because,) if self.empty_because else ()
        notes = []
        if self.malformed:
            notes.append(
                f"{counted(self.malformed, 'line')} could not be read and are not counted: they "
                f"were cut off, or written into each other"
            )
        if not any(call.implementation for call in self.calls):
            notes.append(
                f"none but {self.calls[0].primitive}, which names no kernel: the framework asked "
                f"oneDNN for products of matrices only; TensorFlow does so where oneDNN is off, "
                f"and TF_ENABLE_ONEDNN_OPTS=1 switches it on"
            )
        notes.extend(self._notes_on_bf16())
        return tuple(notes)

    def _notes_on_bf16(self) -> Iterator[str]:
        """Of an x86 CPU without BF16, what became of it; the words for others do not say."""
        if not re.search("AVX|SSE", self.isa) or "bfloat16" in self.isa:
            return
        count = sum(call.precision == Precision.BF16.value for call in self.calls)
        if count:
            yield f"this CPU has no BF16 ({self.isa}): {counted(count, 'call')} emulated it"
        else:
            yield f"this CPU has no BF16 ({self.isa}): no kernel ran in it, whatever was asked for"


@lru_cache(maxsize=4096)
def _isa(implementation: str) -> str:
    """The instruction sets that a name has, each once."""
    return "+".join(dict.fromkeys(_ISA.findall(implementation)))


_NAMES = {
    KernelKey.IMPLEMENTATION: lambda call: call.implementation or call.primitive,
    KernelKey.PRIMITIVE: lambda call: call.primitive,
    KernelKey.ISA: lambda call: call.isa or UNNAMED,
    KernelKey.PRECISION: lambda call: call.precision,
    KernelKey.PROBLEM: lambda call: call.work,
}
