"""Op types and cast rules of torch functions called from Python.

`x + y`, `x.add_(y)`, `torch.add` and `1 + x` are the op `add`, named as in `op_types.TYPES`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

from torch.nn import functional as F

from neural_mp.adaptors.pytorch.graph.op_types import TYPES, every_op_type


class Handling(Enum):
    """Numeric effect of a function."""

    #: None: queries, comparisons, new tensors, autograd bookkeeping.
    NONE = auto()
    #: Passes values on: a cast by the user, or a view of the same memory.
    PASSES = auto()
    #: Computes.
    COMPUTES = auto()


@dataclass(frozen=True, slots=True)
class Function:
    """A function that takes tensors.

    Attributes:
        op_type: its op type on the lists.
        handling: its numeric effect.
        writes: whether it writes to its first argument.
        inplace_at: position of its argument `inplace`; None without one.
        first_only: whether only its first argument decides and may be cast. The others are FP32
            statistics, which kernels accept next to 16 bits, or determine a shape.
        numbers_differ: whether 0-d tensors count as numbers, in any dtype.
        takes_masks: whether it takes masks, e.g. attention.
        variant: selects the op type by the arguments of a call.
    """

    op_type: str
    handling: Handling = Handling.COMPUTES
    writes: bool = False
    inplace_at: int | None = None
    first_only: bool = False
    numbers_differ: bool = False
    takes_masks: bool = False
    variant: Callable[[tuple[Any, ...], Mapping[str, Any]], str] | None = None

    def deciding_arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Sequence[Any]:
        """Return the arguments that decide and may be cast."""
        if self.first_only:
            return (_get_first_argument(args, kwargs),)
        return (*args, *kwargs.values()) if kwargs else args

    def written_tensors(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return what a call writes to: a tensor, or a tuple in `out`; None if nothing."""
        if kwargs and kwargs.get("out") is not None:
            return kwargs["out"]
        if self.writes:
            return _get_first_argument(args, kwargs)
        at = self.inplace_at
        if at is not None and (args[at] if len(args) > at else kwargs.get("inplace")):
            return _get_first_argument(args, kwargs)
        return None


def _get_first_argument(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return args[0] if args else next(iter(kwargs.values()), None)


def _split_words(*lines: str) -> frozenset[str]:
    return frozenset(token for line in lines for token in line.split())


#: Python's computing operators and protocols, without underscores.
_OPERATORS = {
    **{name: name for name in ("add", "sub", "mul", "pow", "matmul", "neg", "abs", "getitem")},
    **{"truediv": "div", "div": "div", "floordiv": "floor_divide", "mod": "remainder"},
    **{"rsub": "rsub", "setitem": "index_put", "iter": "unbind", "reversed": "flip"},
}
#: Operators with an in-place (`i`) and a reflected (`r`) variant.
_REFLECTED = _split_words("add mul pow matmul truediv div floordiv mod")
_IN_PLACE = _REFLECTED | {"sub"}

#: Other names → op type; a Python composition has the name of its decisive op.
_ALIASES = {
    **{"absolute": "abs", "negative": "neg", "fix": "trunc", "special_expit": "sigmoid"},
    **{"arccos": "acos", "arcsin": "asin", "multiply": "mul", "subtract": "sub", "divide": "div"},
    **{"_sparse_mm": "mm"},
    **{"outer": "mul", "ger": "mul", "inner": "tensordot", "vdot": "dot"},
    **{"linalg_matmul": "matmul", "linalg_norm": "norm", "frobenius_norm": "norm"},
    **{"nuclear_norm": "norm", "native_norm": "norm", "normalize": "linalg_vector_norm"},
    **{"logaddexp2": "logaddexp", "nanmean": "mean", "nansum": "sum", "sum_to_size": "sum"},
    **{"cross_entropy": "cross_entropy_loss", "linear_cross_entropy": "cross_entropy_loss"},
    **{"softmin": "softmax", "gumbel_softmax": "softmax", "tanhshrink": "tanh"},
    **{"logsigmoid": "log_sigmoid", "lp_pool1d": "lp_pool2d", "lp_pool3d": "lp_pool2d"},
    **{"grid_sample": "grid_sampler", "affine_grid": "affine_grid_generator"},
    **{"dropout1d": "dropout", "dropout2d": "dropout", "dropout3d": "dropout"},
    **{"feature_dropout": "dropout", "native_dropout": "dropout"},
    **{"multi_head_attention_forward": "scaled_dot_product_attention"},
    **{"ravel": "flatten", "swapdims": "swapaxes", "moveaxis": "movedim", "adjoint": "transpose"},
    **{"T": "numpy_T", "mT": "transpose", "H": "transpose", "mH": "transpose"},
    **{"row_stack": "vstack", "column_stack": "hstack", "dstack": "hstack"},
    **{"hsplit": "tensor_split", "vsplit": "tensor_split", "dsplit": "tensor_split"},
    **{"unsafe_split": "split", "unsafe_chunk": "chunk", "linalg_diagonal": "diagonal"},
    **{"unsafe_split_with_sizes": "split_with_sizes", "msort": "sort"},
    **{"fliplr": "flip", "flipud": "flip", "native_channel_shuffle": "channel_shuffle"},
}
#: Functions that share their name with another op.
_IN_NN_FUNCTIONAL = {"unfold": "im2col", "fold": "col2im"}

#: Pass values on. `contiguous` and `clone` may be cast: they return new tensors anyway.
_PASSING = _split_words(
    "tensor as_tensor asarray",
    "to float half bfloat16 double type type_as cpu cuda xpu ipu mtia pin_memory detach alias data",
    "copy_ real imag positive pos resolve_conj resolve_neg view_as_real view_as_complex",
    "atleast_1d atleast_2d atleast_3d meshgrid values _values coalesce to_dense to_sparse",
    "to_mkldnn requires_grad_ detach_",
)
#: Functions whose result does not depend on the dtype's accuracy.
_WITHOUT_NUMBERS = _split_words(
    "eq ne lt le gt ge equal not_equal less less_equal greater greater_equal isnan isinf isfinite",
    "isposinf isneginf isreal isin all any logical_and logical_or logical_not logical_xor",
    "bitwise_and bitwise_or bitwise_not bitwise_xor signbit argmax argmin argsort argwhere nonzero",
    "nonzero_static count_nonzero searchsorted bucketize bincount one_hot unravel_index unique",
    "unique_consecutive multinomial size dim ndimension numel nelement stride element_size",
    "storage_offset storage storage_type untyped_storage data_ptr const_data_ptr dim_order",
    "get_device is_coalesced is_complex is_conj is_contiguous is_distributed is_floating_point",
    "is_inference is_neg is_nonzero is_pinned is_same_size is_set_to is_shared is_signed",
    "is_sparse sparse_dim dense_dim qscheme item tolist numpy backward register_hook retain_grad",
    "register_post_accumulate_grad_hook grad module_load record_stream share_memory_ set_ resize_",
    "resize_as_ resize resize_as apply_ map_ map2_ int long short bool byte char cdouble cfloat",
    "chalf empty_like zeros_like ones_like full_like rand_like randn_like randint_like new_empty",
    "new_empty_strided new_zeros new_ones new_full new_tensor new bernoulli result_type can_cast",
    "promote_types broadcast_shapes names has_names rename refine_names align_to",
    "align_as as_subclass hash_tensor quantize_per_tensor quantize_per_channel dequantize",
    "int_repr indices",
)
#: Modules whose functions operate on the tensors themselves.
_OUTSIDE = ("torch.nn.init", "torch.autograd", "torch.optim", "torch.utils", "torch.distributed")

_ATTENTION = "scaled_dot_product_attention"

_FIRST_ONLY = _split_words(
    *TYPES["batch_norm"], *TYPES["instance_norm"], "expand_as view_as reshape_as sum_to_size"
)
_ARITHMETIC = frozenset(
    op_type for kind in ("add", "sub", "mul", "div") for op_type in TYPES[kind]
) - {"addcmul", "addcdiv"}

#: Op types missing in torch's dispatcher, e.g. `softsign`.
_LISTED = frozenset(op_type for names in TYPES.values() for op_type in names)


def all_op_types() -> frozenset[str]:
    """Return every op type that an edit of the lists may name."""
    return every_op_type() | _LISTED


def classify_torch_function(func: Callable[..., Any]) -> Function:
    """Classify a function that `__torch_function__` receives."""
    name, module = str(getattr(func, "__name__", "")), str(getattr(func, "__module__", ""))
    if name in ("__get__", "__set__", "__delete__"):
        described = getattr(func, "__self__", None)
        described = getattr(described, "fget", described)
        return _of_property(name, str(getattr(described, "__name__", "")))
    name = name.split(".")[0]  # an overload of `torch.ops` is called `add.Tensor`
    if name.startswith("__") and name.endswith("__"):
        return _of_operator(name[2:-2])
    # An op may write to arguments that its name does not reveal.
    is_mutable = getattr(getattr(func, "_schema", None), "is_mutable", False)
    # Optimizer loops, queries, packing.
    is_internal = name.startswith(("_", "sym_")) and name.removesuffix("_") not in (
        _LISTED | _PASSING | _ALIASES.keys()
    )
    if module.startswith(_OUTSIDE) or (is_mutable and not name.endswith("_")) or is_internal:
        return Function(name, Handling.NONE)
    if func is F.unfold or func is F.fold:
        return Function(_IN_NN_FUNCTIONAL[name])
    if name == "interpolate":
        return Function(name, variant=_classify_interpolation_op)
    function = _classify_by_name(name)
    return replace(function, inplace_at=_position_of_inplace(func, module))


def _classify_by_name(name: str) -> Function:
    """Classify by name; a trailing underscore means in place."""
    base = name[:-1] if name.endswith("_") else name
    if name in _PASSING or base in _PASSING:
        return Function(base, Handling.PASSES, writes=name != base)
    if name in _WITHOUT_NUMBERS or base in _WITHOUT_NUMBERS:
        return Function(base, Handling.NONE)
    return replace(_classify_computing(base), writes=name != base)


def _classify_computing(name: str) -> Function:
    """Classify by name, also without `special_` and `_with_indices`."""
    short = name.removeprefix("special_").removesuffix("_with_indices")
    base = next((base for base in (name, short) if base in _LISTED), name)
    return _with_ways(_ALIASES.get(base, base))


def _with_ways(op_type: str) -> Function:
    return Function(
        op_type,
        first_only=op_type in _FIRST_ONLY,
        numbers_differ=op_type in _ARITHMETIC,
        takes_masks=op_type == _ATTENTION,
    )


def _of_operator(name: str) -> Function:
    if name == "pos":
        return Function(name, Handling.PASSES)
    if name in _OPERATORS:
        return replace(_with_ways(_OPERATORS[name]), writes=name == "setitem")
    if name[1:] in _IN_PLACE and name.startswith("i"):
        return replace(_with_ways(_OPERATORS[name[1:]]), writes=True)
    if name[1:] in _REFLECTED and name.startswith("r"):
        return _with_ways(_OPERATORS[name[1:]])
    return Function(name, Handling.NONE)


def _of_property(access: str, name: str) -> Function:
    if access != "__get__":
        return Function(name, Handling.NONE)
    if name in _ALIASES:  # transposes: T, H, mT, mH
        return _classify_computing(name)
    return Function(name, Handling.PASSES if name in _PASSING else Handling.NONE)


def _position_of_inplace(func: Callable[..., Any], module: str) -> int | None:
    if module != F.__name__ or not inspect.isfunction(func):
        return None
    parameters = list(inspect.signature(func).parameters)
    return parameters.index("inplace") if "inplace" in parameters else None


def _classify_interpolation_op(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    mode = str(kwargs.get("mode", args[3] if len(args) > 3 else "nearest"))
    tensor = args[0] if args else kwargs["input"]
    axes = tensor.dim() - 2
    if mode == "area":
        return f"adaptive_avg_pool{axes}d"
    aliases = {"nearest-exact": "nearest"}
    return f"upsample_{aliases.get(mode, mode)}{axes}d"
