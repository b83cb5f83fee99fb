"""Kernels and times of ops, from the runtime model of the CPU plugin."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from neural_mp.adaptors.openvino.convert import QUANTIZED, SCALED
from neural_mp.adaptors.openvino.fusion import has_weight, is_product
from neural_mp.adaptors.openvino.graph.edit import SIXTEEN_BITS, find_only_reader, name_of
from neural_mp.adaptors.openvino.graph.integer_weights import STORED
from neural_mp.adaptors.openvino.layer_params import REDUCED
from neural_mp.adaptors.openvino.model import OpenVinoModel
from neural_mp.adaptors.openvino.ops import (
    CONVERSION_KERNELS,
    ELEMENTWISE_KERNELS,
    LAYER_KERNELS,
    PRODUCT_KERNELS,
    Role,
    has_role,
)
from neural_mp.adaptors.openvino.runtime import Kernel, Runner, ov
from neural_mp.core.op_timings import OpTrace, TracedKernel, build_op_trace
from neural_mp.core.precision import Precision

#: Element types of kernels → precision.
_PRECISIONS = {"f32": Precision.FP32, "bf16": Precision.BF16, "f16": Precision.FP16}
_BYTES = ("u8", "i8", "u4", "i4")
#: Suffixes that the plugin adds to names of ops in INT8 graphs.
_ADDED = ("/DequantizationMultiply", "/DequantizationSubtract", "_original", REDUCED, STORED)
#: Element types of bytes that no plan quantized: conditions and integers.
_OWN_BYTES = (ov.Type.boolean, ov.Type.u8, ov.Type.i8)
#: Average microseconds, per number of runs, from which single runs are told apart.
_LEAST_AVERAGES = 10


def time_ops(model: OpenVinoModel, inputs: object, runs: int) -> dict[str, list[float]]:
    """Return op → seconds of every run; fused ops count towards their fusion group.

    A kernel of moving and other ops counts towards the first of the others, such as attention.
    Layout changes and conversions that the plugin inserts have entries of their own (`Reorder`).
    """
    feeds = model.order_feeds(model.signature.bind_inputs(inputs))
    runner = Runner(model.program, profiled=True)
    seconds = {op: [0.0] * runs for op in model.structure.nodes if op not in model.ops}
    averages = []
    for _ in range(runs):
        runner(feeds)
        averages.append(runner.microseconds())
    for kernel, means in zip(runner.executed_kernels(), zip(*averages, strict=True), strict=True):
        if any(means):
            ops = list(_iterate_kernel_ops(model, kernel))
            computing = (op for op in ops if not has_role(model.structure.nodes[op], Role.MOVING))
            op = next(computing, ops[0] if ops else None)
            op = kernel.type if op is None else model.structure.layer_of.get(op, op)
            durations = seconds.setdefault(op, [0.0] * runs)
            for run, microseconds in enumerate(separate_single_runs(means)):
                durations[run] += microseconds / 1e6
    return seconds


def separate_single_runs(averages: Sequence[float]) -> list[float]:
    """Return the microseconds of every run from the averages over all runs so far.

    The plugin rounds averages down to whole microseconds, so the sum of n runs is known up to n.
    Kernels for which that is much get the average of all runs but the first, which is slower.
    """
    count = len(averages)
    sums = [n * mean + (n - 1) / 2 for n, mean in enumerate(averages, 1)]
    if count > 1 and averages[-1] < _LEAST_AVERAGES * count:
        return [averages[0], *[max(0.0, sums[-1] - sums[0]) / (count - 1)] * (count - 1)]
    return [max(0.0, current - previous) for previous, current in pairwise([0.0, *sums])]


def trace_kernels(model: OpenVinoModel, inputs: object) -> dict[str, OpTrace]:
    """Return op → its kernels in one run; see `Adaptor.trace_kernels`.

    An integer kernel is that of its layer: the ops fused into the kernel compute in float. The
    plugin gives some kernels the name of their last op only, e.g. that of the bias of a product:
    such a kernel is that of the layer, too.
    """
    feeds = model.order_feeds(model.signature.bind_inputs(inputs))
    runner = Runner(model.program, profiled=True)
    runner(feeds)
    traces: dict[str, list[TracedKernel]] = {}
    products: set[str] = set()
    in_registers: dict[str, bool] = {}
    for kernel in runner.executed_kernels():
        if kernel.microseconds is None or kernel.type in CONVERSION_KERNELS:
            continue
        # Scaling of the inputs is not the product itself.
        own = tuple(name for name in kernel.ops if not name.endswith(SCALED))
        ran = list(dict.fromkeys(_iterate_kernel_ops(model, replace(kernel, ops=own))))
        if _is_integer_kernel(kernel) and ran:
            joining = next((op for op in ran if op in model.structure.fusion_groups), ran[0])
            ran = [_layer_of_kernel(model, ran) if kernel.type in LAYER_KERNELS else joining]
        for op in ran:
            values = model.structure.nodes[op].input_values()[:1]
            quantized = all(value.get_element_type() not in _OWN_BYTES for value in values)
            traces.setdefault(op, []).append(_parse_traced_kernel(kernel, quantized=quantized))
            is_elementwise = kernel.type in ELEMENTWISE_KERNELS and not has_role(
                model.structure.nodes[op], Role.LAYER
            )
            in_registers[op] = in_registers.get(op, True) and is_elementwise
        products.update(ran if kernel.type in PRODUCT_KERNELS else ())
    for op, node in reversed(list(model.structure.nodes.items())):
        reader = find_only_reader(node.output(0))
        layer = "" if reader is None else name_of(reader)
        if op not in traces and layer in products and has_role(node, Role.PRODUCT):
            traces[op] = traces[layer]
            products.add(op)
    # The plugin may run an op that is written in 16 bits in FP32.
    written = {
        op: SIXTEEN_BITS.get(node.get_output_element_type(0))
        for op, node in model.structure.nodes.items()
    }
    return {
        model.ops.get(op, op): build_op_trace(kernels, written.get(op), in_registers.get(op, False))
        for op, kernels in traces.items()
    }


def _is_integer_kernel(kernel: Kernel) -> bool:
    """Whether a kernel computes with integers, or reads and writes them, as a mean may."""
    return kernel.is_integer or (
        kernel.type == "Reduce" and any(name.endswith(QUANTIZED) for name in kernel.ops)
    )


def _layer_of_kernel(model: OpenVinoModel, ran: list[str]) -> str:
    """Return the layer of an integer kernel: among its ops, or before the first of them."""
    nodes, preceding = model.structure.nodes, ran[:1]
    layers = [op for op in ran if has_weight(nodes[op]) or is_product(nodes[op])]
    while not layers and preceding:
        preceding = [op for op in model.structure.read_by(preceding[0]) if op in nodes]
        layers = [op for op in preceding[:1] if has_weight(nodes[op])]
    return layers[0] if layers else ran[0]


def _iterate_kernel_ops(model: OpenVinoModel, kernel: Kernel) -> Iterator[str]:
    """Yield the ops of the unconverted graph that a kernel runs.

    The plugin renames some INT8 products; the name of the weight then identifies the op.
    """
    weights = [name for name in kernel.constants if name.removesuffix(REDUCED).endswith(STORED)]
    for name in (*kernel.ops, *weights):
        for suffix in _ADDED:
            name = name.removesuffix(suffix)
        op = model.ops.get(name, name)
        if op in model.structure.nodes:
            yield op


def _parse_traced_kernel(kernel: Kernel, *, quantized: bool) -> TracedKernel:
    if kernel.precision in _BYTES and not quantized:
        return TracedKernel(kernel.primitive)
    if kernel.precision not in _BYTES:
        return TracedKernel(kernel.primitive, _PRECISIONS.get(kernel.precision))
    if _is_integer_kernel(kernel):
        return TracedKernel(kernel.primitive, Precision.INT8, True)
    # Kernels without integer variants, such as means, compute in float on what they read.
    return TracedKernel(kernel.primitive, None if kernel.may_be_integer else Precision.FP32, True)
