"""Four lists of op types, and edits to them.

The lists, their words and what they mean are those of TensorFlow's auto mixed precision pass
(`auto_mixed_precision_lists.h`) and of Intel Extension for TensorFlow's guide "Advanced Auto Mixed
Precision", which calls them by the same names.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum

from neural_mp.errors import ConfigurationError, UnknownOperatorError, did_you_mean


class AmpList(str, Enum):
    """What 16 bits do to the ops of a type."""

    #: Safe and worth it: always in 16 bits.
    ALLOW = "allow"
    #: Dangerous, and makes what is downstream dangerous.
    DENY = "deny"
    #: Safe unless something dangerous is upstream.
    INFER = "infer"
    #: Without effect on the numbers: follows its neighbours.
    CLEAR = "clear"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class FourLists:
    """Op types by what 16 bits do to them."""

    allow: frozenset[str] = frozenset()
    deny: frozenset[str] = frozenset()
    infer: frozenset[str] = frozenset()
    clear: frozenset[str] = frozenset()

    def of(self, op_type: str) -> AmpList | None:
        """The list an op type is on; None for none."""
        return next((name for name in AmpList if op_type in self.types(name)), None)

    def types(self, name: AmpList) -> frozenset[str]:
        """The op types on a list."""
        found: frozenset[str] = getattr(self, name.value)
        return found

    def translated(self, names: Mapping[str, Iterable[str]]) -> FourLists:
        """The lists in other words: name → what it is called there, more than one thing or none."""
        return FourLists(
            *(
                frozenset(other for name in self.types(which) for other in names.get(name, ()))
                for which in AmpList
            )
        )

    def allowing(self, op_types: Iterable[str]) -> FourLists:
        """Every one of these types on the ALLOW list, dangerous or not."""
        moved = frozenset(op_types)
        return FourLists(
            self.allow | moved, self.deny - moved, self.infer - moved, self.clear - moved
        )

    def denying_infer(self) -> FourLists:
        """Every type on the INFER list moved to DENY."""
        return FourLists(self.allow, self.deny | self.infer, frozenset(), self.clear)

    def edited(self, edits: Iterable[ListEdit]) -> FourLists:
        """The lists with edits made: first everything that is removed, then what is added.

        Raises:
            ConfigurationError: a type is added that stands on another list, or removed from a
                list that it is not on.
        """
        changed = self
        for edit in sorted(edits, key=lambda edit: edit.adds):
            changed = changed._with(edit)
        return changed

    def _with(self, edit: ListEdit) -> FourLists:
        types = self.types(edit.list)
        stands_on = self.of(edit.op_type)
        if not edit.adds:
            if edit.op_type not in types:
                where = f"; it is on the {stands_on} list" if stands_on else "; it is on none"
                raise ConfigurationError(
                    f"{edit.origin} removes {edit.op_type!r} from the {edit.list} list, which it "
                    f"is not on{where}"
                )
            return replace(self, **{edit.list.value: types - {edit.op_type}})
        if stands_on not in (None, edit.list):
            raise ConfigurationError(
                f"{edit.origin} adds {edit.op_type!r} to the {edit.list} list, but it is on the "
                f"{stands_on} list; remove it from there first, with {stands_on}list_remove"
            )
        return replace(self, **{edit.list.value: types | {edit.op_type}})


@dataclass(frozen=True)
class ListEdit:
    """One op type put on a list, or taken off.

    Attributes:
        adds: which of the two.
        list: the list.
        op_type: the framework's word for the type.
        origin: where the user says so, in words for messages.
    """

    adds: bool
    list: AmpList
    op_type: str
    origin: str


#: The options, by what they are called everywhere: `allowlist_add`, …, `clearlist_remove`.
EDIT_OPTIONS: Mapping[str, tuple[AmpList, bool]] = {
    f"{name}list_{action}": (name, action == "add")
    for name in AmpList
    for action in ("add", "remove")
}


def check_known(edits: Iterable[ListEdit], known: Collection[str]) -> None:
    """Make sure that the framework knows the op types of edits.

    Args:
        edits: the edits.
        known: the op types that the framework has.

    Raises:
        UnknownOperatorError: it does not know one of them.
    """
    for edit in edits:
        if edit.op_type not in known:
            raise UnknownOperatorError(
                f"{edit.origin} names {edit.op_type!r}, which is no op of the model's framework"
                f"{did_you_mean(edit.op_type, known)}"
            )
