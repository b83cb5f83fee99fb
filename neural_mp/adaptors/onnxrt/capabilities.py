"""What every op can run in here, asked of ONNX Runtime's kernel registry and ONNX's schemas."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import numpy as np
import onnx_ir as ir

from neural_mp.adaptors.common.kernel_products import Products, products_for
from neural_mp.adaptors.onnxrt.folding import used_outputs
from neural_mp.adaptors.onnxrt.fusion import JOINERS, LAYERS, confuses, is_float32
from neural_mp.adaptors.onnxrt.kernel_products import kernel_products
from neural_mp.adaptors.onnxrt.kernel_registry import CONTRIB, has_kernel, runs_natively
from neural_mp.adaptors.onnxrt.model import OnnxModel
from neural_mp.adaptors.onnxrt.op_kinds import TYPES
from neural_mp.adaptors.onnxrt.schemas import is_function, takes, typed_inputs
from neural_mp.adaptors.onnxrt.sessions import CPU, array_of
from neural_mp.adaptors.onnxrt.weight_range import kernel_of
from neural_mp.core.byte_products import REDUCED_WEIGHT, ByteProducts, KernelKind, weight_spec
from neural_mp.core.hardware import Hardware
from neural_mp.core.precision import DYNAMIC, FP32, RANGE_ALGORITHMS, OpConfig, Precision, QuantSpec
from neural_mp.space import Capability

_UNSIGNED = QuantSpec("uint8", "symmetric", "per_channel")
_SCATTERS = ("ScatterElements", "ScatterND")
_SIXTEEN = {Precision.BF16: "bfloat16", Precision.FP16: "float16"}
#: The integer kernel of a layer, and the domain of its name.
_KERNELS = {
    "Conv": ("", "QLinearConv"),
    "MatMul": (CONTRIB, "MatMulIntegerToFloat"),
    "Gemm": (CONTRIB, "MatMulIntegerToFloat"),
}


def capabilities(model: OnnxModel, hardware: Hardware) -> Mapping[str, Capability]:
    """Op → what it can run in here."""
    judge = _Judge(model, hardware)
    found = {name: judge.capability(name) for name in model.structure.nodes}
    reason = "it is a further result of an op, and has what that has"
    for part in model.structure.parts:
        reasons = dict.fromkeys((Precision.INT8, *_SIXTEEN), reason)
        found[part] = Capability(reasons=reasons)
    return found


class _Judge:
    def __init__(self, model: OnnxModel, hardware: Hardware) -> None:
        self.model, self.structure = model, model.structure
        self.supports = {p: hardware.support(p) for p in (Precision.INT8, *_SIXTEEN)}
        self.confused = any(confuses(node) for node in self.structure.nodes.values())
        self.hardware = hardware

    def capability(self, name: str) -> Capability:
        node = self.structure.nodes[name]
        configs: list[OpConfig] = []
        reasons: dict[Precision, str] = {}
        obstacle = self.model.obstacle or self.int8_obstacle(name, node)
        if obstacle is None:
            configs.extend(self.int8_configs(node))
        else:
            reasons[Precision.INT8] = obstacle
        for precision in _SIXTEEN:
            reason = self.model.obstacle or self.obstacle_16_bit(node, precision)
            if reason is None:
                configs.append(OpConfig(precision))
            else:
                reasons[precision] = reason
        sixteen = frozenset(c.precision for c in configs if c.precision.is_16_bit)
        emulated = frozenset(p for p in sixteen if not self.is_native(node, p))
        weights = () if obstacle is not None else self.other_weights(node)
        return Capability((*configs, FP32), reasons, emulated, weights)

    @cached_property
    def products(self) -> Products:
        """How the integer kernels multiply."""
        if self.model.provider != CPU:
            return dict.fromkeys(KernelKind, ByteProducts.EXACT)
        return products_for(self.hardware, kernel_products)

    def products_of(self, node: ir.Node) -> ByteProducts:
        """How the kernel of a layer multiplies."""
        return self.products[kernel_of(node, node.inputs[1])]

    def other_weights(self, node: ir.Node) -> tuple[QuantSpec, ...]:
        """How a plan may ask for the weight to be stored: unsigned it is exact, and slow.

        Products of two unsigned bytes are made of 16-bit numbers: exact everywhere, at two thirds
        of the speed of signed weights of ±63 with AVX2, and at less than half with VNNI.
        """
        if node.op_type not in LAYERS:
            return ()
        return REDUCED_WEIGHT, _UNSIGNED

    def is_native(self, node: ir.Node, precision: Precision) -> bool:
        """Whether ONNX Runtime has a kernel that computes in 16 bits."""
        model, native = self.model, self.supports[precision].native
        return native and runs_natively(model.provider, node, model.opset, _SIXTEEN[precision])

    def int8_configs(self, node: ir.Node) -> list[OpConfig]:
        """The INT8 forms of an op, best first; they differ in how the range is chosen."""
        weight = weight_spec(self.products_of(node)) if node.op_type in LAYERS else None
        ways: tuple[str, ...] = RANGE_ALGORITHMS
        if node.op_type in ("MatMul", "Gemm") and self.model.provider == CPU:
            ways = (*ways, DYNAMIC)
        return [
            OpConfig(Precision.INT8, weight, QuantSpec("uint8", "asymmetric", "per_tensor", way))
            for way in ways
        ]

    def obstacle_16_bit(self, node: ir.Node, precision: Precision) -> str | None:
        """Why an op cannot run in 16 bits; None if it can."""
        support = self.supports[precision]
        if not support.available:
            return support.reason
        if not is_float32(node.outputs[0]):
            return "its result is not known to be float32"
        if len(used_outputs(node)) > 1:
            return "it has several results"
        if node.domain:
            return f"{node.domain}.{node.op_type} is no op of ONNX's own"
        if not typed_inputs(node, self.model.opset):
            return "its result does not have the type of what it reads"
        if any(a.type is ir.AttributeType.GRAPH for a in node.attributes.values()):
            return "it runs a graph of its own"
        if node.op_type in _SCATTERS and "reduction" in node.attributes:
            return "its kernels reduce in FP32 only"
        if precision is Precision.FP16 and not takes(node, self.model.opset, "float16"):
            return f"ONNX has no FP16 {node.op_type} in opset {self.model.opset}"
        if precision is Precision.FP16 and self._falls_apart(node):
            return "ONNX Runtime has no FP16 kernel of it, and what it is made of takes FP32 only"
        return None

    def _falls_apart(self, node: ir.Node) -> bool:
        """Whether ONNX Runtime runs an op in FP16 as a function of others, that takes no FP16.

        Of all such functions, those of the kinds we have lists for do (see the tests on ONNX's own
        models), unless they read tensors of another type beside.
        """
        opset = self.model.opset
        if not is_function(node, opset):
            return False
        typed = typed_inputs(node, opset)
        others = [v for i, v in enumerate(node.inputs) if v is not None and i not in typed]
        known = any(node.op_type in types for types in TYPES.values())
        has_own = has_kernel(self.model.provider, node.op_type, "", "float16")
        return any(map(is_float32, others)) or not (known or has_own)

    def int8_obstacle(self, name: str, node: ir.Node) -> str | None:
        """Why an op has no INT8 form of its own; None if it has one."""
        if name not in self.structure.fusion_groups:
            return self._no_kernel(name, node)
        support = self.supports[Precision.INT8]
        if not support.available:
            return support.reason
        provider = self.model.provider
        joined = (CONTRIB, JOINERS.get(node.op_type, ""))
        domain, kernel = _KERNELS.get(node.op_type, joined)
        if not has_kernel(provider, kernel, domain):
            return f"{provider} has no integer kernel for {node.op_type}"
        if not all(is_float32(v) for v in node.inputs if v is not None):
            return "it reads what is not known to be float32"
        return self._weight_obstacle(node) if node.op_type in LAYERS else None

    def _weight_obstacle(self, node: ir.Node) -> str | None:
        weight = array_of(node.inputs[1])
        if weight is None:
            return "its weight is computed, not constant"
        if node.inputs[0] is None or node.inputs[0].const_value is not None:
            return "what it reads is constant, not computed"
        if not weight.size or not np.isfinite(weight).all():
            return "its weight is empty, or holds NaN or Inf"
        if node.op_type == "MatMul" and weight.ndim != 2:
            return "its weight is no matrix"
        if node.op_type == "Gemm":
            return self._gemm_obstacle(node, weight)
        bias = node.inputs[2] if len(node.inputs) > 2 else None
        if bias is not None and array_of(bias) is None:
            return "its bias is computed, not constant"
        if self.confused:
            return "the model has an op that ONNX Runtime runs wrongly near integer convolutions"
        return None

    def _gemm_obstacle(self, node: ir.Node, weight: np.ndarray) -> str | None:
        flag = node.attributes.get("transA")
        if flag is not None and flag.as_int():
            return "it reads its input transposed, which the integer kernel does not"
        added = node.inputs[2] if len(node.inputs) > 2 else None
        if added is None:
            return None
        bias = array_of(added)
        if bias is None:
            return "what it adds is computed, not constant"
        transposed = node.attributes.get("transB")
        columns = weight.shape[0 if transposed is not None and transposed.as_int() else 1]
        if bias.size not in (1, columns) or (bias.ndim and bias.shape[-1] != bias.size):
            return "what it adds differs from row to row"
        return None

    def _no_kernel(self, name: str, node: ir.Node) -> str:
        if name in self.structure.layer_of:
            return "runs in the INT8 kernel of the op before it, not by itself"
        if name in self.structure.agnostic_ops:
            return "moves INT8 values where the ops around it run in INT8, computes nothing itself"
        if node.op_type in (*LAYERS, *JOINERS) and not node.domain:
            return "its result is not known to be float32, or one of its inputs is constant"
        return "no integer kernel"
