"""The declaration of a task: columns of its data, inputs of its model, metric and answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from neural_mp.errors import DataError
from neural_mp.metrics.predictions import map_named_outputs
from neural_mp.tasks.folders import ModelFolder
from neural_mp.tasks.rows import Column, Row, read_rows
from neural_mp.util.pytree import convert_to_numpy

if TYPE_CHECKING:
    from neural_mp.api.mixed_precision import MixedPrecision
    from neural_mp.api.optimized_model import OptimizedModel

#: Keys of the labels of a batch.
CONTEXT, TRUTH = "context", "truth"


@dataclass(frozen=True)
class Outputs:
    """The outputs of a model by name."""

    by_name: Mapping[str, np.ndarray]

    @classmethod
    def from_predictions(cls, predictions: object) -> Outputs:
        """Return outputs of any framework as arrays."""
        named = map_named_outputs(predictions) or {"logits": predictions}
        arrays = {name: value for name, value in named.items() if hasattr(value, "shape")}
        return cls({name: convert_to_numpy(value) for name, value in arrays.items()})

    def __getitem__(self, names: str) -> np.ndarray:
        """Return the output of a name, or of the first of several names separated by `|`.

        Raises:
            DataError: the model has no such output.
        """
        for name in names.split("|"):
            if name in self.by_name:
                values = self.by_name[name]
                return values.astype(np.float32) if values.dtype.kind == "f" else values
        raise DataError(
            f"the model must have the output {' or '.join(names.split('|'))}, got "
            f"{', '.join(self.by_name) or 'none'}"
        )


@dataclass(frozen=True)
class Encoded:
    """The inputs of a batch, and what the answers of its samples need besides the outputs."""

    inputs: dict[str, np.ndarray]
    contexts: list[Any]


@dataclass(frozen=True)
class TaskData:
    """The data files of a run.

    Attributes:
        evaluation: the data on which the accuracy is measured.
        calibration: the data for calibration; None for `evaluation`.
        columns: column of the task → name in the data, where it is none of the usual ones.
        batch_size: rows per batch.
    """

    evaluation: str | Path
    calibration: str | Path | None
    columns: Mapping[str, str] | None
    batch_size: int


@dataclass(frozen=True)
class Task(ABC):
    """A task: columns of its data, a preprocessing, a metric and answers.

    Attributes:
        name: name of the task, as on the hub.
        auto_class: auto class of `transformers`, `AutoModelForSequenceClassification`.
        processor: auto class of the preprocessing, `AutoTokenizer`.
        inputs: the columns of the inputs; in a call, the first is the input.
        labels: the columns of the labels.
        media: the column of files of images or sound; None for texts.
        variants: the task for models of other auto classes.
        default_batch_size: rows per batch; 1 where padding would change the outputs.
    """

    name: str
    auto_class: str
    processor: str
    inputs: tuple[Column, ...]
    labels: tuple[Column, ...] = ()
    media: str | None = field(default=None, kw_only=True)
    variants: tuple[Task, ...] = field(default=(), kw_only=True)
    default_batch_size: int = field(default=32, kw_only=True)

    @abstractmethod
    def configure(self, converter: MixedPrecision, folder: ModelFolder, data: TaskData) -> None:
        """Set data and metric of a run.

        Raises:
            DataError: the data are damaged or do not fit the task.
        """

    @abstractmethod
    def answer_rows(
        self, model: OptimizedModel, folder: ModelFolder, rows: Sequence[Row], **options: Any
    ) -> Any:
        """Return an answer for each row, by a model that is called with arrays."""

    def read_rows(self, data: str | Path, columns: Mapping[str, str] | None) -> list[Row]:
        """Return the rows of a data file.

        Raises:
            DataError: the data are damaged or lack a column.
        """
        return read_rows(data, self.columns, self.media, columns)

    @property
    def columns(self) -> tuple[Column, ...]:
        """All columns."""
        return (*self.inputs, *self.labels)

    def make_row(self, item: object) -> Row:
        """Return the row of an input of a call.

        `item` is the value of the first column; a tuple of values of the first columns; or a dict
        of values by column.

        Raises:
            DataError: a dict names no column of the task.
        """
        names = [column.name for column in self.columns]
        if isinstance(item, Mapping):
            unknown = [str(name) for name in item if name not in names]
            if unknown:
                raise DataError(
                    f"an input of {self.name} must have the keys {', '.join(names)}, got "
                    f"{', '.join(unknown)}"
                )
            return Row(dict(item))
        values = item if isinstance(item, tuple) else (item,)
        return Row(dict(zip(names, values, strict=False)))


@dataclass(frozen=True, kw_only=True)
class GraphTask(Task):
    """A task of a model that is one graph.

    Attributes:
        encode: folder and rows → inputs of a batch.
        read_truth: folder and row → label.
        decode: folder, outputs and contexts → predictions, in the form of the metric.
        answer: folder, predictions and contexts → an answer for each input of a call.
        choose_metric: folder → the metric, a name or a name with options.
        join_truth: labels of the rows of a batch → labels in the form of the metric.
    """

    encode: Callable[[ModelFolder, Sequence[Row]], Encoded]
    read_truth: Callable[[ModelFolder, Row], Any]
    decode: Callable[[ModelFolder, Outputs, Sequence[Any]], Any]
    answer: Callable[[ModelFolder, Any, Sequence[Any]], Any]
    choose_metric: Callable[[ModelFolder], Any]
    join_truth: Callable[[list[Any]], Any] = field(default=list)

    def configure(self, converter: MixedPrecision, folder: ModelFolder, data: TaskData) -> None:
        """Set data and metric of a run.

        Raises:
            DataError: the data are damaged or do not fit the task.
        """
        converter.eval_dataloader = self._read_batches(folder, data.evaluation, data)
        if data.calibration is not None:
            converter.calib_dataloader = self._read_batches(folder, data.calibration, data)
        converter.metric = self.choose_metric(folder)
        converter.postprocess = Decoder(self, folder)

    def _read_batches(self, folder: ModelFolder, path: str | Path, data: TaskData) -> TaskBatches:
        """Return the batches of a data file, checked before the model is loaded."""
        rows = self.read_rows(path, data.columns)
        for row in rows:
            self.read_truth(folder, row)
            for column in self.inputs:
                if column.name == self.media:
                    row.path(column.name)
                elif column.required:
                    row[column.name]
        batches = TaskBatches(self, folder, tuple(rows), data.batch_size)
        batches[0]  # raises what is wrong with the preprocessing
        return batches

    def answer_rows(
        self, model: OptimizedModel, folder: ModelFolder, rows: Sequence[Row], **options: Any
    ) -> Any:
        """Return an answer for each row."""
        if options:
            raise DataError(f"{self.name} must be called without options, got {', '.join(options)}")
        encoded = self.encode(folder, rows)
        outputs = Outputs.from_predictions(model(encoded.inputs))
        decoded = self.decode(folder, outputs, encoded.contexts)
        return self.answer(folder, decoded, encoded.contexts)


@dataclass(frozen=True)
class TaskBatches(Sequence[tuple[dict[str, np.ndarray], dict[str, Any]]]):
    """The rows of a data file as batches, encoded each time, as images need much memory."""

    task: GraphTask
    folder: ModelFolder
    rows: tuple[Row, ...] = field(repr=False)
    batch_size: int

    def __len__(self) -> int:
        return -(-len(self.rows) // self.batch_size)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        start = range(len(self))[index] * self.batch_size
        rows = self.rows[start : start + self.batch_size]
        encoded = self.task.encode(self.folder, rows)
        truth = [self.task.read_truth(self.folder, row) for row in rows]
        return encoded.inputs, {CONTEXT: encoded.contexts, TRUTH: truth}


@dataclass(frozen=True)
class Decoder:
    """Conversion of outputs and labels of a batch to the form of the task's metric."""

    applies_to_reference: ClassVar[bool] = True
    task: GraphTask
    folder: ModelFolder

    def __call__(self, pair: tuple[Any, Any]) -> tuple[Any, Any]:
        """Return predictions and labels."""
        predictions, labels = pair
        outputs = Outputs.from_predictions(predictions)
        decoded = self.task.decode(self.folder, outputs, labels[CONTEXT])
        return decoded, self.task.join_truth(labels[TRUTH])
