"""Seconds of every op, from ONNX Runtime's own profiler."""

from __future__ import annotations

import json
import re
from pathlib import Path

from neural_mp.adaptors.common.signature import Array
from neural_mp.adaptors.onnxrt.model import OnnxModel

#: How the profiler calls the time of a kernel, behind the name of its node.
_SUFFIX = "_kernel_time"
#: What ONNX Runtime puts around the name of a node, or of its result, when it makes a kernel of it.
_DECORATION = re.compile(r"^InsertedPrecisionFreeCast_|(_nchwc|_nhwc)?(_token_\d+)?$")


def time_ops(
    model: OnnxModel, feeds: dict[str, Array], runs: int, threads: int | None
) -> dict[str, list[float]]:
    """Op → seconds of every run; what runs along with another op is counted with that.

    Where ONNX Runtime rearranges tensors between kernels, that stands under its own name for it
    (`ReorderOutput`, `Transpose`).
    """
    runner = model.session(model.program, threads=threads, profiled=True)
    outputs = model.signature.output_tensors
    for _ in range(runs):
        runner(feeds, outputs)
    events = json.loads(Path(runner.session.end_profiling()).read_text(encoding="utf-8"))
    # What was found no kernel for runs within that of another op.
    seconds = {op: [0.0] * runs for op in model.structure.nodes if op not in model.ops}
    owners, run = _owners(model), 0
    for event in events:
        name = str(event.get("name", ""))
        if event.get("cat") == "Node" and name.endswith(_SUFFIX):
            kernel = name.removesuffix(_SUFFIX)
            bare = _DECORATION.sub("", kernel)
            op = owners.get(kernel) or owners.get(bare) or bare
            seconds.setdefault(op, [0.0] * runs)[run] += event["dur"] / 1e6
        run += name == "model_run"  # is written when the run is over
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
