"""Parsers of oneDNN verbose logs (all versions, among other lines) and ONNX Runtime profiles.

A oneDNN line is a comma-separated list,
`onednn_verbose,v1,primitive,exec,cpu,convolution,…,0.3259`, whose last field is milliseconds
("Verbose Mode" in oneDNN's developer guide, 0.20 to 3.12). Versions differ in the fields before and
after `exec`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from sys import intern
from types import MappingProxyType
from typing import Any

from neural_mp.errors import NeuralMPError
from neural_mp.profiling.kernel_records import KernelCall, KernelLog
from neural_mp.util.text import format_count
from neural_mp.util.validators import (
    anything,
    list_of,
    mapping_of,
    non_negative_float,
    record,
    string,
)

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
