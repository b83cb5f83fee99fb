"""What a tuning run needs to know."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from neural_mp.adaptors.contract import Adaptor, Model
from neural_mp.core.precision import Precision
from neural_mp.space import TuningSpace
from neural_mp.strategies.base import Strategy
from neural_mp.tuning.batches import Batches
from neural_mp.tuning.criterion import AccuracyCriterion, ExitPolicy
from neural_mp.tuning.evaluator import Evaluator
from neural_mp.tuning.history import History
from neural_mp.tuning.objectives import Measurement


@dataclass(frozen=True)
class TuningJob:
    """What a run needs to know.

    Attributes:
        adaptor, model: the framework and the model it holds.
        space: what every op may run in, user's constraints applied.
        precisions: what the user asked for and this machine supports.
        strategy: proposes plans.
        evaluator: measures accuracy.
        metric: what the evaluator measures, by name; empty where it measures nothing.
        calibration: batches for calibration; None where there are none.
        sampling_size: calibration samples to use.
        criterion, exit_policy, seed: as the user set them.
        open_history: opens the run's record; only called where accuracy is evaluated.
        load: makes the adaptor and the model once more, in another process.
        workers: processes that try the plans of a round side by side.
        early_stopping: whether an evaluation that is lost is stopped.
        for_numbers: precisions wanted whatever they cost here: forced on (`FORCE_BF16=1`), or not
            native on this machine and yet on the one that is converted for.
        measurement: how latency and memory are measured.
        amp: what the user said of auto mixed precision, in words.
        warnings: what the user was already warned of.
        seconds: phases already done → how long they took.
    """

    adaptor: Adaptor
    model: Model
    space: TuningSpace
    precisions: tuple[Precision, ...]
    strategy: Strategy
    evaluator: Evaluator
    calibration: Batches | None
    open_history: Callable[[], History]
    load: Callable[[], tuple[Adaptor, Model]]
    measurement: Measurement
    metric: str = ""
    sampling_size: int = 100
    criterion: AccuracyCriterion = AccuracyCriterion()
    exit_policy: ExitPolicy = ExitPolicy()
    seed: int = 0
    for_numbers: frozenset[Precision] = frozenset()
    workers: int = 1
    early_stopping: bool = True
    amp: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def objectives(self) -> Mapping[str, float]:
        """What is made small → its weight."""
        return self.measurement.objectives
