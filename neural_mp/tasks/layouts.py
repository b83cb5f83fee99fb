"""Folders for other tools: the model card, and files as the readers of the hub name them."""

from __future__ import annotations

import shutil
from pathlib import Path

import neural_mp
from neural_mp.api.optimized_model import OptimizedModel
from neural_mp.api.saved_model import name_target
from neural_mp.errors import ConversionError, NeuralMPError
from neural_mp.reporting.tables import before_and_after, verdict_line
from neural_mp.tasks.folders import ModelFolder
from neural_mp.util.validators import file_path, validate_option

CARD = "README.md"
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
        (target / CARD).write_text(card, encoding="utf-8")
    result.save(file)
    return file
