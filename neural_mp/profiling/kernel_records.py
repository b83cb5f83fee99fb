"""Records of executed kernels, their parsers for all log types, and the comparison of two logs.

Logs are oneDNN verbose logs (all versions, among other lines) and ONNX Runtime profiles. A oneDNN
line is a comma-separated list, `onednn_verbose,v1,primitive,exec,cpu,convolution,…,0.3259`, whose
last field is milliseconds ("Verbose Mode" in oneDNN's developer guide, 0.20 to 3.12). Versions
differ in the fields before and after `exec`.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from sys import intern
from types import MappingProxyType
from typing import Any

from neural_mp.core.precision import Precision
from neural_mp.errors import NeuralMPError
from neural_mp.util.string_enum import StringEnum
from neural_mp.util.text import format_count
from neural_mp.util.validators import (
    anything,
    list_of,
    mapping_of,
    non_negative_float,
    record,
    string,
)

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
#: Line prefixes, oldest first.
MARKERS = ("mkldnn_verbose,", "dnnl_verbose,", "onednn_verbose,")
_MARKER = re.compile("|".join(MARKERS))
#: Variables that enable the log, oldest first.
VARIABLES = ("MKLDNN_VERBOSE", "DNNL_VERBOSE", "ONEDNN_VERBOSE")

#: Fields after `exec`: since 1.2, in 1.0, in 0.18 to 0.21, and before.
_LAYOUTS = tuple(
    tuple(names.split())
    for names in (
        "engine primitive implementation prop_kind memory_descriptors attributes auxiliary"
        " problem_desc exec_time",
        "engine primitive implementation prop_kind memory_descriptors auxiliary problem_desc"
        " exec_time",
        "primitive implementation prop_kind memory_descriptors auxiliary problem_desc exec_time",
        "primitive prop_kind memory_descriptors auxiliary problem_desc exec_time",
    )
)
_NEEDED = {"primitive", "prop_kind", "memory_descriptors", "problem_desc", "exec_time"}
_VERSION = re.compile(r"v\d+")
_TIMESTAMP = re.compile(r"\d+\.\d+")
_NUMBER = re.compile(r"\d+(\.\d+)?([eE][-+]?\d+)?")
_ENGINE = re.compile(r"(cpu|gpu)(:\d+)?")
_WORD = re.compile(r"[a-z]\w*")
_AUXILIARY = re.compile(r"[a-z]\w*:")
#: Prefixes of operations without a kernel.
_OTHERS = ("info", "create", "exec:", "error", "warn", "check", "dispatch", "stack", "debug")
#: A tensor and its type: `src:f32::blocked:…`, `src_f32::blocked:…`, `in:f32_nchw`.
_TENSOR = re.compile(
    r"([a-z]\w*?)[:_](bf16|f16|f32|f64|[su](?:4|8|32|64)|f[48]_e\dm\d|e8m0|boolean)(?=[:_])"
)
_LIBRARIES = ("oneDNN", "DNNL", "Intel")


#: Hint for logs without oneDNN kernels.
ENABLE_ONEDNN = (
    "In TensorFlow, TF_ENABLE_ONEDNN_OPTS=1 enables oneDNN; for ONNX Runtime, which does not use "
    "oneDNN, give a profile"
)


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


class OneDnnReader:
    """Line-by-line reader of a oneDNN log; `silence` is the reason for an empty log, if known."""

    def __init__(self, silence: str = "") -> None:
        self._silence = silence
        self._calls: list[KernelCall] = []
        self._malformed = 0
        self._operations: Counter[str] = Counter()
        self._layout: tuple[str, ...] = ()
        self._isa = self._library = ""

    def read_line(self, line: str) -> None:
        """Parse all records of a line; text before the first is ignored."""
        markers = list(_MARKER.finditer(line))
        ends = [following.start() for following in markers[1:]] + [len(line)]
        for marker, end in zip(markers, ends):  # noqa: B905 - of no marker there is one end
            record = line[marker.end() : end].strip()
            if not self._read_record(marker[0], record.split(",")):
                self._malformed += 1

    def finished_log(self) -> KernelLog:
        """Return the log read so far."""
        why = "" if self._calls else self._explain_empty_log()
        return KernelLog(tuple(self._calls), self._malformed, self._isa, self._library, why)

    def _read_record(self, marker: str, fields: list[str]) -> bool:
        """Parse a record without its marker; return whether it is well-formed."""
        for leading in (_VERSION, _TIMESTAMP):
            if leading.fullmatch(fields[0]):
                fields = fields[1:] or [""]
        component = ""
        if fields[0] != "exec" and not fields[0].startswith(_OTHERS):
            component, fields = fields[0], fields[1:] or [""]
            if not _WORD.fullmatch(component):
                return False
        operation = fields[0]
        if operation != "exec":
            self._operations[operation] += 1
            if operation == "info":
                self._read_header(fields[1:])
            return operation.startswith(_OTHERS)
        if component not in ("", "primitive"):
            # For a graph partition: its primitives have their own lines.
            self._operations[component] += 1
            return True
        call = _parse_call(fields[1:], self._list_possible_layouts(marker, fields))
        if call is not None:
            self._calls.append(call)
        return call is not None

    def _list_possible_layouts(self, marker: str, fields: list[str]) -> tuple[tuple[str, ...], ...]:
        if self._layout:
            return (self._layout,)
        if marker == MARKERS[-1]:
            return _LAYOUTS[:1]
        has_engine = len(fields) > 1 and _ENGINE.fullmatch(fields[1])
        return _LAYOUTS[:2] if has_engine else _LAYOUTS[2:]

    def _read_header(self, fields: list[str]) -> None:
        text = ",".join(fields)
        if re.match("(prim_)?template:", text):
            names = text.split(":", 1)[1].split(",")
            if "operation" in names and set(names) >= _NEEDED:
                self._layout = tuple(names[names.index("operation") + 1 :])
        elif text.startswith("cpu,isa:"):
            self._isa = self._isa or text.removeprefix("cpu,isa:")
        elif text.startswith(_LIBRARIES):
            self._library = self._library or fields[0]
            # Up to 1.1, the ISA follows the version.
            self._isa = self._isa or ",".join(fields[1:])

    def _explain_empty_log(self) -> str:
        if self._malformed:
            return f"none of {format_count(self._malformed, 'oneDNN line')} is readable"
        kinds = {operation.split(":")[0] for operation in self._operations}
        if kinds & {"create", "graph"}:
            return (
                "the log lists created kernels, but no executed ones; run the program with "
                "ONEDNN_VERBOSE=1 (or profile)"
            )
        if self._silence:
            return self._silence
        if self._operations:
            return f"oneDNN was loaded, but ran no kernels. {ENABLE_ONEDNN}"
        return f"no line is of oneDNN; run the program with ONEDNN_VERBOSE=1. {ENABLE_ONEDNN}"


def _parse_call(fields: list[str], layouts: tuple[tuple[str, ...], ...]) -> KernelCall | None:
    """Return the call described by the fields after `exec`; None if they fit no layout."""
    layout = next((names for names in layouts if len(names) == len(fields)), None)
    if layout is None:
        return None
    value = dict(zip(layout, fields, strict=True))
    engine, elapsed, problem = value.get("engine", "cpu"), value["exec_time"], value["problem_desc"]
    whole = (
        _NUMBER.fullmatch(elapsed)
        and _ENGINE.fullmatch(engine)
        and _WORD.fullmatch(value["primitive"])
        and _WORD.fullmatch(value["prop_kind"])
        and problem
        # A line truncated after its sizes has `alg:convolution_direct` here.
        and not _AUXILIARY.match(problem)
    )
    if not whole:
        return None
    return KernelCall(
        intern(value["primitive"]),
        intern(value.get("implementation", "")),
        intern(value["prop_kind"]),
        _parse_dtypes(value["memory_descriptors"]),
        intern(problem),
        float(elapsed),
        intern(engine),
    )


@lru_cache(maxsize=4096)
def _parse_dtypes(descriptors: str) -> Mapping[str, str]:
    """Return tensor → type; tensors without a type are omitted."""
    dtypes: dict[str, str] = {}
    for descriptor in descriptors.split():
        match = _TENSOR.match(descriptor)
        if match:
            dtypes.setdefault(match[1], match[2])
    return MappingProxyType(dtypes)


#: Name endings of fence events, which wait for pending device work.
_FENCES = ("_fence_before", "_fence_after")
#: Ops whose time is that of inner nodes, which have their own events.
_AROUND_OTHERS = ("If", "Loop", "Scan")
_EMPTY = "the profile has no events of nodes; call end_profiling() after running the model"


_TENSORS = list_of(mapping_of(list_of(anything)))
_EVENT = record(
    {
        "dur": non_negative_float,
        "args": record(
            {"op_name": string},
            {"provider": string, "input_type_shape": _TENSORS, "output_type_shape": _TENSORS},
        ),
    }
)


def read_profile(events: Sequence[Mapping[str, Any]]) -> KernelLog:
    """Return the kernels of a profile; events without time or op count as malformed."""
    calls, malformed = [], 0
    for event in events:
        if event.get("cat") != "Node" or str(event.get("name", "")).endswith(_FENCES):
            continue
        try:
            entry = _EVENT(event)
        except NeuralMPError:
            malformed += 1
            continue
        details = entry["args"]
        if details["op_name"] not in _AROUND_OTHERS:
            calls.append(_parse_profiled_call(details["op_name"], details, entry["dur"] / 1000))
    return KernelLog(tuple(calls), malformed, "", "ONNX Runtime", "" if calls else _EMPTY)


def _parse_profiled_call(op: str, details: Mapping[str, Any], milliseconds: float) -> KernelCall:
    provider = details.get("provider", "")
    short = provider.removesuffix("ExecutionProvider")
    inputs, outputs = (
        [
            (kind, "x".join(map(str, sizes)))
            for tensor in details.get(f"{side}_type_shape", ())
            for kind, sizes in tensor.items()
        ]
        for side in ("input", "output")
    )
    dtypes = {f"input {index}": kind for index, (kind, _) in enumerate(inputs)}
    dtypes |= {f"output {index}": kind for index, (kind, _) in enumerate(outputs)}
    return KernelCall(
        op,
        f"{op}:{short}" if short else op,
        "",
        dtypes,
        ":".join(sizes for _, sizes in inputs),
        milliseconds,
        provider,
    )
