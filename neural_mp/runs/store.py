"""What a run writes down: in its storage, as long as that takes it, and in memory."""

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

#: What keeps a storage from being written may be over at once, such as a connection that was cut.
_ATTEMPTS = 2


class RunBook:
    """Attributes of a run, and trials with attributes of their own.

    A disk that is full, or a database that is gone, does not end a run that has computed for hours:
    it goes on in memory.

    Args:
        study: the run in its storage.

    Attributes:
        name: of the run in the storage.
        attributes: name → value.
        trouble: why the storage holds only a part of the run; empty where it holds all.
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
        """Number → attributes, oldest first."""
        return self._trials

    def write(self, name: str, value: Any) -> None:
        """Set an attribute."""
        self.attributes[name] = value
        self._stored(lambda study: study.set_user_attr(name, value))

    def start(self) -> int:
        """Open a trial; its number."""
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
        """Close a trial: with a value, or as one that failed."""
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
        """Write into the storage, unless it was given up; what that gives."""
        if self._study is None:
            return None
        for attempt in range(_ATTEMPTS):
            try:
                with quiet_optuna():
                    return write(self._study)
            except Exception as error:
                # SQLAlchemy and the database drivers raise types of their own, by the dozen.
                logger.debug("attempt %d to write a run down failed", attempt, exc_info=True)
                words = one_line(error.__cause__ or error)  # Optuna's own says less
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
    """What the cache of a run holds."""
    return {
        key.removeprefix(MEASURED): value
        for key, value in book.attributes.items()
        if key.startswith(MEASURED)
    }


def record_of(book: RunBook) -> RunRecord:
    """All that is kept of a run.

    Raises:
        HistoryError: it is damaged, or was begun by a version that kept less.
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
    """The FP32 baseline, once it was measured.

    Raises:
        HistoryError: it is damaged.
    """
    found = book.attributes.get(BASELINE)
    with file_context(f"{book.name}: {BASELINE}", HistoryError):
        return None if found is None else BASELINE_FIGURES(found)


def kept(book: RunBook, key: str, kind: Validator[T]) -> T | None:
    """What is kept of a run under a key, packed; None where nothing is.

    Raises:
        HistoryError: it is damaged.
    """
    stored = book.attributes.get(key)
    origin = f"{book.name}: {key}"
    return None if stored is None else parse_json(stored, kind, origin, HistoryError)


def trial_of(stored: Any, origin: str) -> Trial:
    """A trial as `History.finish` wrote it down.

    Raises:
        HistoryError: it is damaged.
    """
    return parse_json(stored, Trial.from_dict, origin, HistoryError)


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
