"""Conversion of model outputs for text windows to answers of SQuAD 1.1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from neural_mp.compat.inc.components.registries import (
    POSITIVE,
    TRANSFORMS,
    Options,
    option,
    predictions_and_labels,
    registered,
)
from neural_mp.compat.inc.components.transforms.squad_windows import (
    Question,
    SquadWindows,
    Tokenizer,
    Window,
)
from neural_mp.data.option_checks import existing_path, true_or_false, whole_number
from neural_mp.errors import DataError

#: Id of the first window; the others follow consecutively.
FIRST_WINDOW = 1_000_000_000
#: Answer to a question with windows missing from the predictions.
SKIPPED = "*#skip this example#*"
NOTHING_YET = (None, None)
_NO_ANSWER = "empty"


@registered(TRANSFORMS, "Collect", "tensorflow")
class Collect:
    """Collect predictions `[N, tokens, 2]` until those of all windows are complete.

    Args:
        length: number of windows.
    """

    def __init__(self, length: int = 10833) -> None:
        self.length = whole_number(f"{type(self).__name__}: length", length, minimum=1)
        self.reset()

    def reset(self) -> None:
        """Restart with the first window."""
        self._starts: list[np.ndarray] = []
        self._ends: list[np.ndarray] = []

    def __call__(self, sample: object) -> tuple[Any, Any]:
        """`(predictions, labels)` → `([ids, starts, ends], labels)`, or nothing yet."""
        predictions, labels = predictions_and_labels(self, sample)
        starts, ends = self._start_and_end_scores(predictions)
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

    def _start_and_end_scores(self, predictions: Any) -> tuple[np.ndarray, np.ndarray]:
        scores = np.asarray(predictions)
        if scores.ndim != 3 or scores.shape[2] != 2:
            raise DataError(
                f"Collect: predictions must be [N, tokens, 2], got the shape {list(scores.shape)}"
            )
        return scores[..., 0], scores[..., 1]


@registered(TRANSFORMS, "ModelZooCollect", "tensorflow")
class ModelZooCollect(Collect):
    """`Collect` for predictions (starts `[N, tokens]`, ends `[N, tokens]`)."""

    def _start_and_end_scores(self, predictions: Any) -> tuple[np.ndarray, np.ndarray]:
        if not isinstance(predictions, Sequence | np.ndarray) or len(predictions) != 2:
            raise DataError(
                f"{type(self).__name__}: predictions must be (starts, ends), got "
                f"{type(predictions).__name__}"
            )
        return np.asarray(predictions[0]), np.asarray(predictions[1])


@registered(TRANSFORMS, "SquadV1", "tensorflow")
@dataclass(frozen=True)
class SquadV1(Options):
    """Best answer to each question.

    Attributes:
        label_file: the SQuAD 1.1 file that the dataset was made from.
        vocab_file: vocabulary of the model.
        n_best_size: number of candidate starts and ends per window.
        max_seq_length: length of a window with its question, in tokens.
        max_query_length: maximum length of a question, in tokens; the rest is truncated.
        max_answer_length: in tokens.
        do_lower_case: whether the model is uncased.
        doc_stride: distance between the windows of a text, in tokens.
        task: the questions and their windows.
    """

    label_file: Any = option(existing_path)
    vocab_file: Any = option(existing_path)
    n_best_size: int = option(POSITIVE, 20)
    max_seq_length: int = option(POSITIVE, 384)
    max_query_length: int = option(POSITIVE, 64)
    max_answer_length: int = option(POSITIVE, 30)
    do_lower_case: bool = option(true_or_false, True)
    doc_stride: int = option(POSITIVE, 128)
    task: SquadWindows = field(init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        tokenizer = Tokenizer(self.vocab_file, self.do_lower_case)
        lengths = self.max_seq_length, self.max_query_length, self.doc_stride
        self.put(task=SquadWindows(self.label_file, tokenizer, *lengths))

    def __call__(self, sample: object) -> tuple[Any, Any]:
        """`([window ids, starts, ends], labels)` → `({question: answer}, labels)`.

        `(None, None)`, meaning nothing yet, is returned unchanged.
        """
        predictions, labels = predictions_and_labels(self, sample)
        if predictions is None:
            return NOTHING_YET
        if not isinstance(predictions, Sequence | np.ndarray) or len(predictions) != 3:
            raise DataError(
                f"{type(self).__name__}: predictions must be (window ids, starts, ends), got "
                f"{type(predictions).__name__}"
            )
        numbers, starts, ends = predictions
        scores = {
            int(np.asarray(number).item()) - FIRST_WINDOW: (_flat_scores(start), _flat_scores(end))
            for number, start, end in zip(numbers, starts, ends, strict=True)
        }
        return self._answers(scores), labels

    def _answers(self, scores: Mapping[int, tuple[np.ndarray, np.ndarray]]) -> dict[str, str]:
        answers = {}
        for question, windows in zip(self.task.questions, self.task.of_question(), strict=True):
            if not windows:
                continue
            scored = [(window, *scores[index]) for index, window in windows if index in scores]
            complete = windows[-1][0] in scores
            answers[question.identity] = (
                self._best_answer(question, scored) if complete else SKIPPED
            )
        return answers

    def _best_answer(
        self, question: Question, scored: Sequence[tuple[Window, np.ndarray, np.ndarray]]
    ) -> str:
        best: tuple[float, Window, int, int] | None = None
        for window, starts, ends in scored:
            for start in self._candidate_tokens(starts):
                if not window.shows(start) or not window.best_seen[start - window.first]:
                    continue
                for end in self._candidate_tokens(ends):
                    if not window.shows(end) or not start <= end < start + self.max_answer_length:
                        continue
                    score = float(starts[start]) + float(ends[end])
                    if best is None or score > best[0]:
                        best = score, window, start, end
        if best is None:
            return _NO_ANSWER
        _, window, start, end = best
        first, last = (window.words[index - window.first] for index in (start, end))
        pieces = window.pieces[start : end + 1]
        return self.task.tokenizer.original_text(question.words[first : last + 1], pieces)

    def _candidate_tokens(self, scores: np.ndarray) -> list[int]:
        """Return the tokens with the best scores; ties in order of position."""
        return [int(index) for index in np.argsort(-scores, kind="stable")[: self.n_best_size]]


def _flat_scores(scores: object) -> np.ndarray:
    return np.asarray(scores, dtype=np.float64).reshape(-1)


@registered(TRANSFORMS, "SquadV1ModelZoo", "tensorflow")
@dataclass(frozen=True)
class SquadV1ModelZoo(SquadV1):
    """`SquadV1` for predictions (starts, ends) per batch; answers come with the last batch."""

    collect: ModelZooCollect = field(init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.put(collect=ModelZooCollect(len(self.task.windows)))

    def reset(self) -> None:
        """Restart with the first window."""
        self.collect.reset()

    def __call__(self, sample: object) -> tuple[Any, Any]:
        """`((starts, ends), labels)` → `({question: answer}, labels)`, or nothing yet."""
        return super().__call__(self.collect(sample))
