"""Write-through store of a run: in memory, and in its storage while that is writable."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from neural_mp.core.observations import Observations, OpTimings
from neural_mp.core.trial import Trial
from neural_mp.errors import HistoryError, one_line
from neural_mp.io.readers import file_context, parse_json
from neural_mp.runs.record import ELEMENTS, TIMES, ProbeMeasurements, RunRecord, output_nsr_in
from neural_mp.runs.record_schema import BASELINE_FIGURES, ending_from_dict, setup_from_dict
from neural_mp.util.optuna_logging import quiet_optuna
from neural_mp.util.validators import Validator, mapping_of, non_negative_float, validate_at

if TYPE_CHECKING:
    import optuna

logger = logging.getLogger(__name__)

#: Attempts per write, since some failures are transient, e.g. a lost connection.
_ATTEMPTS = 2


class RunBook:
    """Attributes of a run, and trials with attributes.

    If the disk is full or the database is lost, the run goes on in memory, so that hours of
    computation are not lost.

    Args:
        study: the run in its storage.

    Attributes:
        name: name of the run in the storage.
        attributes: name → value.
        trouble: reason why the storage holds only a part of the run; empty if complete.
    """

    def __init__(self, study: optuna.Study) -> None:
        self.name = str(study.study_name)
        self.attributes: dict[str, Any] = dict(study.user_attrs)
        trials = study.get_trials(deepcopy=False)
        self._trials = {int(trial.number): dict(trial.user_attrs) for trial in trials}
        self._study: optuna.Study | None = study
        self._open: dict[int, optuna.Trial] = {}
        self.trouble = ""

    @property
    def trials(self) -> Mapping[int, Mapping[str, Any]]:
        """Trial number → attributes, oldest first."""
        return self._trials

    def write(self, name: str, value: Any) -> None:
        """Set an attribute."""
        self.attributes[name] = value
        self._stored(lambda study: study.set_user_attr(name, value))

    def start(self) -> int:
        """Open a trial and return its number."""
        opened = self._stored(lambda study: study.ask())
        number = max(self._trials, default=-1) + 1 if opened is None else int(opened.number)
        if opened is not None:
            self._open[number] = opened
        self._trials[number] = {}
        return number

    def note(self, number: int, values: Mapping[str, Any]) -> None:
        """Set attributes of an open trial."""
        self._trials[number] |= values

        def store(_: optuna.Study) -> None:
            for name, value in values.items():
                self._open[number].set_user_attr(name, value)

        if number in self._open:
            self._stored(store)

    def close(self, number: int, value: float | None, *, pruned: bool = False) -> None:
        """Close a trial with a value, or as failed if the value is None."""
        from optuna.trial import TrialState

        handle = self._open.pop(number, None)
        if handle is None:
            return
        if value is None:
            self._stored(lambda study: study.tell(number, state=TrialState.FAIL))
        elif pruned:
            self._stored(lambda study: handle.report(value, step=0))
            self._stored(lambda study: study.tell(number, state=TrialState.PRUNED))
        else:
            self._stored(lambda study: study.tell(number, value))

    def _stored(self, write: Callable[[optuna.Study], Any]) -> Any:
        """Write to the storage unless it was given up; return the result."""
        if self._study is None:
            return None
        for attempt in range(_ATTEMPTS):
            try:
                with quiet_optuna():
                    return write(self._study)
            except Exception as error:
                # SQLAlchemy and the database drivers raise dozens of types.
                logger.debug("attempt %d to write a run down failed", attempt, exc_info=True)
                words = one_line(error.__cause__ or error)  # Optuna's own message is vaguer
        self._study = None
        self.trouble = (
            f"the run {self.name!r} is no longer written down, and what comes now cannot be "
            f"resumed: {words}"
        )
        logger.warning(self.trouble)
        return None


T = TypeVar("T")

#: Attributes of a run, and of a trial.
BASELINE, OBSERVATIONS, TRIAL = "baseline", "observations", "trial"
SETUP, ENDING = "setup", "ending"
MEASURED = "measured: "


def measurements_of(book: RunBook) -> dict[str, Any]:
    """Return the entries of a run's cache."""
    return {
        key.removeprefix(MEASURED): value
        for key, value in book.attributes.items()
        if key.startswith(MEASURED)
    }


def record_of(book: RunBook) -> RunRecord:
    """Return all stored data of a run.

    Raises:
        HistoryError: the data is damaged, or an earlier version stored less.
    """
    notes = measurements_of(book)
    setup = kept(book, SETUP, setup_from_dict)
    if setup is None:
        raise HistoryError(
            f"{book.name!r} was begun by a version that kept less, or was killed before it "
            f"began to search; there is nothing to show of it"
        )
    with file_context(book.name, HistoryError):
        measured = ProbeMeasurements(
            validate_at(TIMES, OpTimings.from_dict, notes[TIMES])
            if notes.get(TIMES)
            else OpTimings(),
            output_nsr_in(notes),
            validate_at(ELEMENTS, mapping_of(non_negative_float), notes.get(ELEMENTS) or {}),
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
    """Return the FP32 baseline; None before it was measured.

    Raises:
        HistoryError: the baseline is damaged.
    """
    found = book.attributes.get(BASELINE)
    with file_context(f"{book.name}: {BASELINE}", HistoryError):
        return None if found is None else BASELINE_FIGURES(found)


def kept(book: RunBook, key: str, kind: Validator[T]) -> T | None:
    """Return the value stored under a key; None if there is none.

    Raises:
        HistoryError: the value is damaged.
    """
    stored = book.attributes.get(key)
    origin = f"{book.name}: {key}"
    return None if stored is None else parse_json(stored, kind, origin, HistoryError)


def trial_of(stored: Any, origin: str) -> Trial:
    """Read a trial that `History.keep` or `History.finish` stored.

    Raises:
        HistoryError: the trial is damaged.
    """
    return parse_json(stored, Trial.from_dict, origin, HistoryError)


def trials_of(book: RunBook) -> list[Trial]:
    """Return all stored trials, oldest first.

    Raises:
        HistoryError: a trial is damaged.
    """
    return [
        replace(trial_of(attributes[TRIAL], f"{book.name}: trial {number}"), number=number)
        for number, attributes in book.trials.items()
        if TRIAL in attributes
    ]
