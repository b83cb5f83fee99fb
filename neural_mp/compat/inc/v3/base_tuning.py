"""`neural_compressor.common.base_tuning`: sets of configurations, tried in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from neural_mp.api.metric_direction import directed
from neural_mp.api.user_metrics import MetricSet
from neural_mp.compat.inc.import_aliases import NotHereError, absent_names
from neural_mp.compat.inc.log import logger
from neural_mp.compat.inc.v3.base_config import BaseConfig, expanded
from neural_mp.errors import ConfigurationError, MetricError, NeuralMPError
from neural_mp.tuning.criterion import AccuracyCriterion
from neural_mp.util.validators import integer_between, validate_option

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

    def __init__(self, eval_fn: Callable[..., Any], eval_args: Any = None) -> None:
        self.eval_fn = eval_fn
        self.eval_args = tuple(eval_args or ())

    def evaluate(self, model: Any) -> float:
        """Return the accuracy of a model.

        Raises:
            MetricError: the function returns no number.
        """
        found = self.eval_fn(model, *self.eval_args)
        try:
            return float(found)
        except (TypeError, ValueError):
            raise MetricError(
                f"eval_fn must return a number, got {type(found).__name__}; return the accuracy"
            ) from None


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

    def criterion(self, eval_fn: Callable[..., Any]) -> AccuracyCriterion:
        """Return the tolerated loss with the direction of an evaluation function.

        Raises:
            ConfigurationError: the direction is unclear: the name suggests an error.
        """
        wanted = AccuracyCriterion(
            self.tolerable_loss,
            higher_is_better=self.higher_is_better,
            any_tolerance=True,
            any_baseline=True,
        )
        try:
            return directed(wanted, MetricSet(()), eval_fn)
        except ConfigurationError as error:
            words = str(error).replace("in accuracy_criterion", "in TuningConfig", 1)
            raise ConfigurationError(words) from None

    def configs(self) -> Iterator[BaseConfig]:
        """Yield the configurations in the order of the sampler, each once."""
        found = ConfigSet.from_fwk_configs(self.config_set)
        seen: list[BaseConfig] = []
        for index in self.sampler(found):
            config = found[index]
            if config not in seen:
                seen.append(config)
                yield config


@dataclass(frozen=True)
class OrderedTrials:
    """Configurations tried one after the other.

    Attributes:
        options: the options of the search.
        evaluation: the evaluation function.
    """

    options: TuningConfig
    evaluation: EvaluationFuncWrapper

    def chosen(self, model: Any, convert: Callable[[BaseConfig], Any]) -> Any:
        """Return the first converted model that meets the target; else the given model.

        Args:
            model: the FP32 model, as `eval_fn` accepts it.
            convert: configuration → converted model. A configuration that is not supported is
                skipped, with a warning.

        Raises:
            NeuralMPError: no configuration is supported.
        """
        most = validate_option("max_trials", integer_between(1), self.options.max_trials)
        criterion = self.options.criterion(self.evaluation.eval_fn)
        baseline = self.evaluation.evaluate(model)
        target = criterion.target(baseline)
        logger.info("accuracy in FP32 %.4g, target %.4g", baseline, target)
        best: tuple[float, BaseConfig] | None = None
        refused: NeuralMPError | None = None
        tried = 0
        for number, config in enumerate(self.options.configs(), 1):
            if number > most:
                break
            try:
                converted = convert(config)
            except (NotHereError, ConfigurationError) as error:
                logger.warning("trial %d, %s: skipped: %s", number, config.name, error)
                refused = error
                continue
            tried += 1
            accuracy = self.evaluation.evaluate(converted)
            met = criterion.met(baseline, accuracy)
            logger.info(
                "trial %d, %s: accuracy %.4g, target %s",
                *(number, config.name, accuracy, "met" if met else "missed"),
            )
            if met:
                return converted
            if best is None or criterion.loss(best[0], accuracy) < 0:
                best = accuracy, config
        if refused is not None and not tried:
            raise refused
        closest = "" if best is None else f"; {best[1].name} came closest, with {best[0]:.4g}"
        logger.warning(
            "no configuration meets the target %.4g%s; the model in FP32 is returned; set "
            "sampler='neural_mp' to search the precision of each op",
            target,
            closest,
        )
        return model


__getattr__ = absent_names(globals())
