"""Kernels available to each op, determined by running the op."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node
from torch.utils import _pytree as pytree

from neural_mp.adaptors.common import capabilities as reasons
from neural_mp.adaptors.common.capabilities import IntegerKernel, OpKernels
from neural_mp.adaptors.common.kernels.int8_accumulation import KernelAccumulation
from neural_mp.adaptors.common.weights.grouped_weight import GROUP_SIZES, list_fitting_specs
from neural_mp.adaptors.pytorch.files.loading import RUNS_BODIES, runs_bodies
from neural_mp.adaptors.pytorch.graph import graph_edit as fx
from neural_mp.adaptors.pytorch.graph import quantizable_ops as layers
from neural_mp.adaptors.pytorch.graph.casts import DTYPES, STATISTICS, cast_saturating
from neural_mp.adaptors.pytorch.graph.fusion import map_fused_layers
from neural_mp.adaptors.pytorch.graph.kernel_ops import OUTPUT_BLOCK
from neural_mp.adaptors.pytorch.graph.model import TorchModel
from neural_mp.adaptors.pytorch.graph.recurrent import (
    RECURRENT_INT8,
    RECURRENT_TYPES,
    find_recurrent_obstacle,
)
from neural_mp.adaptors.pytorch.kernels.float_kernels import ONEDNN, find_packable_ops
from neural_mp.adaptors.pytorch.versions import find_integer_convolution
from neural_mp.core.enums import CalibrationAlgorithm, Scheme
from neural_mp.core.hardware import Hardware
from neural_mp.core.int8_accumulation import REDUCED_WEIGHT, Int8Accumulation, weight_quant_spec
from neural_mp.core.precision import Precision
from neural_mp.core.quant_spec import FLOAT_SPECS, RANGE_ALGORITHMS, QuantSpec

logger = logging.getLogger(__name__)

_KERNELS = {
    **{layer: find_integer_convolution(axes).name() for layer, axes in layers.CONVOLUTIONS.items()},
    layers.LINEAR: "onednn::qlinear_pointwise",
}
#: Bits of weights in groups, those with a kernel first.
_LOW_BITS = (4, 3, 2)
#: Larger integers may overflow FP16; smaller integers are sizes and axes.
_MAX_FP16_SAFE_INTEGER = 60_000
_BEYOND_16_BITS = "its values exceed the range of 16 bits, e.g. in a mask"


def find_kernels(
    model: TorchModel, hardware: Hardware, accumulation: KernelAccumulation
) -> dict[str, OpKernels]:
    """Return op → its kernels, or the reason for a missing kernel."""
    available = [precision for precision in DTYPES if hardware.support(precision).available]
    missing = missing_in_16_bits(model, available)
    result = {}
    for part in model.parts.values():
        fused, packable = map_fused_layers(part.portable), find_packable_ops(part.portable)
        for name, node in fx.map_op_nodes(part.portable).items():
            obstacle = _find_int8_obstacle(part.portable, node, name in fused)
            int8 = obstacle or _find_integer_kernel(part.portable, node, accumulation)
            own = (ONEDNN,) if name in packable else ()
            result[name] = OpKernels(int8, missing.get(name, {}), fp32=own)
    return result


def missing_in_16_bits(
    model: TorchModel, precisions: Iterable[Precision]
) -> dict[str, Mapping[Precision, str]]:
    """Run all ops once; return op → 16-bit precision → reason for a missing kernel."""
    missing: dict[str, Mapping[Precision, str]] = {}
    refusals: dict[Any, str] = {}
    precisions = tuple(precisions)
    for part in model.parts.values() if precisions else ():
        with torch.no_grad():
            run = _TriedIn16Bits(part.portable, precisions, refusals)
            run.run(*part.example.flatten_leaves(), enable_io_processing=False)
        missing.update(run.missing)
    return missing


class _TriedIn16Bits(Interpreter):
    """Interpreter that also runs each distinct call once per 16-bit precision.

    Attributes:
        precisions: 16-bit precisions to try.
        refusals: (call signature, precision) → reason for failure, empty if the call runs.
        missing: op → precision → reason for the missing kernel.
    """

    def __init__(
        self, module: GraphModule, precisions: tuple[Precision, ...], refusals: dict[Any, str]
    ) -> None:
        super().__init__(module)
        self.precisions = precisions
        self.refusals = refusals
        self.missing: dict[str, Mapping[Precision, str]] = {}

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if fx.OP_NAME in n.meta:
            self.missing[n.meta[fx.OP_NAME]] = {
                precision: why
                for precision in self.precisions
                if (why := self._find_node_refusal(n, result, precision))
            }
        return result

    def _find_node_refusal(self, node: Node, result: object, precision: Precision) -> str:
        if not any(map(fx.is_float, pytree.tree_leaves(result))):
            return reasons.NO_FLOATS
        computed = [self.env[source] for source in node.all_input_nodes if source.op != "get_attr"]
        if any(map(_near_the_end, pytree.tree_leaves((result, computed)))):
            return _BEYOND_16_BITS
        kind = _kind_of_call(node), precision
        if kind not in self.refusals:
            args, kwargs = self.fetch_args_kwargs_from_env(node)
            self.refusals[kind] = _call_refusal(node.target, args, kwargs, DTYPES[precision])
        return self.refusals[kind]


def _kind_of_call(node: Node) -> Any:
    """Return the parts of a call on which 16-bit support may depend."""
    leaves = pytree.tree_leaves((node.args, node.kwargs))
    return node.target, *(
        leaf
        for leaf in leaves
        if isinstance(leaf, float | torch.dtype)
        or (isinstance(leaf, int) and abs(leaf) > _MAX_FP16_SAFE_INTEGER)
    )


def _call_refusal(
    target: Callable[..., Any],
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    dtype: torch.dtype,
) -> str:
    """Return the reason why a call does not run in a dtype; empty if it runs."""

    def narrow_float_leaf(leaf: object) -> Any:
        return cast_saturating(leaf, dtype) if fx.is_float(leaf) else leaf

    # Statistics are read and returned in float32.
    statistics = target in STATISTICS
    wide_args = args[1:] if statistics else ()
    low_args = pytree.tree_map(narrow_float_leaf, args[: len(args) - len(wide_args)])
    try:
        result = target(*low_args, *wide_args, **pytree.tree_map(narrow_float_leaf, kwargs))
    except (RuntimeError, TypeError, NotImplementedError) as error:
        logger.debug("%s does not run in %s", target, dtype, exc_info=True)
        return f"the runtime rejects the call: {str(error).splitlines()[0]}"
    computed = result[:1] if statistics and isinstance(result, tuple) else result
    floats = filter(fx.is_float, pytree.tree_leaves(computed))
    return "" if all(value.dtype == dtype for value in floats) else f"its output is not {dtype}"


def _near_the_end(value: object) -> bool:
    """Whether a tensor has finite values beyond the bfloat16 range, as masks do."""
    if not isinstance(value, torch.Tensor) or value.dtype != torch.float32 or not value.numel():
        return False
    ends = torch.aminmax(value)
    if not (ends.min.isfinite() and ends.max.isfinite()):
        ends = torch.aminmax(torch.nan_to_num(value, posinf=0.0, neginf=0.0))
    return max(-float(ends.min), float(ends.max)) > torch.finfo(torch.bfloat16).max


def _find_integer_kernel(
    module: GraphModule, node: Node, accumulation: KernelAccumulation
) -> IntegerKernel:
    """Return the integer kernel of a layer with its quantization options, fastest first."""
    if node.target in RECURRENT_INT8:
        return IntegerKernel(
            weight_quant_spec(Int8Accumulation.EXACT), (CalibrationAlgorithm.DYNAMIC,)
        )
    own = weight_quant_spec(accumulation[layers.get_kernel_kind(node)])
    if node.target in layers.CONVOLUTIONS:
        return IntegerKernel(own, RANGE_ALGORITHMS, other_weights=(REDUCED_WEIGHT,))
    # Weight-only quantization accumulates no INT8 products, so the full range is exact; a tied
    # weight is stored once and follows the layer that multiplies it.
    weight_only = (
        own if _is_tied_embedding(module, node) else weight_quant_spec(Int8Accumulation.EXACT)
    )
    is_layer = node.target is layers.LINEAR
    algorithms = (*RANGE_ALGORITHMS, CalibrationAlgorithm.DYNAMIC) if is_layer else ()
    corrections = reasons.LAYER_CORRECTIONS if is_layer else reasons.TABLE_CORRECTIONS
    low_bits = _low_bit_specs(node)
    alternatives: tuple[QuantSpec, ...] = (REDUCED_WEIGHT,)
    if is_layer:
        alternatives += tuple(map(QuantSpec.parse, FLOAT_SPECS.values()))
    if not isinstance(low_bits, str):
        inputs = fx.get_arguments(node)["weight"].meta["val"].shape[1]
        symmetric = list_fitting_specs(inputs, scheme=Scheme.SYMMETRIC)
        alternatives += tuple(replace(s, corrections=c) for c in corrections for s in symmetric)
    return IntegerKernel(own, algorithms, weight_only, alternatives, low_bits, corrections)


def _low_bit_specs(node: Node) -> tuple[QuantSpec, ...] | str:
    """Return the quantizations of a dense layer or table in 4 to 2 bits, or why there are none."""
    outputs, inputs = fx.get_arguments(node)["weight"].meta["val"].shape
    if node.target is layers.LINEAR and outputs % OUTPUT_BLOCK:
        return (
            f"the kernel for weights below 8 bits requires a multiple of {OUTPUT_BLOCK} outputs, "
            f"got {outputs}"
        )
    return list_fitting_specs(inputs, _LOW_BITS) or (
        f"weights below 8 bits require inputs that a group size divides "
        f"({', '.join(map(str, GROUP_SIZES))}), got {inputs}"
    )


def _is_tied_embedding(module: GraphModule, node: Node) -> bool:
    """Whether an embedding shares its weight with a layer that multiplies in INT8."""
    if node.target is not layers.EMBEDDING:
        return False
    source = str(fx.get_arguments(node)["weight"].target)
    same = (n for n in module.graph.nodes if n.op == "get_attr" and n.target == source)
    return any(user.target in layers.INTEGER_LAYERS for n in same for user in n.users)


def _find_int8_obstacle(module: GraphModule, node: Node, fused: bool) -> str | None:
    """Return the reason why an op cannot run in INT8 itself; None if it can."""
    if fx.get_op_type(node) in RECURRENT_TYPES:
        return find_recurrent_obstacle(module, node)
    if node.target not in layers.WEIGHTED:
        if fused:
            return reasons.FUSED
        return reasons.AGNOSTIC if layers.quantize_agnostic(node) else _explain_missing_kernel(node)
    weight = fx.get_constant(module, fx.get_arguments(node)["weight"])
    if weight is None:
        return reasons.COMPUTED_WEIGHT
    if not weight.numel():
        return reasons.UNUSABLE_WEIGHT
    if weight.dtype not in (torch.float32, *DTYPES.values()):
        return f"its weight is {weight.dtype}; INT8 requires float32 or a 16-bit float"
    if node.target is layers.EMBEDDING:
        return None
    if not _is_registered(_KERNELS[node.target]):
        return "this build of torch has no oneDNN integer kernels"
    if not layers.has_integer_kernel(module, node):
        return reasons.CONSTANT_INPUT
    axes = layers.CONVOLUTIONS.get(node.target)
    if axes is not None and node.args[0].meta["val"].ndim != axes + 2:
        return f"the integer kernel requires batches ({axes + 2} axes)"
    if axes is not None and _pads_beyond_its_window(node):
        return "its padding is as wide as its window; the integer kernel returns wrong results"
    return None


@lru_cache(maxsize=len(_KERNELS))
def _is_registered(kernel: str) -> bool:
    return torch.backends.mkldnn.is_available() and bool(
        torch._C._dispatch_has_kernel_for_dispatch_key(kernel, "MkldnnCPU")
    )


def _pads_beyond_its_window(node: Node) -> bool:
    """Whether some outputs depend on padding alone.

    oneDNN leaves some of these outputs unwritten if the zero point is not 0.
    """
    _, padding, dilation, _ = layers.convolution_geometry(node)
    window = node.args[1].meta["val"].shape[2:]
    return any(
        pad > gap * (size - 1) for pad, gap, size in zip(padding, dilation, window, strict=True)
    )


def _explain_missing_kernel(node: Node) -> str:
    if runs_bodies(node):
        return RUNS_BODIES
    name = str(node.target)
    if "transpose" in name and "conv" in name:
        return "no integer kernel for transposed convolutions"
    if "conv" in name:
        return "integer kernels require numeric padding"
    if any(pattern in name for pattern in ("matmul", "bmm", "attention")):
        return reasons.BOTH_FACTORS_COMPUTED
    return reasons.NO_INTEGER_KERNEL
