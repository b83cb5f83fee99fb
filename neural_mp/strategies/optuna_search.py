"""`random`, `tpe` and `bayesian`: plans drawn by an Optuna sampler."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from importlib.util import find_spec
from math import inf
from typing import TYPE_CHECKING, ClassVar

from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import Precision
from neural_mp.core.trial import Trial
from neural_mp.errors import ConfigurationError
from neural_mp.space import TuningSpace
from neural_mp.strategies.base import Search, Strategy, TuningProblem
from neural_mp.strategies.decisions import (
    Combination,
    NewPlans,
    decision_levels,
    iterate_combinations,
)
from neural_mp.util.optional_packages import install_command, silence_optuna_log

if TYPE_CHECKING:
    import optuna

#: Maximum number of consecutive plans without improvement.
_MAX_TRIALS_WITHOUT_GAIN = 20


class OptunaStrategy(Strategy):
    """A search with one categorical variable per decision: its precision.

    The first plan has the lowest precisions; the sampler draws all others. Plans that were tried
    before or have no lower precision are drawn again; after `repeats` such draws in a row, the next
    plan of `exhaustive` is tried instead, so that every plan is tried eventually.

    The minimized objective is between 0 and 1 for plans that meet the accuracy target, and between
    1 and 2 for the others:

    - Plans that meet the target: weighted objectives relative to FP32; without measurements, the
      bits of the plan relative to FP32.
    - Other plans: distance to the target; failed plans have the worst value, 2.

    The search continues after a plan has met the target, since a faster one may follow. It ends
    after 20 consecutive plans without improvement, when all plans were proposed, or after 1000
    combinations in a row without a new plan.
    """

    #: Plans drawn per round. Independent of the number of workers, so that a seed proposes the same
    #: plans everywhere.
    round_size: ClassVar[int] = 1
    #: Maximum number of consecutive draws without a new plan.
    repeats: ClassVar[int] = 5

    @abstractmethod
    def create_sampler(self, seed: int) -> optuna.samplers.BaseSampler:
        """Return the Optuna sampler."""

    def search(self, problem: TuningProblem) -> Search:
        """Search as described in the class."""
        if not problem.space.decision_groups:
            return
        import optuna

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            sampler = self.create_sampler(problem.seed)
        study = _Study(problem.space, sampler, self.repeats)
        best, without_gain = inf, 0
        while without_gain < _MAX_TRIALS_WITHOUT_GAIN:
            draws = (study.draw_plan() for _ in range(self.round_size))
            drawn = [draw for draw in draws if draw is not None]
            if not drawn:
                return
            trials = yield [plan for _, plan in drawn]
            for (draw, _), trial in zip(drawn, trials, strict=True):
                value = compute_objective_value(problem, trial)
                study.optuna_study.tell(draw, value)
                without_gain = 0 if value < best else without_gain + 1
                best = min(best, value)


class _Study:
    """An in-memory study that yields every plan once.

    Attributes:
        optuna_study: the study of Optuna, which is told the value of every draw.
    """

    def __init__(
        self, space: TuningSpace, sampler: optuna.samplers.BaseSampler, repeats: int
    ) -> None:
        import optuna

        with silence_optuna_log():
            self.optuna_study = optuna.create_study(study_name="plans", sampler=sampler)
        self._plans, self._repeats = NewPlans(space), repeats
        self._levels = {ops[0]: decision_levels(space, ops) for ops in space.decision_groups}
        self._variables: dict[str, optuna.distributions.BaseDistribution] = {
            name: optuna.distributions.CategoricalDistribution([str(level) for level in choices])
            for name, choices in self._levels.items()
        }
        self._in_order = iterate_combinations(list(self._levels.values()))
        self._drawn: set[Combination] = set()

    def draw_plan(self) -> tuple[optuna.Trial, PrecisionPlan] | None:
        """Return a new plan; None if no more are left."""
        from optuna.trial import TrialState

        repeated = 0
        while not self._plans.is_exhausted:
            if (not self._drawn or repeated >= self._repeats) and not self._enqueue_next():
                return None
            draw = self.optuna_study.ask(self._variables)
            plan = self._make_untried_plan(
                tuple(Precision(draw.params[name]) for name in self._levels)
            )
            if plan is not None:
                return draw, plan
            # Samplers ignore failed draws.
            self.optuna_study.tell(draw, state=TrialState.FAIL)
            repeated += 1
        return None

    def _enqueue_next(self) -> bool:
        """Enqueue the next combination in order; return False if none is left."""
        following = next((c for c in self._in_order if c not in self._drawn), None)
        if following is None:
            return False
        self.optuna_study.enqueue_trial(dict(zip(self._levels, map(str, following), strict=True)))
        return True

    def _make_untried_plan(self, combination: Combination) -> PrecisionPlan | None:
        """Return the plan of a combination; None if tried before or without a lower precision."""
        if combination in self._drawn:
            return None
        self._drawn.add(combination)
        return self._plans.make_new_plan(combination)


def compute_objective_value(problem: TuningProblem, trial: Trial) -> float:
    """Return the objective value of a trial (see `OptunaStrategy`)."""
    if not trial.meets_accuracy:
        return 1.0 + squash_to_unit(trial.ranking_loss)
    cost = trial.relative_cost(problem.objectives)
    if cost < inf:
        return squash_to_unit(cost)
    chosen = trial.plan.precisions
    bits = [chosen.get(op, Precision.FP32).bits for op in problem.space.tunable_ops]
    return squash_to_unit(sum(bits) / (Precision.FP32.bits * len(bits)))


def squash_to_unit(value: float) -> float:
    """Map 0 … infinity to 0 … 1, monotonically."""
    return 1.0 if value == inf else max(0.0, value) / (1.0 + max(0.0, value))


class Bayesian(OptunaStrategy):
    """Intel Neural Compressor's `bayesian`: Bayesian optimization.

    1. The lowest precisions, then random plans, 10 in total.
    2. A Gaussian process is fitted to the trials; the next plan has the highest expected
       improvement over the best one. Uses Optuna's `GPSampler`, which requires torch.

    For the objective and the end of the search, see `OptunaStrategy`. The published strategy
    chooses among INT8 approaches; this one chooses precisions.

    Source: `tuning_strategies.md`, "Bayesian".

    Raises:
        ConfigurationError: torch is missing.
    """

    name = "bayesian"
    # Without a new trial, the sampler would repeat its draw, and slowly.
    repeats: ClassVar[int] = 1

    def __init__(self) -> None:
        # Fail at once instead of after evaluating the baseline.
        if find_spec("torch") is None:
            raise ConfigurationError(
                "strategy 'bayesian' requires torch, which is not installed; run "
                f"{install_command('torch')}, or use strategy 'tpe', which requires no torch"
            )

    def create_sampler(self, seed: int) -> optuna.samplers.BaseSampler:
        """See the base class."""
        import optuna

        return optuna.samplers.GPSampler(seed=seed)


class Tpe(OptunaStrategy):
    """Intel Neural Compressor's `tpe`: a Tree-structured Parzen Estimator.

    1. The lowest precisions, then random plans, 10 in total.
    2. Trials are split into good and bad ones. The next plan maximizes the ratio of its likelihood
       among the good to that among the bad, for all decisions jointly. Uses Optuna's `TPESampler`.

    For the objective and the end of the search, see `OptunaStrategy`.

    Sources: Bergstra et al., "Algorithms for Hyper-Parameter Optimization", NeurIPS 2011;
    `tuning_strategies.md`, "TPE".
    """

    name = "tpe"

    def create_sampler(self, seed: int) -> optuna.samplers.BaseSampler:
        """See the base class."""
        import optuna

        return optuna.samplers.TPESampler(seed=seed, multivariate=True)


class RandomSearch(OptunaStrategy):
    """Intel Neural Compressor's `random`: every decision independently at random.

    1. All ops in their lowest precision.
    2. Plans in rounds of 8, drawn by Optuna's `RandomSampler`. Draws are independent of earlier
       trials, so the plans of a round can be tried in parallel.

    For the end of the search, see `OptunaStrategy`. The published strategy draws INT8 approaches;
    this one draws precisions.

    Source: `tuning_strategies.md`, "Random".
    """

    name = "random"
    round_size: ClassVar[int] = 8

    def create_sampler(self, seed: int) -> optuna.samplers.BaseSampler:
        """See the base class."""
        import optuna

        return optuna.samplers.RandomSampler(seed=seed)
