"""Which ops follow those that a plan has in 16 bits: the four lists, applied to a plan."""

from __future__ import annotations

from collections.abc import Mapping

from neural_mp.amp import AmpList, FourLists, Painting, paint
from neural_mp.core.graph import OpGraph
from neural_mp.core.precision import Precision

#: Why an op is in 16 bits, or is not, where that does not follow from the lists.
BY_PLAN = "the plan says so"


def paint_plan(
    graph: OpGraph,
    lists: FourLists,
    precision: Precision,
    named: Mapping[str, Precision],
    effective: Mapping[str, Precision],
    obstacles: Mapping[str, str],
) -> Painting:
    """Paint a graph in one 16-bit precision, from the ops that a plan has in it.

    Args:
        graph: the model.
        lists: the lists of the precision.
        precision: BF16 or FP16.
        named: op → what the plan says of it; what it has in INT8, and is not, is left open.
        effective: op → what it runs in, as far as that is settled: INT8 and the other 16-bit
            precision are boundaries.
        obstacles: op → why it cannot run in the precision.
    """
    chosen, unable = {}, dict(obstacles)
    for op in graph:
        says, begins = named.get(op.name), lists.of(op.type) is AmpList.ALLOW
        if says is Precision.INT8:
            continue  # in effect, and so a boundary; or not, and then for the lists to decide
        if says is precision and not begins:
            chosen[op.name] = BY_PLAN
        elif says is Precision.FP32 or (begins and says is not precision):
            unable.setdefault(op.name, BY_PLAN)
    boundaries = _boundaries(effective, precision)
    return paint(graph, lists, boundaries=boundaries, unable=unable, chosen=chosen)


def explain_plan(
    graph: OpGraph,
    lists: FourLists,
    precision: Precision,
    effective: Mapping[str, Precision],
    obstacles: Mapping[str, str],
) -> Painting:
    """The painting that gives just these precisions, with a reason for every op.

    The lists explain as much as they can; only where they would decide otherwise is an op said to
    be as it is because the plan says so.
    """
    wanted = {op for op, p in effective.items() if p is precision}
    unable, chosen = dict(obstacles), dict[str, str]()
    for op in graph:
        if lists.of(op.type) is AmpList.ALLOW and op.name not in wanted:
            unable.setdefault(op.name, BY_PLAN)
    boundaries = _boundaries(effective, precision)
    while True:
        painting = paint(graph, lists, boundaries=boundaries, unable=unable, chosen=chosen)
        missing, extra = wanted - painting.allowed, painting.allowed - wanted
        if not missing and not extra:
            return painting
        chosen.update(dict.fromkeys(missing, BY_PLAN))
        unable.update(dict.fromkeys(extra, BY_PLAN))


def _boundaries(effective: Mapping[str, Precision], precision: Precision) -> dict[str, str]:
    settled = (Precision.INT8, *(p for p in Precision if p.is_16_bit and p is not precision))
    return {op: f"it runs in {p}" for op, p in effective.items() if p in settled}
