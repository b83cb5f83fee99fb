"""Seconds of every op, from ONNX Runtime's own profiler."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from neural_mp.adaptors.common.signature import Array
from neural_mp.adaptors.onnxrt.model import OnnxModel

#: How the profiler calls the time of a kernel, behind the name of its node.
_SUFFIX = "_kernel_time"
#: Kernels within whose time others run.
_RUN_GRAPHS = ("If", "Loop", "Scan", "SequenceMap")
#: What ONNX Runtime puts around the name of a node, or of its result, when it makes a kernel of it.
#: The body of a function such as SequenceMap is named after that, too.
_DECORATION = re.compile(
    r"^InsertedPrecisionFreeCast_|^(_inlfunc_[A-Za-z]+_)+|(_nchwc|_nhwc)?(_token_\d+)?$"
)


def time_ops(
    model: OnnxModel, feeds: dict[str, Array], runs: int, threads: int | None
) -> dict[str, list[float]]:
    """Op → seconds of every run; what runs along with another op is counted with that.

    Where ONNX Runtime rearranges tensors between kernels, that stands under its own name for it
    (`ReorderOutput`, `Transpose`).
    """
    # What was found no kernel for runs within that of another op.
    seconds = {op: [0.0] * runs for op in model.structure.nodes if op not in model.ops}
    owners, run = _owners(model), 0
    kernels: list[dict[str, Any]] = []
    for event in events(model, feeds, runs, threads):
        if is_kernel(event):
            kernels.append(event)
        if event.get("name") == "model_run":  # is written when the run is over
            for kernel, microseconds in own_times(kernels):
                op = op_of(kernel, owners) or bare_name(kernel)
                seconds.setdefault(op, [0.0] * runs)[run] += microseconds / 1e6
            run, kernels = run + 1, []
    return seconds


def own_times(kernels: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], float]]:
    """Every kernel with its microseconds, without those of the kernels that ran within it.

    An op that runs a graph takes as long as all that runs in that.
    """
    running: list[tuple[dict[str, Any], float]] = []
    for kernel in sorted(kernels, key=lambda found: (found["ts"], -found["dur"])):
        while running and kernel["ts"] >= running[-1][0]["ts"] + running[-1][0]["dur"]:
            yield running.pop()
        if running:
            around, own = running[-1]
            running[-1] = around, max(own - kernel["dur"], 0.0)
        if kernel["args"].get("op_name") in _RUN_GRAPHS:
            running.append((kernel, float(kernel["dur"])))
        else:
            yield kernel, float(kernel["dur"])
    yield from running


def events(
    model: OnnxModel, feeds: dict[str, Array], runs: int, threads: int | None
) -> list[dict[str, Any]]:
    """What the profiler says of so many runs, in order."""
    runner = model.session(model.program, threads=threads, profiled=True)
    for _ in range(runs):
        runner(feeds, model.signature.output_tensors)
    found = json.loads(Path(runner.session.end_profiling()).read_text(encoding="utf-8"))
    return list(found)


def is_kernel(event: Mapping[str, Any]) -> bool:
    """Whether an event is that of a kernel that ran."""
    return event.get("cat") == "Node" and str(event.get("name", "")).endswith(_SUFFIX)


def bare_name(event: Mapping[str, Any]) -> str:
    """The name of the node, or of its result, that a kernel was made of."""
    return _DECORATION.sub("", str(event["name"]).removesuffix(_SUFFIX))


def op_of(event: Mapping[str, Any], owners: Mapping[str, str]) -> str | None:
    """The op that a kernel is of, by the names that kernels may have; None for a foreign one."""
    whole = str(event["name"]).removesuffix(_SUFFIX)
    return owners.get(whole) or owners.get(bare_name(event))


def _owners(model: OnnxModel) -> dict[str, str]:
    """What a kernel may be called, by its node or by its result → the op it counts for."""
    found: dict[str, str] = {}
    for name, node in model.structure.nodes.items():
        op = model.ops.get(name, name)
        op = model.structure.layer_of.get(op, op)
        found[name] = op
        for value in node.outputs:
            found.setdefault(str(value.name), op)
    return found
