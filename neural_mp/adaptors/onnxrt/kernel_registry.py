"""Which kernels an execution provider has, asked of ONNX Runtime itself."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping
from functools import lru_cache

import onnx
import onnx_ir as ir

from neural_mp.adaptors.onnxrt.schemas import takes

logger = logging.getLogger(__name__)

#: The domain of ONNX Runtime's own operators.
CONTRIB = "com.microsoft"


@lru_cache(maxsize=8)
def _kernels(provider: str) -> Mapping[tuple[str, str], frozenset[str]] | None:
    """(domain, op) → the types of tensors that some kernel takes; None where it cannot be asked."""
    try:
        from onnxruntime.capi import _pybind_state as bindings

        definitions = bindings.get_all_opkernel_def()
    except (ImportError, AttributeError, RuntimeError):
        logger.warning("this version of ONNX Runtime does not say which kernels it has")
        return None
    found: dict[tuple[str, str], set[str]] = defaultdict(set)
    for definition in definitions:
        if definition.provider == provider:
            types = found[definition.domain, definition.op_name]
            for accepted in definition.type_constraints.values():
                types.update(accepted)
    return {key: frozenset(types) for key, types in found.items()}


def every_op_type(provider: str) -> frozenset[str]:
    """The op types of ONNX, and those of ONNX Runtime's own, fused ones among them."""
    own = {op for _, op in _kernels(provider) or ()}
    return frozenset({*own, *(str(schema.name) for schema in onnx.defs.get_all_schemas())})


def has_kernel(provider: str, op: str, domain: str = "", dtype: str | None = None) -> bool:
    """Whether there is a kernel of an op, for tensors of a type such as `bfloat16` if given.

    Where ONNX Runtime cannot be asked, it is taken to have its integer kernels, on the CPU.
    """
    kernels = _kernels(provider)
    if kernels is None:
        return dtype not in ("float16", "bfloat16")
    types = kernels.get((domain, op))
    return types is not None and (dtype is None or f"tensor({dtype})" in types)


def runs_natively(provider: str, node: ir.Node, opset: int, dtype: str) -> bool:
    """Whether ONNX has an op in a 16-bit type, and the provider a kernel of it."""
    return takes(node, opset, dtype) and has_kernel(provider, node.op_type, "", dtype)
