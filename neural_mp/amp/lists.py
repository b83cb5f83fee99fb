"""Four lists of op types (ALLOW, DENY, INFER, CLEAR), and edits to the lists.

Names and semantics are those of TensorFlow's auto mixed precision pass
(`auto_mixed_precision_lists.h`) and of Intel Extension for TensorFlow's guide "Advanced Auto Mixed
Precision". Frameworks name a kind of op differently: adaptors map their op types to the kinds
listed here, and `FourLists.translated` returns the lists of a framework.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from neural_mp.core.precision import Precision
from neural_mp.errors import ConfigurationError, UnknownOperatorError, did_you_mean
from neural_mp.util.string_enum import StringEnum


class AmpList(StringEnum):
    """Effect of 16 bits on the ops of a type."""

    #: Safe and faster: always in 16 bits.
    ALLOW = "allow"
    #: Numerically dangerous, and makes downstream ops dangerous.
    DENY = "deny"
    #: Safe unless downstream of a dangerous op.
    INFER = "infer"
    #: No effect on the numerics: follows its neighbours.
    CLEAR = "clear"


@dataclass(frozen=True)
class FourLists:
    """Op types, grouped by the effect of 16 bits."""

    allow: frozenset[str] = frozenset()
    deny: frozenset[str] = frozenset()
    infer: frozenset[str] = frozenset()
    clear: frozenset[str] = frozenset()

    def of(self, op_type: str) -> AmpList | None:
        """Return the list of an op type; None if on no list."""
        return next((name for name in AmpList if op_type in self.types(name)), None)

    def types(self, name: AmpList) -> frozenset[str]:
        """Return the op types on a list."""
        op_types: frozenset[str] = getattr(self, name.value)
        return op_types

    def translated(self, names: Mapping[str, Iterable[str]]) -> FourLists:
        """Return the lists with each name replaced by its names (zero or more) in a framework."""
        translations = (
            frozenset[str]().union(*(names.get(name, ()) for name in self.types(which)))
            for which in AmpList
        )
        return FourLists(*translations)

    def allowing(self, op_types: Iterable[str]) -> FourLists:
        """Return the lists with these types moved to ALLOW, dangerous or not."""
        moved = frozenset(op_types)
        return FourLists(
            self.allow | moved, self.deny - moved, self.infer - moved, self.clear - moved
        )

    def edited(self, edits: Iterable[ListEdit]) -> FourLists:
        """Return the lists after edits: first all removals, then all additions.

        Raises:
            ConfigurationError: a type is added that is on another list, or removed from a list
                without the type.
        """
        changed = self
        for edit in sorted(edits, key=lambda edit: edit.adds):
            changed = changed._apply_edit(edit)
        return changed

    def _apply_edit(self, edit: ListEdit) -> FourLists:
        types = self.types(edit.list)
        current = self.of(edit.op_type)
        if not edit.adds:
            if edit.op_type not in types:
                location = f"the {current} list" if current else "no list"
                raise ConfigurationError(
                    f"{edit.origin} removes {edit.op_type!r} from the {edit.list} list, but "
                    f"{edit.op_type!r} is on {location}"
                )
            return replace(self, **{edit.list.value: types - {edit.op_type}})
        if current not in (None, edit.list):
            raise ConfigurationError(
                f"{edit.origin} adds {edit.op_type!r} to the {edit.list} list, but "
                f"{edit.op_type!r} is on the {current} list; remove the type from that list with "
                f"{current}list_remove"
            )
        return replace(self, **{edit.list.value: types | {edit.op_type}})


@dataclass(frozen=True)
class ListEdit:
    """Addition of an op type to a list, or its removal.

    Attributes:
        adds: True for an addition.
        list: the list.
        op_type: the framework's name of the type.
        origin: source of the edit in the user's settings, for messages.
    """

    adds: bool
    list: AmpList
    op_type: str
    origin: str


#: Option name → list, whether adding: `allowlist_add`, …, `clearlist_remove`.
EDIT_OPTIONS: Mapping[str, tuple[AmpList, bool]] = {
    f"{name}list_{action}": (name, action == "add")
    for name in AmpList
    for action in ("add", "remove")
}


def check_known(edits: Iterable[ListEdit], known: Collection[str]) -> None:
    """Check that the op types of edits are among the framework's.

    Raises:
        UnknownOperatorError: an op type does not exist.
    """
    for edit in edits:
        if edit.op_type not in known:
            raise UnknownOperatorError(
                f"{edit.origin} names {edit.op_type!r}, which is not an op type of the framework"
                f"{did_you_mean(edit.op_type, known)}"
            )


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


def _iterate_canonical_kinds() -> Iterator[Kind]:
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
KINDS: Mapping[str, Kind] = {kind.name: kind for kind in _iterate_canonical_kinds()}


def build_canonical_lists(precision: Precision) -> FourLists:
    """Return the four lists of a 16-bit precision, by names of kinds."""
    attribute = "fp16" if precision is Precision.FP16 else "bf16"
    return FourLists(
        *(
            frozenset(kind.name for kind in KINDS.values() if getattr(kind, attribute) is amp_list)
            for amp_list in AmpList
        )
    )
