"""What is asked for where no model is converted: one 16-bit precision, and edits of its lists."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from neural_mp.amp.lists import ListEdit, check_known
from neural_mp.amp.options import (
    TENSORFLOW_PREFIXES,
    AmpSettings,
    AutoMixedPrecisionOptions,
    settle,
)
from neural_mp.core.precision import Precision, parse_precisions
from neural_mp.errors import ConfigurationError


def requested(
    asker: str,
    precision: str | Precision | None,
    amp: AutoMixedPrecisionOptions | None,
    environment: Mapping[str, str],
) -> tuple[Precision, AmpSettings]:
    """The precision that counts, and everything else that was said of mixed precision.

    Args:
        asker: who takes the precision, in words for messages, such as `the rewrite`.
        precision: what the user gave; None for what the settings say, else BF16.
        amp: the options the user gave.
        environment: variable → value; it counts for what is not given.

    Raises:
        ConfigurationError: more than one precision is given, `precision` and `amp.data_type`
            contradict each other, or an option cannot be understood.
    """
    settings = settle({"amp.{option}": amp}, environment)
    if precision is None:
        return settings.data_type or Precision.BF16, settings
    (chosen, *others) = parse_precisions(precision)
    said = settings.data_type if settings.origins.get("data_type") == "amp.data_type" else None
    if others or said not in (None, chosen):
        raise ConfigurationError(
            f"{asker} takes one 16-bit precision, got {precision!r}"
            + (f" and amp.data_type {said}" if said else "")
        )
    return chosen, settings


def known_edits(
    edits: Iterable[ListEdit], framework: str, op_types: Callable[[], Collection[str]]
) -> tuple[tuple[ListEdit, ...], tuple[str, ...]]:
    """The edits of types that the framework has, and a warning for every edit that is left.

    Variables that were made for TensorFlow may be set for it, and another framework be at work.

    Args:
        edits: what the user wants moved.
        framework: the one at work.
        op_types: lists every op type that it has.

    Raises:
        UnknownOperatorError: an edit names a type that the framework does not have.
    """
    edits = tuple(edits)
    if not edits:
        return (), ()  # to list all op types takes a framework a while
    known = op_types()
    foreign = [
        edit
        for edit in edits
        if framework != "tensorflow"
        and edit.origin.startswith(TENSORFLOW_PREFIXES)
        and edit.op_type not in known
    ]
    warnings = tuple(
        f"{edit.origin} names {edit.op_type!r}, which {framework} does not have; it is left"
        for edit in foreign
    )
    kept = tuple(edit for edit in edits if edit not in foreign)
    check_known(kept, known)
    return kept, warnings
