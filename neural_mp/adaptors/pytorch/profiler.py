"""Kernels executed for every op, op times from torch's profiler, and runs of single layers."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.fx import Node

from neural_mp.adaptors.pytorch.capture.module_capture import visit_nodes
from neural_mp.adaptors.pytorch.graph import graph_edit as fx
from neural_mp.adaptors.pytorch.graph.graph_edit import OP_NAME
from neural_mp.adaptors.pytorch.graph.model import CONVERSIONS, TorchModel
from neural_mp.adaptors.pytorch.graph.quantizable_ops import LINEAR
from neural_mp.adaptors.pytorch.graph.recurrent import KERNELS as RECURRENT_KERNELS
from neural_mp.adaptors.pytorch.kernels.direct_calls import DirectGraph
from neural_mp.core.op_timings import NOT_REACHED, OpTrace, TracedKernel, build_op_trace
from neural_mp.core.precision import Precision
from neural_mp.errors import ConversionError, KernelLogError

#: Prefix of an op's name in the trace, around the events of the op.
_MARK = "neural_mp op: "
#: Name prefix of oneDNN's integer kernels.
_INTEGER = "onednn::q"
#: Profiler's dtype name → precision.
_PRECISIONS = {
    "float": Precision.FP32,
    "double": Precision.FP32,
    "c10::BFloat16": Precision.BF16,
    "c10::Half": Precision.FP16,
}
_BYTES = ("unsigned char", "signed char")
_BOOKKEEPING_NAMES = (
    "empty empty_like empty_strided new_empty resize_ as_strided as_strided_ view reshape "
    "_reshape_alias _unsafe_view expand expand_as permute transpose t unsqueeze squeeze slice "
    "select narrow alias detach lift_fresh set_ resolve_conj resolve_neg result_type item "
    "_local_scalar_dense is_nonzero _nnpack_available"
)
#: Ops that allocate, view or query memory; an op may consist of these alone.
_BOOKKEEPING = frozenset(f"aten::{name}" for name in _BOOKKEEPING_NAMES.split())
#: Ops that convert, copy or fill: not counted next to a kernel of the same op.
_COPIES = frozenset(
    f"aten::{name}"
    for name in ("to", "_to_copy", "copy_", "contiguous", "clone", "fill_", "zero_", "zeros")
)
#: Environment variable that silences the profiler's library on standard error.
_LOG_LEVEL, _NOTHING = "KINETO_LOG_LEVEL", "99"


@dataclass(frozen=True)
class _Event:
    name: str
    types: tuple[str, ...]
    end: float
    children: list[_Event] = field(default_factory=list)

    def nested_events(self) -> Iterator[_Event]:
        """Yield all nested events."""
        for child in self.children:
            yield child
            yield from child.nested_events()

    def innermost_kernels(self, idle: frozenset[str]) -> list[_Event]:
        """Return the innermost nested events that did work; events in `idle` did none."""
        events = []
        for child in self.children:
            if _is_integer(child.name):
                events.append(child)  # its children only view its inputs
            elif child.name not in idle:
                events += child.innermost_kernels(idle | _BOOKKEEPING | _COPIES) or [child]
        return events


def trace_kernels(model: TorchModel, inputs: object) -> dict[str, OpTrace]:
    """Return op → executed kernels, excluding inserted conversions."""

    def mark_op(node: Node, run: Callable[[], Any]) -> Any:
        if node.op != "call_function" or OP_NAME not in node.meta:
            return run()
        with torch.profiler.record_function(_MARK + node.meta[OP_NAME]):
            return run()

    run, call = visit_nodes(model, mark_op), model.call(inputs)
    os.environ.setdefault(_LOG_LEVEL, _NOTHING)  # read on first use
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, record_shapes=True) as profiler:
        run(call)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        events = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    traced: dict[str, list[TracedKernel]] = {}
    bytes_read: set[str] = set()
    for root in _nest_events(events):
        op = root.name.removeprefix(_MARK)
        # The events that did the work; if there are none, conversions and copies, then views.
        tried = (
            root.innermost_kernels(idle)
            for idle in (_BOOKKEEPING | _COPIES, _BOOKKEEPING, frozenset())
        )
        traced.setdefault(op, []).extend(map(_parse_traced_kernel, next(filter(None, tried), [])))
        if any(kind in _BYTES for event in root.nested_events() for kind in event.types):
            bytes_read.add(op)
    ran = {
        op: replace(build_op_trace(kernels), reads_int8=op in bytes_read)
        for op, kernels in traced.items()
        if kernels
    }
    ops = (op for part in model.parts.values() for op in fx.map_op_nodes(part.runnable))
    return {**{op: NOT_REACHED for op in ops if op not in traced}, **ran}


def _nest_events(events: Iterable[Mapping[str, Any]]) -> list[_Event]:
    """Return the events that mark ops, with the nested events of each, in order."""
    roots: list[_Event] = []
    within: dict[Any, list[_Event]] = {}
    timed = [event for event in events if event.get("cat") in ("cpu_op", "user_annotation")]
    for event in sorted(timed, key=lambda event: (event["ts"], -event["dur"])):
        types = tuple(event.get("args", {}).get("Input type", ()))
        entry = _Event(event["name"], types, event["ts"] + event["dur"])
        stack = within.setdefault(event["tid"], [])
        while stack and stack[-1].end <= event["ts"]:
            stack.pop()
        if entry.name.startswith(_MARK):
            roots.append(entry)
        elif stack:
            stack[-1].children.append(entry)
        stack.append(entry)
    return roots


def _is_integer(name: str) -> bool:
    return name.startswith(_INTEGER) or name in RECURRENT_KERNELS


def _parse_traced_kernel(event: _Event) -> TracedKernel:
    if _is_integer(event.name):
        return TracedKernel(event.name, Precision.INT8)
    return TracedKernel(event.name, next(filter(None, map(_PRECISIONS.get, event.types)), None))


def time_ops(model: TorchModel, inputs: object, runs: int) -> dict[str, list[float]]:
    """Return op (or conversion, by node name) → the seconds of each of `runs` runs."""
    seconds: dict[str, list[float]] = defaultdict(lambda: [0.0] * runs)
    number = 0

    def time_node(node: Node, run: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = run()
        if node.op == "call_function":
            name = node.meta.get(OP_NAME) or _make_conversion_name(node)
            seconds[name][number] += time.perf_counter() - start
        return result

    run, call = visit_nodes(model, time_node), model.call(inputs)
    for number in range(runs):  # noqa: B007 - the visits read it
        run(call)
    return seconds


def _make_conversion_name(node: Node) -> str:
    """Return a name for a conversion, prefixed with the name of the converted op."""
    if node.target not in CONVERSIONS:
        return str(node.name)
    source = node.args[0]
    named = source.meta.get(OP_NAME, source.name) if isinstance(source, Node) else node.name
    return f"{named}/{CONVERSIONS[node.target]}"


@contextmanager
def verbose_onednn() -> Iterator[None]:
    """Make oneDNN print a line to standard output for every kernel in this context.

    Raises:
        KernelLogError: if PyTorch is built without oneDNN, or oneDNN is disabled.
    """
    backend = torch.backends.mkldnn
    if not backend.is_available():
        raise KernelLogError("kernel logs require oneDNN, which this build of PyTorch lacks")
    if not backend.enabled:
        raise KernelLogError("kernel logs require oneDNN; set torch.backends.mkldnn.enabled = True")
    with backend.verbose(backend.VERBOSE_ON):
        yield


def list_layer_shapes(model: TorchModel) -> dict[str, Hashable]:
    """Return dense layer → the properties that decide on its time; empty for one whole graph."""
    if model.shell is None:
        return {}
    return {
        name: (*args["weight"].meta["val"].shape, args["bias"] is not None)
        for part in model.parts.values()
        for name, node in fx.map_op_nodes(part.portable).items()
        if node.target is LINEAR and (args := fx.get_arguments(node))
    }


def make_layer_run(model: TorchModel, op: str, rows: int) -> Callable[[], object]:
    """Return a function that runs the part of a dense layer on random rows.

    Raises:
        ConversionError: no part of the model holds the layer.
    """
    parts = (part for part in model.parts.values() if op in fx.map_op_nodes(part.portable))
    part = next(parts, None)
    if part is None:
        raise ConversionError(f"the model must hold the layer {op!r} to time it, found none")
    example = part.example.args[0]
    shape = [1] * (example.ndim - 2) + [rows, example.shape[-1]]
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(example.dtype)
    return partial(DirectGraph(part.runnable), values)
