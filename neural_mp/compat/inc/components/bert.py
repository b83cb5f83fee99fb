"""Datasets of pre-tokenized questions and answers: `bert` and `mzbert`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from neural_mp.common import stack
from neural_mp.compat.inc.components.records import Record, RecordDataset, tensorflow_for
from neural_mp.compat.inc.components.registries import Options, choice, dataset, option
from neural_mp.data.option_checks import existing_file, one_of
from neural_mp.errors import DataError
from neural_mp.io.readers import read_data_json

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
    one_of(f"{name}: task", task, TASKS)
    one_of(f"{name}: model_type", model_type, MODEL_TYPES)
    file = str(existing_file(f"{name}: root", root))
    path = existing_file(f"{name}: label_file", label_file)
    content = read_data_json(path)
    squad = content if isinstance(content, dict) else {}
    if squad.get("version") != "1.1" or not isinstance(squad.get("data"), list):
        raise DataError(
            f"{name}: label_file must be a file of SQuAD 1.1, got {path} of version "
            f"{squad.get('version')!r}; set e.g. dev-v1.1.json"
        )
    first = next(iter(RecordDataset(name, (file,), Record.parse)), None)
    if first is None or not all(len(first.integers(feature)) for feature in FEATURES):
        raise DataError(
            f"{name}: root: the first record of {file} must have the features "
            f"{', '.join(FEATURES)}; write the file with create_tf_record.py of INC's example"
        )
    return file, list(squad["data"])


@dataset("bert", "tensorflow", needs=tensorflow_for)
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
    return QuestionRecords(RecordDataset("bert", (file,), _with_id), articles, by_name=True)


def _with_id(serialized: bytes) -> dict[str, np.ndarray]:
    record = Record.parse(serialized)
    named = {"unique_ids": record.integer("unique_ids"), **_integer_features(record)}
    return {name: np.asarray(values, dtype=np.int32) for name, values in named.items()}


@dataset("mzbert", "tensorflow", ignored=("num_cores", "filter"), needs=tensorflow_for)
def model_zoo_bert(
    root: object, label_file: object, task: str = "squad", model_type: str = "bert"
) -> QuestionRecords:
    """Return the questions of `bert`, with the same options, for a model with three inputs.

    Inputs are int64 arrays `[L]`: `input_ids`, `input_mask` and `segment_ids`.
    """
    file, articles = _read_questions("mzbert", root, label_file, task, model_type)
    records = RecordDataset("mzbert", (file,), _without_id)
    return QuestionRecords(records, articles, by_name=False)


def _without_id(serialized: bytes) -> dict[str, np.ndarray]:
    return _integer_features(Record.parse(serialized))


def _integer_features(record: Record) -> dict[str, np.ndarray]:
    return {name: record.integers(name) for name in FEATURES}


def _python_dataset(option: str, value: Any) -> Any:
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

    dataset: Any = option(_python_dataset)
    task: str = option(choice(*TASKS))
    model_type: str = option(choice("distilbert", *MODEL_TYPES), "bert")

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
