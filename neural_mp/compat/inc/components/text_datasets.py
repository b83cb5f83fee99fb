"""Datasets of text as token ids: `GLUE`, and questions and answers, `bert` and `mzbert`."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from neural_mp.common import stack
from neural_mp.compat.inc.components.records import Record, RecordDataset, import_tensorflow_for
from neural_mp.compat.inc.components.registries import Options, check_choice, dataset, option
from neural_mp.data.option_checks import (
    check_existing_file,
    check_existing_folder,
    check_one_of,
    check_whole_number,
    import_package,
    true_or_false,
)
from neural_mp.data.text import convert_tokenizer_errors
from neural_mp.errors import ConfigurationError, DataError, did_you_mean, one_line
from neural_mp.io.readers import read_data_json

GLUE_MODEL_TYPES = ("distilbert", "bert", "mobilebert", "roberta")


@dataclass(frozen=True)
class GlueTask:
    """Format of a task's files.

    Source: https://gluebenchmark.com/tasks

    Attributes:
        texts: columns of the one or two sentences.
        label: column of the label.
        labels: labels in class order; empty for numeric labels.
        evaluation: the evaluation file; the training file is `train.tsv`.
        skips_short_rows: whether rows with missing cells, which some published files have, are
            skipped; otherwise an error.
        has_header: whether the first row names the columns; otherwise columns are indices from 0.
    """

    texts: tuple[str, ...]
    label: str
    labels: tuple[str, ...]
    evaluation: str = "dev.tsv"
    skips_short_rows: bool = False
    has_header: bool = True


_ENTAILED = ("entailment", "not_entailment")
_TWO = ("0", "1")
GLUE_TASKS = {
    "mrpc": GlueTask(("#1 String", "#2 String"), "Quality", _TWO),
    "qqp": GlueTask(("question1", "question2"), "is_duplicate", _TWO, skips_short_rows=True),
    "qnli": GlueTask(("question", "sentence"), "label", _ENTAILED),
    "rte": GlueTask(("sentence1", "sentence2"), "label", _ENTAILED),
    "sts-b": GlueTask(("sentence1", "sentence2"), "score", ()),
    "cola": GlueTask(("3",), "1", _TWO, has_header=False),
    "mnli": GlueTask(
        ("sentence1", "sentence2"),
        "gold_label",
        ("contradiction", "entailment", "neutral"),
        "dev_matched.tsv",
    ),
    "wnli": GlueTask(("sentence1", "sentence2"), "label", _TWO),
}
#: Class order of RoBERTa models for MNLI published with fairseq.
_ROBERTA_MNLI = ("contradiction", "neutral", "entailment")


@dataclass(frozen=True, eq=False)
class TokenizedSentences:
    """Sentences as token ids.

    Attributes:
        inputs: arrays int64 `[N, max_seq_length]`: token ids, the mask (1 for tokens, 0 for
            padding), and for the model type `bert` the segments.
        labels: int64 `[N]`, or float32 `[N]` for a task with numeric labels.
        lengths: number of tokens per sample, `[N]`.
        dynamic_length: whether batches are cut to their longest sample, not `max_seq_length`.
    """

    inputs: tuple[np.ndarray, ...]
    labels: np.ndarray
    lengths: np.ndarray
    dynamic_length: bool

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[tuple[np.ndarray, ...], Any]:
        return tuple(array[index] for array in self.inputs), self.labels[index]

    def collate_samples(self, samples: list[Any]) -> Any:
        """Return stacked samples, cut to the longest of them if the length is dynamic."""
        inputs, labels = stack(samples)
        if self.dynamic_length:
            longest = int(inputs[1].sum(axis=1).max())
            inputs = tuple(array[:, :longest] for array in inputs)
        return inputs, labels


@dataset("GLUE", "onnxrt")
def glue(
    data_dir: object,
    model_name_or_path: object,
    max_seq_length: int = 128,
    do_lower_case: bool = True,
    task: str = "mrpc",
    model_type: str = "bert",
    dynamic_length: bool = False,
    evaluate: bool = True,
) -> TokenizedSentences:
    """Return the sentences of a GLUE task with their labels.

    Args:
        data_dir: the folder of the task's `train.tsv` and `dev.tsv` (MNLI: `dev_matched.tsv`).
        model_name_or_path: a folder with a tokenizer's files, or a name in the cache of the
            `transformers` package. Nothing is downloaded.
        max_seq_length: longer samples are truncated, shorter samples padded with 0.
        do_lower_case: whether the tokenizer lowercases text.
        task: one of `GLUE_TASKS`.
        model_type: one of `GLUE_MODEL_TYPES`; `bert` has a third input, the segments.
        dynamic_length: whether to cut batches to their longest sample.
        evaluate: whether to read the evaluation samples, else the training samples.

    Returns:
        Samples of two or three arrays int64 `[max_seq_length]` (token ids, mask, segments), and
        the class (int64), or for `sts-b` a number (float32).
    """
    task = check_one_of("GLUE: task", str(task).lower(), tuple(GLUE_TASKS))
    model_type = check_one_of("GLUE: model_type", str(model_type).lower(), GLUE_MODEL_TYPES)
    length = check_whole_number("GLUE: max_seq_length", max_seq_length, minimum=1)
    is_dynamic = true_or_false("GLUE: dynamic_length", dynamic_length)
    form = GLUE_TASKS[task]
    is_evaluation = true_or_false("GLUE: evaluate", evaluate)
    folder = check_existing_folder("GLUE: data_dir", data_dir)
    tokenizer = _load_tokenizer(
        model_name_or_path, true_or_false("GLUE: do_lower_case", do_lower_case)
    )
    classes = _ROBERTA_MNLI if (task, model_type) == ("mnli", "roberta") else form.labels
    file = folder / (form.evaluation if is_evaluation else "train.tsv")
    texts, labels = read_task(file, form, classes)
    ids, mask, segments = _tokenize_texts(tokenizer, texts, length)
    inputs = (ids, mask, segments) if model_type == "bert" else (ids, mask)
    return TokenizedSentences(inputs, labels, mask.sum(axis=1), is_dynamic)


def _load_tokenizer(name: object, do_lower_case: bool) -> Any:
    if not isinstance(name, str | Path) or not str(name):
        raise ConfigurationError(f"GLUE: model_name_or_path must be a path, got {name!r}")
    transformers = import_package("transformers", "dataset 'GLUE'", "text")
    path = Path(name).expanduser()
    source = str(path) if path.is_dir() else str(name)
    try:
        with convert_tokenizer_errors(path):
            return transformers.AutoTokenizer.from_pretrained(
                source, do_lower_case=do_lower_case, local_files_only=True, trust_remote_code=False
            )
    except DataError as error:
        # For an uncached name, the cause reports network problems, which would mislead.
        why = f" ({one_line(error.__cause__ or error)})" if path.is_dir() else ""
        raise DataError(
            f"GLUE: model_name_or_path: no tokenizer can be read from {source!r}{why}; nothing is "
            f"downloaded, set a folder with its files, e.g. vocab.txt and config.json"
        ) from error


def read_task(
    file: Path, form: GlueTask, classes: tuple[str, ...]
) -> tuple[list[tuple[str, ...]], np.ndarray]:
    """Read the sentences of a task's file, one or two per sample, and the labels.

    Args:
        file: tab-separated, UTF-8, unquoted.
        form: the file format.
        classes: labels in class order; empty for numeric labels.
    """
    if not file.is_file():
        raise DataError(f"GLUE: {file} does not exist; set data_dir to the folder of the task")
    texts, labels = [], []
    try:
        with file.open(encoding="utf-8-sig", newline="") as lines:
            rows = csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
            columns = _find_columns(file, form, rows)
            for row in rows:
                if not row or (len(row) <= max(columns) and form.skips_short_rows):
                    continue
                if len(row) <= max(columns):
                    raise DataError(
                        f"{file}, line {rows.line_num}: at least {max(columns) + 1} cells are "
                        f"expected, got {row}"
                    )
                texts.append(tuple(row[column] for column in columns[:-1]))
                labels.append(
                    _parse_label(f"{file}, line {rows.line_num}", row[columns[-1]], classes)
                )
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{file} cannot be read as tab-separated text: {error}") from error
    if not texts:
        raise DataError(f"GLUE: {file} has no samples")
    return texts, np.array(labels, dtype=np.int64 if classes else np.float32)


def _find_columns(file: Path, form: GlueTask, rows: Iterator[list[str]]) -> list[int]:
    """Return the positions of the sentences and, last, of the label; consume a header."""
    columns = (*form.texts, form.label)
    if not form.has_header:
        return [int(column) for column in columns]
    header: list[str] = next(rows, [])
    for column in columns:
        if column not in header:
            raise DataError(f"{file} has no column {column!r}{did_you_mean(column, header)}")
    return [header.index(column) for column in columns]


def _parse_label(where: str, text: str, classes: tuple[str, ...]) -> int | float:
    if classes:
        if text not in classes:
            raise DataError(f"{where}: label must be one of {', '.join(classes)}, got {text!r}")
        return classes.index(text)
    try:
        return float(text)
    except ValueError as error:
        raise DataError(f"{where}: label must be a number, got {text!r}") from error


def _tokenize_texts(
    tokenizer: Any, texts: list[tuple[str, ...]], length: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return token ids, mask and segments, each int64 `[N, length]`, padded with 0."""
    ids, mask, segments = (np.zeros((len(texts), length), dtype=np.int64) for _ in range(3))
    for number, sentences in enumerate(texts):
        with convert_tokenizer_errors(Path(tokenizer.name_or_path)):
            encoding = tokenizer(
                *sentences, truncation=True, max_length=length, return_token_type_ids=True
            )
        count = len(encoding["input_ids"])
        ids[number, :count] = encoding["input_ids"]
        mask[number, :count] = 1
        segments[number, :count] = encoding["token_type_ids"]
    return ids, mask, segments


TASKS = ("classifier", "squad")
MODEL_TYPES = ("bert", "xlnet", "xlm")
FEATURES = ("input_ids", "input_mask", "segment_ids")


@dataclass(frozen=True, eq=False)
class QuestionRecords:
    """Records of token ids; the label of every sample is the whole list of articles.

    Attributes:
        records: the inputs of each sample, one array per feature.
        articles: the entry `data` of the label file.
        by_name: whether inputs are a dict by feature name, else a tuple.
    """

    records: RecordDataset
    articles: list[Any] = field(repr=False)
    by_name: bool

    def __iter__(self) -> Iterator[tuple[Any, list[Any]]]:
        for features in self.records:
            inputs = features if self.by_name else tuple(features[name] for name in FEATURES)
            yield inputs, self.articles

    def collate_samples(self, samples: list[Any]) -> tuple[Any, Any]:
        """Return the stacked inputs, and the common label."""
        return stack([inputs for inputs, _ in samples]), samples[0][1]


def _read_questions(
    name: str, root: object, label_file: object, task: object, model_type: object
) -> tuple[str, list[Any]]:
    """Return the path of the records, and the articles."""
    check_one_of(f"{name}: task", task, TASKS)
    check_one_of(f"{name}: model_type", model_type, MODEL_TYPES)
    file = str(check_existing_file(f"{name}: root", root))
    path = check_existing_file(f"{name}: label_file", label_file)
    content = read_data_json(path)
    squad = content if isinstance(content, dict) else {}
    if squad.get("version") != "1.1" or not isinstance(squad.get("data"), list):
        raise DataError(
            f"{name}: label_file must be a file of SQuAD 1.1, got {path} of version "
            f"{squad.get('version')!r}; set e.g. dev-v1.1.json"
        )
    first = next(iter(RecordDataset(name, (file,), Record.parse_example)), None)
    if first is None or not all(len(first.read_integers(feature)) for feature in FEATURES):
        raise DataError(
            f"{name}: root: the first record of {file} must have the features "
            f"{', '.join(FEATURES)}; write the file with create_tf_record.py of INC's example"
        )
    return file, list(squad["data"])


@dataset("bert", "tensorflow", needs=import_tensorflow_for)
def bert(
    root: object, label_file: object, task: str = "squad", model_type: str = "bert"
) -> QuestionRecords:
    """Return SQuAD 1.1 questions as token ids from a TFRecord file, for a model with four inputs.

    In INC, the model gets the path and reads the file; here, the model gets the content.

    Args:
        root: the TFRecord file.
        label_file: the questions with their answers, `dev-v1.1.json`.
        task: `squad` or `classifier`.
        model_type: one of `MODEL_TYPES`.

    Returns:
        Samples of int32 arrays by name: `unique_ids` `[]`, and `input_ids`, `input_mask` and
        `segment_ids`, `[L]` each. The label of all samples, and of a batch, is the list of
        articles in `label_file`.
    """
    file, articles = _read_questions("bert", root, label_file, task, model_type)
    records = RecordDataset("bert", (file,), partial(_decode_features, with_id=True))
    return QuestionRecords(records, articles, by_name=True)


@dataset("mzbert", "tensorflow", ignored=("num_cores", "filter"), needs=import_tensorflow_for)
def model_zoo_bert(
    root: object, label_file: object, task: str = "squad", model_type: str = "bert"
) -> QuestionRecords:
    """Return the questions of `bert`, with the same options, for a model with three inputs.

    Inputs are int64 arrays `[L]`: `input_ids`, `input_mask` and `segment_ids`.
    """
    file, articles = _read_questions("mzbert", root, label_file, task, model_type)
    records = RecordDataset("mzbert", (file,), partial(_decode_features, with_id=False))
    return QuestionRecords(records, articles, by_name=False)


def _decode_features(serialized: bytes, with_id: bool) -> dict[str, np.ndarray]:
    """Return the features of a record; with the id, as int32."""
    record = Record.parse_example(serialized)
    if not with_id:
        return {name: record.read_integers(name) for name in FEATURES}
    named = {"unique_ids": record.read_integer("unique_ids")}
    named |= {name: record.read_integers(name) for name in FEATURES}
    return {name: np.asarray(values, dtype=np.int32) for name, values in named.items()}


def _check_python_dataset(option: str, value: Any) -> Any:
    if isinstance(value, str | Path) or not hasattr(value, "__getitem__"):
        raise DataError(
            f"{option} must be a dataset made in Python, got {value!r}; pass e.g. a TensorDataset"
        )
    return value


@dataset("bert", "pytorch")
@dataclass(frozen=True, eq=False)
class NamedTensors(Options):
    """Tensors of a dataset created in Python, by the names of the model's arguments.

    Not usable in tuning files, which cannot contain a dataset.

    Attributes:
        dataset: samples are tuples: token ids, mask, segments, then the labels (`classifier`) or
            the index of the question (`squad`), then for xlnet and xlm `cls_index` and `p_mask`.
        task: `classifier` or `squad`.
        model_type: `bert`, `distilbert`, `xlnet` or `xlm`; only bert and xlnet get the segments.
    """

    dataset: Any = option(_check_python_dataset)
    task: str = option(check_choice(*TASKS))
    model_type: str = option(check_choice("distilbert", *MODEL_TYPES), "bert")

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[dict[str, Any], Any]:
        sample = self.dataset[index]
        inputs = {"input_ids": sample[0], "attention_mask": sample[1]}
        if self.task == "classifier":
            inputs["labels"] = sample[3]
        if self.model_type in ("bert", "xlnet"):
            inputs["token_type_ids"] = sample[2]
        if self.task == "squad" and self.model_type in ("xlnet", "xlm"):
            inputs |= {"cls_index": sample[4], "p_mask": sample[5]}
        return inputs, sample[3]
