"""Metrics of texts and spans: word errors, BLEU, ROUGE, exact matches and F1.

Predictions are texts. With a `tokenizer`, token ids `[N, T]` and logits `[N, T, V]`, whose largest
counts, are decoded first, those of a CTC model included: its tokenizer merges repeated tokens.
Labels are texts or token ids, or a list of texts per sample where several are right.
"""

from __future__ import annotations

import itertools
import re
import string
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from neural_mp.data.option_checks import (
    check_existing_path,
    check_one_of,
    import_package,
    true_or_false,
)
from neural_mp.data.text import convert_tokenizer_errors
from neural_mp.errors import ConfigurationError, MetricError
from neural_mp.metrics.base import METRICS, nothing_taken_in
from neural_mp.metrics.predictions import describe_value, map_named_outputs
from neural_mp.util.labels import IGNORED_LABEL
from neural_mp.util.pytree import convert_to_numpy

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ROUGE_KINDS = ("rouge1", "rouge2", "rougeL", "rougeLsum")
_LOGITS = "logits"


class _Texts:
    """All predicted texts with their references.

    Args:
        tokenizer: folder of the tokenizer that decodes token ids and logits; None for texts.

    Raises:
        ConfigurationError: an option is invalid.
        DataError: the folder does not exist or has no tokenizer.
    """

    higher_is_better: ClassVar[bool] = True
    best_value: ClassVar[float | None] = None
    #: Whether a sample may have several references.
    several: ClassVar[bool] = True

    def __init__(self, tokenizer: str | Path | None = None) -> None:
        self._name = type(self).__name__
        self._tokenizer = None if tokenizer is None else _read_decoder(self._name, tokenizer)
        self.reset()

    def reset(self) -> None:
        """Discard all texts."""
        self._predicted: list[str] = []
        self._references: list[list[str]] = []

    def update(self, preds: object, labels: object) -> None:
        """Add one batch."""
        predicted = self._to_texts(preds, "predictions")
        items = list(labels) if isinstance(labels, list | tuple) else []
        are_lists = bool(items) and all(isinstance(item, list | tuple) for item in items)
        if self.several and are_lists and all(_are_texts(item) for item in items):
            references = [list(item) for item in items]
        else:
            references = [[text] for text in self._to_texts(labels, "labels")]
        if len(predicted) != len(references) or not all(references):
            raise MetricError(
                f"{self._name} requires a text and at least one reference for each sample, got "
                f"{len(predicted)} texts and {sum(map(bool, references))} references"
            )
        self._predicted += predicted
        self._references += references

    def merge(self, other: _Texts) -> None:
        """Append the texts of another instance."""
        self._predicted += other._predicted
        self._references += other._references

    def _to_texts(self, values: object, what: str) -> list[str]:
        if isinstance(values, list | tuple) and _are_texts(values):
            return list(values)
        outputs = map_named_outputs(values)
        if outputs is not None:
            values = outputs.get(_LOGITS, next(iter(outputs.values())))
        array = convert_to_numpy(values)
        if array.dtype.kind in "US" or (array.dtype.kind == "O" and _are_texts(array.tolist())):
            return [str(text) for text in array.reshape(-1).tolist()]
        if array.ndim == 3 and array.dtype.kind == "f":
            array = array.argmax(axis=-1)
        if array.ndim != 2 or array.dtype.kind not in "iu":
            raise MetricError(
                f"{self._name}: the {what} must be texts, token ids [N, T] or logits [N, T, V], "
                f"got {describe_value(array)}"
            )
        if self._tokenizer is None:
            raise MetricError(
                f"{self._name}: the {what} are token ids, which a tokenizer decodes; set the "
                f"option tokenizer to the folder of the model"
            )
        return decode_ids(self._tokenizer, array, merged=what == "predictions")

    def result(self) -> float:
        """Return the value over all texts since the last reset.

        Raises:
            MetricError: there are no texts.
        """
        if not self._predicted:
            raise nothing_taken_in(self)
        return self._compute(self._predicted, self._references)

    def _compute(self, predicted: list[str], references: list[list[str]]) -> float:
        raise NotImplementedError


class _ErrorRate(_Texts):
    """Edits over the length of the references, by jiwer (extra `texts`)."""

    higher_is_better: ClassVar[bool] = False
    best_value: ClassVar[float | None] = 0.0
    several: ClassVar[bool] = False
    function: ClassVar[str]

    def __init__(self, tokenizer: str | Path | None = None) -> None:
        self._jiwer = import_package("jiwer", f"the metric {self.function}", "texts")
        super().__init__(tokenizer)

    def _compute(self, predicted: list[str], references: list[list[str]]) -> float:
        function = getattr(self._jiwer, self.function)
        return float(function([item[0] for item in references], predicted))


@METRICS.register("wer", "word_error_rate")
class WER(_ErrorRate):
    """The word error rate: edits of words over words of the references, jiwer's `wer`."""

    function: ClassVar[str] = "wer"


@METRICS.register("cer", "character_error_rate")
class CER(_ErrorRate):
    """The character error rate: edits over characters of the references, jiwer's `cer`."""

    function: ClassVar[str] = "cer"


@METRICS.register("bleu", "sacrebleu")
class BLEU(_Texts):
    """The BLEU score of the whole corpus, 0 to 100, by sacrebleu (extra `texts`).

    Args:
        tokenizer: folder of the tokenizer that decodes token ids and logits; None for texts.
        lowercase: whether case is ignored.
    """

    best_value: ClassVar[float | None] = 100.0

    def __init__(self, tokenizer: str | Path | None = None, lowercase: bool = False) -> None:
        self._sacrebleu = import_package("sacrebleu", "the metric bleu", "texts")
        self.lowercase = true_or_false("bleu: lowercase", lowercase)
        super().__init__(tokenizer)

    def _compute(self, predicted: list[str], references: list[list[str]]) -> float:
        # None where a sample has fewer references, as sacrebleu expects.
        columns = [list(column) for column in itertools.zip_longest(*references)]
        score = self._sacrebleu.corpus_bleu(predicted, columns, lowercase=self.lowercase)
        return float(score.score)


@METRICS.register("rouge")
class ROUGE(_Texts):
    """The mean F-measure of ROUGE, 0 to 1, by rouge-score (extra `texts`).

    Of several references, the best counts.

    Args:
        tokenizer: folder of the tokenizer that decodes token ids and logits; None for texts.
        kind: `rouge1`, `rouge2`, `rougeL` or `rougeLsum`, with sentences in lines.
        stemmer: whether words are reduced to their stems, by Porter's rules.
    """

    best_value: ClassVar[float | None] = 1.0

    def __init__(
        self, tokenizer: str | Path | None = None, kind: str = "rougeL", stemmer: bool = False
    ) -> None:
        package = import_package("rouge_score.rouge_scorer", "the metric rouge", "texts")
        self.kind = check_one_of("rouge: kind", kind, _ROUGE_KINDS)
        self._scorer = package.RougeScorer([self.kind], true_or_false("rouge: stemmer", stemmer))
        super().__init__(tokenizer)

    def _compute(self, predicted: list[str], references: list[list[str]]) -> float:
        pairs = zip(references, predicted, strict=True)
        scores = [self._scorer.score_multi(right, text)[self.kind] for right, text in pairs]
        return float(np.mean([score.fmeasure for score in scores]))


class _Answers(_Texts):
    """The mean over answers of a value for the reference that fits best.

    Args:
        tokenizer: folder of the tokenizer that decodes token ids and logits; None for texts.
        normalize: whether case, punctuation and articles are ignored, as by SQuAD.
    """

    best_value: ClassVar[float | None] = 1.0

    def __init__(self, tokenizer: str | Path | None = None, normalize: bool = True) -> None:
        super().__init__(tokenizer)
        self.normalize = true_or_false(f"{self._name}: normalize", normalize)

    def _compute(self, predicted: list[str], references: list[list[str]]) -> float:
        split = split_normalized_words if self.normalize else str.split
        values = [
            max(self._compare(split(text), split(right)) for right in references_of_text)
            for text, references_of_text in zip(predicted, references, strict=True)
        ]
        return float(np.mean(values))

    @staticmethod
    def _compare(words: list[str], reference: list[str]) -> float:
        raise NotImplementedError


@METRICS.register("exact_match", "em")
class ExactMatch(_Answers):
    """The share of answers with the words of a reference, as SQuAD counts."""

    @staticmethod
    def _compare(words: list[str], reference: list[str]) -> float:
        return float(words == reference)


@METRICS.register("answer_f1")
class SquadF1(_Answers):
    """The mean F1 score of the words of answers, 0 to 1, as SQuAD counts."""

    @staticmethod
    def _compare(words: list[str], reference: list[str]) -> float:
        return compute_token_f1(words, reference)


@METRICS.register("span_f1", "entity_f1", "seqeval")
class SpanF1:
    """The F1 score of the spans in sequences of tags, as seqeval counts.

    A span is right if its start, end and kind are. Predictions are scores `[N, T, C]` or classes
    `[N, T]`, with labels `[N, T]`, -100 where a token does not count; or lists of tags.

    Args:
        names: the tag of each class, e.g. `[O, B-person, I-person]`; not needed for tags.

    Raises:
        ConfigurationError: `names` is not a list of tags.
    """

    higher_is_better: ClassVar[bool] = True
    best_value: ClassVar[float | None] = 1.0

    def __init__(self, names: Sequence[str] | None = None) -> None:
        if names is not None and (isinstance(names, str) or not _are_texts(names)):
            raise ConfigurationError(f"span_f1: names must be a list of tags, got {names!r}")
        self.names = None if names is None else list(names)
        self.reset()

    def reset(self) -> None:
        """Discard all spans."""
        self._sequences = self._common = self._predicted = self._true = 0

    def update(self, preds: object, labels: object) -> None:
        """Add the sequences of one batch."""
        for predicted, truth in self._iterate_tags(preds, labels):
            if len(predicted) != len(truth):
                raise MetricError(
                    f"span_f1 requires as many tags as labels, got {len(predicted)} tags for "
                    f"{len(truth)} labels"
                )
            spans, right = set(find_spans(predicted)), set(find_spans(truth))
            self._sequences += 1
            self._common += len(spans & right)
            self._predicted += len(spans)
            self._true += len(right)

    def merge(self, other: SpanF1) -> None:
        """Add the spans of another instance."""
        self._sequences += other._sequences
        self._common += other._common
        self._predicted += other._predicted
        self._true += other._true

    def result(self) -> float:
        """Return the F1 score over all spans since the last reset; 0 without a common span."""
        if not self._sequences:
            raise nothing_taken_in(self)
        total = self._predicted + self._true
        return 2 * self._common / total if total else 0.0

    def _iterate_tags(self, preds: Any, labels: Any) -> Iterator[tuple[list[str], list[str]]]:
        if isinstance(preds, list | tuple) and preds and isinstance(preds[0], list | tuple):
            for predicted, truth in zip(preds, labels, strict=True):
                yield list(predicted), list(truth)
            return
        outputs = map_named_outputs(preds)
        if outputs is not None:
            preds = outputs.get(_LOGITS, next(iter(outputs.values())))
        classes, truth = convert_to_numpy(preds), convert_to_numpy(labels)
        classes = classes.argmax(axis=-1) if classes.ndim == 3 else classes
        if classes.shape != truth.shape or truth.dtype.kind not in "iu":
            raise MetricError(
                f"span_f1 requires scores [N, T, C] and classes [N, T] as labels, or lists of "
                f"tags, got {np.shape(preds)} and labels {truth.dtype} of {truth.shape}"
            )
        counted = truth != IGNORED_LABEL
        for row, right, used in zip(classes, truth, counted, strict=True):
            yield self._name_tags(row[used]), self._name_tags(right[used])

    def _name_tags(self, classes: np.ndarray) -> list[str]:
        if self.names is None:
            raise MetricError("span_f1 requires the tag of each class; set the option names")
        if classes.size and not 0 <= classes.min() <= classes.max() < len(self.names):
            raise MetricError(
                f"span_f1: classes must be from 0 to {len(self.names) - 1}, the last of names, got "
                f"{classes.min()} to {classes.max()}"
            )
        return [self.names[index] for index in classes]


def find_spans(tags: Sequence[str]) -> Iterator[tuple[str, int, int]]:
    """Yield kind, start and end (exclusive) of the spans in a sequence of tags.

    Tags are `O`, or a mark of IOB or IOBES with a kind, `B-person`; a tag without a mark continues
    a span of its kind. Invalid sequences are read as by conlleval: a span starts where the kind
    changes.
    """
    start, previous = -1, ("O", "")
    for index, tag in enumerate([*tags, "O"]):
        mark, kind = _split_tag(tag)
        is_new = mark in "BS" or previous[0] in "ES" or kind != previous[1]
        if start >= 0 and (mark == "O" or is_new):
            yield previous[1], start, index
            start = -1
        if mark != "O" and start < 0:
            start = index
        previous = (mark, kind)


def _split_tag(tag: str) -> tuple[str, str]:
    """Return the mark, one of O, B, I, E, S, and the kind of a tag."""
    if tag == "O":
        return "O", ""
    mark, separator, kind = tag.partition("-")
    marks = {"B": "B", "I": "I", "M": "I", "E": "E", "L": "E", "S": "S", "U": "S"}
    return (marks[mark], kind) if separator and mark in marks else ("I", tag)


def compute_token_f1(predicted: Sequence[Hashable], truth: Sequence[Hashable]) -> float:
    """Return the harmonic mean of precision and recall, with tokens counted as multisets."""
    common = (Counter(predicted) & Counter(truth)).total()
    # From precision = common/p and recall = common/t follows 2·common/(p + t).
    return 2 * common / (len(predicted) + len(truth)) if common else 0.0


def split_normalized_words(answer: str) -> list[str]:
    """Return the words of an answer, without case, punctuation and articles.

    Source: the evaluation script of SQuAD 1.1, `normalize_answer`.
    """
    return _ARTICLES.sub(" ", answer.lower().translate(_NO_PUNCTUATION)).split()


def decode_ids(tokenizer: Any, ids: np.ndarray, merged: bool) -> list[str]:
    """Return the texts of token ids `[N, T]`; -100 is padding.

    Args:
        tokenizer: of `transformers`.
        ids: the token ids.
        merged: whether a tokenizer of CTC merges repeated tokens, as in predictions.
    """
    padded = np.where(ids == IGNORED_LABEL, tokenizer.pad_token_id or 0, ids)
    # Blanks, which are special tokens, separate the tokens that are merged.
    is_ctc = "CTC" in type(tokenizer).__name__
    options = {"group_tokens": merged} if is_ctc else {"skip_special_tokens": True}
    texts: list[str] = tokenizer.batch_decode(padded, **options)
    return texts


def _are_texts(values: Any) -> bool:
    return all(isinstance(value, str) for value in values)


def _read_decoder(name: str, folder: str | Path) -> Any:
    """Return the tokenizer of a folder; no code from the folder runs, nothing is downloaded."""
    path = check_existing_path(f"{name}: tokenizer", str(folder))
    transformers = import_package("transformers", f"the metric {name} of token ids", "text")
    with convert_tokenizer_errors(path):
        return transformers.AutoTokenizer.from_pretrained(
            path, local_files_only=True, trust_remote_code=False
        )
