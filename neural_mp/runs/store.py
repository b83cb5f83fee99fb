"""Write-through store of a run: in memory, and in its storage while that is writable."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from neural_mp.core.observations import Observations
from neural_mp.core.trial import Trial
from neural_mp.errors import HistoryError, one_line
from neural_mp.io.readers import compress_text, file_context, parse_json
from neural_mp.runs.record_schema import BASELINE_FIGURES, setup_from_dict
from neural_mp.runs.report import (
    ELEMENTS,
    LAYER_ERRORS,
    TIMES,
    ProbeMeasurements,
    RunEnd,
    RunRecord,
    RuntimeFigures,
    output_nsr_in,
)
from neural_mp.util.validators import Validator

if TYPE_CHECKING:
    from optuna.storages import RDBStorage

logger = logging.getLogger(__name__)
T = TypeVar("T")

#: Attempts per write, since some failures are transient, e.g. a lost connection.
_ATTEMPTS = 2
#: Attributes of a run, and of a trial; the keys of measurements follow `MEASURED`.
BASELINE, OBSERVATIONS, TRIAL = "baseline", "observations", "trial"
SETUP, ENDING = "setup", "ending"
MEASURED = "measured: "


class RunStore:
    """The stored data of a run and its trials.

    If the disk is full or the database is lost, the run goes on in memory, so that hours of
    computation are not lost.

    Optuna's storage is called directly: `Study.ask` and `Study.tell` read the trials again for
    their samplers, which takes longer than the writing.

    Args:
        storage: the storage with the run.
        name: name of the run in the storage.

    Attributes:
        name: name of the run in the storage.
        degraded_because: reason why the storage holds only a part of the run; empty if complete.
    """

    def __init__(self, storage: RDBStorage, name: str) -> None:
        self.name = name
        self.degraded_because = ""
        self._run_id = storage.get_study_id_from_name(name)
        self._attributes: dict[str, Any] = dict(storage.get_study_user_attrs(self._run_id))
        trials = storage.get_all_trials(self._run_id, deepcopy=False)
        #: Trial number → attributes, oldest first.
        self._trials = {int(trial.number): dict(trial.user_attrs) for trial in trials}
        self._storage = storage
        #: Number of an open trial → its ID in the storage.
        self._open: dict[int, int] = {}

    @property
    def baseline(self) -> dict[str, Any] | None:
        """The FP32 baseline; None before it was measured.

        Raises:
            HistoryError: the baseline is damaged.
        """
        figures = self._attributes.get(BASELINE)
        with file_context(f"{self.name}: {BASELINE}", HistoryError):
            return None if figures is None else BASELINE_FIGURES(figures)

    @baseline.setter
    def baseline(self, values: Mapping[str, Any]) -> None:
        self.set_attribute(BASELINE, dict(values))

    @property
    def observations(self) -> Observations | None:
        """The observations of calibration; None before calibration.

        Raises:
            HistoryError: the observations are damaged.
        """
        return self._read_attribute(OBSERVATIONS, Observations.from_dict)

    @observations.setter
    def observations(self, observations: Observations) -> None:
        self.set_packed(OBSERVATIONS, observations.to_dict())

    @property
    def has_ended(self) -> bool:
        """Whether the ending of the run is stored."""
        return self._attributes.get(ENDING) is not None

    def measurements(self) -> dict[str, Any]:
        """Return the entries of the run's cache."""
        return {
            key.removeprefix(MEASURED): value
            for key, value in self._attributes.items()
            if key.startswith(MEASURED)
        }

    def trials(self) -> list[Trial]:
        """Return all stored trials, oldest first.

        Raises:
            HistoryError: a trial is damaged.
        """
        return [
            replace(trial_of(attributes[TRIAL], f"{self.name}: trial {number}"), number=number)
            for number, attributes in self._trials.items()
            if TRIAL in attributes
        ]

    @property
    def runtimes(self) -> tuple[RuntimeFigures, ...]:
        """The figures of the runtimes that were compared before the search.

        Raises:
            HistoryError: the description of the run is damaged.
        """
        setup = self._read_attribute(SETUP, setup_from_dict)
        return () if setup is None else setup.runtimes

    def record(self) -> RunRecord:
        """Return all stored data of the run.

        Raises:
            HistoryError: the data is damaged, or an earlier version stored less.
        """
        setup = self._read_attribute(SETUP, setup_from_dict)
        if setup is None:
            raise HistoryError(
                f"run {self.name!r} must have a description of its model and settings, got none: "
                f"the run was created by an earlier version, or killed before its search; start a "
                f"new run"
            )
        entries = self.measurements()
        stored = {key: entries[key] for key in (TIMES, ELEMENTS, LAYER_ERRORS) if entries.get(key)}
        with file_context(self.name, HistoryError):
            measured = ProbeMeasurements.from_dict({**stored, "output_nsr": output_nsr_in(entries)})
        return RunRecord(
            setup,
            self.name,
            self.baseline,
            self.observations or Observations(),
            tuple(self.trials()),
            measured,
            self._read_attribute(ENDING, RunEnd.from_dict),
        )

    def _read_attribute(self, key: str, kind: Validator[T]) -> T | None:
        stored = self._attributes.get(key)
        origin = f"{self.name}: {key}"
        return None if stored is None else parse_json(stored, kind, origin, HistoryError)

    def set_attribute(self, name: str, value: Any) -> None:
        """Set an attribute of the run."""
        self._attributes[name] = value
        self._write_or_degrade(
            lambda storage: storage.set_study_user_attr(self._run_id, name, value)
        )

    def set_packed(self, name: str, value: Mapping[str, Any]) -> None:
        """Set an attribute of the run, compressed."""
        self.set_attribute(name, compress_text(json.dumps(value).encode()))

    def open_trial(self) -> int:
        """Open a trial and return its number; no other process adds trials to the run."""
        number = max(self._trials, default=-1) + 1
        opened = self._write_or_degrade(lambda storage: storage.create_new_trial(self._run_id))
        if opened is not None:
            self._open[number] = opened
        self._trials[number] = {}
        return number

    def set_trial_attributes(self, number: int, values: Mapping[str, Any]) -> None:
        """Set attributes of an open trial."""
        self._trials[number] |= values

        def store_attributes(storage: RDBStorage) -> None:
            for name, value in values.items():
                storage.set_trial_user_attr(self._open[number], name, value)

        if number in self._open:
            self._write_or_degrade(store_attributes)

    def close_trial(self, number: int, value: float | None, *, pruned: bool = False) -> None:
        """Close a trial with a value, or as failed if the value is None or NaN."""
        trial = self._open.pop(number, None)
        if trial is not None:
            self._write_or_degrade(lambda storage: _end_trial(storage, trial, value, pruned))

    def close_killed_trials(self) -> None:
        """Close trials that are still marked as running because their process was killed."""
        from optuna.trial import TrialState

        storage, states = self._storage, (TrialState.RUNNING,)
        for trial in storage.get_all_trials(self._run_id, deepcopy=False, states=states):
            number = trial.number
            trial_id = storage.get_trial_id_from_study_id_trial_number(self._run_id, number)
            _end_trial(storage, trial_id, accuracy_in(trial.user_attrs, number))

    def _write_or_degrade(self, write: Callable[[RDBStorage], Any]) -> Any:
        """Write to the storage unless it was given up; return the result."""
        if self.degraded_because:
            return None
        for attempt in range(_ATTEMPTS):
            try:
                return write(self._storage)
            except Exception as error:
                # SQLAlchemy and the database drivers raise dozens of types.
                logger.debug("run %r: write attempt %d failed", self.name, attempt, exc_info=True)
                cause = one_line(error.__cause__ or error)  # Optuna's own message is vaguer
        self.degraded_because = (
            f"the storage of run {self.name!r} cannot be written to: {cause}; the run continues in "
            f"memory, and its further trials cannot be resumed"
        )
        logger.warning(self.degraded_because)
        return None


def _end_trial(
    storage: RDBStorage, trial_id: int, value: float | None, pruned: bool = False
) -> None:
    """End a trial with a value, or as failed if the value is None or NaN."""
    from optuna.trial import TrialState

    if value is None or math.isnan(value):
        storage.set_trial_state_values(trial_id, TrialState.FAIL)
        return
    if pruned:
        storage.set_trial_intermediate_value(trial_id, 0, value)
    state = TrialState.PRUNED if pruned else TrialState.COMPLETE
    storage.set_trial_state_values(trial_id, state, [float(value)])


def trial_of(stored: Any, origin: str) -> Trial:
    """Read a stored trial.

    Raises:
        HistoryError: the trial is damaged.
    """
    return parse_json(stored, Trial.from_dict, origin, HistoryError)


def accuracy_in(attributes: Mapping[str, Any], number: int) -> float | None:
    """Return the accuracy in the attributes of a trial; None if no result was stored."""
    stored = attributes.get(TRIAL)
    return None if stored is None else trial_of(stored, f"trial {number}").accuracy
