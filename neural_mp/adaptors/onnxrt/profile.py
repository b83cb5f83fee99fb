"""Seconds of every op, from ONNX Runtime's own profiler."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from neural_mp.adaptors.onnxrt.model import OnnxModel
from neural_mp.adaptors.signature import Array

_RUNS, _WARM_UP = 5, 2
#: How the profiler calls the time of a kernel, behind the name of its node.
_SUFFIX = "_kernel_time"


def profile(model: OnnxModel, feeds: dict[str, Array], threads: int | None) -> Mapping[str, float]:
    """Op → seconds of one run; what runs along with another op is counted with that."""
    runner = model.session(model.program, threads=threads, profiled=True)
    outputs = [port.tensor for port in model.signature.outputs]
    for _ in range(_WARM_UP + _RUNS):
        runner(feeds, outputs)
    events = json.loads(Path(runner.session.end_profiling()).read_text(encoding="utf-8"))
    times: dict[str, list[float]] = defaultdict(list)
    for event in events:
        name = str(event.get("name", ""))
        if event.get("cat") == "Node" and name.endswith(_SUFFIX):
            times[name.removesuffix(_SUFFIX)].append(event["dur"] / 1e6)
    seconds: dict[str, float] = defaultdict(float)
    for kernel, found in times.items():
        seconds[_op_of(kernel, model)] += sum(found[-_RUNS:]) / len(found[-_RUNS:])
    return dict(seconds)


def _op_of(kernel: str, model: OnnxModel) -> str:
    return model.ops.get(kernel, kernel)
