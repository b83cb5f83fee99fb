"""The representation of an OpenVINO model, its ops and the edges between them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np

from neural_mp.adaptors.common.named_graphs import GraphModel, Run
from neural_mp.adaptors.common.signatures.signature import Array
from neural_mp.adaptors.openvino.fusion import (
    GraphStructure,
    get_kernel_kind,
    graph_structure,
    has_weight,
    is_product,
    list_factors,
    list_joined_inputs,
)
from neural_mp.adaptors.openvino.graph.edit import (
    SIXTEEN_BITS,
    get_known_sizes,
    get_op_type,
    get_tensor_name,
    iterate_read_constants,
    name_of,
    rename_graph_ops,
)
from neural_mp.adaptors.openvino.kernel_check import find_rejected_ops, keep_rejected
from neural_mp.adaptors.openvino.ops import Role, has_role
from neural_mp.adaptors.openvino.runtime import ShapedRunner, from_bytes, ov, to_bytes
from neural_mp.core.graph import MIN_CONSTANT_ELEMENTS, Layer, Op, OpGraph
from neural_mp.core.int8_accumulation import KernelKind
from neural_mp.core.precision import Precision


@dataclass(frozen=True, eq=False)
class OpenVinoModel(GraphModel[ov.Model]):
    """An `openvino.Model` that OpenVINO runs, with the signature in the order of the data.

    Attributes:
        streams: concurrent calls that the model is compiled for; None for one at a time.
    """

    streams: int | None = None

    @cached_property
    def structure(self) -> GraphStructure:
        """The structure of the graph."""
        return graph_structure(self.program, self.rejected_ops)

    @cached_property
    def rejected_ops(self) -> Mapping[str, str]:
        """Op → the reason why it cannot run next to integer kernels; empty once converted."""
        return {} if self.given is None else find_rejected_ops(self.program)

    @cached_property
    def _input_names(self) -> list[str]:
        return [name_of(port.get_node()) for port in self.active_graph.inputs]

    @cached_property
    def _output_positions(self) -> list[int]:
        """The positions in the graph of the outputs of the signature."""
        names = [name_of(port.get_node()) for port in self.active_graph.outputs]
        return [names.index(tensor) for tensor in self.signature.output_tensors]

    def in_order(self, outputs: Sequence[Array]) -> list[Array]:
        """Return outputs of the graph in the order of the signature."""
        return [outputs[position] for position in self._output_positions]

    def order_feeds(self, bound: Mapping[str, Array]) -> list[Array]:
        """Return bound inputs in the order of the graph."""
        return [bound[tensor] for tensor in self._input_names]

    def compile_graph(self) -> Run:
        """Return the compiled graph to run, for the allowed number of threads."""
        inputs = self._input_names
        example = tuple(np.shape(self.example[tensor]) for tensor in inputs)
        is_converted = self.given is None
        runner = ShapedRunner(
            self.active_graph, example, streams=self.streams, rounds=not is_converted
        )
        return lambda bound: self.in_order(runner([bound[tensor] for tensor in inputs]))

    def __reduce__(self) -> tuple[Callable[..., OpenVinoModel], tuple[Any, ...]]:
        """Return the parts for pickling: graphs as the contents of their files."""
        rest = {field.name: getattr(self, field.name) for field in fields(self)}
        original = rest.pop("given")
        contents = [to_bytes(rest.pop("program"))]
        if original is not None and original is not self.program:
            contents.append(to_bytes(original))
        return _unpickle_model, (contents, original is None, {**rest, "_runners": {}})


def with_streams(model: OpenVinoModel, count: int) -> OpenVinoModel:
    """Return a model compiled for concurrent calls."""
    return replace(model, streams=count, _runners={})


def rename_ops(model: OpenVinoModel, names: Mapping[str, str]) -> OpenVinoModel:
    """Return a loaded model with new names of ops, and of what is named after these."""
    program = model.program.clone()
    keep_rejected(model.program, program, rename_graph_ops(program, names))
    return replace(model, program=program, given=program, _runners={})


def _unpickle_model(
    contents: list[tuple[bytes, bytes]], converted: bool, rest: dict[str, Any]
) -> OpenVinoModel:
    graphs = [from_bytes(*content) for content in contents]
    return OpenVinoModel(graphs[0], given=None if converted else graphs[-1], **rest)


#: Start of the names of ops that come from the modules of a PyTorch model.
_MODULE = "__module."


def build_graph(model: OpenVinoModel) -> OpGraph:
    """Return every node with edges and fusion group; further results follow as ops."""
    structure = model.structure
    counted: set[str] = set()
    groups = structure.fusion_groups.values()
    sums = {group.residual_sum.ops[-1] for group in groups if group.residual_sum is not None}
    ops = []
    for name, node in structure.nodes.items():
        # A constant that several ops read counts once.
        constants = {
            name_of(c): c for c in iterate_read_constants(node) if name_of(c) not in counted
        }
        counted.update(constants)
        weights = sum(int(c.get_data().size) for c in constants.values() if _is_weight(c))
        quantized: Iterable[str] = ()
        if name in structure.fusion_groups:
            factors = dict.fromkeys(map(get_tensor_name, list_factors(node)))
            quantized = factors if is_product(node) else list_joined_inputs(node)
        ops.append(
            Op(
                name,
                get_op_type(node),
                tuple(dict.fromkeys(structure.read_by(name))),
                fusion_group=structure.layer_of.get(name),
                quantize_agnostic=name in structure.agnostic_ops,
                writes_int8=has_role(node, Role.SEQUENCE) and name in structure.fusion_groups,
                joins_int8=has_role(node, Role.JOINING) and name in structure.fusion_groups,
                quantized_inputs=tuple(quantized),
                channel_scales=has_weight(node) and get_kernel_kind(node) is KernelKind.DEPTHWISE,
                quantizes_terms=name in sums,
                weights=weights,
                constants=_list_large_constants(node),
                layers=_parse_module_layers(name, get_op_type(node)),
                source_precision=_find_source_precision(node),
                shape=get_known_sizes(node.output(0)),
            )
        )
    for part, op in structure.parts.items():
        moved = op in structure.agnostic_ops
        ops.append(Op(part, get_op_type(structure.nodes[op]), (op,), quantize_agnostic=moved))
    outputs = {get_tensor_name(result.input_value(0)) for result in model.program.get_results()}
    return OpGraph(ops, model.signature.input_tensors, sorted(outputs & set(structure.tensors)))


def _list_large_constants(node: ov.Node) -> tuple[str, ...]:
    weights = filter(_is_weight, iterate_read_constants(node))
    large = (c for c in weights if c.get_data().size >= MIN_CONSTANT_ELEMENTS)
    return tuple(dict.fromkeys(map(name_of, large)))


def _is_weight(constant: ov.Node) -> bool:
    return bool(constant.get_element_type().is_real())


def _find_source_precision(node: ov.Node) -> Precision:
    """Return the precision of the first 16-bit input of a node; FP32 if there is none."""
    kinds = (port.get_element_type() for port in node.inputs())
    return next((SIXTEEN_BITS[kind] for kind in kinds if kind in SIXTEEN_BITS), Precision.FP32)


def _parse_module_layers(name: str, kind: str) -> tuple[Layer, ...]:
    """Return the PyTorch modules in the name of an op, such as `__module.layer1.0.conv1/Conv`.

    The op type stands for the type of the innermost module.
    """
    if not name.startswith(_MODULE):
        return ()
    path = name.removeprefix(_MODULE).partition("/")[0].split(".")
    names = [".".join(path[: end + 1]) for end in range(len(path))]
    return tuple(Layer(layer, kind if layer == names[-1] else "Module") for layer in names)
