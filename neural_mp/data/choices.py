"""Questions with several answers, of which a language model takes the most likely."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from neural_mp.data.datasets import DATASETS
from neural_mp.data.option_checks import (
    check_existing_file,
    check_existing_path,
    check_whole_number,
)
from neural_mp.data.text import (
    check_vocabulary,
    convert_tokenizer_errors,
    iterate_json_lines,
    read_tokenizer,
)
from neural_mp.errors import ConfigurationError, DataError
from neural_mp.util.labels import IGNORED_LABEL
from neural_mp.util.validators import is_integer, preview_value


@dataclass(frozen=True)
class _Answer:
    """One answer of a question.

    Attributes:
        tokens: those of the question and the answer.
        start: position of the answer's first token.
        question: number of the question.
        correct: whether the answer is the right one.
        characters: length of the answer's text.
    """

    tokens: np.ndarray
    start: int
    question: int
    correct: bool
    characters: int


@DATASETS.register("multiple_choice")
@dataclass(frozen=True)
class MultipleChoiceDataset:
    """One sample per answer: the token ids of question and answer, for `multiple_choice`.

    A question and its answers are tokenized as by lm-evaluation-harness: as one text, in which
    spaces at the end of the question belong to the answer. Samples are padded at the end, which
    changes no earlier output of a causal model. A label is a dict: `tokens` `[T]`, -100 outside of
    the answer; `question`, a number; `correct`, 0 or 1; `characters`, the length of the answer.

    Attributes:
        path: `.jsonl`, a question per line: a text under `question`, a list of texts under
            `choices`, and under `answer` the position of the right one, from 0, or its text.
        tokenizer: folder with `tokenizer.json`, or the file.
        length: largest number of tokens; the start of a longer question is left out. Default: the
            longest sample.
        delimiter: text between question and answer.
        question, choices, answer: keys of the lines.
        max_questions: questions to keep, the first ones; default: all.

    Raises:
        ConfigurationError: an option is invalid.
        DataError: the file cannot be read, has no question, or has an invalid line.
        MissingFrameworkError: the package tokenizers is not installed.
    """

    path: str
    tokenizer: str
    length: int | None = None
    delimiter: str = " "
    question: str = "question"
    choices: str = "choices"
    answer: str = "answer"
    max_questions: int | None = None
    _answers: Sequence[_Answer] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        path = check_existing_file("multiple_choice: path", self.path)
        if path.suffix != ".jsonl":
            raise ConfigurationError(f"multiple_choice: path must end in .jsonl, got {str(path)!r}")
        most = None
        if self.max_questions is not None:
            most = check_whole_number(
                "multiple_choice: max_questions", self.max_questions, minimum=1
            )
        answers = self._tokenize_answers(path, most)
        if not answers:
            raise DataError(f"{str(path)!r} must have a question, got none; use another file")
        longest = max(len(answer.tokens) for answer in answers)
        if self.length is not None:
            longest = min(
                longest, check_whole_number("multiple_choice: length", self.length, minimum=2)
            )
        object.__setattr__(self, "length", longest)
        object.__setattr__(self, "_answers", answers)

    def _tokenize_answers(self, path: Path, most: int | None) -> list[_Answer]:
        folder = check_existing_path("multiple_choice: tokenizer", self.tokenizer)
        tokenizer, answers = read_tokenizer(folder), list[_Answer]()
        for number, (origin, entry) in enumerate(iterate_json_lines(path)):
            if number == most:
                break
            question, texts, right = self._check_entry(origin, entry)
            for index, text in enumerate(texts):
                both = question + self.delimiter + text, question.rstrip()
                with convert_tokenizer_errors(folder):
                    tokens, prompt = (_strip_end_tokens(tokenizer.encode(part)) for part in both)
                whole, start = np.array(tokens, np.int64), len(prompt)
                check_vocabulary(whole, folder)
                if not 0 < start < len(whole):
                    raise DataError(
                        f"{origin}, must have a token of the question and one of each answer, got "
                        f"{start} and {len(whole) - start} for {text!r}"
                    )
                answers.append(_Answer(whole, start, number, index == right, len(text)))
        return answers

    def _check_entry(self, origin: str, entry: object) -> tuple[str, list[str], int]:
        """Return the question, its answers and the position of the right one."""
        fields: dict[str, Any] = entry if isinstance(entry, dict) else {}
        question: Any = fields.get(self.question)
        texts: Any = fields.get(self.choices)
        answer: Any = fields.get(self.answer)
        is_list = isinstance(texts, list) and all(isinstance(t, str) and t for t in texts)
        if not (isinstance(question, str) and question.strip() and is_list and len(texts) > 1):
            raise DataError(
                f"{origin}, must have a text under {self.question!r} and two or more under "
                f"{self.choices!r}, got {preview_value(entry)}"
            )
        if isinstance(answer, str) and texts.count(answer) == 1:
            answer = texts.index(answer)
        if not is_integer(answer) or not 0 <= answer < len(texts):
            raise DataError(
                f"{origin}, must have under {self.answer!r} the text of one of the answers, or its "
                f"position from 0 to {len(texts) - 1}, got {preview_value(answer)}"
            )
        return question, texts, int(answer)

    def __len__(self) -> int:
        return len(self._answers)

    def __getitem__(self, index: int) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        answer, length = self._answers[index], self.length or 0
        cut = max(0, len(answer.tokens) - length)
        inputs = np.zeros(length, np.int64)
        labels = np.full(length, IGNORED_LABEL, np.int64)
        inputs[: len(answer.tokens) - cut] = answer.tokens[cut:]
        # The first token of a sample has no context that predicts it.
        start = max(1, answer.start - cut)
        labels[start : len(answer.tokens) - cut] = answer.tokens[cut + start :]
        figures = (answer.question, int(answer.correct), answer.characters)
        return {"input_ids": inputs}, {
            "tokens": labels,
            **dict(zip(("question", "correct", "characters"), map(np.int64, figures), strict=True)),
        }


def _strip_end_tokens(encoding: Any) -> list[int]:
    """Return the tokens without special ones at the end, which the question would have, too."""
    ids, special = list(encoding.ids), list(encoding.special_tokens_mask)
    while ids and special[len(ids) - 1]:
        ids.pop()
    return ids
