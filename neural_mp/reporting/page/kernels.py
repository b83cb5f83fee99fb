"""The boxes of the map: ops that one kernel can run together."""

from __future__ import annotations

from dataclasses import dataclass

from neural_mp.core.graph import Op, OpGraph


@dataclass(frozen=True)
class Kernels:
    """Groups of ops, and which group reads which.

    Attributes:
        groups: of every box, the places of its ops in the graph.
        edges: from a box to a box that reads it.
    """

    groups: tuple[tuple[int, ...], ...]
    edges: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, graph: OpGraph) -> Kernels:
        """An op shares the box of the op before it if the kernel of that can run it along."""
        box_of: dict[str, int] = {}
        groups: list[list[int]] = []
        for index, op in enumerate(graph):
            box = next(
                (box_of[source.name] for source in _joined(graph, op) if source.name in box_of),
                len(groups),
            )
            if box == len(groups):
                groups.append([])
            groups[box].append(index)
            box_of[op.name] = box
        pairs = (
            (box_of[source.name], box_of[op.name])
            for op in graph
            for source in graph.producers(op.name)
        )
        edges = dict.fromkeys((source, reader) for source, reader in pairs if source != reader)
        return cls(tuple(map(tuple, groups)), tuple(edges))


def _joined(graph: OpGraph, op: Op) -> list[Op]:
    """The producers of an op whose kernel may run it, and whose result nobody else reads."""
    if op.fusion_group is None:
        return []
    return [
        source
        for source in graph.producers(op.name)
        if op.fusion_group in (source.name, source.fusion_group)
        and len(graph.consumer_names(source.name)) == 1
    ]
