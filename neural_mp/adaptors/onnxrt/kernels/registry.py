"""The kernels of an execution provider, from ONNX Runtime's registry."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import onnx
import onnx_ir as ir

from neural_mp.adaptors.onnxrt.graph.opset import (
    find_version_in,
    map_type_variables,
    supports_dtype,
)

logger = logging.getLogger(__name__)

#: The domain of ONNX Runtime's own operators.
CONTRIB = "com.microsoft"
#: ONNX Runtime's INT8 matrix product with float output, and its LSTM with INT8 products.
INT8_PRODUCT, INT8_LSTM = "MatMulIntegerToFloat", "DynamicQuantizeLSTM"
_CPU = "CPUExecutionProvider"
#: The last version of a kernel definition without an upper bound.
_WITHOUT_END = 2**31 - 1


@dataclass(frozen=True)
class _Kernel:
    """One definition: the versions of its op, and the types of each type variable."""

    first: int
    last: int
    types: Mapping[str, frozenset[str]]

    def supports_op(self, version: int, types: Mapping[str, str]) -> bool:
        """Whether the kernel runs an op last changed in a version, on the given types."""
        # An unbounded range does not cover later changes of the op.
        runs = self.first == version or self.first < version <= self.last < _WITHOUT_END
        return runs and all(types.get(name, "") in ("", *ok) for name, ok in self.types.items())


@lru_cache(maxsize=8)
def _read_registered_kernels(provider: str) -> Mapping[tuple[str, str], tuple[_Kernel, ...]] | None:
    """Return (domain, op) → its kernels; None if the registry is not accessible."""
    try:
        from onnxruntime.capi import _pybind_state as bindings

        definitions = bindings.get_all_opkernel_def()
    except (ImportError, AttributeError, RuntimeError):
        logger.warning(
            "this version of ONNX Runtime has no accessible kernel registry; kernels are assumed"
        )
        return None
    registry: dict[tuple[str, str], list[_Kernel]] = defaultdict(list)
    for definition in definitions:
        if definition.provider == provider:
            types = {name: frozenset(ok) for name, ok in definition.type_constraints.items()}
            first, last = definition.version_range
            kernel = _Kernel(first, last, types)
            registry[definition.domain, definition.op_name].append(kernel)
    return {key: tuple(kernels) for key, kernels in registry.items()}


def every_op_type(provider: str) -> frozenset[str]:
    """Return the op types of ONNX and ONNX Runtime, including fused ops."""
    own = {op for _, op in _read_registered_kernels(provider) or ()}
    return frozenset({*own, *(str(schema.name) for schema in onnx.defs.get_all_schemas())})


def has_kernel(provider: str, op: str, domain: str = "") -> bool:
    """Whether an op has a kernel; assumed if the registry is not accessible."""
    kernels = _read_registered_kernels(provider)
    return kernels is None or (domain, op) in kernels


def has_kernel_of(provider: str, node: ir.Node, opset: int, dtype: str) -> bool:
    """Whether an ONNX op has a kernel for an element type, e.g. `bfloat16`.

    The kernel must match the op's definition in the opset and the types of its other inputs: newer
    kernels often exist for the newest version of an op only. If the registry is not accessible,
    16-bit kernels are assumed missing.
    """
    kernels = (_read_registered_kernels(provider) or {}).get(("", node.op_type), ())
    version = 0 if node.domain else find_version_in(node.op_type, opset)
    types = map_type_variables(node, opset, dtype)
    return any(kernel.supports_op(version, types) for kernel in kernels)


def can_quantize(opset: int) -> bool:
    """Whether tensors can be quantized in an opset; assumed without a registry.

    All providers fall back to the CPU, so CPU kernels decide.
    """
    kernels = _read_registered_kernels(_CPU)
    return kernels is None or all(
        any(
            kernel.supports_op(find_version_in(op, opset), {})
            for kernel in kernels.get(("", op), ())
        )
        for op in ("QuantizeLinear", "DequantizeLinear")
    )


def moves_bytes(node: ir.Node, opset: int) -> bool:
    """Whether a quantize-agnostic op supports uint8; assumed without a registry.

    All providers fall back to the CPU, so CPU kernels decide.
    """
    return _read_registered_kernels(_CPU) is None or has_kernel_of(_CPU, node, opset, "uint8")


def runs_natively(provider: str, node: ir.Node, opset: int, dtype: str) -> bool:
    """Whether ONNX defines an op in a 16-bit type and the provider has a kernel for it."""
    return supports_dtype(node, opset, dtype) and has_kernel_of(provider, node, opset, dtype)
