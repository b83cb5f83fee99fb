"""Questions of SQuAD 1.1 in text windows for a BERT model, and answers from the model's outputs.

The windows are those of `run_squad.py` of https://github.com/google-research/bert.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from neural_mp.compat.inc.components.registries import (
    POSITIVE,
    TRANSFORMS,
    Options,
    option,
    predictions_and_labels,
    register_for,
)
from neural_mp.data.option_checks import (
    check_existing_path,
    check_whole_number,
    import_package,
    true_or_false,
)
from neural_mp.errors import DataError
from neural_mp.io.readers import read_data_json

#: Id of the first window; the others follow consecutively.
FIRST_WINDOW = 1_000_000_000
#: Answer to a question with windows missing from the predictions.
SKIPPED = "*#skip this example#*"
NOTHING_YET = (None, None)
_NO_ANSWER = "empty"
_LONGEST_WORD = 200  # in characters; longer words are unknown tokens
_NARROW_SPACE = "\u202f"


@dataclass(frozen=True)
class Question:
    """A question about a text.

    Attributes:
        identity: question id in the file.
        text: the question.
        words: the text, split at white space.
    """

    identity: str
    text: str
    words: tuple[str, ...]


@dataclass(frozen=True)
class Window:
    """A span of a text, in the model input after the question.

    Attributes:
        question: index of the question.
        pieces: the model input: `[CLS] question [SEP] span [SEP]`.
        first: index in `pieces` of the start of the span.
        words: for each piece of the span, the index of its word in the text.
        best_seen: for each piece of the span, whether no other window has more context around it.
    """

    question: int
    pieces: tuple[str, ...]
    first: int
    words: tuple[int, ...]
    best_seen: tuple[bool, ...]

    def shows_index(self, index: int) -> bool:
        """Whether an index in `pieces` is in the span."""
        return self.first <= index < self.first + len(self.words)


def read_questions(path: Path) -> list[Question]:
    """Read the questions of a SQuAD 1.1 file, in file order."""
    try:
        data = read_data_json(path)["data"]
        return [
            Question(str(question["id"]), question["question"], words)
            for article in data
            for paragraph in article["paragraphs"]
            for words in [_split_words(paragraph["context"])]
            for question in paragraph["qas"]
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path} must be a SQuAD 1.1 file with data, paragraphs, context and qas; "
            f"{type(error).__name__}: {error}"
        ) from error


def _split_words(text: str) -> tuple[str, ...]:
    """Split at BERT's white space, a subset of Python's."""
    for space in ("\t", "\r", "\n", _NARROW_SPACE):
        text = text.replace(space, " ")
    return tuple(word for word in text.split(" ") if word)


class Tokenizer:
    """BERT's tokenizer: words and punctuation, split into WordPiece tokens (pieces).

    Args:
        vocabulary: a file with one piece per line.
        lower_case: whether to remove case and accents.
    """

    def __init__(self, vocabulary: Path, lower_case: bool) -> None:
        tokenizers = import_package("tokenizers", "SquadV1", "text")
        pieces = _read_vocabulary(vocabulary)
        if "[UNK]" not in pieces:
            raise DataError(f"{vocabulary} must be a vocabulary of BERT, with a line [UNK]")
        self._normalizer = tokenizers.normalizers.BertNormalizer(lowercase=lower_case)
        self._splitter = tokenizers.pre_tokenizers.BertPreTokenizer()
        self._tokenizer = tokenizers.Tokenizer(
            tokenizers.models.WordPiece(
                pieces, unk_token="[UNK]", max_input_chars_per_word=_LONGEST_WORD
            )
        )
        self._tokenizer.normalizer = self._normalizer
        self._tokenizer.pre_tokenizer = self._splitter

    def split_words(self, text: str) -> list[str]:
        """Return words and punctuation, not yet split into pieces."""
        normal = self._normalizer.normalize_str(text)
        return [word for word, _ in self._splitter.pre_tokenize_str(normal)]

    def split_pieces(self, texts: Sequence[str]) -> list[list[str]]:
        """Return the pieces of each text."""
        encoded = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [encoding.tokens for encoding in encoded]

    def restore_original_text(self, words: Sequence[str], pieces: Sequence[str]) -> str:
        """Return the original text of an answer, from its pieces and the words around them."""
        original = " ".join(words)
        answer = " ".join(pieces).replace(" ##", "").replace("##", "")
        answer = " ".join(answer.split())
        split = " ".join(self.split_words(original))
        start = split.find(answer)
        if start < 0:
            return original
        original_indices = [index for index, letter in enumerate(original) if letter != " "]
        split_indices = [index for index, letter in enumerate(split) if letter != " "]
        if len(original_indices) != len(split_indices):
            return original
        rank = {index: number for number, index in enumerate(split_indices)}
        ends = (rank.get(start), rank.get(start + len(answer) - 1))
        if ends[0] is None or ends[1] is None:
            return original
        return original[original_indices[ends[0]] : original_indices[ends[1]] + 1]


def _read_vocabulary(vocabulary: Path) -> dict[str, int]:
    try:
        lines = vocabulary.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise DataError(f"{vocabulary} cannot be read as a vocabulary of BERT") from error
    return {line.strip(): number for number, line in enumerate(lines)}


@dataclass(frozen=True)
class SquadWindows:
    """The questions of a SQuAD 1.1 file, split into windows.

    Attributes:
        label_file: the file.
        tokenizer: the tokenizer.
        length: length of a window with its question, in pieces.
        question_length: maximum length of a question, in pieces; the rest is truncated.
        stride: distance between the windows of a text, in pieces.
    """

    label_file: Path
    tokenizer: Tokenizer
    length: int
    question_length: int
    stride: int

    @cached_property
    def questions(self) -> list[Question]:
        """The questions in file order."""
        return read_questions(self.label_file)

    @cached_property
    def windows(self) -> list[Window]:
        """The windows of all questions, in model input order."""
        question_pieces = self.tokenizer.split_pieces(
            [question.text for question in self.questions]
        )
        texts = dict.fromkeys(question.words for question in self.questions)
        pieces = {words: self.tokenizer.split_pieces(words) for words in texts}
        return [
            window
            for number, question in enumerate(self.questions)
            for window in self._build_windows(
                number, question_pieces[number], pieces[question.words]
            )
        ]

    def of_question(self) -> list[list[tuple[int, Window]]]:
        """Return for each question its windows, with their indices among all."""
        windows: list[list[tuple[int, Window]]] = [[] for _ in self.questions]
        for index, window in enumerate(self.windows):
            windows[window.question].append((index, window))
        return windows

    def _build_windows(self, number: int, query: list[str], text: list[list[str]]) -> list[Window]:
        query = query[: self.question_length]
        room = self.length - len(query) - 3  # [CLS], and [SEP] twice
        if room < 1:
            raise DataError(
                f"a question of {len(query)} pieces leaves no room for its text in a window of "
                f"{self.length}; set a larger max_seq_length or a smaller max_query_length"
            )
        words = [word for word, parts in enumerate(text) for _ in parts]
        pieces = [piece for parts in text for piece in parts]
        step, last = min(room, self.stride), max(len(pieces) - room, 0)
        begins = range(0, last + step, step) if pieces else ()
        spans = [(begin, min(begin + room, len(pieces))) for begin in begins]
        start = ["[CLS]", *query, "[SEP]"]
        return [
            Window(
                number,
                (*start, *pieces[begin:end], "[SEP]"),
                len(start),
                tuple(words[begin:end]),
                tuple(_find_best_span(spans, index) == span for index in range(begin, end)),
            )
            for span, (begin, end) in enumerate(spans)
        ]


def _find_best_span(spans: Sequence[tuple[int, int]], index: int) -> int:
    """Return the span with the most context on the shorter side of a place; ties: the longer."""
    if len(spans) == 1:
        return 0
    around = {
        span: min(index - begin, end - 1 - index) + 0.01 * (end - begin)
        for span, (begin, end) in enumerate(spans)
        if begin <= index < end
    }
    return max(around, key=lambda span: around[span])


@register_for(TRANSFORMS, "Collect", "tensorflow")
class Collect:
    """Collect predictions `[N, tokens, 2]` until those of all windows are complete.

    Args:
        length: number of windows.
    """

    def __init__(self, length: int = 10833) -> None:
        self.length = check_whole_number(f"{type(self).__name__}: length", length, minimum=1)
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

    def _start_and_end_scores(self, predictions: object) -> tuple[np.ndarray, np.ndarray]:
        scores = np.asarray(predictions)
        if scores.ndim != 3 or scores.shape[2] != 2:
            raise DataError(
                f"Collect: predictions must be [N, tokens, 2], got the shape {list(scores.shape)}"
            )
        return scores[..., 0], scores[..., 1]


@register_for(TRANSFORMS, "ModelZooCollect", "tensorflow")
class ModelZooCollect(Collect):
    """`Collect` for predictions (starts `[N, tokens]`, ends `[N, tokens]`)."""

    def _start_and_end_scores(self, predictions: object) -> tuple[np.ndarray, np.ndarray]:
        if not isinstance(predictions, Sequence | np.ndarray) or len(predictions) != 2:
            raise DataError(
                f"{type(self).__name__}: predictions must be (starts, ends), got "
                f"{type(predictions).__name__}"
            )
        return np.asarray(predictions[0]), np.asarray(predictions[1])


@register_for(TRANSFORMS, "SquadV1", "tensorflow")
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

    label_file: Any = option(check_existing_path)
    vocab_file: Any = option(check_existing_path)
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
        self.set_fields(task=SquadWindows(self.label_file, tokenizer, *lengths))

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
            int(np.asarray(number).item()) - FIRST_WINDOW: (
                _flatten_score_array(start),
                _flatten_score_array(end),
            )
            for number, start, end in zip(numbers, starts, ends, strict=True)
        }
        return self._extract_answers(scores), labels

    def _extract_answers(
        self, scores: Mapping[int, tuple[np.ndarray, np.ndarray]]
    ) -> dict[str, str]:
        answers = {}
        for question, windows in zip(self.task.questions, self.task.of_question(), strict=True):
            if not windows:
                continue
            scored = [(window, *scores[index]) for index, window in windows if index in scores]
            complete = windows[-1][0] in scores
            answers[question.identity] = (
                self._find_best_answer(question, scored) if complete else SKIPPED
            )
        return answers

    def _find_best_answer(
        self, question: Question, scored: Sequence[tuple[Window, np.ndarray, np.ndarray]]
    ) -> str:
        best: tuple[float, Window, int, int] | None = None
        for window, starts, ends in scored:
            for start in self._list_candidate_tokens(starts):
                if not window.shows_index(start) or not window.best_seen[start - window.first]:
                    continue
                for end in self._list_candidate_tokens(ends):
                    if (
                        not window.shows_index(end)
                        or not start <= end < start + self.max_answer_length
                    ):
                        continue
                    score = float(starts[start]) + float(ends[end])
                    if best is None or score > best[0]:
                        best = score, window, start, end
        if best is None:
            return _NO_ANSWER
        _, window, start, end = best
        first, last = (window.words[index - window.first] for index in (start, end))
        pieces = window.pieces[start : end + 1]
        return self.task.tokenizer.restore_original_text(question.words[first : last + 1], pieces)

    def _list_candidate_tokens(self, scores: np.ndarray) -> list[int]:
        """Return the tokens with the best scores; ties in order of position."""
        return [int(index) for index in np.argsort(-scores, kind="stable")[: self.n_best_size]]


def _flatten_score_array(scores: object) -> np.ndarray:
    return np.asarray(scores, dtype=np.float64).reshape(-1)


@register_for(TRANSFORMS, "SquadV1ModelZoo", "tensorflow")
@dataclass(frozen=True)
class SquadV1ModelZoo(SquadV1):
    """`SquadV1` for predictions (starts, ends) per batch; answers come with the last batch."""

    collect: ModelZooCollect = field(init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.set_fields(collect=ModelZooCollect(len(self.task.windows)))

    def reset(self) -> None:
        """Restart with the first window."""
        self.collect.reset()

    def __call__(self, sample: object) -> tuple[Any, Any]:
        """`((starts, ends), labels)` → `({question: answer}, labels)`, or nothing yet."""
        return super().__call__(self.collect(sample))
