"""What every op can run in here, asked of the runtime by running it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node
from torch.utils import _pytree as pytree

from neural_mp.adaptors.common.kernel_products import products_for
from neural_mp.adaptors.pytorch.casts import DTYPES, STATISTICS, narrowed
from neural_mp.adaptors.pytorch.graph import (
    CONVOLUTIONS,
    EMBEDDING,
    INTEGER_LAYERS,
    LINEAR,
    WEIGHT_ARGUMENT,
    find_fusion_groups,
    is_head,
    quantize_agnostic,
)
from neural_mp.adaptors.pytorch.integer_kernels import geometry
from neural_mp.adaptors.pytorch.kernel_products import kernel_products
from neural_mp.adaptors.pytorch.model import OP_NAME, TorchModel, constant, op_nodes
from neural_mp.core.byte_products import REDUCED_WEIGHT, ByteProducts, KernelKind, weight_spec
from neural_mp.core.hardware import Hardware, Support
from neural_mp.core.precision import (
    DYNAMIC,
    FP32,
    RANGE_ALGORITHMS,
    OpConfig,
    Precision,
    QuantSpec,
)
from neural_mp.space import Capability

logger = logging.getLogger(__name__)

#: Layer → how its ranges may be chosen, fastest first; of an embedding, the weight alone is stored.
_RANGES: Mapping[Any, tuple[str, ...]] = {
    **dict.fromkeys(CONVOLUTIONS, RANGE_ALGORITHMS),
    LINEAR: (*RANGE_ALGORITHMS, DYNAMIC),
    EMBEDDING: (),
}
_KERNELS = {
    **dict.fromkeys(CONVOLUTIONS, "onednn::qconv_pointwise"),
    LINEAR: "onednn::qlinear_pointwise",
}


#: (op target and what it is called with, dtype) → why it is refused; empty where it runs.
Answers = dict[tuple[Any, torch.dtype], str]
#: Whole numbers beyond this may be too large for FP16; others are sizes and axes.
_LARGE = 60_000


class _Probe(Interpreter):
    """Runs a graph once and tries every kind of call once in every 16-bit dtype asked for."""

    def __init__(
        self,
        module: GraphModule,
        dtypes: tuple[torch.dtype, ...],
        answers: Answers,
    ) -> None:
        super().__init__(module)
        self.dtypes = dtypes
        self.answers = answers
        self.beyond: set[str] = set()

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if OP_NAME in n.meta and _is_float(result):
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            computed = [self.env[source] for source in n.all_input_nodes if source.op != "get_attr"]
            if any(map(_near_the_end, pytree.tree_leaves((result, computed)))):
                self.beyond.add(str(n.meta[OP_NAME]))
            call = _call(n)
            for dtype in self.dtypes:
                if (call, dtype) not in self.answers:
                    self.answers[call, dtype] = _try(n.target, args, kwargs, dtype)
        return result


def _call(node: Node) -> Any:
    """What an op is called with, as far as it may decide on whether 16 bits will do."""
    leaves = pytree.tree_leaves((node.args, node.kwargs))
    return node.target, *(
        leaf
        for leaf in leaves
        if isinstance(leaf, float | torch.dtype) or (isinstance(leaf, int) and abs(leaf) > _LARGE)
    )


def _is_float(value: Any) -> bool:
    leaves = pytree.tree_leaves(value)
    return any(isinstance(v, torch.Tensor) and v.is_floating_point() for v in leaves)


def _try(target: Any, args: Any, kwargs: Any, dtype: torch.dtype) -> str:
    """Why a call does not run in a dtype; empty where it does."""

    def low(leaf: Any) -> Any:
        return narrowed(leaf, dtype) if _is_float(leaf) else leaf

    kept = args[1:] if target in STATISTICS else ()
    low_args = pytree.tree_map(low, args[: len(args) - len(kept)])
    try:
        result = target(*low_args, *kept, **pytree.tree_map(low, kwargs))
        if not _all_dtype(_results(target, result), dtype):
            return f"its result is not {dtype}"
    except (RuntimeError, TypeError, NotImplementedError) as error:
        logger.debug("%s does not run in %s", target, dtype, exc_info=True)
        return f"the runtime refuses: {str(error).splitlines()[0]}"
    return ""


def _results(target: Any, value: Any) -> Any:
    """What an op computes, without the statistics that it also hands back."""
    return value[:1] if target in STATISTICS and isinstance(value, tuple) else value


def _near_the_end(value: Any) -> bool:
    """Whether a tensor holds numbers that float32 has and no 16-bit dtype: masks do."""
    if not isinstance(value, torch.Tensor) or value.dtype != torch.float32 or not value.numel():
        return False
    largest = torch.nan_to_num(value, posinf=0.0, neginf=0.0).abs().max()
    return bool(largest > torch.finfo(torch.bfloat16).max)


def _all_dtype(value: Any, dtype: torch.dtype) -> bool:
    floats = [v for v in pytree.tree_leaves(value) if _is_float(v)]
    return all(v.dtype == dtype for v in floats)


@lru_cache(maxsize=1)
def _has_integer_kernels() -> dict[str, bool]:
    return {
        name: torch.backends.mkldnn.is_available()
        and torch._C._dispatch_has_kernel_for_dispatch_key(name, "MkldnnCPU")
        for name in set(_KERNELS.values())
    }


def probe(model: TorchModel, dtypes: tuple[torch.dtype, ...]) -> tuple[Answers, frozenset[str]]:
    """What the runtime takes in 16 bits, by running every kind of call once; ops out of range."""
    answers: Answers = {}
    beyond: set[str] = set()
    for part in model.parts.values() if dtypes else ():
        run = _Probe(part.portable, dtypes, answers)
        with torch.no_grad():
            run.run(*part.example.leaves(), enable_io_processing=False)
        beyond |= run.beyond
    return answers, frozenset(beyond)


def int8_configs(target: Any, products: ByteProducts, alone: ByteProducts) -> tuple[OpConfig, ...]:
    """The INT8 forms of a layer, fastest first; static ones differ in how the range is chosen.

    Args:
        target: the layer's op.
        products: how its integer kernel multiplies bytes.
        alone: what its weight alone in INT8 has to be right with.
    """
    weight = weight_spec(products)
    with_ranges = tuple(
        OpConfig(Precision.INT8, weight, QuantSpec("uint8", "asymmetric", "per_tensor", algorithm))
        for algorithm in _RANGES[target]
    )
    weight_only = OpConfig(Precision.INT8, weight=weight_spec(alone))
    return with_ranges if target in CONVOLUTIONS else (*with_ranges, weight_only)


def kernel_of(node: Node) -> KernelKind:
    """The kind of integer kernel that a layer runs in."""
    if node.target not in CONVOLUTIONS:
        return KernelKind.DENSE
    # One input and one output channel a group; of volumes, oneDNN has no such kernel.
    weight, groups = node.args[1].meta["val"], geometry(node)[3]
    single = weight.shape[0] == groups and weight.shape[1] == 1 and weight.ndim < 5
    return KernelKind.DEPTHWISE if single and groups > 1 else KernelKind.CONVOLUTION


def capabilities(model: TorchModel, hardware: Hardware) -> Mapping[str, Capability]:
    """Op → what it can run in here."""
    products = products_for(hardware, kernel_products)
    supports = {p: hardware.support(p) for p in (Precision.INT8, *DTYPES)}
    dtypes = tuple(DTYPES[p] for p in DTYPES if supports[p].available)
    answers, beyond = probe(model, dtypes)
    found = {}
    for part in model.parts.values():
        module = part.portable
        fusion_groups = find_fusion_groups(module)
        for name, node in op_nodes(module).items():
            obstacle = int8_obstacle(module, node, name in fusion_groups)
            configs: tuple[OpConfig, ...] = ()
            if obstacle is None:
                mine = products[kernel_of(node)]
                # Of a weight alone no products of bytes are made; but one that is tied to that of
                # another layer is stored once, as that one needs it.
                alone = mine if _is_tied(module, node) else ByteProducts.EXACT
                configs = int8_configs(node.target, mine, alone)
            capability = _capability(node, obstacle, supports, answers, configs)
            found[name] = _without_16_bits(capability) if name in beyond else capability
    return found


def _is_tied(module: GraphModule, node: Node) -> bool:
    """Whether a layer that multiplies bytes has the same weight as this embedding."""
    if node.target is not EMBEDDING:
        return False
    source = str(node.args[WEIGHT_ARGUMENT[node.target]].target)
    same = (n for n in module.graph.nodes if n.op == "get_attr" and n.target == source)
    return any(user.target in INTEGER_LAYERS for n in same for user in n.users)


def _capability(
    node: Node,
    obstacle: str | None,
    supports: Mapping[Precision, Support],
    answers: Answers,
    int8: tuple[OpConfig, ...],
) -> Capability:
    emulated = frozenset(p for p, s in supports.items() if s.available and not s.native)
    builder = _Builder(emulated)
    builder.configs.extend(int8)
    if obstacle is not None:
        builder.reasons[Precision.INT8] = obstacle
    for precision, dtype in DTYPES.items():
        if not supports[precision].available:
            builder.reasons[precision] = supports[precision].reason
            continue
        builder.take(precision, answers.get((_call(node), dtype)))
    return builder.build()


def _without_16_bits(capability: Capability) -> Capability:
    reason = "it works on numbers that float32 only has room for, as in a mask"
    return replace(
        capability,
        configs=tuple(config for config in capability.configs if not config.precision.is_16_bit),
        reasons={**dict.fromkeys(DTYPES, reason), **capability.reasons},
        emulated=capability.emulated - set(DTYPES),
    )


@dataclass
class _Builder:
    emulated: frozenset[Precision]
    configs: list[OpConfig] = field(default_factory=list)
    reasons: dict[Precision, str] = field(default_factory=dict)

    def take(self, precision: Precision, answer: str | None) -> None:
        if answer is None:
            self.reasons[precision] = "its result holds no floating-point numbers"
        elif answer:
            self.reasons[precision] = answer
        else:
            self.configs.append(OpConfig(precision))

    def build(self) -> Capability:
        mine = {config.precision for config in self.configs}
        emulated = self.emulated & frozenset(mine)
        weights = (REDUCED_WEIGHT,) if Precision.INT8 in mine else ()
        return Capability((*self.configs, FP32), self.reasons, emulated, weights)


def int8_obstacle(module: GraphModule, node: Node, in_fusion_group: bool) -> str | None:
    """Why an op has no INT8 form of its own; None if it has one."""
    if node.target not in _RANGES:
        if in_fusion_group:
            return "runs in the INT8 kernel of the layer before it, not by itself"
        if quantize_agnostic(node):
            return "moves INT8 values where the ops around it run in INT8, computes nothing itself"
        return _no_kernel(node)
    weight = constant(module, node.args[WEIGHT_ARGUMENT[node.target]])
    if weight is None:
        return "its weight is computed, not constant"
    if weight.dtype not in (torch.float32, *DTYPES.values()):
        return f"its weight is {weight.dtype}; integers are made of float32 and 16-bit floats"
    if node.target is EMBEDDING:
        return None
    if not _has_integer_kernels()[_KERNELS[node.target]]:
        return "this build of torch has no oneDNN integer kernels"
    if not is_head(module, node):
        return "what it reads is constant, not computed"
    axes = CONVOLUTIONS.get(node.target)
    if axes is not None and node.args[0].meta["val"].ndim != axes + 2:
        return f"the integer kernel takes batches ({axes + 2} axes), not single samples"
    if axes is not None and _pads_beyond_its_window(node):
        return "its padding is as wide as its window, where the integer kernel gives wrong numbers"
    return None


def _pads_beyond_its_window(node: Node) -> bool:
    """Whether some results are made of padding alone.

    Of these oneDNN leaves some unwritten where zero is stored as something else than 0.
    """
    _, padding, dilation, _ = geometry(node)
    window = node.args[1].meta["val"].shape[2:]
    return any(
        pad > gap * (size - 1) for pad, gap, size in zip(padding, dilation, window, strict=True)
    )


def _no_kernel(node: Node) -> str:
    name = str(node.target)
    if "transpose" in name and "conv" in name:
        return "no integer kernel for transposed convolutions"
    if "conv" in name:
        return "integer kernels exist for convolutions with numeric padding only"
    if any(word in name for word in ("matmul", "bmm", "attention")):
        return "both factors are computed; no integer kernel"
    return "no integer kernel"
