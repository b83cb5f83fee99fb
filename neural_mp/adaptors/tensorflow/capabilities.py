"""What every op can run in here, asked of the runtime's kernel registry and of its kernels."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import numpy as np
import tensorflow as tf

from neural_mp.adaptors.common.kernel_products import Products, products_for
from neural_mp.adaptors.tensorflow.fold import LAYERS
from neural_mp.adaptors.tensorflow.fusion import FusionGroup
from neural_mp.adaptors.tensorflow.kernel_products import (
    bf16_obstacle,
    forms_that_work,
    kernel_products,
)
from neural_mp.adaptors.tensorflow.kernel_registry import has_kernel, kernel_dtypes
from neural_mp.adaptors.tensorflow.loops import in_loops
from neural_mp.adaptors.tensorflow.model import TensorFlowModel
from neural_mp.adaptors.tensorflow.nodes import (
    CONSTANT,
    Array,
    NodeDef,
    data_inputs,
    dtype_attribute,
    integers_attribute,
    node_of,
    output_of,
    plain,
    text_attribute,
    typed_outputs,
)
from neural_mp.adaptors.tensorflow.padding import padding_of
from neural_mp.adaptors.tensorflow.tensor_forms import DTYPES, FORM_OF
from neural_mp.core.byte_products import REDUCED_WEIGHT, ByteProducts, KernelKind, weight_spec
from neural_mp.core.hardware import Hardware
from neural_mp.core.precision import FP32, RANGE_ALGORITHMS, OpConfig, Precision, QuantSpec
from neural_mp.space import Capability

_SIXTEEN = (Precision.BF16, Precision.FP16)
_KERNELS = {"Conv2D": KernelKind.CONVOLUTION, "MatMul": KernelKind.DENSE}


def capabilities(model: TensorFlowModel, hardware: Hardware) -> Mapping[str, Capability]:
    """Op → what it can run in here."""
    judge = _Judge(model, hardware)
    return {
        name: judge.capability(node)
        for name, node in model.graph.nodes.items()
        if node.op not in (CONSTANT, "NoOp") and name not in judge.fed
    }


def _int8_configs(products: ByteProducts) -> tuple[OpConfig, ...]:
    """The INT8 forms of a layer, best first; they differ in how the range is chosen."""
    weight = weight_spec(products)
    return tuple(
        OpConfig(Precision.INT8, weight, QuantSpec("uint8", "asymmetric", "per_tensor", algorithm))
        for algorithm in RANGE_ALGORITHMS
    )


class _Judge:
    def __init__(self, model: TensorFlowModel, hardware: Hardware) -> None:
        supports = {p: hardware.support(p) for p in (Precision.INT8, *_SIXTEEN)}
        self.model, self.structure, self.supports = model, model.structure, supports
        self.hardware = hardware
        self.fed = {node_of(port.tensor) for port in model.signature.inputs}
        self.loops = in_loops(model.graph)
        self.members = model.structure.layer_of()
        self.several = {
            node_of(tensor)
            for node in model.graph.nodes.values()
            for tensor in data_inputs(node)
            if output_of(tensor)
        } | {node_of(port.tensor) for port in model.signature.outputs if output_of(port.tensor)}
        self.emulated = frozenset(p for p, s in supports.items() if s.available and not s.native)

    def capability(self, node: NodeDef) -> Capability:
        configs: list[OpConfig] = []
        reasons: dict[Precision, str] = {}
        weights: tuple[QuantSpec, ...] = ()
        obstacle = self.int8_obstacle(node)
        if obstacle is None:
            products = self.products[self.kernel_of(node)]
            configs.extend(_int8_configs(products))
            weights = (REDUCED_WEIGHT,)
        else:
            reasons[Precision.INT8] = obstacle
        for precision in _SIXTEEN:
            reason = self.obstacle_16_bit(node, precision)
            if reason is None:
                configs.append(OpConfig(precision))
            else:
                reasons[precision] = reason
        have = frozenset(config.precision for config in configs)
        return Capability((*configs, FP32), reasons, self.emulated & have, weights)

    @cached_property
    def products(self) -> Products:
        """How the integer kernels multiply."""
        return products_for(self.hardware, kernel_products)

    def kernel_of(self, node: NodeDef) -> KernelKind:
        """The kind of integer kernel that a layer runs in."""
        if node.op in _KERNELS:
            return _KERNELS[node.op]
        weight = self.model.graph.constant(node.input[1])
        single = weight is not None and weight.shape[3] == 1
        return KernelKind.DEPTHWISE if single else KernelKind.CONVOLUTION

    def obstacle_16_bit(self, node: NodeDef, precision: Precision) -> str | None:
        """Why an op cannot run in 16 bits; None if it can."""
        support = self.supports[precision]
        if not support.available:
            return support.reason
        if precision is Precision.BF16 and (failure := bf16_obstacle()) is not None:
            return failure
        if dtype_attribute(node) is not tf.float32:
            return "it does not compute in float32"
        if not typed_outputs(node):
            return "its result holds no floating-point numbers"
        if node.name in self.loops:
            return "it lies in a loop, whose ops stay as they are"
        if node.name in self.several:
            return "it has several results"
        if precision is Precision.FP16 and "..." in text_attribute(node, "equation"):
            return "TensorFlow's FP16 kernel gives wrong numbers for an equation with an ellipsis"
        if DTYPES[FORM_OF[precision]] not in kernel_dtypes(node.op):
            return f"TensorFlow has no {precision} kernel for {node.op} on the CPU"
        return None

    def int8_obstacle(self, node: NodeDef) -> str | None:
        """Why an op has no INT8 form of its own; None if it has one."""
        if node.op not in LAYERS:
            return self._no_kernel(node)
        if not self.supports[Precision.INT8].available:
            return self.supports[Precision.INT8].reason
        if dtype_attribute(node) is not tf.float32:
            return "it does not compute in float32"
        if node.name in self.loops:
            return "it lies in a loop, whose ops stay as they are"
        weight = self.model.graph.constant(node.input[1])
        if weight is None:
            return "its weight is computed, not constant"
        if not weight.size or not np.isfinite(weight).all():
            return "its weight is empty, or holds NaN or Inf"
        if self.model.graph.is_constant(node.input[0]):
            return "what it reads is constant, not computed"
        if output_of(node.input[0]):
            return "it lies in a branch of dataflow control"
        geometry = self._geometry_obstacle(node, weight)
        if geometry is not None:
            return geometry
        missing = forms_needed(node, self.structure.fusion_groups[node.name]) - forms_that_work()
        if missing:
            return f"the integer kernel does not work here: {', '.join(sorted(missing))}"
        return None

    def _geometry_obstacle(self, node: NodeDef, weight: Array) -> str | None:
        if node.op == "MatMul":
            if node.attr["transpose_a"].b:
                return "it reads its input transposed, which the integer kernel does not"
            return None
        if text_attribute(node, "data_format") not in ("", "NHWC"):
            return "the integer kernel takes channels last, and the op has them first"
        shape = self.model.shapes[node_of(node.input[0])][0]
        if shape is None or shape[3] is None:
            return "how many channels it reads is not known"
        if shape[3] != weight.shape[2]:
            return "the integer kernel does not take convolutions in groups"
        if set(integers_attribute(node, "dilations")) - {1} and node.op != "Conv2D":
            return "the integer kernel does not take dilated depthwise convolutions"
        signed = plain(node.input[0]) not in self.structure.non_negative
        if signed and padding_of(node, weight, shape) is None:
            return "how much it pads depends on a size that is not known"
        return None

    def _no_kernel(self, node: NodeDef) -> str:
        if node.name in self.members:
            return "runs in the INT8 kernel of the layer before it, not by itself"
        if node.name in self.structure.agnostic_ops:
            return "moves INT8 values where the ops around it run in INT8, computes nothing itself"
        if node.op in ("BatchMatMul", "BatchMatMulV2", "Einsum"):
            return "both factors are computed; no integer kernel"
        if not has_kernel(node.op):
            return "TensorFlow has no kernel for it on the CPU at all"
        return "no integer kernel"


def forms_needed(node: NodeDef, fusion_group: FusionGroup) -> frozenset[str]:
    """The forms of integer kernel that a layer may be written in, as `probe` calls them."""
    kinds = {step.kind for step in fusion_group.steps} - {"BiasAdd"}
    needed = {f"{node.op} {kind}" for kind in kinds}
    if set(integers_attribute(node, "dilations")) - {1}:
        needed.add(f"{node.op} dilated")
    if text_attribute(node, "padding") == "EXPLICIT":
        needed.add(f"{node.op} explicit")
    return frozenset({f"{node.op} plain", *needed})
