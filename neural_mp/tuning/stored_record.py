"""A run as Optuna's storage keeps it, read back: whoever wrote it last, all of it is checked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

from neural_mp.core.observations import Observations, Times
from neural_mp.core.trial import Trial
from neural_mp.errors import HistoryError
from neural_mp.io.readers import of_json, reading
from neural_mp.runs.record import Measured, RunRecord
from neural_mp.runs.record_schema import BASELINE_FIGURES, ending_from_dict, setup_from_dict
from neural_mp.tuning.notes import TIMES, VALUES, arriving_in
from neural_mp.tuning.run_book import RunBook
from neural_mp.util.validators import Kind, amount, at, mapping_of

T = TypeVar("T")

#: Attributes of a run, and of a trial.
BASELINE, OBSERVATIONS, TRIAL = "baseline", "observations", "trial"
SETUP, ENDING = "setup", "ending"
MEASURED = "measured: "


def record_of(book: RunBook) -> RunRecord:
    """All that is kept of a run.

    Raises:
        HistoryError: it is damaged, or was begun by a version that kept less.
    """
    attributes = book.attributes
    notes = {
        key.removeprefix(MEASURED): value
        for key, value in attributes.items()
        if key.startswith(MEASURED)
    }
    setup = kept(book, SETUP, setup_from_dict)
    if setup is None:
        raise HistoryError(
            f"{book.name!r} was begun by a version that kept less, or was killed before it "
            f"began to search; there is nothing to show of it"
        )
    with reading(book.name, HistoryError):
        measured = Measured(
            at(TIMES, Times.from_dict, notes[TIMES]) if notes.get(TIMES) else Times(),
            arriving_in(notes),
            at(VALUES, mapping_of(amount), notes.get(VALUES) or {}),
        )
    return RunRecord(
        setup,
        book.name,
        baseline_of(book),
        kept(book, OBSERVATIONS, Observations.from_dict) or Observations(),
        tuple(trials_of(book)),
        measured,
        kept(book, ENDING, ending_from_dict),
    )


def baseline_of(book: RunBook) -> dict[str, Any] | None:
    """The FP32 baseline, once it was measured.

    Raises:
        HistoryError: it is damaged.
    """
    found = book.attributes.get(BASELINE)
    with reading(f"{book.name}: {BASELINE}", HistoryError):
        return None if found is None else BASELINE_FIGURES(found)


def kept(book: RunBook, key: str, kind: Kind[T]) -> T | None:
    """What is kept of a run under a key, packed; None where nothing is.

    Raises:
        HistoryError: it is damaged.
    """
    stored = book.attributes.get(key)
    origin = f"{book.name}: {key}"
    return None if stored is None else of_json(stored, kind, origin, HistoryError)


def trial_of(stored: Any, origin: str) -> Trial:
    """A trial as `History.finish` wrote it down.

    Raises:
        HistoryError: it is damaged.
    """
    return of_json(stored, Trial.from_dict, origin, HistoryError)


def trials_of(book: RunBook) -> list[Trial]:
    """All trials that were written down, oldest first.

    Raises:
        HistoryError: one is damaged.
    """
    return [
        replace(trial_of(attributes[TRIAL], f"{book.name}: trial {number}"), number=number)
        for number, attributes in book.trials.items()
        if TRIAL in attributes
    ]
