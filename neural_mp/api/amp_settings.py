"""User settings of the four lists, merged and applied to the precisions and the tuning space."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from neural_mp.adaptors.contract import Adaptor
from neural_mp.amp import (
    PREFIXES,
    SWITCH,
    AmpSettings,
    AutoMixedPrecisionOptions,
    FourLists,
    ListEdit,
    known_edits,
    settle,
)
from neural_mp.core.precision import Precision
from neural_mp.errors import ConfigurationError
from neural_mp.space import TuningSpace
from neural_mp.util.environment import users_environment


def gather_amp(given: Any, configured: AutoMixedPrecisionOptions | None) -> AmpSettings:
    """Merge the AMP options: Python overrides the YAML file, which overrides the environment.

    Raises:
        ConfigurationError: an option is invalid.
    """
    sources = {"amp.{option}": given, "mixed_precision.{option}": configured}
    return settle(sources, users_environment())


def with_data_type(
    explicit: tuple[Precision, ...] | None,
    default: tuple[Precision, ...],
    amp: AmpSettings,
) -> tuple[tuple[Precision, ...], tuple[str, ...]]:
    """Return the precisions with the 16-bit type of `data_type` as the only one, and warnings.

    If mixed precision is enabled as a whole, BF16 is added if there is no 16-bit type. Environment
    variables without effect cause a warning.

    Args:
        explicit: precisions set by the user; None if unset.
        default: precisions used if `explicit` is None.
        amp: the merged AMP options.

    Raises:
        ConfigurationError: `explicit` and `data_type` contradict each other.
    """
    dtype = amp.data_type
    names = ",".join(map(str, explicit or ()))
    if dtype is None:
        chosen = explicit or default
        if not amp.switched_on or any(precision.is_16_bit for precision in chosen):
            return chosen, ()
        if explicit is not None:  # explicit precisions override environment variables
            return explicit, (
                f"{SWITCH} requires a 16-bit precision, but precisions are {names}; the variable "
                f"is ignored",
            )
        return tuple(p for p in Precision if p in (*chosen, Precision.BF16)), ()
    origin = amp.origins["data_type"]
    if explicit is not None and dtype not in explicit:
        if origin.startswith(PREFIXES):  # explicit precisions override environment variables
            return explicit, (
                f"{origin} requires {dtype}, but precisions are {names}; the variable is ignored",
            )
        raise ConfigurationError(
            f"{origin} requires {dtype}, but precisions are {names}; add {dtype} to precisions, "
            f"or remove one of the two options"
        )
    remaining = [p for p in explicit or default if not p.is_16_bit]
    return tuple(p for p in Precision if p in (*remaining, dtype)), ()


def edited_lists(
    adaptor: Adaptor[Any], amp: AmpSettings, precisions: tuple[Precision, ...]
) -> tuple[Mapping[Precision, FourLists], tuple[str, ...]]:
    """Return the four lists of every 16-bit precision, edited for `precisions`, and warnings.

    Edits without effect cause a warning.

    Raises:
        UnknownOperatorError: an edit names an op type that the framework lacks.
        ConfigurationError: an edit contradicts the lists.
    """
    edits, warnings = known_edits(amp.edits, adaptor.framework, adaptor.op_types)
    used = [p for p in precisions if p.is_16_bit]
    if edits and not used:
        warnings = (
            *warnings,
            f"{edits[0].origin} has no effect: no 16-bit precision is requested and supported",
        )
    lists = {p: adaptor.amp_lists(p) for p in Precision if p.is_16_bit}
    originals = [lists[p] for p in used]
    edited = {p: lists[p].edited(_relevant_edits(lists[p], edits, originals)) for p in used}
    if amp.infer_as_deny:
        edited = {p: four_lists.denying_infer() for p, four_lists in edited.items()}
    return lists | edited, warnings


def _relevant_edits(
    lists: FourLists, edits: tuple[ListEdit, ...], used: list[FourLists]
) -> list[ListEdit]:
    """Return the edits, without removals that match only the lists of another precision."""
    return [
        edit
        for edit in edits
        if edit.adds
        or lists.of(edit.op_type) is edit.list
        or not any(four_lists.of(edit.op_type) is edit.list for four_lists in used)
    ]


def forced(space: TuningSpace, amp: AmpSettings) -> TuningSpace:
    """Return the space with every op type on the ALLOW list if `force_all` is set."""
    if not amp.force_all:
        return space
    every = space.graph.types
    return replace(space, lists={p: lists.allowing(every) for p, lists in space.lists.items()})
