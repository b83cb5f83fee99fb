"""Four lists of op types (ALLOW, DENY, INFER, CLEAR), and edits to the lists.

Names and semantics are those of TensorFlow's auto mixed precision pass
(`auto_mixed_precision_lists.h`) and of Intel Extension for TensorFlow's guide "Advanced Auto Mixed
Precision".
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

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
        return FourLists(
            *(
                frozenset(
                    translation for name in self.types(which) for translation in names.get(name, ())
                )
                for which in AmpList
            )
        )

    def allowing(self, op_types: Iterable[str]) -> FourLists:
        """Return the lists with these types moved to ALLOW, dangerous or not."""
        moved = frozenset(op_types)
        return FourLists(
            self.allow | moved, self.deny - moved, self.infer - moved, self.clear - moved
        )

    def denying_infer(self) -> FourLists:
        """Return the lists with all of INFER moved to DENY."""
        return FourLists(self.allow, self.deny | self.infer, frozenset(), self.clear)

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
