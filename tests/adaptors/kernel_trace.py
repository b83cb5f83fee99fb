"""Which integer kernels a model runs, read from the runtime's own trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch

from neural_mp.adaptors.pytorch.model import OP_NAME
from neural_mp.adaptors.pytorch.submodules import visited

_MARK = "op: "


def _marked(node, run):
    """Writes the name of every op into the trace, around what it runs."""
    with torch.profiler.record_function(_MARK + node.meta.get(OP_NAME, node.name)):
        return run()


def kernels_by_op(model, call) -> Mapping[str, Counter[str]]:
    """Op → kernels that ran for it, with how often."""
    run = visited(model, _marked)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as trace:
        run(call)
    found: dict[str, Counter[str]] = {}
    for event in trace.events():
        above = event.cpu_parent
        while above is not None and not above.name.startswith(_MARK):
            above = above.cpu_parent
        if above is not None:
            found.setdefault(above.name.removeprefix(_MARK), Counter())[event.name] += 1
    return found


def ops_in_integers(model, call) -> dict[str, int]:
    """Op → how many oneDNN integer kernels ran for it, those that ran one only."""
    counts = {
        op: sum(count for name, count in kernels.items() if name.startswith("onednn::q"))
        for op, kernels in kernels_by_op(model, call).items()
    }
    return {op: count for op, count in counts.items() if count}
