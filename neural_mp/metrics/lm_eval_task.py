"""Tasks of lm-evaluation-harness as the accuracy of a language model."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from neural_mp.errors import ConfigurationError, MetricError, MissingFrameworkError, did_you_mean

#: Metrics of the harness for which lower is better.
_LOWER = frozenset(
    {"perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte", "brier_score"}
)


def task_results(
    model: Any,
    tasks: Sequence[str],
    *,
    tokenizer: Any = None,
    batch_size: int | str = 1,
    **options: Any,
) -> dict[str, Any]:
    """Return the results of `lm_eval.simple_evaluate`.

    Args:
        model: a model of `transformers`, or a kind of model in the harness.
        tasks: names of tasks.
        tokenizer: tokenizer of a model of `transformers`, or its folder.
        batch_size: sequences per batch.
        **options: further options, e.g. `num_fewshot`, `limit`, `model_args`, `task_manager`.

    Raises:
        MissingFrameworkError: lm-eval is not installed.
    """
    try:
        harness: Any = importlib.import_module("lm_eval")
        models: Any = importlib.import_module("lm_eval.models.huggingface")
    except ImportError:
        raise MissingFrameworkError(
            "evaluation of tasks requires the package lm-eval; install it with: "
            "pip install 'lm-eval[hf]'"
        ) from None
    if not isinstance(model, str):
        tokenizer = str(tokenizer) if hasattr(tokenizer, "__fspath__") else tokenizer
        model = models.HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
    results: dict[str, Any] = harness.simple_evaluate(
        model=model, tasks=list(tasks), batch_size=batch_size, **options
    )
    return results


@dataclass(frozen=True)
class LMEvalTask:
    """Mean of a metric over tasks of lm-evaluation-harness, as `eval_func`.

    Attributes:
        tasks: name of a task or a group, or several names.
        tokenizer: tokenizer of the model, or its folder.
        metric: metric of the tasks, e.g. `acc`, `acc_norm`, `word_perplexity`.
        batch_size: sequences per batch.
        options: further options of `lm_eval.simple_evaluate`, e.g. `{"limit": 100}`.
    """

    tasks: str | Sequence[str]
    tokenizer: Any
    metric: str = "acc"
    batch_size: int = 8
    options: Mapping[str, Any] | None = None

    @property
    def higher_is_better(self) -> bool:
        """The direction of the metric."""
        return self.metric not in _LOWER

    @property
    def __name__(self) -> str:
        return f"{self.metric} of {', '.join(self._names)}"

    @property
    def _names(self) -> Sequence[str]:
        return (self.tasks,) if isinstance(self.tasks, str) else tuple(self.tasks)

    def __call__(self, model: Any) -> float:
        """Return the mean over the tasks.

        Raises:
            ConfigurationError: `tasks` is empty.
            MetricError: a task does not have the metric.
            MissingFrameworkError: lm-eval is not installed.
        """
        if not self._names:
            raise ConfigurationError("tasks must have at least one task of lm-eval, got none")
        results = task_results(
            model,
            self._names,
            tokenizer=self.tokenizer,
            batch_size=self.batch_size,
            **(self.options or {}),
        )["results"]
        values = [self._task_metric(name, results.get(name, {})) for name in self._names]
        return sum(values) / len(values)

    def _task_metric(self, task: str, results: Mapping[str, Any]) -> float:
        """Return the metric of a task, whose names are `metric,filter`."""
        by_metric: dict[str, float] = {}
        for key, value in results.items():
            metric, _, _ = key.partition(",")
            if isinstance(value, int | float) and not metric.endswith("_stderr"):
                by_metric.setdefault(metric, float(value))
        by_metric.pop("sample_len", None)
        if self.metric not in by_metric:
            names = ", ".join(sorted(by_metric)) or "none"
            raise MetricError(
                f"metric must be one of the task {task!r} ({names}), got {self.metric!r}"
                f"{did_you_mean(self.metric, by_metric)}"
            )
        return by_metric[self.metric]
