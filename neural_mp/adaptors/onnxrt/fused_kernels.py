"""Attribution of kernels that ONNX Runtime fuses, inlines or inserts, from its optimized graph."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx


def nodes_of(file: Path) -> list[onnx.NodeProto]:
    """Return the nodes of an optimized graph; empty if the runtime could not write the file."""
    if not file.exists():
        return []
    return list(onnx.load(file, load_external_data=False).graph.node)


def fused_owners(
    kernels: Iterable[Mapping[str, Any]],
    nodes: Sequence[onnx.NodeProto],
    owners: Mapping[str, str],
) -> dict[str, str]:
    """Return name of a kernel → op, for kernels that ONNX Runtime has named.

    A kernel counts towards the op that writes its result, or else towards the next op after it: a
    fused kernel writes the result of its last op, and an inlined function that of its op.

    Args:
        kernels: the profiler's events of the kernels of unknown ops, in one run.
        nodes: the nodes of the optimized graph.
        owners: name of a tensor → its op.
    """
    readers: dict[str, list[onnx.NodeProto]] = defaultdict(list)
    for node in nodes:
        for value in node.input:
            readers[value].append(node)
    named = {node.name: node for node in nodes if node.name}
    unnamed: dict[str, list[onnx.NodeProto]] = defaultdict(list)
    for node in nodes:
        if not node.name:
            unnamed[node.op_type].append(node)
    ops = {}
    for name, node in _matched(kernels, named, unnamed):
        op = _owner(node, readers, owners)
        if op is not None:
            ops[name] = op
    return ops


def _matched(
    kernels: Iterable[Mapping[str, Any]],
    named: Mapping[str, onnx.NodeProto],
    unnamed: Mapping[str, Sequence[onnx.NodeProto]],
) -> Iterator[tuple[str, onnx.NodeProto]]:
    """Yield name of a kernel and its node; kernels of nodes without a name have a number."""
    numbered: dict[str, dict[int, str]] = defaultdict(dict)
    for kernel in kernels:
        name, details = str(kernel["name"]).removesuffix("_kernel_time"), kernel["args"]
        if name in named:
            yield name, named[name]
        elif name == f"{details['op_name']}_{details.get('node_index')}":
            numbered[details["op_name"]][int(details["node_index"])] = name
    for kind, by_number in numbered.items():
        # Functions are inlined in the order of the graph.
        if len(by_number) == len(unnamed[kind]):
            names = (by_number[number] for number in sorted(by_number))
            yield from zip(names, unnamed[kind], strict=True)


def _owner(
    node: onnx.NodeProto,
    readers: Mapping[str, Sequence[onnx.NodeProto]],
    owners: Mapping[str, str],
) -> str | None:
    """Return the op of the first known result of a node or of those after it."""
    waiting, visited = [node], set[str]()
    while waiting:
        current = waiting.pop(0)
        for value in current.output:
            if value in owners:
                return owners[value]
        for value in current.output:
            if value not in visited:
                visited.add(value)
                waiting += readers.get(value, ())
    return None
