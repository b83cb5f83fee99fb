"""The representation of an ONNX model, its ops and the edges between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import onnx_ir as ir

from neural_mp.adaptors.common.named_graphs import GraphModel, Run
from neural_mp.adaptors.onnxrt.constant_folding import find_stored_constants
from neural_mp.adaptors.onnxrt.fusion import GraphStructure, graph_structure
from neural_mp.adaptors.onnxrt.graph.edit import (
    SIXTEEN_BITS,
    get_known_sizes,
    iterate_node_constants,
    read_by,
)
from neural_mp.adaptors.onnxrt.graph.sessions import CPU, Runner
from neural_mp.adaptors.onnxrt.kernel_check import KernelCheck
from neural_mp.adaptors.onnxrt.kernels.ops import (
    Role,
    has_role,
    is_convolution,
    is_dequantize,
    is_product,
)
from neural_mp.adaptors.onnxrt.kernels.registry import CONTRIB, INT8_PRODUCT, has_kernel
from neural_mp.adaptors.onnxrt.kernels.writers import is_pointwise
from neural_mp.adaptors.onnxrt.source_quantization import IN_INTEGERS
from neural_mp.core.graph import MIN_CONSTANT_ELEMENTS, Op, OpGraph
from neural_mp.core.precision import Precision
from neural_mp.errors import ModelLoadError


@dataclass(frozen=True)
class Origin:
    """The files of weights that were not loaded, with their initial state.

    Attributes:
        folder: the base folder of external data.
        files: file → its size in bytes and its modification time in ns.
    """

    folder: Path
    files: Mapping[str, tuple[int, int]]

    @classmethod
    def from_program(cls, folder: Path, program: ir.Model) -> Origin | None:
        """Return the files with the weights of a graph; None if all weights are in memory.

        Raises:
            ModelLoadError: a file is missing or outside of the folder.
        """
        names = {
            str(value.const_value.location)
            for value in program.graph.initializers.values()
            if isinstance(value.const_value, ir.ExternalTensor)
        }
        root = folder.resolve()
        for name in names:
            # Some versions of ONNX Runtime accept such paths.
            if not (root / name).resolve().is_relative_to(root):
                raise ModelLoadError(
                    f"weight file {name!r} must be inside the folder of the model, "
                    f"{str(folder)!r}; move the file into that folder"
                )
        return (
            cls(folder, {name: _size_and_mtime(folder / name) for name in names}) if names else None
        )

    def check_unchanged(self) -> None:
        """Check that the weight files are unchanged.

        Raises:
            ModelLoadError: a file was changed.
        """
        for name, state in self.files.items():
            if _size_and_mtime(self.folder / name) != state:
                raise ModelLoadError(
                    f"weight file {str(self.folder / name)!r} changed after the model was loaded; "
                    f"load the model again"
                )


def _size_and_mtime(file: Path) -> tuple[int, int]:
    try:
        status = file.stat()
    except OSError:
        raise ModelLoadError(
            f"weight file {str(file)!r} does not exist; put the file into the folder of the model"
        ) from None
    return status.st_size, status.st_mtime_ns


@dataclass(frozen=True, eq=False)
class OnnxModel(GraphModel[ir.Model]):
    """A graph that ONNX Runtime runs.

    Attributes:
        origin: the files of weights that were not loaded.
        opset: the ai.onnx opset of the canonicalized graph.
        obstacle: the reason why nothing can be converted, if any.
        provider: the execution provider to run the model.
        held: an object that must live as long as the model.
        quantized: the canonicalized graph with the quantization of the given model; None if the
            given model is not quantized.
        kernel_check: the check of the ops between integer ops; None for a converted model, and for
            providers without a check.
    """

    origin: Origin | None = None
    opset: int = 0
    obstacle: str | None = None
    provider: str = CPU
    held: Any = None
    quantized: ir.Model | None = None
    kernel_check: KernelCheck | None = None

    @property
    def rejected_ops(self) -> Mapping[str, str]:
        """Op → the reason why it cannot run between integer ops."""
        return {} if self.kernel_check is None else self.kernel_check.rejected_ops

    @cached_property
    def structure(self) -> GraphStructure:
        """The structure of the graph."""
        check = self.kernel_check
        if check is not None and check.program is self.program and not check.rejected_ops:
            return check.structure
        return graph_structure(self.program, self.rejected_ops)

    @property
    def weights_folder(self) -> Path | None:
        """The folder of external data."""
        return self.origin.folder if self.origin is not None else None

    @property
    def as_given(self) -> OnnxModel:
        """The model with the given quantization, of which `program` has only the ranges."""
        if self.given is None or self.quantized is None:
            return self
        return replace(self, program=self.quantized, quantized=None, _runners={})

    def create_session(self, program: ir.Model, **settings: Any) -> Runner:
        """Return a session of a graph that shares the weights of this model."""
        if self.origin is not None:
            self.origin.check_unchanged()
        return Runner(program, self.weights_folder, self.provider, **settings)

    def compile_graph(self) -> Run:
        """Return a session of the graph to run, for the allowed number of threads."""
        return self.create_session(self.active_graph).make_fetcher(self.signature.output_tensors)


def build_graph(model: OnnxModel) -> OpGraph:
    """Return every node with edges and fusion group; further results follow as ops.

    Nodes of bodies precede the node that runs them, which reads the results of the bodies. Per-step
    inputs of bodies are graph inputs.
    """
    structure = model.structure
    ops = []
    for name, node in structure.nodes.items():
        inputs = [structure.names[value] for value in read_by(node) if value in structure.names]
        ops.append(
            Op(
                name,
                node.op_type,
                tuple(dict.fromkeys(inputs)),
                fusion_group=structure.layer_of.get(name),
                quantize_agnostic=name in structure.agnostic_ops,
                writes_int8=_writes_int8_only(model, name),
                joins_int8=name in structure.fusion_groups and has_role(node, Role.JOINING),
                may_write_int8=name in structure.fusion_groups and is_convolution(node),
                weights=sum(constant.size for constant in iterate_node_constants(node)),
                source_precision=_find_source_precision(node),
                shape=get_known_sizes(node.outputs[0]) if node.outputs else None,
                constants=_large_constant_names(node),
            )
        )
    for part, op in structure.parts.items():
        moved = op in structure.agnostic_ops
        ops.append(Op(part, structure.nodes[op].op_type, (op,), quantize_agnostic=moved))
    outputs = {structure.names[v] for v in model.program.graph.outputs if v in structure.names}
    step_inputs = [structure.names[value] for value in structure.given_to_bodies]
    return OpGraph(ops, [*model.signature.input_tensors, *step_inputs], sorted(outputs))


def _large_constant_names(node: ir.Node) -> tuple[str, ...]:
    """Return the names of the large stored constants that a node reads, also through others."""
    stored = (
        constant for value in node.inputs if value for constant in find_stored_constants(value)
    )
    large = {
        str(value.name)
        for value in stored
        if value.const_value is not None and value.const_value.size >= MIN_CONSTANT_ELEMENTS
    }
    return tuple(sorted(large))


def _writes_int8_only(model: OnnxModel, name: str) -> bool:
    node, group = model.structure.nodes[name], model.structure.fusion_groups.get(name)
    if group is None or not has_role(node, Role.LAYER) or is_product(node):
        return False
    as_product = is_pointwise(node) and has_kernel(model.provider, INT8_PRODUCT, CONTRIB)
    return not as_product or group.activation is not None


def _find_source_precision(node: ir.Node) -> Precision:
    """Return INT8 if the given model quantizes the inputs of a node, or else its 16-bit precision.

    FP32 for other nodes.
    """
    source = node.inputs[0].producer() if node.inputs and node.inputs[0] is not None else None
    if IN_INTEGERS in node.meta or (source is not None and is_dequantize(source)):
        return Precision.INT8
    dtypes = (value.dtype for value in node.inputs if value is not None)
    return next((SIXTEEN_BITS[dtype] for dtype in dtypes if dtype in SIXTEEN_BITS), Precision.FP32)
