"""From what a model says on windows of text to the answers of SQuAD 1.1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from neural_mp.compat.inc.components.registries import TRANSFORMS, registered
from neural_mp.compat.inc.components.transforms.squad_windows import (
    Question,
    Task,
    Tokenizer,
    Window,
    Windows,
)
from neural_mp.data.option_checks import existing_path, true_or_false, whole_number
from neural_mp.errors import DataError

#: The number of the first window; the others follow one by one.
FIRST_WINDOW = 1_000_000_000
#: What stands for the answer to a question whose windows were not all seen.
SKIPPED = "*#skip this example#*"
NOTHING_YET = (None, None)
_NO_ANSWER = "empty"
_SIZES = ("n_best_size", "max_seq_length", "max_query_length", "max_answer_length", "doc_stride")


def _pair(transform: object, sample: Any) -> tuple[Any, Any]:
    if not isinstance(sample, tuple | list) or len(sample) != 2:
        raise DataError(f"{type(transform).__name__} takes (predictions, labels)")
    return sample[0], sample[1]


@registered(TRANSFORMS, "Collect", "tensorflow")
class Collect:
    """Hold back predictions `[N, places, 2]` until those of all windows are there.

    Args:
        length: how many windows there are.

    Raises:
        ConfigurationError: `length` is no whole number from 1.
    """

    def __init__(self, length: int = 10833) -> None:
        self.length = whole_number(f"{type(self).__name__}: length", length, minimum=1)
        self.reset()

    def reset(self) -> None:
        """Begin with the first window again."""
        self._starts: list[np.ndarray] = []
        self._ends: list[np.ndarray] = []

    def __call__(self, sample: object) -> tuple[Any, Any]:
        """`(predictions, labels)` → `([numbers, starts, ends], labels)`, or nothing yet.

        Raises:
            DataError: it is no such pair.
        """
        predictions, labels = _pair(self, sample)
        starts, ends = self._two(predictions)
        # Windows beyond `length` pad the last batch.
        room = self.length - len(self._starts)
        self._starts += [*starts[:room]]
        self._ends += [*ends[:room]]
        if len(self._starts) < self.length:
            return NOTHING_YET
        numbers = list(range(FIRST_WINDOW, FIRST_WINDOW + self.length))
        complete = [numbers, self._starts, self._ends]
        self.reset()
        return complete, labels

    def _two(self, predictions: Any) -> tuple[np.ndarray, np.ndarray]:
        """For each window the scores of its places as starts and as ends."""
        scores = np.asarray(predictions)
        if scores.ndim != 3 or scores.shape[2] != 2:
            raise DataError(
                f"Collect takes predictions [N, places, 2], got the shape {list(scores.shape)}"
            )
        return scores[..., 0], scores[..., 1]


@registered(TRANSFORMS, "ModelZooCollect", "tensorflow")
class ModelZooCollect(Collect):
    """The same, for predictions (starts `[N, places]`, ends `[N, places]`)."""

    def _two(self, predictions: Any) -> tuple[np.ndarray, np.ndarray]:
        if not isinstance(predictions, Sequence | np.ndarray) or len(predictions) != 2:
            raise DataError(f"{type(self).__name__} takes two predictions: starts and ends")
        return np.asarray(predictions[0]), np.asarray(predictions[1])


@registered(TRANSFORMS, "SquadV1", "tensorflow")
@dataclass(frozen=True)
class SquadV1:
    """The best answer to each question.

    Attributes:
        label_file: a file of SQuAD 1.1, the one that the dataset was made from.
        vocab_file: the vocabulary of the model.
        n_best_size: how many starts and how many ends of each window are looked at.
        max_seq_length: of a window with its question, in pieces.
        max_query_length: of a question, in pieces; the rest is cut off.
        max_answer_length: in pieces.
        do_lower_case: whether the model knows no upper case.
        doc_stride: from one window of a text to the next, in pieces.
        task: the questions and their windows.

    Raises:
        ConfigurationError: an option is wrong.
        DataError: a file is missing or of another form.
        MissingFrameworkError: the tokenizers are not installed.
    """

    label_file: Any
    vocab_file: Any
    n_best_size: int = 20
    max_seq_length: int = 384
    max_query_length: int = 64
    max_answer_length: int = 30
    do_lower_case: bool = True
    doc_stride: int = 128
    task: Task = field(init=False, repr=False)

    def __post_init__(self) -> None:
        name = type(self).__name__
        for option in _SIZES:
            whole_number(f"{name}: {option}", getattr(self, option), minimum=1)
        true_or_false(f"{name}: do_lower_case", self.do_lower_case)
        questions = existing_path(f"{name}: label_file", self.label_file)
        vocabulary = existing_path(f"{name}: vocab_file", self.vocab_file)
        tokenizer = Tokenizer(vocabulary, self.do_lower_case)
        windows = Windows(tokenizer, self.max_seq_length, self.max_query_length, self.doc_stride)
        object.__setattr__(self, "task", Task(questions, windows))

    def __call__(self, sample: object) -> tuple[Any, Any]:
        """`([numbers of windows, starts, ends], labels)` → `({question: answer}, labels)`.

        `(None, None)`, which is nothing yet, stays that.

        Raises:
            DataError: it is no such pair.
        """
        predictions, labels = _pair(self, sample)
        if predictions is None:
            return NOTHING_YET
        if not isinstance(predictions, Sequence | np.ndarray) or len(predictions) != 3:
            raise DataError(f"{type(self).__name__} takes numbers of windows, starts and ends")
        numbers, starts, ends = predictions
        scores = {
            int(np.asarray(number).item()) - FIRST_WINDOW: (_row(start), _row(end))
            for number, start, end in zip(numbers, starts, ends, strict=True)
        }
        return self._answers(scores), labels

    def _answers(self, scores: Mapping[int, tuple[np.ndarray, np.ndarray]]) -> dict[str, str]:
        found = {}
        for question, windows in zip(self.task.questions, self.task.of_question(), strict=True):
            if not windows:
                continue
            seen = [(window, *scores[place]) for place, window in windows if place in scores]
            complete = windows[-1][0] in scores
            found[question.identity] = self._answer(question, seen) if complete else SKIPPED
        return found

    def _answer(
        self, question: Question, seen: Sequence[tuple[Window, np.ndarray, np.ndarray]]
    ) -> str:
        best: tuple[float, Window, int, int] | None = None
        for window, starts, ends in seen:
            for start in self._candidates(starts):
                if not window.shows(start) or not window.best_seen[start - window.first]:
                    continue
                for end in self._candidates(ends):
                    if not window.shows(end) or not start <= end < start + self.max_answer_length:
                        continue
                    score = float(starts[start]) + float(ends[end])
                    if best is None or score > best[0]:
                        best = score, window, start, end
        if best is None:
            return _NO_ANSWER
        _, window, start, end = best
        first, last = (window.words[place - window.first] for place in (start, end))
        pieces = window.pieces[start : end + 1]
        return self.task.answers.text(question.words[first : last + 1], pieces)

    def _candidates(self, scores: np.ndarray) -> list[int]:
        """The places with the best scores; of two that are equal, the first comes first."""
        return [int(place) for place in np.argsort(-scores, kind="stable")[: self.n_best_size]]


def _row(scores: object) -> np.ndarray:
    return np.asarray(scores, dtype=np.float64).reshape(-1)


@registered(TRANSFORMS, "SquadV1ModelZoo", "tensorflow")
@dataclass(frozen=True)
class SquadV1ModelZoo(SquadV1):
    """The same, for predictions (starts, ends) batch by batch; answers come with the last batch."""

    collect: ModelZooCollect = field(init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "collect", ModelZooCollect(len(self.task.windows)))

    def reset(self) -> None:
        """Begin with the first window again."""
        self.collect.reset()

    def __call__(self, sample: object) -> tuple[Any, Any]:
        """`((starts, ends), labels)` → `({question: answer}, labels)`, or nothing yet.

        Raises:
            DataError: it is no such pair.
        """
        return super().__call__(self.collect(sample))
