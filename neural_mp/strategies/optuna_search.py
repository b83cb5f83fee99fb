"""What strategies share that leave the choice of plans to a sampler of Optuna's."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from math import inf
from typing import TYPE_CHECKING, ClassVar

from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import Precision
from neural_mp.core.trial import Trial
from neural_mp.space import ResolvedPlan, TuningSpace
from neural_mp.strategies.base import Search, Strategy, TuningProblem
from neural_mp.strategies.decisions import Combination, combinations, levels, plan_of
from neural_mp.util.optuna_logging import quiet_optuna

if TYPE_CHECKING:
    import optuna

#: Plans in a row that may be no better than the best before, until the search ends.
_MAX_TRIALS_WITHOUT_GAIN = 20


class OptunaStrategy(Strategy):
    """A search with one categorical variable per decision: its precision.

    The first plan has everything as low as it can; the sampler draws all others. A plan that was
    tried before, or that has nothing low, is drawn again; after a few such draws in a row the next
    plan of `exhaustive` takes its place, so that every plan has its turn in the end.

    What the sampler is told of a trial, smaller being better, is between 0 and 1 for plans that
    meet the accuracy target, and from there to 2 for the others, so that any of the former is
    better than any of the latter:

    - The former are ordered by the objectives, as shares of FP32's, by weight; where there are no
      figures, by the bits of the plan as a share of FP32's.
    - The latter are ordered by how far they missed; those that failed have the worst value, 2.

    The search goes on after a plan has met the target, because a faster one may come. It ends when
    20 plans in a row were no better than the best before, or all were proposed.
    """

    #: Plans that are drawn before any of them is tried. No matter how many run side by side, so
    #: that the same seed proposes the same plans everywhere.
    round_size: ClassVar[int] = 1
    #: Draws in a row that may bring nothing new, until a plan is given instead.
    repeats: ClassVar[int] = 5

    @abstractmethod
    def sampler(self, seed: int) -> optuna.samplers.BaseSampler:
        """What draws the plans."""

    def search(self, problem: TuningProblem) -> Search:
        """See the class."""
        if not problem.space.decision_groups:
            return
        draws = _Study(problem.space, self.sampler(problem.seed), self.repeats)
        best, in_vain = inf, 0
        while in_vain < _MAX_TRIALS_WITHOUT_GAIN:
            drawn = draws.several(self.round_size)
            if not drawn:
                return
            trials = yield [plan for _, plan in drawn]
            for (draw, _), trial in zip(drawn, trials, strict=True):
                value = objective_value(problem, trial)
                draws.tell(draw, value)
                in_vain = 0 if value < best else in_vain + 1
                best = min(best, value)


class _Study:
    """A study in memory, from which every plan comes once."""

    def __init__(
        self, space: TuningSpace, sampler: optuna.samplers.BaseSampler, repeats: int
    ) -> None:
        import optuna

        with quiet_optuna():
            self._study = optuna.create_study(study_name="plans", sampler=sampler)
        self._space, self._repeats = space, repeats
        self._levels = {ops[0]: levels(space, ops) for ops in space.decision_groups}
        self._variables: dict[str, optuna.distributions.BaseDistribution] = {
            name: optuna.distributions.CategoricalDistribution([str(level) for level in choices])
            for name, choices in self._levels.items()
        }
        self._in_order = combinations(list(self._levels.values()))
        self._drawn: set[Combination] = set()
        self._tried: set[ResolvedPlan] = set()

    def several(self, count: int) -> list[tuple[optuna.Trial, PrecisionPlan]]:
        """So many new plans, or fewer where there are no more."""
        found = (self._one() for _ in range(count))
        return [draw for draw in found if draw is not None]

    def tell(self, draw: optuna.Trial, value: float) -> None:
        """What came of a draw."""
        self._study.tell(draw, value)

    def _one(self) -> tuple[optuna.Trial, PrecisionPlan] | None:
        from optuna.trial import TrialState

        repeated = 0
        while True:
            if (not self._drawn or repeated >= self._repeats) and not self._give_next():
                return None
            draw = self._study.ask(self._variables)
            plan = self._new(tuple(Precision(draw.params[name]) for name in self._levels))
            if plan is not None:
                return draw, plan
            # Samplers take no notice of draws that failed.
            self._study.tell(draw, state=TrialState.FAIL)
            repeated += 1

    def _give_next(self) -> bool:
        """Have the next combination in order drawn next; False if all were."""
        given = next((other for other in self._in_order if other not in self._drawn), None)
        if given is None:
            return False
        self._study.enqueue_trial(dict(zip(self._levels, map(str, given), strict=True)))
        return True

    def _new(self, combination: Combination) -> PrecisionPlan | None:
        """The plan of a combination; None if it was tried before or is not worth a try."""
        if combination in self._drawn:
            return None
        self._drawn.add(combination)
        plan = plan_of(self._space, combination)
        resolved = self._space.resolve(plan)
        if resolved in self._tried or not resolved.has_low_precision:
            return None
        self._tried.add(resolved)
        return plan


def objective_value(problem: TuningProblem, trial: Trial) -> float:
    """What a sampler is told of a trial (see `Sampled`)."""
    if not trial.meets_accuracy:
        return 1.0 + squashed(trial.ranking_loss)
    cost = trial.relative_cost(problem.objectives)
    return squashed(cost if cost < inf else _share_of_bits(trial.plan, problem.space.tunable_ops))


def _share_of_bits(plan: PrecisionPlan, decided: tuple[str, ...]) -> float:
    said: Mapping[str, Precision] = plan.precisions
    bits = [said.get(op, Precision.FP32).bits for op in decided]
    return sum(bits) / (Precision.FP32.bits * len(bits))


def squashed(value: float) -> float:
    """From 0 … infinity to 0 … 1, in the same order."""
    return 1.0 if value == inf else max(0.0, value) / (1.0 + max(0.0, value))
