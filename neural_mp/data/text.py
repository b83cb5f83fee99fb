"""Texts as windows of tokens, for language models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from neural_mp.data.datasets import DATASETS
from neural_mp.data.numpy_files import iterate_plain_arrays
from neural_mp.data.option_checks import (
    check_existing_file,
    check_existing_path,
    check_fits_memory,
    check_whole_number,
    import_package,
)
from neural_mp.errors import ConfigurationError, DataError, one_line
from neural_mp.io.readers import JsonError, load_json, read_json
from neural_mp.util.labels import IGNORED_LABEL
from neural_mp.util.validators import anything, is_integer, preview_value

_TOKENIZER = "tokenizer.json"
#: Tokens per window.
DEFAULT_LENGTH = 512
#: File of a model folder, and its keys for the longest context, in order of preference.
_CONFIG = "config.json"
_CONTEXT = ("max_position_embeddings", "n_positions", "max_seq_len")
_VOCABULARY = ("vocab_size",)
_SUFFIXES = (".txt", ".jsonl", ".npy")


@DATASETS.register("text")
@dataclass(frozen=True)
class TextDataset:
    """Windows of a text: token ids as inputs, and the same ids as labels, for `perplexity`.

    Windows start every `stride` tokens; tokens that an earlier window covered have the label -100,
    so that each token counts once, with at least `length - stride` tokens of context from the
    second window on. Windows of equal length: the rest of a text shorter than a window is left out.
    Tokens that the tokenizer adds before a text, such as `<bos>`, begin every window and do not
    count.

    Attributes:
        path: `.txt` (one text), `.jsonl` (a text or a conversation per line, under `key`) or `.npy`
            (token ids). A conversation is a list of messages `{"role": …, "content": …}`, written
            by the chat template of the tokenizer's folder.
        tokenizer: folder with `tokenizer.json`, or the file; not for `.npy`.
        length: tokens per window.
        stride: tokens of the text from one window to the next; default: without overlap.
        key: key of the text in `.jsonl` files.
        max_windows: windows to keep, the first ones; default: all.

    Raises:
        ConfigurationError: an option is invalid.
        DataError: the file cannot be read, or has no window of this length.
        MissingFrameworkError: the package tokenizers is not installed.
    """

    path: str
    tokenizer: str | None = None
    length: int = DEFAULT_LENGTH
    stride: int | None = None
    key: str = "text"
    max_windows: int | None = None
    _windows: np.ndarray = field(init=False, repr=False)
    #: Tokens that begin every window and are none of the text.
    _first: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        length = check_whole_number("text: length", self.length, minimum=2)
        stride = check_whole_number("text: stride", self.stride or length, minimum=1)
        if stride > length:
            raise ConfigurationError(
                f"text: stride must be at most length ({length}), got {stride}; tokens between "
                f"windows would be skipped"
            )
        path = check_existing_file("text: path", self.path)
        tokens, first = self._read_tokens(path)
        if not len(tokens):
            raise DataError(
                f"the text {str(path)!r} must have tokens, got "
                f"{'none for its characters' if path.stat().st_size else 'an empty file'}; use "
                f"another text"
            )
        if len(first) >= length:
            raise ConfigurationError(
                f"text: length must exceed the {len(first)} tokens that the tokenizer adds before "
                f"a text, got {length}; set length"
            )
        covered = length - len(first)
        stride = min(stride, covered)
        starts = range(0, len(tokens) - covered + 1, stride)
        if self.max_windows is not None:
            starts = starts[: check_whole_number("text: max_windows", self.max_windows, minimum=1)]
        if not starts:
            raise DataError(
                f"the text {str(self.path)!r} must have at least one window of {length} tokens, "
                f"got {len(tokens)} tokens; use a longer text or set length"
            )
        parts = [np.append(first, tokens[start : start + covered]) for start in starts]
        object.__setattr__(self, "_windows", np.stack(parts))
        object.__setattr__(self, "_first", len(first))
        object.__setattr__(self, "stride", stride)

    def _read_tokens(self, path: Path) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of all texts, and those that the tokenizer adds before a text."""
        first = np.zeros(0, np.int64)
        if path.suffix == ".npy":
            with iterate_plain_arrays(path) as stored:
                return _check_token_ids(stored, path), first
        if path.suffix not in _SUFFIXES:
            raise ConfigurationError(
                f"text: path must end in {', '.join(_SUFFIXES)}, got {str(path)!r}"
            )
        if self.tokenizer is None:
            raise ConfigurationError(
                f"text: tokenizer must name a folder with {_TOKENIZER} for {path.name}; or give "
                f"token ids in an .npy file"
            )
        folder = check_existing_path("text: tokenizer", self.tokenizer)
        tokenizer, ids, chat = read_tokenizer(folder), [], _ChatTemplate(folder)
        for text in self._read_texts(path):
            written = text if isinstance(text, str) else chat.apply_template(text)
            with convert_tokenizer_errors(folder):
                first = _find_first_tokens(tokenizer)
                # A chat template writes the special tokens itself.
                encoding = tokenizer.encode(written, add_special_tokens=written is text)
                ids.append(np.array(encoding.ids, np.int64))
        tokens = np.concatenate(ids) if ids else np.zeros(0, np.int64)
        check_vocabulary(tokens, folder)
        # The first window begins with them anyway.
        begins = len(first) and np.array_equal(tokens[: len(first)], first)
        return tokens[len(first) :] if begins else tokens, first

    def _read_texts(self, path: Path) -> Iterator[str | list[dict[str, Any]]]:
        """Yield texts, and conversations as lists of messages."""
        if path.suffix == ".txt":
            yield _read_utf8(path)
            return
        for origin, entry in iterate_json_lines(path):
            content: Any = entry.get(self.key) if isinstance(entry, dict) else None
            if not isinstance(content, str) and not _is_conversation(content):
                raise DataError(
                    f"{origin}, must have under {self.key!r} a text, or messages with 'role' and "
                    f"'content', got {preview_value(entry)}"
                )
            yield content

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
        window = self._windows[index]
        labels = window.copy()
        labels[: self._first] = IGNORED_LABEL
        if index and self.stride is not None:
            labels[: len(window) - self.stride] = IGNORED_LABEL
        return {"input_ids": window}, labels


def _find_first_tokens(tokenizer: Any) -> np.ndarray:
    """Return the tokens that a tokenizer adds before every text."""
    encoding = tokenizer.encode("a")
    added: list[int] = encoding.special_tokens_mask
    # Without a token of the text, tokens before and behind look alike.
    count = added.index(0) if 0 in added else 0
    return np.array(encoding.ids[:count], np.int64)


def _is_conversation(value: object) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(m, dict) and {"role", "content"} <= set(m) for m in value)
    )


@dataclass(frozen=True)
class _ChatTemplate:
    """The chat template of a tokenizer's folder, or of the folder of its file; read once."""

    tokenizer: Path

    @cached_property
    def _loaded_tokenizer(self) -> Any:
        transformers = import_package("transformers", "a chat template", "text")
        return transformers.AutoTokenizer.from_pretrained(
            str(self._tokenizer_folder), local_files_only=True
        )

    @property
    def _tokenizer_folder(self) -> Path:
        return self.tokenizer if self.tokenizer.is_dir() else self.tokenizer.parent

    def apply_template(self, messages: list[dict[str, Any]]) -> str:
        """Return a conversation as the template writes it.

        Raises:
            DataError: there is no template, or it rejects the conversation.
            MissingFrameworkError: the package transformers is not installed.
        """
        jinja = import_package("jinja2", "a chat template", "text")
        try:
            return str(self._loaded_tokenizer.apply_chat_template(messages, tokenize=False))
        except (OSError, ValueError, jinja.TemplateError) as error:
            raise DataError(
                f"a conversation needs the chat template of {str(self._tokenizer_folder)!r}, "
                f"which fails: {one_line(error)}; save the tokenizer with its template, or use "
                "texts"
            ) from error


def iterate_json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield a description of the place and the value of every line that is not blank.

    Raises:
        DataError: the file is not UTF-8 text, or a line is not JSON.
    """
    for number, line in enumerate(_read_utf8(path).splitlines(), start=1):
        if not line.strip():
            continue
        origin = f"{path.name}, line {number}"
        try:
            yield origin, load_json(line)
        except JsonError as error:
            raise DataError(f"{origin}, {error}") from error


def _read_utf8(path: Path) -> str:
    check_fits_memory(path)
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{str(path)!r} must be UTF-8 text: {error}") from error


def read_tokenizer(path: Path) -> Any:
    """Return the tokenizer of a folder or file, without running code from the folder.

    Raises:
        DataError: there is no tokenizer, or the file is damaged.
        MissingFrameworkError: the package tokenizers is not installed.
    """
    tokenizers = import_package("tokenizers", "a dataset of texts", "text")
    file = path / _TOKENIZER if path.is_dir() else path
    if not file.is_file():
        raise DataError(
            f"the folder {str(path)!r} must contain {_TOKENIZER}; save the tokenizer with "
            f"save_pretrained, or give token ids in an .npy file"
        )
    with convert_tokenizer_errors(file):
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    # Those of an earlier call, which save_pretrained stores.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


@contextmanager
def convert_tokenizer_errors(path: Path) -> Iterator[None]:
    """Raise one error for any failure of the tokenizer from a file or folder in this context.

    Raises:
        DataError: the package tokenizers fails to read the file, or to encode with its contents.
    """
    try:
        yield
    except BaseException as error:
        # The package raises plain Exceptions, and its Rust code panics on contents that contradict
        # each other; a panic is no Exception.
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise DataError(
                f"the tokenizer {str(path)!r} is damaged: {one_line(error)}; save the tokenizer "
                f"again"
            ) from error
        raise


def read_context_length(folder: Path) -> int | None:
    """Return the largest number of tokens that a model folder's configuration allows, if any.

    Raises:
        DataError: the configuration cannot be read.
    """
    return _read_configured_size(folder, _CONTEXT)


def _read_configured_size(folder: Path, keys: tuple[str, ...]) -> int | None:
    """Return the first size above 1 under these keys of a folder's configuration, if any."""
    if not (folder / _CONFIG).is_file():
        return None
    config = read_json(folder / _CONFIG, anything, DataError)
    values: dict[str, Any] = config if isinstance(config, dict) else {}
    sizes = (values[key] for key in keys if is_integer(values.get(key)))
    return next((int(size) for size in sizes if size > 1), None)


def check_vocabulary(tokens: np.ndarray, folder: Path) -> None:
    """Refuse tokens that the model beside the tokenizer does not have.

    Raises:
        DataError: a token is beyond the vocabulary.
    """
    size = _read_configured_size(folder, _VOCABULARY)
    if size is not None and tokens.max(initial=0) >= size:
        raise DataError(
            f"the tokenizer of {str(folder)!r} must fit the model, which has {size} tokens, got "
            f"token {int(tokens.max())}; use the tokenizer that the model was trained with"
        )


def _check_token_ids(stored: object, path: Path) -> np.ndarray:
    ids = np.asarray(stored)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise DataError(
            f"{str(path)!r} must contain token ids, whole numbers in one axis, got {ids.dtype} "
            f"{list(ids.shape)}"
        )
    return ids.astype(np.int64)
