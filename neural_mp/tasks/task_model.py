"""`TaskModel`, a result with the call of its task, and its folder, also as other tools read it."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

import neural_mp
from neural_mp.api import optimized_model
from neural_mp.api.optimized_model import OptimizedModel
from neural_mp.api.saved_model import name_target
from neural_mp.errors import ConversionError, ModelLoadError, NeuralMPError
from neural_mp.io.readers import read_json
from neural_mp.reporting.tables import before_and_after, verdict_line
from neural_mp.tasks.declaration import Task
from neural_mp.tasks.folders import ModelFolder, open_folder
from neural_mp.tasks.table import TASKS
from neural_mp.util.validators import (
    anything,
    file_path,
    list_of,
    mapping_of,
    one_of,
    optional,
    record,
    string,
    validate_option,
)

CARD = "README.md"
_TOKENIZER = "tokenizer_config.json"
#: Framework → file as optimum, transformers.js and sentence-transformers name it.
_FILES = {
    "onnxrt": "onnx/model_quantized.onnx",
    "pytorch": "onnx/model_quantized.onnx",
    "openvino": "openvino_model.xml",
}

_CARD = """\
---
pipeline_tag: {task}
tags: [neural-mp, quantized]
---

# {name}

{verdict}.

| | FP32 | result | change |
|---|---|---|---|
{rows}

{machine}INT8 is exact on {exact_on}.

Made by neural-mp {version}:

```
neural-mp tune {folder} --task {task} --data {data} --output OUT
```

In Python, `neural_mp.load("OUT")` returns a model that is called with inputs of the task.
"""


def make_model_card(result: OptimizedModel, task: str, folder: ModelFolder, data: str) -> str:
    """Return the model card: measured loss, speed and size, machine and command."""
    rows = ["| " + " | ".join(row) + " |" for row in before_and_after(result.report)]
    machine = ""
    if result.record is not None:
        start = result.record.setup
        packages = ", ".join(f"{name} {version}" for name, version in start.versions.items())
        cores = f"{start.machine.cores} cores"
        machine = f"Measured on {start.machine.name} ({cores}) with {packages}. "
    return _CARD.format(
        task=task,
        name=f"{folder.path.resolve().name}, tuned for {task}",
        verdict=verdict_line(result.report, result.met).rstrip("."),
        rows="\n".join(rows),
        machine=machine,
        exact_on=result.exact_on,
        version=neural_mp.__version__,
        folder=folder.path.resolve().name,
        data=data or "FILE",
    )


def copy_kept_files(folder: ModelFolder, target: Path) -> None:
    """Copy the files of configuration and preprocessing."""
    for name in folder.list_kept_files():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(folder.path / name, target / name)


def write_layout(result: OptimizedModel, folder: ModelFolder, card: str, path: str | Path) -> Path:
    """Write model, preprocessing and card into a new folder; return the file of the model.

    Raises:
        ConversionError: other tools have no file for the framework of the result.
        NeuralMPError: the folder is not empty, or cannot be written.
    """
    target = validate_option("the folder", file_path, path)
    if result.framework not in _FILES:
        raise ConversionError(
            f"a layout for other tools must be of one graph in {', '.join(_FILES)}, got a result "
            f"in {result.framework}; use save"
        )
    with name_target(target):
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise NeuralMPError(f"{str(target)!r} must be a new or empty folder; choose another")
        file = target / _FILES[result.framework]
        file.parent.mkdir(parents=True, exist_ok=True)
        copy_kept_files(folder, target)
        _name_tokenizer_for_others(target / _TOKENIZER)
        (target / CARD).write_text(card, encoding="utf-8")
    result.save(file)
    return file


def _name_tokenizer_for_others(file: Path) -> None:
    """Name the class of a tokenizer as `transformers` 4 does, which later versions read, too."""
    if not file.is_file():
        return
    settings = read_json(file, mapping_of(anything), ModelLoadError)
    if settings.get("tokenizer_class") == "TokenizersBackend":
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
        file.write_text(json.dumps(settings, indent=2, ensure_ascii=False), encoding="utf-8")


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
