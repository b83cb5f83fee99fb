"""Metrics of language models: perplexity, divergence from FP32, multiple choice, lm-eval tasks.

Predictions are logits `[N, T, V]` for N texts of T tokens and V words: the logits at position t
predict the token at t + 1. A model with several outputs must have an output `logits`.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from neural_mp.data.option_checks import true_or_false
from neural_mp.errors import ConfigurationError, MetricError, MissingFrameworkError, did_you_mean
from neural_mp.metrics.base import METRICS, RunningMean, nothing_taken_in
from neural_mp.metrics.predictions import log_softmax, map_named_outputs
from neural_mp.util.labels import IGNORED_LABEL
from neural_mp.util.pytree import convert_to_numpy
from neural_mp.util.token_masks import TokenMasks

_LOGITS = "logits"


class _MeanOfTexts(RunningMean):
    """A mean over all tokens that also keeps the sum of every text."""

    takes_mask: ClassVar[bool] = True

    def reset(self) -> None:
        """Discard all values."""
        super().reset()
        self._texts: list[tuple[np.ndarray, np.ndarray]] = []

    def take_in_texts(self, losses: np.ndarray, counts: np.ndarray) -> None:
        """Add the losses of all tokens of texts with these numbers of tokens, in order."""
        self.take_in(losses)
        text = np.repeat(np.arange(len(counts)), counts)
        sums = np.bincount(text, losses.astype(np.float64), minlength=len(counts))
        self._texts.append((sums, counts))

    def merge(self, other: RunningMean) -> None:
        """Add the values of another instance."""
        super().merge(other)
        if isinstance(other, _MeanOfTexts):
            self._texts += other._texts

    def text_losses(self) -> tuple[Sequence[float], Sequence[float]]:
        """Return the sum of losses and the number of tokens of every text, in order."""
        sums, counts = ([part[i] for part in self._texts] for i in range(2))
        return (
            (np.concatenate(sums).tolist(), np.concatenate(counts).tolist()) if sums else ([], [])
        )

    def at_loss(self, loss: float) -> float:
        """Return the result for a mean loss per token."""
        return loss


@METRICS.register("perplexity", "ppl")
class Perplexity(_MeanOfTexts):
    """The exponential of the mean loss per token, in nats.

    Labels are the token ids `[N, T]`, as in `transformers`; -100 at positions that do not count.

    Args:
        shift: whether logits predict the token after their position, as those of
            `transformers`; False if the labels are shifted already.

    Raises:
        ConfigurationError: `shift` is neither true nor false.
    """

    higher_is_better: ClassVar[bool] = False

    def __init__(self, shift: bool = True) -> None:
        self.shift = true_or_false("perplexity: shift", shift)
        super().__init__()

    def update(self, preds: object, labels: object, mask: TokenMasks | None = None) -> None:
        """Add the tokens of one batch.

        Args:
            preds: the logits.
            labels: the token ids.
            mask: the tokens that count, beside the labels; a token whose prediction reads padding
                alone does not count either.
        """
        logits, tokens = _select_logits(preds), convert_to_numpy(labels)
        aligned = logits.ndim == 3 and tokens.shape == logits.shape[:2]
        if not (aligned and logits.dtype.kind == "f" and tokens.dtype.kind in "iu"):
            raise MetricError(
                f"perplexity requires logits, floats of shape (texts, tokens, words), got "
                f"{logits.dtype} of {logits.shape}, and token ids of shape (texts, tokens), got "
                f"{tokens.dtype} of {tokens.shape}"
            )
        real = _counted_positions(logits, mask)
        if self.shift:
            logits, tokens, real = logits[:, :-1], tokens[:, 1:], real[:, :-1] & real[:, 1:]
        counted = (tokens != IGNORED_LABEL) & real
        self.take_in_texts(
            _compute_token_losses(logits[counted], tokens[counted]), counted.sum(axis=1)
        )

    def result(self) -> float:
        """Return the perplexity since the last reset; infinite above the largest float."""
        return self.at_loss(super().result())

    def at_loss(self, loss: float) -> float:
        """Return the perplexity for a mean loss per token."""
        try:
            return math.exp(loss)
        except OverflowError:
            return math.inf


@METRICS.register("kl_divergence", "kld")
class KLDivergence(_MeanOfTexts):
    """The mean divergence of the predicted words from those of the FP32 model, in nats per token.

    KL(p ‖ q) with p of the FP32 model (Kullback and Leibler 1951). Needs no labels.
    """

    higher_is_better: ClassVar[bool] = False
    best_value: ClassVar[float | None] = 0.0
    compare_label: ClassVar[bool] = False

    def update(self, preds: object, labels: object, mask: TokenMasks | None = None) -> None:
        """Add the tokens of one batch.

        Args:
            preds: the logits.
            labels: the logits of the FP32 model.
            mask: the tokens that count.
        """
        values, truth = _select_logits(preds), _select_logits(labels)
        aligned = values.shape == truth.shape and values.ndim == 3
        if not (aligned and values.dtype.kind == truth.dtype.kind == "f"):
            raise MetricError(
                f"kl_divergence requires logits of both models, floats of shape (texts, tokens, "
                f"words), got {values.dtype} of {values.shape}, and {truth.dtype} of {truth.shape} "
                f"of the FP32 model"
            )
        counted = _counted_positions(values, mask)
        log_p, log_q = (
            log_softmax(logits[counted].astype(np.float64)) for logits in (truth, values)
        )
        losses = (np.exp(log_p) * (log_p - log_q)).sum(axis=-1)
        self.take_in_texts(losses, counted.sum(axis=1))


@METRICS.register("multiple_choice")
class MultipleChoice:
    """The share of questions whose right answer is the most likely one.

    `acc` and `acc_norm` of lm-evaluation-harness: the logarithms of the probabilities of an
    answer's tokens are added, and with `normalized` divided by the number of its characters. Labels
    are those of the dataset `multiple_choice`; answers of a question may be in several batches.

    Args:
        normalized: whether the length of an answer counts.

    Raises:
        ConfigurationError: `normalized` is neither true nor false.
    """

    higher_is_better: ClassVar[bool] = True
    best_value: ClassVar[float | None] = 1.0

    def __init__(self, normalized: bool = False) -> None:
        self.normalized = true_or_false("multiple_choice: normalized", normalized)
        self.reset()

    def reset(self) -> None:
        """Discard all answers."""
        #: Question → score of each answer, and whether the answer is the right one.
        self._answers: dict[int, list[tuple[float, bool]]] = {}

    def update(self, preds: object, labels: object) -> None:
        """Add the answers of one batch."""
        logits, (tokens, questions, correct, characters) = (
            _select_logits(preds),
            _label_arrays(labels),
        )
        aligned = logits.ndim == 3 and tokens.shape == logits.shape[:2]
        if not (aligned and logits.dtype.kind == "f"):
            raise MetricError(
                f"multiple_choice requires logits, floats of shape (answers, tokens, words), got "
                f"{logits.dtype} of {logits.shape}, and token ids of shape (answers, tokens), got "
                f"{tokens.shape}"
            )
        logits, tokens = logits[:, :-1], tokens[:, 1:]
        counted = tokens != IGNORED_LABEL
        rows = np.nonzero(counted)[0]
        losses = _compute_token_losses(logits[counted], tokens[counted])
        scores = -np.bincount(rows, losses, minlength=len(tokens))
        if self.normalized:
            scores = scores / characters
        for question, score, right in zip(questions, scores, correct, strict=True):
            self._answers.setdefault(int(question), []).append((float(score), bool(right)))

    def merge(self, other: MultipleChoice) -> None:
        """Add the answers of another instance."""
        for question, answers in other._answers.items():
            self._answers.setdefault(question, []).extend(answers)

    def result(self) -> float:
        """Return the accuracy since the last reset.

        Raises:
            MetricError: there are no answers, or not all answers of a question.
        """
        if not self._answers:
            raise nothing_taken_in(self)
        for question, answers in self._answers.items():
            right = sum(is_right for _, is_right in answers)
            if right != 1 or len(answers) < 2:
                raise MetricError(
                    f"question {question} must have two answers or more, one of them right, got "
                    f"{len(answers)}, {right} right; evaluate all samples, each once"
                )
        # Of equal scores the first counts, as in lm-evaluation-harness.
        best = (max(answers, key=lambda answer: answer[0]) for answers in self._answers.values())
        return sum(is_right for _, is_right in best) / len(self._answers)


def _counted_positions(logits: np.ndarray, mask: TokenMasks | None) -> np.ndarray:
    """Return which positions of logits [texts, tokens, words] count."""
    counted = None if mask is None else mask.find_mask(logits.shape)
    return np.ones(logits.shape[:2], bool) if counted is None else counted


def _label_arrays(labels: object) -> list[np.ndarray]:
    """Return the arrays of a label of the dataset `multiple_choice`."""
    names = ("tokens", "question", "correct", "characters")
    if not isinstance(labels, Mapping) or not set(names) <= set(labels):
        got = ", ".join(map(str, labels)) if isinstance(labels, Mapping) else type(labels).__name__
        raise MetricError(
            f"labels of multiple_choice must be a dict with {', '.join(names)}, got {got}; use the "
            f"dataset 'multiple_choice'"
        )
    return [convert_to_numpy(labels[name]) for name in names]


def _select_logits(preds: object) -> np.ndarray:
    outputs = map_named_outputs(preds)
    if outputs is not None and _LOGITS not in outputs:
        raise MetricError(
            f"predictions must be logits, or outputs with the name {_LOGITS!r}, got "
            f"{', '.join(map(repr, outputs))}; select the logits by output"
        )
    return convert_to_numpy(preds if outputs is None else outputs[_LOGITS])


def _compute_token_losses(logits: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Return -log p of every token, from logits [tokens, V]."""
    vocabulary = logits.shape[-1]
    if tokens.size and not (tokens.min() >= 0 and tokens.max() < vocabulary):
        raise MetricError(
            f"token ids must be from 0 to {vocabulary - 1}, or {IGNORED_LABEL} to be ignored, got "
            f"{tokens.min()} to {tokens.max()}; does the tokenizer belong to the model?"
        )
    chances = log_softmax(logits.astype(np.float64))
    return -np.take_along_axis(chances, tokens[:, None].astype(np.int64), axis=1)[:, 0]


#: Metrics of the harness for which lower is better.
_LOWER = frozenset(
    {"perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte", "brier_score"}
)


def evaluate_lm_tasks(
    model: object,
    tasks: Sequence[str],
    *,
    tokenizer: object = None,
    batch_size: int | str = 1,
    **options: object,
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
        return f"{self.metric} of {', '.join(self._task_names)}"

    @property
    def _task_names(self) -> Sequence[str]:
        return (self.tasks,) if isinstance(self.tasks, str) else tuple(self.tasks)

    def __call__(self, model: object) -> float:
        """Return the mean over the tasks.

        Raises:
            ConfigurationError: `tasks` is empty.
            MetricError: a task does not have the metric.
            MissingFrameworkError: lm-eval is not installed.
        """
        if not self._task_names:
            raise ConfigurationError("tasks must have at least one task of lm-eval, got none")
        results = evaluate_lm_tasks(
            model,
            self._task_names,
            tokenizer=self.tokenizer,
            batch_size=self.batch_size,
            **(self.options or {}),
        )["results"]
        values = [self._find_task_metric(name, results.get(name, {})) for name in self._task_names]
        return sum(values) / len(values)

    def _find_task_metric(self, task: str, results: Mapping[str, Any]) -> float:
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
