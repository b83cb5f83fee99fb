"""Seconds of every op, from ONNX Runtime's own profiler."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from neural_mp.adaptors.common.signature import Array
from neural_mp.adaptors.onnxrt.model import OnnxModel

_RUNS, _WARM_UP = 5, 2
#: How the profiler calls the time of a kernel, behind the name of its node.
_SUFFIX = "_kernel_time"
#: What ONNX Runtime puts around the name of a node, or of its result, when it makes a kernel of it.
_DECORATION = re.compile(r"^InsertedPrecisionFreeCast_|(_nchwc|_nhwc)?(_token_\d+)?$")


def profile(model: OnnxModel, feeds: dict[str, Array], threads: int | None) -> Mapping[str, float]:
    """Op → seconds of one run; what runs along with another op is counted with that.

    Where ONNX Runtime rearranges tensors between kernels, that stands under its own name for it
    (`ReorderOutput`, `Transpose`).
    """
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
    owners = _owners(model)
    # What was found no kernel for runs within that of another op.
    seconds = dict.fromkeys(model.structure.nodes.keys() - model.ops.keys(), 0.0)
    for kernel, found in times.items():
        bare = _DECORATION.sub("", kernel)
        op = owners.get(kernel) or owners.get(bare) or bare
        seconds[op] = seconds.get(op, 0.0) + sum(found[-_RUNS:]) / len(found[-_RUNS:])
    return seconds


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
