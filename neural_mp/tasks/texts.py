"""Encoding of texts, and decoding of the outputs of text models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from neural_mp.errors import ConfigurationError, DataError, ModelLoadError
from neural_mp.metrics.predictions import log_softmax
from neural_mp.metrics.texts import find_spans
from neural_mp.tasks.declaration import Encoded, Outputs
from neural_mp.tasks.folders import ModelFolder
from neural_mp.tasks.rows import Row
from neural_mp.util.validators import is_integer, preview_value

#: Longest answer to a question, in tokens, as in the pipelines of `transformers`.
_MAX_ANSWER_TOKENS = 30
_MULTI_LABEL = "multi_label_classification"


def tokenize(folder: ModelFolder, texts: Sequence[Any], **options: Any) -> Any:
    """Return the encoding of texts, or of pairs of texts, padded to the longest."""
    tokenizer = folder.processor
    if tokenizer.pad_token is None:
        raise ModelLoadError(
            f"the tokenizer of {str(folder.path)!r} must have a padding token, got none; set "
            f"tokenizer.pad_token and save the tokenizer again"
        )
    settings = {"truncation": True, "max_length": folder.max_tokens, "padding": True} | options
    encoded = tokenizer(texts, return_tensors="np", **settings)
    size = folder.config.get("vocab_size")
    if is_integer(size) and encoded["input_ids"].max(initial=0) >= size:
        raise ModelLoadError(
            f"the tokenizer of {str(folder.path)!r} must fit the model, which has {size} tokens, "
            f"got token {int(encoded['input_ids'].max())}; use the tokenizer of its training"
        )
    return encoded


def encode_texts(folder: ModelFolder, rows: Sequence[Row]) -> Encoded:
    """Return the inputs of texts, or of pairs of texts, for a classifier."""
    names = [name for name in ("text", "query", "text_pair", "passage") if name in rows[0].values]
    columns = [[row.text(name) for row in rows] for name in names]
    encoded = tokenize(folder, columns[0], **({"text_pair": columns[1]} if columns[1:] else {}))
    return Encoded(folder.select_inputs(encoded), [None] * len(rows))


def read_class(folder: ModelFolder, row: Row) -> float | int:
    """Return the label of a classifier: the index of a class, or a number of a regression.

    Raises:
        DataError: the value is no class of the model.
    """
    if is_regression(folder):
        return row.number("label")
    value, names = row["label"], folder.labels
    if isinstance(value, str) and value in names:
        return names.index(value)
    index = int(value) if isinstance(value, str) and value.isdecimal() else value
    if not is_integer(index) or not 0 <= index < len(names):
        shown = ", ".join(map(preview_value, names[:10]))
        raise DataError(
            f"{row.origin}: 'label' must be a class of the model, {shown}, or an index from 0 to "
            f"{len(names) - 1}, got {preview_value(value)}"
        )
    return int(index)


def is_regression(folder: ModelFolder) -> bool:
    """Whether a classifier returns one number."""
    return len(folder.labels) == 1 or folder.config.get("problem_type") == "regression"


def choose_class_metric(folder: ModelFolder) -> Any:
    """Return the accuracy, or for a regression the rank correlation.

    Raises:
        ConfigurationError: a sample may have several classes.
    """
    if folder.config.get("problem_type") == _MULTI_LABEL:
        raise ConfigurationError(
            f"the model of {str(folder.path)!r} must have one class per sample, got the "
            f"problem_type {_MULTI_LABEL!r} of its configuration"
        )
    return "spearman" if is_regression(folder) else "accuracy"


def decode_classes(folder: ModelFolder, outputs: Outputs, contexts: Sequence[Any]) -> np.ndarray:
    """Return the scores `[N, C]` of the classes, or the numbers `[N]` of a regression."""
    scores = outputs["logits"]
    return scores[:, 0] if is_regression(folder) else scores


def answer_classes(
    folder: ModelFolder, decoded: np.ndarray, contexts: Sequence[Any]
) -> list[dict[str, Any]]:
    """Return the most likely class of each sample with its probability, or its number."""
    if is_regression(folder):
        return [{"label": folder.labels[0], "score": float(score)} for score in decoded]
    chances = np.exp(log_softmax(decoded.astype(np.float64)))
    best = chances.argmax(axis=1)
    rows = zip(chances, best, strict=True)
    return [{"label": folder.labels[index], "score": float(row[index])} for row, index in rows]


def read_relevance(folder: ModelFolder, row: Row) -> tuple[str, float]:
    """Return the query and the relevance of a passage."""
    return row.text("query"), row.number("label")


def join_relevance(truths: list[tuple[str, float]]) -> dict[str, np.ndarray]:
    """Return the labels of a batch in the form of metrics of rankings."""
    queries, relevance = zip(*truths, strict=True)
    return {"query": np.array(queries), "relevance": np.array(relevance)}


def decode_relevance(folder: ModelFolder, outputs: Outputs, contexts: Sequence[Any]) -> np.ndarray:
    """Return the score `[N]` of each pair: the only one, or that of the last class over the first.

    Raises:
        DataError: the model has more than two classes.
    """
    scores = outputs["logits"]
    if scores.ndim != 2 or scores.shape[1] > 2:
        raise DataError(
            f"a model of text-ranking must return one or two scores for a pair, got {scores.shape}"
        )
    return scores[:, -1] - (scores[:, 0] if scores.shape[1] == 2 else 0)


def answer_numbers(
    folder: ModelFolder, decoded: np.ndarray, contexts: Sequence[Any]
) -> list[float]:
    """Return the number of each sample."""
    return [float(value) for value in decoded]


def encode_words(folder: ModelFolder, rows: Sequence[Row]) -> Encoded:
    """Return the inputs of words; a context holds the words and the position of their first token.

    A text, as in a call, is split at spaces.
    """
    words = [_split_into_words(row) for row in rows]
    encoded = tokenize(folder, words, is_split_into_words=True)
    contexts = []
    for index, row in enumerate(words):
        ids = encoded.word_ids(index)
        contexts.append((row, [ids.index(n) if n in ids else -1 for n in range(len(row))]))
    return Encoded(folder.select_inputs(encoded), contexts)


def _split_into_words(row: Row) -> list[str]:
    value = row["tokens"]
    words = value.split() if isinstance(value, str) else row.items("tokens")
    if not words or not all(isinstance(word, str) and word for word in words):
        raise row.fault("tokens", "a list of words")
    return [str(word) for word in words]


def read_tags(folder: ModelFolder, row: Row) -> list[str]:
    """Return the tag of each word.

    Raises:
        DataError: a tag is none of the model, or their number is not that of the words.
    """
    names, tags = folder.labels, row.items("tags")
    if len(tags) != len(_split_into_words(row)):
        raise row.fault("tags", f"a tag for each of {len(_split_into_words(row))} tokens")
    for tag in tags:
        if tag not in names and not (is_integer(tag) and 0 <= tag < len(names)):
            shown = ", ".join(map(preview_value, names[:10]))
            raise DataError(
                f"{row.origin}: 'tags' must be classes of the model, {shown}, or their indices, "
                f"got {preview_value(tag)}"
            )
    return [tag if isinstance(tag, str) else names[tag] for tag in tags]


def decode_tags(folder: ModelFolder, outputs: Outputs, contexts: Sequence[Any]) -> list[list[str]]:
    """Return the tag of each word: that of its first token; `O` beyond the longest text."""
    best, names = outputs["logits"].argmax(axis=-1), folder.labels
    return [
        ["O" if position < 0 else names[row[position]] for position in positions]
        for row, (_, positions) in zip(best, contexts, strict=True)
    ]


def answer_spans(
    folder: ModelFolder, decoded: list[list[str]], contexts: Sequence[Any]
) -> list[list[dict[str, Any]]]:
    """Return the spans of each text: kind, words, and positions of the words."""
    return [
        [
            {"entity": kind, "text": " ".join(words[start:end]), "start": start, "end": end}
            for kind, start, end in find_spans(tags)
        ]
        for tags, (words, _) in zip(decoded, contexts, strict=True)
    ]


def encode_sentences(folder: ModelFolder, rows: Sequence[Row]) -> Encoded:
    """Return the inputs of sentences; of pairs, two rows each. A context is a row of the mask."""
    names = ("sentence1", "sentence2") if "sentence2" in rows[0] else tuple(rows[0].values)[:1]
    encoded = tokenize(folder, [row.text(name) for row in rows for name in names])
    return Encoded(folder.select_inputs(encoded), list(encoded["attention_mask"]))


def encode_source(folder: ModelFolder, rows: Sequence[Row]) -> Encoded:
    """Return the tokens and the mask of texts for an encoder."""
    encoded = tokenize(folder, [row.text("text") for row in rows])
    names = ("input_ids", "attention_mask")
    return Encoded({name: encoded[name] for name in names}, [None] * len(rows))


def read_transcript(folder: ModelFolder, row: Row) -> str:
    """Return the text of a sound."""
    return row.text("text")


def read_similarity(folder: ModelFolder, row: Row) -> float:
    """Return the score of a pair."""
    return row.number("score")


def read_nothing(folder: ModelFolder, row: Row) -> None:
    """Return None, for metrics that compare with the FP32 model."""


def join_numbers(truths: list[float]) -> np.ndarray:
    """Return the labels of a batch as an array."""
    return np.array(truths)


def decode_embeddings(folder: ModelFolder, outputs: Outputs, contexts: Sequence[Any]) -> np.ndarray:
    """Return embeddings `[N, D]`, pooled and scaled as sentence-transformers does."""
    if "sentence_embedding" in outputs.by_name:
        return outputs["sentence_embedding"]
    states, mask = outputs["last_hidden_state|token_embeddings"], np.stack(contexts)[..., None]
    pooling = folder.pooling
    if pooling.mode == "cls":
        # The first token that is no padding, which may be at the left.
        pooled = states[np.arange(len(states)), mask[..., 0].argmax(axis=1)]
    elif pooling.mode == "max":
        pooled = np.where(mask > 0, states, -np.inf).max(axis=1)
    else:
        pooled = (states * mask).sum(axis=1) / np.maximum(mask.sum(axis=1), 1)
    if pooling.normalized:
        pooled = pooled / np.maximum(np.linalg.norm(pooled, axis=1, keepdims=True), 1e-12)
    return np.asarray(pooled, np.float32)


def answer_arrays(folder: ModelFolder, decoded: np.ndarray, contexts: Sequence[Any]) -> np.ndarray:
    """Return the array of all samples."""
    return decoded


def encode_questions(folder: ModelFolder, rows: Sequence[Row]) -> Encoded:
    """Return the inputs of questions; a long context is cut into windows that overlap.

    The context of a window holds its row, the text, and start and end of each token in the text,
    -1 outside of the text.
    """
    if not folder.processor.is_fast:
        raise ModelLoadError(
            f"the folder {str(folder.path)!r} must contain tokenizer.json, whose tokens have "
            f"positions in the text; save a fast tokenizer"
        )
    encoded = tokenize(
        folder,
        [row.text("question") for row in rows],
        text_pair=[row.text("context") for row in rows],
        truncation="only_second",
        stride=folder.max_tokens // 4,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
    )
    contexts = []
    for window, row in enumerate(encoded["overflow_to_sample_mapping"]):
        is_context = np.array([part == 1 for part in encoded.sequence_ids(window)])
        offsets = np.where(is_context[:, None], encoded["offset_mapping"][window], -1)
        contexts.append((int(row), rows[int(row)].text("context"), offsets))
    names = ("overflow_to_sample_mapping", "offset_mapping")
    features = {name: values for name, values in encoded.items() if name not in names}
    return Encoded(folder.select_inputs(features), contexts)


def read_answers(folder: ModelFolder, row: Row) -> list[str]:
    """Return the right answers: a text, a list of texts, or a dict with `text` as in SQuAD.

    Raises:
        DataError: there is no answer.
    """
    value = row["answers"]
    value = value.get("text") if isinstance(value, Mapping) else value
    answers = [value] if isinstance(value, str) else value
    if not answers or not all(isinstance(answer, str) for answer in answers):
        raise row.fault("answers", "a text, or a list of at least one text")
    return list(answers)


def decode_answers(folder: ModelFolder, outputs: Outputs, contexts: Sequence[Any]) -> list[str]:
    """Return the part of each context with the largest sum of scores of its start and end."""
    starts, ends = outputs["start_logits"], outputs["end_logits"]
    best: dict[int, tuple[float, str]] = {}
    for start, end, (row, text, offsets) in zip(starts, ends, contexts, strict=True):
        usable = offsets[:, 0] >= 0
        scores = start[:, None] + end[None, :]
        scores = np.where(usable[:, None] & usable[None, :], scores, -np.inf)
        # From the start to the longest answer.
        ordered = np.triu(np.ones_like(scores)) - np.triu(np.ones_like(scores), _MAX_ANSWER_TOKENS)
        scores = np.where((ordered > 0) & ~np.isnan(scores), scores, -np.inf)
        first, last = np.unravel_index(int(scores.argmax()), scores.shape)
        score, answer = float(scores[first, last]), text[offsets[first, 0] : offsets[last, 1]]
        if row not in best or score > best[row][0]:
            best[row] = score, answer if np.isfinite(score) else ""
    return [answer for _, (_, answer) in sorted(best.items())]


def answer_texts(folder: ModelFolder, decoded: list[str], contexts: Sequence[Any]) -> list[str]:
    """Return the text of each sample."""
    return list(decoded)
