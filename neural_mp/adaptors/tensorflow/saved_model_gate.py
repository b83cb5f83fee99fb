"""What a SavedModel may hold, seen to before TensorFlow reads it.

Reading one runs a part of it: what restores variables, and what fills lookup tables. It also runs
parts of graphs that can be worked out beforehand, wherever they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from tensorflow.core.protobuf import meta_graph_pb2, saved_model_pb2

from neural_mp.adaptors.tensorflow.functions import called, reached
from neural_mp.adaptors.tensorflow.safe_ops import Found, suspicious
from neural_mp.adaptors.tensorflow.tensor_graph import node_of
from neural_mp.core.neighbours import beside

_ASSETS = "assets"
#: What may be handed to the function that fills a table: the table, and the name of an asset.
_HANDED = ("asset", "resource")
#: Where graphs of TensorFlow 1 keep what is run first.
_FIRST = ("saved_model_main_op", "legacy_init_op")


def check_saved_model(saved: saved_model_pb2.SavedModel, file: Path, *, session: bool) -> None:
    """See that a SavedModel does nothing but compute, restore its variables and read its assets.

    Args:
        saved: what its file holds.
        file: the file.
        session: whether it is read by a session, which runs no functions for tables.

    Raises:
        ModelLoadError: it does more.
    """
    for meta in saved.meta_graphs:
        for asset in meta.asset_file_def:
            beside(file, asset.filename, _ASSETS)
        found = list(suspicious(meta.graph_def))
        if found:
            _check(meta, found, f"the SavedModel {str(file.parent)!r}", session)


def _check(
    meta: meta_graph_pb2.MetaGraphDef, found: Iterable[Found], what: str, session: bool
) -> None:
    # Objects hand over what they save: the functions that write and read it are none of theirs.
    run = reached(meta.graph_def, _entered(meta), meta.object_graph_def.concrete_functions)
    restored = reached(meta.graph_def, [meta.saver_def.restore_op_name])
    for item in found:
        if item.fills_a_table:
            fine = _from_asset(meta, item) if not item.where else not session
            fine = fine and (not item.where or _handed_assets(meta, item))
        elif item.saves:
            fine = not _within(item, run) and not _within(item, restored)
        else:
            fine = item.restores and not _within(item, run)
        if not fine:
            raise item.refusal(what)


def _within(found: Found, run: tuple[set[str], set[str]]) -> bool:
    nodes, functions = run
    return found.where in functions if found.where else found.node.name in nodes


def _entered(meta: meta_graph_pb2.MetaGraphDef) -> list[str]:
    """The nodes that are run by somebody: results of signatures, and what is run first."""
    results = [
        node_of(name)
        for signature in meta.signature_def.values()
        for tensor in signature.outputs.values()
        for name in _tensors_of(tensor)
    ]
    return [
        *results,
        *(
            name
            for key in _FIRST
            if key in meta.collection_def
            for name in meta.collection_def[key].node_list.value
        ),
    ]


def _tensors_of(info: meta_graph_pb2.TensorInfo) -> Iterator[str]:
    """The tensors that one result consists of."""
    sparse = info.coo_sparse
    yield from (info.name, sparse.values_tensor_name, sparse.indices_tensor_name)
    yield sparse.dense_shape_tensor_name
    for component in info.composite_tensor.components:
        yield from _tensors_of(component)


def _from_asset(meta: meta_graph_pb2.MetaGraphDef, found: Found) -> bool:
    """Whether a node fills a table from a file whose name is handed to it when it is read."""
    nodes = {node.name: node for node in meta.graph_def.node}
    assets = {node_of(asset.tensor_info.name) for asset in meta.asset_file_def}
    name = node_of(found.node.input[1]) if len(found.node.input) > 1 else ""
    while name in nodes and name not in assets and nodes[name].op == "Identity":
        name = node_of(nodes[name].input[0])
    return name in assets


def _handed_assets(meta: meta_graph_pb2.MetaGraphDef, found: Found) -> bool:
    """Whether the function with this node takes the name of the file, and gets that of an asset."""
    objects = meta.object_graph_def
    if found.where not in objects.concrete_functions or _called_within(meta, found.where):
        return False
    (function,) = (f for f in meta.graph_def.library.function if f.signature.name == found.where)
    arguments = {argument.name for argument in function.signature.input_arg}
    named = len(found.node.input) > 1 and node_of(found.node.input[1]) in arguments
    bound = objects.concrete_functions[found.where].bound_inputs
    kinds = [objects.nodes[i].WhichOneof("kind") if i < len(objects.nodes) else None for i in bound]
    return named and len(bound) == len(arguments) and set(kinds) <= set(_HANDED)


def _called_within(meta: meta_graph_pb2.MetaGraphDef, name: str) -> bool:
    """Whether another function calls one, and so could hand it any name of a file."""
    library = meta.graph_def.library
    if any(gradient.gradient_func == name for gradient in library.gradient):
        return True
    return any(name in called(node) for function in library.function for node in function.node_def)
