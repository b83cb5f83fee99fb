"""SQuAD 1.1 questions with their texts, split into windows for a BERT model.

The algorithm is that of `run_squad.py` of https://github.com/google-research/bert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from neural_mp.data.option_checks import package
from neural_mp.errors import DataError
from neural_mp.io.readers import read_data_json

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

    def shows(self, index: int) -> bool:
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
        tokenizers = package("tokenizers", "SquadV1", "text")
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

    def words(self, text: str) -> list[str]:
        """Return words and punctuation, not yet split into pieces."""
        normal = self._normalizer.normalize_str(text)
        return [word for word, _ in self._splitter.pre_tokenize_str(normal)]

    def pieces(self, texts: Sequence[str]) -> list[list[str]]:
        """Return the pieces of each text."""
        encoded = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [encoding.tokens for encoding in encoded]

    def original_text(self, words: Sequence[str], pieces: Sequence[str]) -> str:
        """Return the original text of an answer.

        Args:
            words: the words of the text that the pieces belong to.
            pieces: the pieces of the answer.
        """
        original = " ".join(words)
        answer = " ".join(pieces).replace(" ##", "").replace("##", "")
        answer = " ".join(answer.split())
        split = " ".join(self.words(original))
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
        question_pieces = self.tokenizer.pieces([question.text for question in self.questions])
        texts = dict.fromkeys(question.words for question in self.questions)
        pieces = {words: self.tokenizer.pieces(words) for words in texts}
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

    def _build_windows(self, number: int, asked: list[str], text: list[list[str]]) -> list[Window]:
        asked = asked[: self.question_length]
        room = self.length - len(asked) - 3  # [CLS], and [SEP] twice
        if room < 1:
            raise DataError(
                f"a question of {len(asked)} pieces leaves no room for its text in a window of "
                f"{self.length}; set a larger max_seq_length or a smaller max_query_length"
            )
        words = [word for word, parts in enumerate(text) for _ in parts]
        pieces = [piece for parts in text for piece in parts]
        spans = self._window_spans(len(pieces), room)
        start = ["[CLS]", *asked, "[SEP]"]
        return [
            Window(
                number,
                (*start, *pieces[begin:end], "[SEP]"),
                len(start),
                tuple(words[begin:end]),
                tuple(_best_span(spans, index) == span for index in range(begin, end)),
            )
            for span, (begin, end) in enumerate(spans)
        ]

    def _window_spans(self, count: int, room: int) -> list[tuple[int, int]]:
        step, last = min(room, self.stride), max(count - room, 0)
        begins = range(0, last + step, step) if count else ()
        return [(begin, min(begin + room, count)) for begin in begins]


def _best_span(spans: Sequence[tuple[int, int]], index: int) -> int:
    """Return the span with the most context on the shorter side of a place; ties: the longer."""
    if len(spans) == 1:
        return 0
    around = {
        span: min(index - begin, end - 1 - index) + 0.01 * (end - begin)
        for span, (begin, end) in enumerate(spans)
        if begin <= index < end
    }
    return max(around, key=lambda span: around[span])
