"""Framework-independent kinds of ops, with their lists and the sources.

Frameworks name a kind differently: adaptors map their op types to kinds, and `FourLists.translated`
returns the lists of a framework.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from neural_mp.amp.lists import AmpList, FourLists
from neural_mp.core.precision import Precision

ALLOW, DENY, INFER, CLEAR = AmpList

_TENSORFLOW = "TensorFlow 2.21, auto_mixed_precision_lists.h"
_TORCH = "PyTorch 2.13, ATen/autocast_mode.h, lower_precision_fp"
_TORCH_FLOAT32 = "PyTorch 2.13, ATen/autocast_mode.h, fp32 (CUDA)"


@dataclass(frozen=True)
class Kind:
    """A kind of op.

    Attributes:
        name: canonical name.
        bf16, fp16: list for the precision; None for none.
        source: reference of the assignment; for composites, the parts.
    """

    name: str
    bf16: AmpList | None
    fp16: AmpList | None
    source: str


def _canonical_kinds() -> Iterator[Kind]:
    for names, bf16, fp16, source in (
        ("matmul conv conv_transpose einsum", ALLOW, ALLOW, _TENSORFLOW),
        ("attention recurrent", ALLOW, ALLOW, _TORCH),
        ("add sub mul div avg_pool batch_norm", INFER, INFER, _TENSORFLOW),
        ("elu selu leaky_relu sigmoid tanh softplus softsign", INFER, INFER, _TENSORFLOW),
        ("erf log log1p sqrt reciprocal softmax log_softmax prod", INFER, INFER, _TENSORFLOW),
        ("celu prelu", INFER, INFER, "as elu and leaky_relu, of which they are forms"),
        ("gelu", INFER, INFER, "of erf or tanh, mul and add"),
        ("silu", INFER, INFER, "of sigmoid and mul"),
        ("mish", INFER, INFER, "of softplus, tanh and mul"),
        ("hard_sigmoid hard_swish", INFER, INFER, "of add, mul and clip"),
        ("instance_norm group_norm", INFER, INFER, "as batch_norm, over other axes"),
        ("mean sum", INFER, DENY, f"{_TENSORFLOW}: sums overflow the range of FP16"),
        ("rsqrt square squared_difference", INFER, None, _TENSORFLOW),
        ("variance", INFER, DENY, "of mean and squared_difference"),
        ("layer_norm rms_norm", INFER, DENY, f"of mean, square and rsqrt; {_TORCH_FLOAT32}"),
        ("exp expm1 pow l2_norm cross_entropy", DENY, DENY, _TENSORFLOW),
        ("logsumexp", DENY, DENY, "of exp, sum and log"),
        ("cumsum cumprod sinh cosh tan asin acos erfinv", DENY, DENY, _TORCH_FLOAT32),
        ("abs ceil floor round sign neg clip relu", CLEAR, CLEAR, _TENSORFLOW),
        ("concat split stack unstack slice gather tile pad", CLEAR, CLEAR, _TENSORFLOW),
        ("broadcast identity reshape transpose reverse where", CLEAR, CLEAR, _TENSORFLOW),
        ("max_pool maximum minimum max min", CLEAR, CLEAR, _TENSORFLOW),
        ("resize_nearest space_to_depth depth_to_space", CLEAR, CLEAR, _TENSORFLOW),
        ("resize_bilinear", CLEAR, None, _TENSORFLOW),
        ("triangle", CLEAR, CLEAR, "as where, with a mask of ones"),
    ):
        for name in names.split():
            yield Kind(name, bf16, fp16, source)


#: Name → kind.
KINDS: Mapping[str, Kind] = {kind.name: kind for kind in _canonical_kinds()}


def canonical_lists(precision: Precision) -> FourLists:
    """Return the four lists of a 16-bit precision, by names of kinds."""
    attribute = "fp16" if precision is Precision.FP16 else "bf16"
    return FourLists(
        *(
            frozenset(kind.name for kind in KINDS.values() if getattr(kind, attribute) is amp_list)
            for amp_list in AmpList
        )
    )
