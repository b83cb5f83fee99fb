"""Kernels available in the runtime, from its own registry."""

from __future__ import annotations

from functools import cache

import tensorflow as tf
from tensorflow.core.framework import types_pb2
from tensorflow.python.framework import kernels, op_def_registry

#: Device types of kernels: the target device, and kernels for any device.
_DEVICES = ("CPU", "DEFAULT")


@cache
def kernel_dtypes(op: str, attribute: str = "T") -> frozenset[tf.DType]:
    """Return the element types of an op's CPU kernels; empty for ops without `attribute`."""
    definition = op_def_registry.get(op)
    declared = (
        next((a for a in definition.attr if a.name == attribute and a.type == "type"), None)
        if definition is not None
        else None
    )
    if declared is None:
        return frozenset()
    every = frozenset(types_pb2.DataType.values())
    allowed = frozenset(declared.allowed_values.list.type) or every
    types: set[int] = set()
    for kernel in kernels.get_registered_kernels_for_op(op).kernel:
        if kernel.device_type in _DEVICES:
            limits = {c.name: c.allowed_values.list.type for c in kernel.constraint}
            types |= allowed & frozenset(limits.get(attribute, every))
    # Numbers from DT_FLOAT_REF on denote reference types.
    return frozenset(tf.as_dtype(value) for value in types if 0 < value < types_pb2.DT_FLOAT_REF)


@cache
def has_kernel(op: str) -> bool:
    """Whether an op has any kernel on the CPU."""
    registered = kernels.get_registered_kernels_for_op(op).kernel
    return any(kernel.device_type in _DEVICES for kernel in registered)


@cache
def every_op_type() -> frozenset[str]:
    """Return every op type that has a definition or, like fused ops, a kernel."""
    with_kernel = {str(kernel.op) for kernel in kernels.get_all_registered_kernels().kernel}
    return frozenset({*dir(tf.raw_ops), *with_kernel})
