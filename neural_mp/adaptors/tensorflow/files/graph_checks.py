"""Ops that an untrusted graph may contain: those that compute without side effects.

Stateless ops are allowed except those known to reach files or Python. Of the ops that TensorFlow
marks as stateful, only those known to keep their state in memory are allowed, so that stateful ops
of later versions are refused.

Nor may a node have a fault that TensorFlow, which checks most nodes while it reads a graph, does
not report: such a node ends the process, waits forever, or raises errors of other types.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import tensorflow as tf
from google.protobuf.message import DecodeError
from tensorflow.core.framework import types_pb2
from tensorflow.core.framework.attr_value_pb2 import AttrValue
from tensorflow.core.framework.op_def_pb2 import OpDef
from tensorflow.core.framework.tensor_pb2 import TensorProto
from tensorflow.core.protobuf import meta_graph_pb2, saved_model_pb2
from tensorflow.python.framework import op_def_registry

from neural_mp.adaptors.tensorflow.graph.control_flow import (
    find_reachable_parts,
    iterate_called_functions,
)
from neural_mp.adaptors.tensorflow.graph.ops import INTEGER_KERNELS, PLACEHOLDERS, Role, get_op_role
from neural_mp.adaptors.tensorflow.graph.tensor_graph import (
    CONSTANT,
    GraphDef,
    NodeDef,
    get_node_name,
    is_control,
    read_constant_shape,
)
from neural_mp.core.int8_accumulation import KernelKind
from neural_mp.errors import ModelLoadError
from neural_mp.io.files import resolve_sibling
from neural_mp.io.limits import (
    MAX_NODE_NAME_CHARS,
    MAX_NODE_TENSORS,
    MAX_REPEATED_BYTES,
    MAX_TENSOR_RANK,
    is_trusted,
)
from neural_mp.util.validators import format_path_key, preview_value

#: Reason for refusal → ops with this effect, although TensorFlow marks the ops as stateless.
_HARMFUL = {
    "may access files, other machines or Python": re.compile(
        r"Abort|CacheDataset|DatasetFromGraph|DebugIdentity|DebugNanCount|DebugNumericSummary"
        r"|(De|En)codeProto(V2)?|(Experimental)?SleepDataset|GenerateVocabRemapping|ImmutableConst"
        r"|InitializeTableFromTextFile|MatchingFiles|PyFuncStateless|ReadFile|Reader.*"
        r"|RegisterDataset(V2)?|Snapshot\w*(Dataset|Reader)(V2)?|SnapshotChunkDataset|TPU.*"
    ),
    "calls native functions by name, or compiled code from the graph": re.compile(
        r"_?Xla(Call|Compile|Custom|Host|Launch|Recv|Run|Send)\w*|MlirPassthroughOp|TRTEngineOp"
        r"|RemoteFusedGraphExecute"
    ),
    "does not check its inputs, so that wrong ones end the process": re.compile(
        r"BoostedTrees\w+|FakeQuantWithMinMaxVarsPerChannelGradient|InfeedDequeueTuple"
        r"|QueueDequeueManyV2|SplitDedupData|XlaSparse\w+|_ScopedAllocator\w*"
        r"|__?Mkl(?!LayerNorm|FusedInstanceNorm|FusedBatchMatMulV2|FusedMish)\w+"
    ),
}
#: Reason for the refusal of ops that are not known to compute only.
_UNKNOWN = "may access files, other machines or Python"
#: Stateful ops with their state in memory only.
_IN_MEMORY = re.compile(
    # Variables.
    r"Variable(V2|Shape)?|VarHandleOp|VarIsInitializedOp|ReadVariableOp|Assign(Add|Sub)?VariableOp"
    r"|Resource\w+|DestroyResourceOp|DisableCopyOnRead|TemporaryVariable|GuaranteeConst|Empty"
    r"|DeepCopy|DeviceIndex"
    # Flow of control.
    r"|Assert|Case|CheckNumerics(V2)?|If|StatefulPartitionedCall|Timestamp|While"
    # Random numbers.
    r"|Multinomial|ParameterizedTruncatedNormal|Random(Crop|Gamma|Poisson(V2)?|Shuffle)"
    r"|Random(StandardNormal|Uniform(Int)?)|Rng(ReadAndSkip|Skip)|NonDeterministicInts"
    r"|SampleDistortedBoundingBox(V2)?|Stateful(RandomBinomial|TruncatedNormal)"
    r"|Stateful(StandardNormal(V2)?|Uniform(FullInt|Int)?)|StatelessRandomGetAlg|TruncatedNormal"
    r"|(All|LearnedUnigram|LogUniform|ThreadUnsafeUnigram|Uniform)CandidateSampler"
    r"|(Anonymous|Delete|Dummy)(Random)?SeedGenerator"
    # Collections of tensors.
    r"|Stack\w*|TensorArray\w*|(Anonymous)?(Mutable)?(Dense)?HashTable(V2)?|InitializeTableV2"
    r"|(Anonymous)?MutableHashTableOfTensors(V2)?|LookupTable\w+|Barrier"
    r"|(FIFO|PaddingFIFO|Priority|RandomShuffle)Queue(V2)?|Queue\w+V2|FakeQueue"
    r"|(Sparse)?ConditionalAccumulator"
    # Data in memory.
    r"|(Anonymous)?Iterator(V2|V3)?|IteratorGet\w+|IteratorToStringHandle|MakeIterator"
    r"|DeleteIterator|OneShotIterator|DatasetToSingleElement|ReduceDataset|GeneratorDataset"
    r"|(List|Random|Range|SparseTensorSlice|Tensor|TensorSlice)Dataset(V2)?"
    r"|Shuffle(AndRepeat)?Dataset(V2|V3)?"
    # Others.
    r"|CudnnRNN\w*|Print"
)
#: Ops that save and restore variables, which every SavedModel contains.
_SAVES = re.compile(r"Save(V2|Slices)?|MergeV2Checkpoints")
_RESTORES = re.compile(r"Restore(V2|Slice)?")
_TABLES_OF_FILES = re.compile(r"InitializeTableFromTextFile(V2)?")
#: Streams that `PrintV2` may write to.
_STREAMS = re.compile(rb"|stdout|stderr|log\((info|warning|error)\)")


@dataclass(frozen=True)
class UnsafeOp:
    """An op that does more than compute.

    Attributes:
        node: the op's node.
        where: function that contains the node; empty for the graph itself.
    """

    node: NodeDef
    where: str = ""

    def refusal_error(self, what: str) -> ModelLoadError:
        """Return the error that refuses the graph, described by `what`."""
        where = f" of function {self.where!r}" if self.where else ""
        return ModelLoadError(
            f"{what} is refused: ops must only compute, but node {self.node.name!r}{where} has the "
            f"op {self.node.op!r}, which {_find_refusal_reason(self.node.op) or _UNKNOWN}. Export "
            "the model without this op; or, if you trust the op in this file, allow it with "
            "--trust "
            f"{self.node.op} or trust=({self.node.op!r},)"
        )


def is_harmless(node: NodeDef) -> bool:
    """Whether a node computes and accesses only its inputs and its own memory.

    True for unknown op types, which TensorFlow itself refuses.
    """
    op = node.op
    if is_trusted(op):
        return True
    if op == "PrintV2":
        stream = node.attr["output_stream"].s if "output_stream" in node.attr else b""
        return _STREAMS.fullmatch(stream) is not None
    if op in ("Copy", "CopyHost"):
        return not node.attr["debug_ops_spec"].list.s
    return _is_harmless_op(op)


@cache
def _is_harmless_op(op: str) -> bool:
    if _find_refusal_reason(op) is not None:
        return False
    definition = op_def_registry.get(op)
    if definition is None or not definition.is_stateful:
        return True
    return _IN_MEMORY.fullmatch(op) is not None


def _find_refusal_reason(op: str) -> str | None:
    """Return the reason for refusing an op that TensorFlow marks as stateless, if there is one."""
    return next((reason for reason, ops in _HARMFUL.items() if ops.fullmatch(op)), None)


def check_graph(graph: GraphDef, what: str) -> None:
    """Check that a graph only computes, before TensorFlow loads the graph.

    TensorFlow runs parts of a graph during loading to infer shapes. Errors describe the graph by
    `what`.

    Raises:
        ModelLoadError: a node of the graph or of a function in its library does more.
    """
    for op in iterate_unsafe_ops(graph):
        raise op.refusal_error(what)
    check_nodes(graph, what)


def check_nodes(graph: GraphDef, what: str) -> None:
    """Check the nodes of a graph, and of its functions, for faults that TensorFlow does not report.

    Raises:
        ModelLoadError: a node has such a fault.
    """
    library = graph.library.function
    functions = ((f.node_def, f" of function {preview_value(f.signature.name)}") for f in library)
    for nodes, where in ((graph.node, ""), *functions):
        by_name = {node.name: node for node in nodes}
        for node in by_name.values():
            for fault in _faults_of_node(by_name, node):
                raise ModelLoadError(
                    f"{what} is refused: node {preview_value(node.name)}{where} "
                    f"({format_path_key(node.op)}) is malformed: {fault}. Export the model again"
                )


def iterate_unsafe_ops(graph: GraphDef) -> Iterator[UnsafeOp]:
    """Yield all nodes of a graph and its functions that do more than compute."""
    for node in graph.node:
        yield from _of_node(node, "")
    for function in graph.library.function:
        for node in function.node_def:
            yield from _of_node(node, function.signature.name)


def _of_node(node: NodeDef, where: str) -> Iterator[UnsafeOp]:
    if not is_harmless(node):
        yield UnsafeOp(node, where)
    # An op name is accepted in place of a function name, too.
    for name in iterate_called_functions(node):
        if name != node.op and not (is_trusted(name) or _is_harmless_op(name)):
            yield UnsafeOp(NodeDef(name=node.name, op=name), where)


_ASSETS = "assets"
#: Objects that a table initializer may capture: the file name of an asset, and the table.
_HANDED = ("asset", "resource")
#: Collections in which TensorFlow 1 keeps initialization ops.
_FIRST = ("saved_model_main_op", "legacy_init_op")
#: Collection in which TensorFlow 1 keeps the assets.
_ASSET_COLLECTION = "saved_model_assets"


def check_saved_model(saved: saved_model_pb2.SavedModel, file: Path, *, session: bool) -> None:
    """Check that a SavedModel only computes, restores its variables and reads its assets.

    A session that loads the model runs no table functions.

    Raises:
        ModelLoadError: the SavedModel does more.
    """
    for meta in saved.meta_graphs:
        assets = _find_assets(meta, file)
        for asset in assets:
            resolve_sibling(file, asset.filename, _ASSETS)
        what = f"the SavedModel {str(file.parent)!r}"
        ops = list(iterate_unsafe_ops(meta.graph_def))
        if ops:
            paths = {get_node_name(asset.tensor_info.name) for asset in assets}
            _check_ops(meta, ops, what, paths, session)
        check_nodes(meta.graph_def, what)
        if session:
            _check_calls(meta.graph_def, what)


def _check_calls(graph: GraphDef, what: str) -> None:
    """Check that all functions exist that nodes call.

    A session reports a missing function with the text of all others, and searches this text for
    names in quadratic time.
    """
    defined = {function.signature.name for function in graph.library.function}
    for node in graph.node:
        for name in iterate_called_functions(node):
            if name != node.op and name not in defined and op_def_registry.get(name) is None:
                raise ModelLoadError(
                    f"{what} is refused: node {preview_value(node.name)} calls the function "
                    f"{preview_value(name)}, which the file does not contain. Save the model again"
                )


def _find_assets(
    meta: meta_graph_pb2.MetaGraphDef, file: Path
) -> list[meta_graph_pb2.AssetFileDef]:
    if meta.asset_file_def:
        return list(meta.asset_file_def)
    assets = []
    if _ASSET_COLLECTION in meta.collection_def:
        for packed in meta.collection_def[_ASSET_COLLECTION].any_list.value:
            asset = meta_graph_pb2.AssetFileDef()
            try:
                unpacked = packed.Unpack(asset)
            except DecodeError:
                unpacked = False
            if not unpacked:
                raise ModelLoadError(
                    f"the SavedModel {str(file.parent)!r} is refused: entries of its collection "
                    f"{_ASSET_COLLECTION!r} must be assets, got {packed.type_url!r}"
                )
            assets.append(asset)
    return assets


def _check_ops(
    meta: meta_graph_pb2.MetaGraphDef,
    ops: Iterable[UnsafeOp],
    what: str,
    assets: set[str],
    session: bool,
) -> None:
    results = (info for s in meta.signature_def.values() for info in s.outputs.values())
    outputs = [get_node_name(name) for info in results for name in _iterate_component_tensors(info)]
    present = [key for key in _FIRST if key in meta.collection_def]
    first = [name for key in present for name in meta.collection_def[key].node_list.value]
    computed = find_reachable_parts(meta.graph_def, outputs)
    # Loading objects does not run the functions that save and restore them.
    functions = meta.object_graph_def.concrete_functions
    run = find_reachable_parts(meta.graph_def, [*outputs, *first], functions)
    restored = find_reachable_parts(meta.graph_def, [meta.saver_def.restore_op_name])
    for item in ops:
        if _TABLES_OF_FILES.fullmatch(item.node.op) and item.where:
            fine = not session and _reads_bound_asset(meta, item)
        elif _TABLES_OF_FILES.fullmatch(item.node.op):
            # Only initialization replaces the paths in the graph by those of the assets.
            fine = _reads_asset(meta, item, assets) and not _is_reached(item, computed)
        elif _SAVES.fullmatch(item.node.op):
            fine = not _is_reached(item, run) and not _is_reached(item, restored)
        else:
            restores = _RESTORES.fullmatch(item.node.op) is not None
            fine = restores and not _is_reached(item, run)
        if not fine:
            raise item.refusal_error(what)


def _is_reached(op: UnsafeOp, run: tuple[set[str], set[str]]) -> bool:
    nodes, functions = run
    return op.where in functions if op.where else op.node.name in nodes


def _iterate_component_tensors(info: meta_graph_pb2.TensorInfo) -> Iterator[str]:
    sparse = info.coo_sparse
    yield from (info.name, sparse.values_tensor_name, sparse.indices_tensor_name)
    yield sparse.dense_shape_tensor_name
    for component in info.composite_tensor.components:
        yield from _iterate_component_tensors(component)


def _reads_asset(meta: meta_graph_pb2.MetaGraphDef, op: UnsafeOp, assets: set[str]) -> bool:
    """Whether a node fills a table from an asset whose path is set on loading."""
    nodes = {node.name: node for node in meta.graph_def.node}
    name = get_node_name(op.node.input[1]) if len(op.node.input) > 1 else ""
    while name in nodes and name not in assets and get_op_role(nodes[name]) is Role.IDENTITY:
        name = get_node_name(nodes[name].input[0])
    return name in assets


def _reads_bound_asset(meta: meta_graph_pb2.MetaGraphDef, op: UnsafeOp) -> bool:
    """Whether the node's function reads a file named by an argument that is bound to an asset."""
    objects = meta.object_graph_def
    if op.where not in objects.concrete_functions or _has_callers(meta, op.where):
        return False
    (function,) = (f for f in meta.graph_def.library.function if f.signature.name == op.where)
    arguments = {argument.name for argument in function.signature.input_arg}
    named = len(op.node.input) > 1 and get_node_name(op.node.input[1]) in arguments
    bound = objects.concrete_functions[op.where].bound_inputs
    kinds = [objects.nodes[i].WhichOneof("kind") if i < len(objects.nodes) else None for i in bound]
    return named and len(bound) == len(arguments) and set(kinds) <= set(_HANDED)


def _has_callers(meta: meta_graph_pb2.MetaGraphDef, name: str) -> bool:
    """Whether another function calls the named one, possibly with any file name."""
    library = meta.graph_def.library
    if any(gradient.gradient_func == name for gradient in library.gradient):
        return True
    return any(
        name in iterate_called_functions(node) for f in library.function for node in f.node_def
    )


#: Element types of tensors, references included.
_TYPES = frozenset(types_pb2.DataType.values()) - {types_pb2.DT_INVALID}
#: Types without values in a file.
_HANDLES = frozenset({types_pb2.DT_RESOURCE, types_pb2.DT_VARIANT})
#: Kind of an attribute → field of the value.
_KINDS = {
    **{"string": "s", "int": "i", "float": "f", "bool": "b"},
    **{kind: kind for kind in ("type", "shape", "tensor", "func")},
}
#: Ops that read variables by name.
_RESTORING = ("RestoreV2", "Restore", "RestoreSlice")
#: Ops that add a tensor to the inputs of an integer kernel.
_SUMS = (b"Sum", b"Add")
#: Tensors with the limits of input and weight.
_LIMITS = 4
#: Axes of an image.
_AXES = 4


def _faults_of_node(nodes: Mapping[str, NodeDef], node: NodeDef) -> Iterator[str]:
    definition = op_def_registry.get(node.op)
    yield from _faults_of_names(nodes, node)
    for key, attribute in node.attr.items():
        for fault in _faults_of_attribute(attribute):
            yield f"its attribute {key!r} {fault}"
    if definition is not None:
        yield from _faults_of_attribute_kinds(node, definition)
        yield from _faults_of_tensor_counts(node, definition)
    if node.op == CONSTANT and node.attr["dtype"].type != node.attr["value"].tensor.dtype:
        yield "its value must be of its type"
    # The ops fused into a kernel determine the numbers of tensors.
    if node.op in INTEGER_KERNELS:
        yield from _faults_of_kernel(node)
    if node.op == "SplitV":
        sizes = _resolve_constant(nodes, node, 1)
        if sizes is not None and len(read_constant_shape(sizes)) != 1:
            yield "its sizes must be a vector"
    if get_op_role(node) is Role.GATHER and "batch_dims" in node.attr and node.attr["batch_dims"].i:
        yield from _faults_of_batch_axes(nodes, node)


def _faults_of_names(nodes: Mapping[str, NodeDef], node: NodeDef) -> Iterator[str]:
    """Yield faults of a node's names, and of the names of the variables that a node restores."""
    names: list[str | bytes] = [node.name, node.op, *node.input]
    if node.op in _RESTORING:
        constants = (
            _resolve_constant(nodes, node, position) for position in range(1, len(node.input))
        )
        tensors = (constant.attr["value"].tensor for constant in constants if constant is not None)
        names += [text for tensor in tensors for text in tensor.string_val]
    longest = max(map(len, names))
    if longest > MAX_NODE_NAME_CHARS:
        yield f"names must have at most {MAX_NODE_NAME_CHARS} characters, got {longest}"


def _faults_of_batch_axes(nodes: Mapping[str, NodeDef], node: NodeDef) -> Iterator[str]:
    axes = abs(node.attr["batch_dims"].i)
    if _resolve_constant(nodes, node, 2) is None:
        yield "its axis must be constant, since it has batch axes"
    for position, least in ((0, axes + 1), (1, axes)):
        rank = _find_known_rank(nodes, node, position)
        if rank is not None and rank < least:
            yield f"its input {position} must have at least {least} axes, got {rank}"


def _find_known_rank(nodes: Mapping[str, NodeDef], node: NodeDef, position: int) -> int | None:
    """Return the number of axes of an input that is a constant or a placeholder; None if unknown.

    The axes of computed inputs are only known after reading the graph.
    """
    constant = _resolve_constant(nodes, node, position)
    if constant is not None:
        return len(read_constant_shape(constant))
    source = nodes.get(get_node_name(node.input[position])) if position < len(node.input) else None
    if source is None or source.op not in PLACEHOLDERS or "shape" not in source.attr:
        return None
    shape = source.attr["shape"].shape
    return None if shape.unknown_rank else len(shape.dim)


def _faults_of_attribute(attribute: AttrValue) -> Iterator[str]:
    kind = attribute.WhichOneof("value")
    tensors = [attribute.tensor] if kind == "tensor" else attribute.list.tensor
    types = [attribute.type] if kind == "type" else attribute.list.type
    for dtype in (*types, *(tensor.dtype for tensor in tensors)):
        if dtype not in _TYPES:
            yield f"must be a type of TensorFlow, got number {dtype}"
    for tensor in tensors:
        yield from _faults_of_tensor(tensor)


def _faults_of_tensor(tensor: TensorProto) -> Iterator[str]:
    sizes = [dimension.size for dimension in tensor.tensor_shape.dim]
    if len(sizes) > MAX_TENSOR_RANK or any(size < 0 for size in sizes):
        yield f"must have a shape of at most {MAX_TENSOR_RANK} known sizes"
        return
    if tensor.dtype in _HANDLES:
        yield "must consist of numbers or strings"
    width = tf.as_dtype(tensor.dtype).size if tensor.dtype in _TYPES - _HANDLES else 0
    nbytes, actual = math.prod(sizes) * width, len(tensor.tensor_content)
    if actual and tensor.dtype == types_pb2.DT_STRING:
        yield "must list its strings"
    elif actual and width and actual != nbytes:
        yield f"must have {nbytes} bytes for its shape, got {actual}"
    if not actual and nbytes > MAX_REPEATED_BYTES:
        yield f"must have at most {MAX_REPEATED_BYTES} bytes, got a shape of {nbytes} bytes"


def _faults_of_attribute_kinds(node: NodeDef, definition: OpDef) -> Iterator[str]:
    """Yield attributes that are missing, or values of another kind than the op declares."""
    for declared in definition.attr:
        kind = "list" if declared.type.startswith("list(") else _KINDS[declared.type]
        if declared.name in node.attr:
            actual = node.attr[declared.name].WhichOneof("value")
            # An empty list may lack a value; in functions, an attribute may be a parameter.
            matches = actual in (kind, "placeholder") or (actual is None and kind == "list")
            if not matches:
                yield f"its attribute {declared.name!r} must be of the kind {declared.type!r}"
        elif not declared.HasField("default_value"):
            yield f"its attribute {declared.name!r} is missing"


def _faults_of_tensor_counts(node: NodeDef, definition: OpDef) -> Iterator[str]:
    for argument in (*definition.input_arg, *definition.output_arg):
        count = node.attr[argument.number_attr].i if argument.number_attr in node.attr else 0
        if not 0 <= count <= MAX_NODE_TENSORS:
            yield (
                f"its attribute {argument.number_attr!r} must be from 0 to {MAX_NODE_TENSORS}, got "
                f"{count}"
            )


def _faults_of_kernel(node: NodeDef) -> Iterator[str]:
    """Yield wrong numbers of inputs and results of an integer kernel."""
    lists = {key: attribute.list for key, attribute in node.attr.items()}
    steps = list(lists["fused_ops"].s) if "fused_ops" in lists else []
    sums = sum(step in _SUMS for step in steps)
    requantizes, dequantizes = b"Requantize" in steps, b"Dequantize" in steps
    convolves = INTEGER_KERNELS[node.op] is not KernelKind.DENSE
    needed = {
        "Tdevice_inputs": 2 + (b"BiasAdd" in steps) + sums,
        "Thost_inputs": _LIMITS + 2 * requantizes + 2 * (sums and requantizes and convolves),
        "Tdevice_outputs": 1,
        "Thost_outputs": 0 if dequantizes else 2,
    }
    actual = {key: len(lists[key].type) if key in lists else 0 for key in needed}
    for key, count in needed.items():
        if actual[key] < count:
            fused = ", ".join(step.decode(errors="replace") for step in steps) or "none"
            yield (
                f"its attribute {key!r} must list {count} types, got {actual[key]} (fused ops: "
                f"{fused})"
            )
    total = actual["Tdevice_inputs"] + actual["Thost_inputs"]
    inputs = sum(not is_control(tensor) for tensor in node.input)
    if inputs != total:
        yield f"it must have {total} inputs, got {inputs}"
    if convolves and len(lists["strides"].i) != _AXES:
        yield f"its strides must be {_AXES} numbers, got {len(lists['strides'].i)}"


def _resolve_constant(nodes: Mapping[str, NodeDef], node: NodeDef, position: int) -> NodeDef | None:
    """Return the constant that is an input of a node, directly or by Identities; None if none."""
    visited = set()
    while position < len(node.input):
        source = nodes.get(get_node_name(node.input[position]))
        if (
            source is None
            or source.name in visited
            or (source.op != CONSTANT and get_op_role(source) is not Role.IDENTITY)
        ):
            return None
        if source.op == CONSTANT:
            return source
        visited.add(source.name)
        node, position = source, 0
    return None
