"""Text metrics of Intel Neural Compressor (INC): GLUE, SquadF1 and BLEU.

Source of the definitions: `neural_compressor/experimental/metric/` (`metric.py`,
`evaluate_squad.py`, `bleu.py` and `bleu_util.py`) of release 1.14.
"""

from __future__ import annotations

import math
import re
import sys
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, ClassVar

import numpy as np

from neural_mp.compat.inc.components.registries import METRICS, register_for, stack_as_one, to_text
from neural_mp.data.option_checks import check_one_of
from neural_mp.errors import MetricError
from neural_mp.metrics.base import Collection, nothing_taken_in
from neural_mp.metrics.predictions import convert_to_integers
from neural_mp.metrics.texts import compute_token_f1, split_normalized_words

_GLUE_TASKS = ("mrpc", "qqp", "qnli", "rte", "sts-b", "cola", "mnli", "wnli", "sst-2")
#: Length of the longest n-grams in BLEU.
_LONGEST = 4


@register_for(METRICS, "GLUE")
class GLUE(Collection):
    """Metric of a GLUE task.

    CoLA uses Matthews' correlation coefficient, STS-B the mean of Pearson's and Spearman's, all
    other tasks the accuracy. As in INC, MRPC and QQP omit the F1 score. Predictions are scores
    `[N, C]`, for STS-B `[N]` or `[N, 1]`; labels are `[N]` or `[N, 1]`.

    Args:
        task: `mrpc`, `qqp`, `qnli`, `rte`, `sts-b`, `cola`, `mnli`, `wnli` or `sst-2`.
    """

    higher_is_better: ClassVar[bool] = True

    def __init__(self, task: str = "mrpc") -> None:
        super().__init__()
        self.task = check_one_of("GLUE: task", task, _GLUE_TASKS)

    def update(self, preds: object, labels: object) -> None:
        """Update with one batch."""
        scores, truth = stack_as_one(preds, "predictions"), stack_as_one(labels, "labels")
        if self.task == "sts-b":
            is_valid = scores.size == truth.size
            predicted, form = scores.reshape(-1), "one number for each label"
        else:
            is_valid = scores.ndim == 2 and len(scores) == truth.size
            predicted = scores.argmax(axis=1) if is_valid else scores
            truth = convert_to_integers(truth, "labels")
            form = "scores [N, C] for labels [N]"
        if not is_valid:
            raise MetricError(
                f"GLUE: with task {self.task!r}, predictions must be {form}, got predictions of "
                f"shape {scores.shape} and labels of shape {truth.shape}"
            )
        self.take_in(predicted, truth.reshape(-1))

    def result(self) -> float:
        """Return the value since the last reset, at most 1."""
        predicted, truth = self.concatenate_batches()
        if self.task not in ("cola", "sts-b"):
            return float((predicted == truth).mean())
        if self.task == "cola":
            from sklearn.metrics import matthews_corrcoef

            return float(matthews_corrcoef(truth, predicted))
        if len(truth) < 2:
            raise MetricError(
                "GLUE: with task 'sts-b', a correlation needs at least two samples, got 1"
            )
        from scipy.stats import pearsonr, spearmanr

        predicted = predicted.astype(np.float64)
        return float(pearsonr(predicted, truth)[0] + spearmanr(predicted, truth)[0]) / 2


@register_for(METRICS, "SquadF1")
class SquadF1:
    """F1 score of answers to the questions of SQuAD 1.1, in percent; 0 before any answer.

    Expects the output of the postprocess transform `SquadV1`: nothing until the last batch, then
    all answers at once. If answers arrive several times, each time with the questions, the result
    is the mean over these times.
    """

    running: ClassVar[bool] = False  # answers arrive with the last batch
    higher_is_better: ClassVar[bool] = True

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Reset the state."""
        self._scores: list[float] = []

    def update(self, preds: object, labels: object, sample_weight: object = None) -> None:
        """Update with answers; None or no answers are ignored.

        Args:
            preds: question id → answer. A question without an answer scores 0.
            labels: the articles under `data` of a SQuAD file, with paragraphs, questions and
                correct answers.
            sample_weight: no effect.
        """
        if preds is None or (isinstance(preds, Sequence | Mapping) and not len(preds)):
            return
        if not isinstance(preds, Mapping):
            raise MetricError(
                f"SquadF1: predictions must be a dict from question ids to answers, got "
                f"{type(preds).__name__}; add the postprocess transform SquadV1"
            )
        questions = list(_iterate_correct_answers(labels))
        if not questions:
            raise MetricError("SquadF1: labels must hold a question, got none")
        total = sum(
            max(
                (
                    compute_token_f1(
                        split_normalized_words(preds[name]), split_normalized_words(right)
                    )
                    for right in answers
                ),
                default=0.0,
            )
            for name, answers in questions
            if name in preds
        )
        self._scores.append(100 * total / len(questions))

    def result(self) -> float:
        """Return the score since the last reset, 0 to 100."""
        return float(np.mean(self._scores)) if self._scores else 0.0


def _iterate_correct_answers(articles: Any) -> Iterable[tuple[str, list[str]]]:
    """Yield the id and the correct answers of every question."""
    if isinstance(articles, Mapping) and "data" in articles:
        articles = articles["data"]
    try:
        for article in articles:
            for paragraph in article["paragraphs"]:
                for question in paragraph["qas"]:
                    yield question["id"], [answer["text"] for answer in question["answers"]]
    except (TypeError, KeyError, IndexError) as error:
        raise MetricError(
            f"SquadF1: labels must be the list under 'data' of a SQuAD 1.1 file, articles with "
            f"'paragraphs' of 'qas' with 'id' and 'answers'; {type(error).__name__}: {error}"
        ) from error


@register_for(METRICS, "BLEU")
class BLEU:
    """BLEU score of translations against one reference each, in percent, case-insensitive.

    Corpus BLEU with n-grams of one to four words and the brevity penalty. If no n-gram of a
    length matches, half a match counts, a quarter for the next such length, and so on. Lengths
    that no translation reaches are ignored. Tokens are those of mteval's international
    tokenization: punctuation (except the backslash) is split off unless next to a digit, symbols
    always.

    Source: Papineni et al., "BLEU: a method for automatic evaluation of machine translation", 2002;
    smoothing and tokens as in `tensor2tensor/utils/bleu_hook.py`.
    """

    running: ClassVar[bool] = True
    higher_is_better: ClassVar[bool] = True

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Reset the state."""
        self._right = np.zeros(_LONGEST, np.int64)
        self._runs = np.zeros(_LONGEST, np.int64)
        self._words = self._reference_words = 0

    def update(self, preds: object, labels: object) -> None:
        """Update with translations and as many references, each a list of strings."""
        translations, references = _to_texts(preds, "predictions"), _to_texts(labels, "labels")
        if len(translations) != len(references):
            raise MetricError(
                f"BLEU: labels must hold a reference for each translation, got {len(translations)} "
                f"translations and {len(references)} references"
            )
        for translation, reference in zip(translations, references, strict=True):
            words, right = _tokenize_sentence(translation), _tokenize_sentence(reference)
            self._words += len(words)
            self._reference_words += len(right)
            for length in range(1, _LONGEST + 1):
                runs, expected = _count_ngrams(words, length), _count_ngrams(right, length)
                self._right[length - 1] += (runs & expected).total()
                self._runs[length - 1] += runs.total()

    def merge(self, other: BLEU) -> None:
        """Add the state of another instance."""
        self._right += other._right
        self._runs += other._runs
        self._words += other._words
        self._reference_words += other._reference_words

    def result(self) -> float:
        """Return the score since the last reset, 0 to 100."""
        if not self._reference_words:
            raise nothing_taken_in(self)
        if not self._words:
            return 0.0
        logarithms, part = 0.0, 1.0
        for right, runs in zip(self._right, self._runs, strict=True):
            if runs and not right:
                part /= 2
            if runs:
                logarithms += math.log((right or part) / runs)
        brevity = min(0.0, 1 - self._reference_words / self._words)
        return 100 * math.exp(logarithms / _LONGEST + brevity)


def _to_texts(values: Any, what: str) -> list[str]:
    values = values.tolist() if isinstance(values, np.ndarray) else values
    is_sequence = isinstance(values, Sequence) and not isinstance(values, str | bytes)
    if not is_sequence or not all(isinstance(value, str | bytes) for value in values):
        raise MetricError(f"BLEU: {what} must be a list of strings, got {values!r:.80}")
    return [to_text(value) for value in values]


def _count_ngrams(words: Sequence[str], length: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(words[i : i + length]) for i in range(len(words) - length + 1))


def _tokenize_sentence(sentence: str) -> list[str]:
    trailing, leading, symbols = _compile_separator_patterns()
    sentence = trailing.sub(r"\1 \2 ", sentence.lower())
    return symbols.sub(r" \1 ", leading.sub(r" \1 \2", sentence)).split()


@cache
def _compile_separator_patterns() -> tuple[re.Pattern[str], re.Pattern[str], re.Pattern[str]]:
    """Return patterns of punctuation after and before non-digits, and of symbols (Unicode)."""
    kinds: dict[str, list[str]] = {"P": [], "S": []}
    for character in map(chr, range(sys.maxunicode + 1)):
        characters = kinds.get(unicodedata.category(character)[0])
        if characters is not None and character != "\\":
            characters.append(re.escape(character))
    punctuation, symbols = ("[" + "".join(kinds[kind]) + "]" for kind in "PS")
    return (
        re.compile(rf"(\D)({punctuation})"),
        re.compile(rf"({punctuation})(\D)"),
        re.compile(f"({symbols})"),
    )
