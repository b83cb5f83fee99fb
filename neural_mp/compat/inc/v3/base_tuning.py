"""`neural_compressor.common.base_tuning`: sets of configurations, tried in order."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from neural_mp.api.user_metrics import MetricSet, resolve_direction
from neural_mp.compat.inc.import_aliases import NotHereError, make_absent_getter
from neural_mp.compat.inc.script_log import logger
from neural_mp.compat.inc.v3.base_config import BaseConfig, expanded
from neural_mp.core.criterion import AccuracyCriterion
from neural_mp.errors import ConfigurationError, MetricError, NeuralMPError
from neural_mp.util.validators import integer_between, validate_option

M = TypeVar("M")
N = TypeVar("N")
#: Sampler that searches with a strategy of neural-mp, and not through a set of configurations.
OUR_SAMPLER = "neural_mp"


class ConfigSet:
    """Configurations to try, with each list of values expanded.

    Args:
        config_list: the configurations.
    """

    def __init__(self, config_list: list[BaseConfig]) -> None:
        self.config_list = config_list

    def __getitem__(self, index: int) -> BaseConfig:
        return self.config_list[index]

    def __len__(self) -> int:
        return len(self.config_list)

    @classmethod
    def generate_config_list(
        cls, fwk_configs: BaseConfig | Iterable[BaseConfig]
    ) -> list[BaseConfig]:
        """Return the configurations that one or several stand for."""
        return list(expanded(fwk_configs))

    @classmethod
    def from_fwk_configs(cls, fwk_configs: BaseConfig | Iterable[BaseConfig]) -> ConfigSet:
        """Return the set of the configurations that one or several stand for."""
        return cls(cls.generate_config_list(fwk_configs))


class Sampler:
    """Order in which the configurations of a set are tried: iterates over their indices.

    Args:
        config_source: the set.
    """

    def __init__(self, config_source: ConfigSet) -> None:
        self.config_source = config_source

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self.config_source)))

    def __len__(self) -> int:
        return len(self.config_source)


class SequentialSampler(Sampler):
    """The order of the set."""


default_sampler = SequentialSampler


class EvaluationFuncWrapper:
    """An evaluation function with its further arguments.

    Args:
        eval_fn: model, further arguments → accuracy.
        eval_args: the further arguments.
    """

    def __init__(self, eval_fn: Callable[..., Any], eval_args: Iterable[Any] | None = None) -> None:
        self.eval_fn = eval_fn
        self.eval_args = tuple(eval_args or ())

    def evaluate(self, model: object) -> float:
        """Return the accuracy of a model.

        Raises:
            MetricError: the function returns no number.
        """
        accuracy = self.eval_fn(model, *self.eval_args)
        try:
            return float(accuracy)
        except (TypeError, ValueError):
            raise MetricError(
                f"eval_fn must return a number, got {type(accuracy).__name__}; return the accuracy"
            ) from None


class Evaluator:
    """Weighted sum of several evaluation functions.

    Attributes:
        eval_fn_registry: dicts with `eval_fn`, `weight` and `name`.
    """

    def __init__(self) -> None:
        self.eval_fn_registry: list[dict[str, Any]] = []

    def set_eval_fn_registry(
        self, eval_fns: Callable[..., Any] | Mapping[str, Any] | Sequence[Mapping[str, Any]] | None
    ) -> None:
        """Set the functions: one, or dicts with `eval_fn`, and perhaps `weight` and `name`."""
        if eval_fns is None:
            return
        entries = {"eval_fn": eval_fns} if callable(eval_fns) else eval_fns
        self.eval_fn_registry = [
            {"weight": 1.0, "name": getattr(entry["eval_fn"], "__name__", "eval_fn"), **entry}
            for entry in ([entries] if isinstance(entries, Mapping) else entries)
        ]

    def get_number_of_eval_functions(self) -> int:
        """Return the number of functions."""
        return len(self.eval_fn_registry)

    def self_check(self) -> None:
        """Check that there is a function.

        Raises:
            ConfigurationError: there is none.
        """
        if not self.eval_fn_registry:
            raise ConfigurationError(
                "an evaluator requires an evaluation function, got none; call set_eval_fn_registry"
            )

    def evaluate(self, model: object) -> float:
        """Return the weighted sum of the functions' values for a model."""
        return float(
            sum(entry["weight"] * entry["eval_fn"](model) for entry in self.eval_fn_registry)
        )


evaluator = Evaluator()


class TuningConfig:
    """Options of `autotune`.

    Args:
        config_set: a configuration or several, tried in this order until one meets the target. None
            searches with a strategy of neural-mp.
        sampler: order of the set: a class as of `Sampler`; or `"neural_mp"`, which searches in the
            precisions of the set.
        tolerable_loss: tolerated loss, as a fraction of the accuracy in FP32.
        max_trials: maximum number of configurations.
        higher_is_better: direction of `eval_fn`; None for that of its name, by default True.
    """

    def __init__(
        self,
        config_set: Any = None,
        sampler: Any = default_sampler,
        tolerable_loss: float = 0.01,
        max_trials: int = 100,
        higher_is_better: bool | None = None,
    ) -> None:
        self.config_set = config_set
        self.sampler = sampler
        self.tolerable_loss = tolerable_loss
        self.max_trials = max_trials
        self.higher_is_better = higher_is_better

    @property
    def searches(self) -> bool:
        """Whether a strategy of neural-mp searches, and not the order of a set."""
        return self.config_set is None or self.sampler == OUR_SAMPLER

    def criterion(self, eval_fn: Callable[..., Any] | None = None) -> AccuracyCriterion:
        """Return the tolerated loss with the direction of an evaluation function, if there is one.

        Raises:
            ConfigurationError: the direction is unclear: the name suggests an error.
        """
        target = AccuracyCriterion(
            self.tolerable_loss,
            higher_is_better=self.higher_is_better,
            any_tolerance=True,
            any_baseline=True,
        )
        if eval_fn is None:
            return target
        try:
            return resolve_direction(target, MetricSet(()), eval_fn)
        except ConfigurationError as error:
            message = str(error).replace("in accuracy_criterion", "in TuningConfig", 1)
            raise ConfigurationError(message) from None

    def configs(self) -> ConfigLoader:
        """Return the configurations in the order of the sampler, each once."""
        return ConfigLoader(self.config_set, self.sampler)


class ConfigLoader:
    """The configurations of a set, in the order of a sampler, each once.

    Args:
        config_set: a configuration or several; lists of values are expanded.
        sampler: order of the set: a class as of `Sampler`.
    """

    def __init__(
        self,
        config_set: BaseConfig | Iterable[BaseConfig],
        sampler: Callable[[ConfigSet], Iterable[int]] = default_sampler,
    ) -> None:
        self.config_set = ConfigSet.from_fwk_configs(config_set)
        self.sampler = sampler(self.config_set)

    def __iter__(self) -> Iterator[BaseConfig]:
        unique: list[BaseConfig] = []
        for index in self.sampler:
            config = self.config_set[index]
            if config not in unique:
                unique.append(config)
                yield config


@dataclass(frozen=True)
class TrialRecord:
    """Outcome of one configuration.

    Attributes:
        trial_index: number of the trial.
        trial_result: accuracy.
        quant_config: the configuration.
    """

    trial_index: int
    trial_result: float
    quant_config: BaseConfig


class TuningMonitor:
    """The trials so far, judged by the target.

    Args:
        tuning_config: the options of the search.
        eval_fn: the function that measures accuracy, whose name may suggest the direction.
    """

    def __init__(
        self, tuning_config: TuningConfig, eval_fn: Callable[..., Any] | None = None
    ) -> None:
        self.tuning_config = tuning_config
        self.criterion = tuning_config.criterion(eval_fn)
        self.tuning_history: list[TrialRecord] = []
        self.baseline: float | None = None

    def set_baseline(self, baseline: float) -> None:
        """Set the accuracy in FP32."""
        self.baseline = baseline
        target = self.criterion.target(baseline)
        logger.info("accuracy in FP32 %.4g, target %.4g", baseline, target)

    def add_trial_result(
        self, trial_index: int, trial_result: float, quant_config: BaseConfig
    ) -> None:
        """Record a trial."""
        self.tuning_history.append(TrialRecord(trial_index, trial_result, quant_config))
        logger.info(
            "trial %d, %s: accuracy %.4g, target %s",
            trial_index,
            quant_config.name,
            trial_result,
            "met" if self.met() else "missed",
        )

    def get_number_of_trials(self) -> int:
        """Return the number of trials."""
        return len(self.tuning_history)

    def get_best_trial_record(self) -> TrialRecord:
        """Return the trial with the best accuracy.

        Raises:
            ConfigurationError: there is no trial.
        """
        if not self.tuning_history:
            raise ConfigurationError("no trial is recorded; call add_trial_result first")
        best = self.tuning_history[0]
        for trial in self.tuning_history:
            if self.criterion.loss(best.trial_result, trial.trial_result) < 0:
                best = trial
        return best

    def get_best_quant_config(self) -> BaseConfig:
        """Return the configuration of the trial with the best accuracy."""
        return self.get_best_trial_record().quant_config

    def met(self) -> bool:
        """Whether the last trial meets the target."""
        if self.baseline is None or not self.tuning_history:
            return False
        return self.criterion.met(self.baseline, self.tuning_history[-1].trial_result)

    def need_stop(self) -> bool:
        """Whether the last trial meets the target, or no more are allowed."""
        return self.met() or len(self.tuning_history) >= self.tuning_config.max_trials


class TuningLogger:
    """Log lines of a loop over configurations."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        subject, _, event = name.rpartition("_")
        if event not in ("start", "end") or not subject:
            raise AttributeError(
                f"TuningLogger has no attribute {name!r}; names are those of a phase and its start "
                f"or end, e.g. 'trial_start'"
            )

        def log_event(trial_index: int | None = None, **ignored: object) -> None:
            number = "" if trial_index is None else f" {trial_index}"
            logger.info("%s%s: %s", subject, number, event)

        return log_event


def init_tuning(tuning_config: TuningConfig) -> tuple[ConfigLoader, TuningLogger, TuningMonitor]:
    """Return the configurations, the log and the monitor of a loop that a script writes itself."""
    return tuning_config.configs(), TuningLogger(), TuningMonitor(tuning_config)


@dataclass(frozen=True)
class OrderedTrials:
    """Configurations tried one after the other.

    Attributes:
        options: the options of the search.
        evaluation: the evaluation function.
    """

    options: TuningConfig
    evaluation: EvaluationFuncWrapper

    def select_model(self, model: M, convert: Callable[[BaseConfig], N]) -> M | N:
        """Return the first converted model that meets the target; else the given model.

        Args:
            model: the FP32 model, as `eval_fn` accepts it.
            convert: configuration → converted model. A configuration that is not supported is
                skipped, with a warning.

        Raises:
            NeuralMPError: no configuration is supported.
        """
        max_trials = validate_option("max_trials", integer_between(1), self.options.max_trials)
        monitor = TuningMonitor(self.options, self.evaluation.eval_fn)
        monitor.set_baseline(self.evaluation.evaluate(model))
        refused: NeuralMPError | None = None
        for number, config in enumerate(itertools.islice(self.options.configs(), max_trials), 1):
            try:
                converted = convert(config)
            except (NotHereError, ConfigurationError) as error:
                logger.warning("trial %d, %s: skipped: %s", number, config.name, error)
                refused = error
                continue
            monitor.add_trial_result(number, self.evaluation.evaluate(converted), config)
            if monitor.met():
                return converted
        if refused is not None and not monitor.tuning_history:
            raise refused
        closest = ""
        if monitor.tuning_history:
            best = monitor.get_best_trial_record()
            closest = f"; {best.quant_config.name} came closest, with {best.trial_result:.4g}"
        logger.warning(
            "no configuration meets the target%s; the model in FP32 is returned; set "
            "sampler='neural_mp' to search the precision of each op",
            closest,
        )
        return model


__getattr__ = make_absent_getter(globals())
