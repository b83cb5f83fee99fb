"""`TaskModel`, a result with the call of its task, and its folder."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from neural_mp.api import optimized_model
from neural_mp.api.optimized_model import OptimizedModel
from neural_mp.errors import ModelLoadError
from neural_mp.io.readers import read_json
from neural_mp.tasks.declaration import Task
from neural_mp.tasks.folders import ModelFolder, open_folder
from neural_mp.tasks.layouts import CARD, copy_kept_files, make_model_card, write_layout
from neural_mp.tasks.table import TASKS
from neural_mp.util.validators import list_of, one_of, optional, record, string

TASK_FILE = "task.json"
_TASK = record(
    {
        "task": one_of(TASKS, ", ".join(TASKS)),
        "class": string,
        "inputs": optional(list_of(string)),
    }
)


class TaskModel(OptimizedModel):
    """A result for a task, called with inputs of the task.

    Attributes:
        result: the result that is called with arrays.
        task: the task.
        folder: configuration and preprocessing of the model.
        data: name of the evaluation data, for the model card.
    """

    def __init__(
        self, result: OptimizedModel, task: Task, folder: ModelFolder, data: str = ""
    ) -> None:
        super().__init__(
            result.loaded,
            result.plan,
            result.report,
            result.met,
            result.trials,
            result.observations,
            result.planned,
            result.label_key,
        )
        self.result = result
        self.task = task
        self.folder = folder
        self.data = data

    def __call__(  # type: ignore[override]  # inputs of the task, in place of arrays
        self, inputs: object, *, batch_size: int | None = None, **options: Any
    ) -> Any:
        """Answer one input or a list of inputs, in the order given.

        Args:
            inputs: a text, the path or the pixels `[H, W, 3]` of an image, or a `.wav` file or its
                samples `[T]`; of tasks with several inputs, a tuple or a dict by column,
                `(question, context)`; or a list of these.
            batch_size: inputs per run of the model; by default 32, of sound 1.
            **options: of tasks that write texts, options of `generate`.

        Returns:
            Of one input the answer, of a list a list, or for embeddings an array `[N, D]`:
            class and score; spans; embeddings; a score; a text; objects; or classes of pixels.

        Raises:
            DataError: an input is none of the task.
        """
        items = inputs if isinstance(inputs, list) else [inputs]
        rows = [self.task.make_row(item) for item in items]
        size = batch_size or self.task.default_batch_size
        parts = [
            self.task.answer_rows(self.result, self.folder, rows[start : start + size], **options)
            for start in range(0, len(rows), size)
        ]
        if not isinstance(inputs, list):
            return parts[0][0]
        if parts and isinstance(parts[0], np.ndarray):
            return np.concatenate(parts)
        return [answer for part in parts for answer in part]

    def __copy__(self) -> TaskModel:
        """Return a result of the same model: calls do not change the model."""
        return TaskModel(copy.copy(self.result), self.task, self.folder, self.data)

    def model_card(self) -> str:
        """Return the model card, Markdown: measured loss, speed and size, machine and command."""
        stored = self.folder.path / CARD
        if (self.folder.path / TASK_FILE).is_file() and stored.is_file():
            return stored.read_text(encoding="utf-8")  # that of the run
        return make_model_card(self.result, self.task.name, self.folder, self.data)

    def save_layout(self, path: str | Path) -> Path:
        """Write a new folder as other tools read it; return the file of the model.

        The file is `onnx/model_quantized.onnx` (transformers.js, optimum, sentence-transformers),
        or `openvino_model.xml` for a result in OpenVINO, beside configuration, tokenizer and card.

        Raises:
            ConversionError: the result is of several graphs, or of another framework.
            NeuralMPError: the folder is not empty, or cannot be written.
        """
        return write_layout(self.result, self.folder, self.model_card(), path)

    def __repr__(self) -> str:
        return f"TaskModel({self.task.name}, {super().__repr__()})"

    def _write_folder(self, folder: Path) -> None:
        copy_kept_files(self.folder, folder)
        (folder / CARD).write_text(self.model_card(), encoding="utf-8")
        names = self.folder.inputs
        document = {
            "task": self.task.name,
            "class": self.task.auto_class,
            "inputs": None if names is None else sorted(names),
        }
        (folder / TASK_FILE).write_text(json.dumps(document), encoding="utf-8")
        super()._write_folder(folder)


def load(path: str | Path, trust: Iterable[str] = ()) -> OptimizedModel:
    """Load a model written by `save` or `save_pretrained`; code in files is never executed.

    The result of `tune_folder` is a `TaskModel`, called with inputs of its task. Checkpoints of
    other tools in the formats of `save_pretrained` are loaded, too.

    Args:
        path: the folder of the model.
        trust: ops that the model may call although files may not, e.g. `aten.segment_reduce`; a
            warning of the conversion lists them.

    Raises:
        ModelLoadError: the folder is missing, incomplete, damaged or of a later version; or the
            results would be wrong on this machine and cannot be corrected.
    """
    result = optimized_model.load(path, trust)
    if not (Path(path) / TASK_FILE).is_file():
        return result
    document = read_json(Path(path) / TASK_FILE, _TASK, ModelLoadError)
    declared = TASKS[document["task"]]
    variants = (v for v in declared.variants if v.auto_class == document["class"])
    task = next(variants, declared)
    names = document["inputs"]
    folder = open_folder(path, task.processor, None if names is None else frozenset(names))
    return TaskModel(result, task, folder)
