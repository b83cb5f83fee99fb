"""What a user says of the four lists, brought together with the precisions and the framework."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from neural_mp.adaptors.base import Adaptor
from neural_mp.amp import (
    AmpSettings,
    AutoMixedPrecisionOptions,
    FourLists,
    check_known,
    settle,
)
from neural_mp.errors import ConfigurationError
from neural_mp.precision import Precision
from neural_mp.space import TuningSpace


def gather_amp(given: Any, configured: AutoMixedPrecisionOptions | None) -> AmpSettings:
    """What counts: of each option Python, else the YAML file, else the environment.

    Raises:
        ConfigurationError: an option cannot be understood.
    """
    if given is not None and not isinstance(given, AutoMixedPrecisionOptions):
        raise ConfigurationError(
            f"amp must be AutoMixedPrecisionOptions, got {type(given).__name__}"
        )
    sources = {"amp.{option}": given, "mixed_precision.{option}": configured}
    return settle(sources, os.environ)


def with_data_type(
    explicit: tuple[Precision, ...] | None,
    default: tuple[Precision, ...],
    amp: AmpSettings,
    warnings: list[str],
) -> tuple[Precision, ...]:
    """The precisions to use, with the 16-bit type that `data_type` names as the only one.

    Args:
        explicit: the precisions the user gave; None where none were.
        default: those in place of them.
        amp: what was said of the 16-bit type.
        warnings: told of a variable that has no effect.

    Raises:
        ConfigurationError: both are given and contradict each other.
    """
    wanted = amp.data_type
    if wanted is None:
        return explicit or default
    origin = amp.origins["data_type"]
    if explicit is not None and wanted not in explicit:
        words = ",".join(map(str, explicit))
        if origin.isupper():  # a variable, which counts less than what is said of precisions
            warnings.append(f"{origin} asks for {wanted}, but precisions are {words}; it is left")
            return explicit
        raise ConfigurationError(
            f"{origin} asks for {wanted}, but precisions are {words}; add {wanted} to them, or "
            f"take one of the two away"
        )
    kept = [p for p in explicit or default if not p.is_16_bit]
    return tuple(p for p in Precision if p in (*kept, wanted))


def edited_lists(
    adaptor: Adaptor,
    amp: AmpSettings,
    precisions: tuple[Precision, ...],
    warnings: list[str],
) -> Mapping[Precision, FourLists]:
    """The four lists of every 16-bit precision: the framework's, with the edits to those in use.

    Raises:
        UnknownOperatorError: an edit names a type that the framework does not have.
        ConfigurationError: an edit does not fit the lists.
    """
    check_known(amp.edits, adaptor.op_types())
    used = [p for p in precisions if p.is_16_bit]
    if amp.edits and not used:
        warnings.append(
            f"{amp.edits[0].origin} has no effect: no 16-bit precision is asked for or supported"
        )
    return {
        p: adaptor.amp_lists(p).edited(amp.edits if p in used else ())
        for p in Precision
        if p.is_16_bit
    }


def forced(space: TuningSpace, amp: AmpSettings) -> TuningSpace:
    """The space with every op type on the ALLOW list, if that is what the user wants."""
    if not amp.force_all:
        return space
    every = space.graph.types
    return replace(space, lists={p: lists.allowing(every) for p, lists in space.lists.items()})
