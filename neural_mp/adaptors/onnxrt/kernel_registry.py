"""Which kernels an execution provider has, asked of ONNX Runtime itself."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import onnx
import onnx_ir as ir

from neural_mp.adaptors.onnxrt.opset import takes, types_of, version_in, version_of

logger = logging.getLogger(__name__)

#: The domain of ONNX Runtime's own operators.
CONTRIB = "com.microsoft"
_CPU = "CPUExecutionProvider"
#: What stands for the last version where a kernel is for all versions known when it was written.
_WITHOUT_END = 2**31 - 1


@dataclass(frozen=True)
class _Kernel:
    """One definition: the versions of its op, and what each type variable may stand for."""

    first: int
    last: int
    types: Mapping[str, frozenset[str]]

    def fits(self, version: int, wanted: Mapping[str, str]) -> bool:
        """Whether it runs an op that changed last in a version, on tensors of some types."""
        # A range without an end says nothing about the versions of the op to come.
        runs = self.first == version or self.first < version <= self.last < _WITHOUT_END
        return runs and all(wanted.get(name, "") in ("", *ok) for name, ok in self.types.items())


@lru_cache(maxsize=8)
def _kernels(provider: str) -> Mapping[tuple[str, str], tuple[_Kernel, ...]] | None:
    """(domain, op) → its kernels; None where ONNX Runtime cannot be asked."""
    try:
        from onnxruntime.capi import _pybind_state as bindings

        definitions = bindings.get_all_opkernel_def()
    except (ImportError, AttributeError, RuntimeError):
        logger.warning("this version of ONNX Runtime does not say which kernels it has")
        return None
    found: dict[tuple[str, str], list[_Kernel]] = defaultdict(list)
    for definition in definitions:
        if definition.provider == provider:
            types = {name: frozenset(ok) for name, ok in definition.type_constraints.items()}
            first, last = definition.version_range
            kernel = _Kernel(first, last, types)
            found[definition.domain, definition.op_name].append(kernel)
    return {key: tuple(kernels) for key, kernels in found.items()}


def every_op_type(provider: str) -> frozenset[str]:
    """The op types of ONNX, and those of ONNX Runtime's own, fused ones among them."""
    own = {op for _, op in _kernels(provider) or ()}
    return frozenset({*own, *(str(schema.name) for schema in onnx.defs.get_all_schemas())})


def has_kernel(provider: str, op: str, domain: str = "") -> bool:
    """Whether there is a kernel of an op; taken to be there where it cannot be asked."""
    kernels = _kernels(provider)
    return kernels is None or (domain, op) in kernels


def has_kernel_of(provider: str, node: ir.Node, opset: int, dtype: str) -> bool:
    """Whether there is a kernel of an op of ONNX's own, for an element type such as `bfloat16`.

    The kernel must be for the op as an opset defines it, and for the types of its other inputs:
    newer kernels are often there for the newest version of an op alone. Where ONNX Runtime cannot
    be asked, it is taken to have no kernels in 16 bits.
    """
    kernels = (_kernels(provider) or {}).get(("", node.op_type), ())
    version, wanted = version_of(node, opset), types_of(node, opset, dtype)
    return any(kernel.fits(version, wanted) for kernel in kernels)


def quantizes(opset: int) -> bool:
    """Whether tensors can be quantized in an opset; taken to where it cannot be asked.

    Any provider leaves to the CPU what it has no kernel for: it is the CPU's that count.
    """
    kernels = _kernels(_CPU)
    return kernels is None or all(
        any(kernel.fits(version_in(op, opset), {}) for kernel in kernels.get(("", op), ()))
        for op in ("QuantizeLinear", "DequantizeLinear")
    )


def moves_bytes(node: ir.Node, opset: int) -> bool:
    """Whether an op that moves values can move uint8; taken to where it cannot be asked.

    Any provider leaves to the CPU what it has no kernel for: it is the CPU's that count.
    """
    return _kernels(_CPU) is None or has_kernel_of(_CPU, node, opset, "uint8")


def runs_natively(provider: str, node: ir.Node, opset: int, dtype: str) -> bool:
    """Whether ONNX has an op in a 16-bit type, and the provider a kernel of it."""
    return takes(node, opset, dtype) and has_kernel_of(provider, node, opset, dtype)
