"""What a run writes down: in its storage, as long as that takes it, and in memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from neural_mp.errors import in_one_line
from neural_mp.util.optuna_logging import quiet_optuna

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
                words = in_one_line(error.__cause__ or error)  # Optuna's own says less
        self._study = None
        self.trouble = (
            f"the run {self.name!r} is no longer written down, and what comes now cannot be "
            f"resumed: {words}"
        )
        logger.warning(self.trouble)
        return None
