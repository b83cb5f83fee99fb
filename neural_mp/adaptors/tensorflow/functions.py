"""The functions a graph calls, such as the bodies of its loops."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

from neural_mp.adaptors.tensorflow.nodes import FunctionDefLibrary, NodeDef, TensorGraph, copied


def with_functions_of_its_own(graph: TensorGraph) -> TensorGraph:
    """The graph with its functions renamed, so that no other graph's bear the same names.

    TensorFlow knows functions by name within a process, where the function that the graph was made
    from still exists, and passes over a graph change the definitions.
    """
    if not graph.library.function:
        return graph
    library = FunctionDefLibrary()
    library.CopyFrom(graph.library)
    del library.gradient[:]  # nothing is trained any more
    digest = hashlib.sha256(library.SerializeToString(deterministic=True)).hexdigest()[:12]
    names = {f.signature.name: f"{f.signature.name}_{digest}" for f in library.function}
    for function in library.function:
        function.signature.name = names[function.signature.name]
        _rename(function.node_def, names)
    nodes = {name: copied(node) for name, node in graph.nodes.items()}
    _rename(nodes.values(), names)
    return TensorGraph(nodes, graph.versions, library)


def _rename(nodes: Iterable[NodeDef], names: Mapping[str, str]) -> None:
    for node in nodes:
        node.op = names.get(node.op, node.op)
        for attribute in node.attr.values():
            for function in (attribute.func, *attribute.list.func):
                if function.name in names:
                    function.name = names[function.name]
