"""Tuning of model folders for a task: `tune_folder`, and its parts for the command line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from neural_mp.api.mixed_precision import MixedPrecision
from neural_mp.api.optimized_model import OptimizedModel
from neural_mp.api.saved_model import check_output
from neural_mp.core.enums import AUTO_RUNTIME
from neural_mp.errors import ConfigurationError
from neural_mp.tasks.declaration import TaskBatches, TaskData
from neural_mp.tasks.folders import (
    REMOTE_CODE,
    check_architecture,
    choose_source,
    open_folder,
    read_config,
)
from neural_mp.tasks.table import choose_variant, find_task
from neural_mp.tasks.task_model import TaskModel
from neural_mp.util.user_calls import ReraiseUserErrors


@dataclass(frozen=True)
class TaskRun:
    """A run prepared for a task.

    Attributes:
        converter: the run, with model, data and metric.
        finish: result of the run → the model with the task's call.
    """

    converter: MixedPrecision
    finish: Callable[[OptimizedModel], TaskModel]


@ReraiseUserErrors()
def tune_folder(
    folder: str | Path,
    task: str,
    data: str | Path,
    output: str | Path | None = None,
    *,
    calibration: str | Path | None = None,
    columns: Mapping[str, str] | None = None,
    batch_size: int | None = None,
    trust: Iterable[str] = (),
    **options: object,
) -> TaskModel:
    """Tune the model in a folder of Hugging Face for a task.

    Args:
        folder: folder written by `save_pretrained`, with the tokenizer, image processor or feature
            extractor; nothing is downloaded.
        task: name of the task, e.g. `text-classification`.
        data: evaluation data: a `.jsonl`, `.csv` or `.parquet` file, or a folder of images or
            sound.
        output: folder to save the result to; None to save nothing.
        calibration: data for calibration, in the form of `data`; by default `data`.
        columns: column of the task → its name in the data, where it is none of the usual ones.
        batch_size: rows per batch; by default 32; 1 of sound, or 8 windows of a text.
        trust: names that may run code; `remote_code` allows that of the folder.
        **options: options of `MixedPrecision`; `runtime` is `auto` and `metric` that of the task
            unless set.

    Returns:
        The result, called with inputs of the task: `result(["a text"])`.

    Raises:
        ConfigurationError: the task or an option is unknown.
        ModelLoadError: the folder is no model of the task.
        DataError: the data are damaged or do not fit the task.
    """
    if output is not None:
        check_output(Path(output))  # fail before the search, not after
    run = prepare_run(
        folder,
        task,
        data,
        calibration=calibration,
        columns=columns,
        batch_size=batch_size,
        trust=trust,
    )
    for name, value in options.items():
        setattr(run.converter, name, value)
    run.converter.set_default("runtime", AUTO_RUNTIME)
    result = run.finish(run.converter())
    if output is not None:
        result.save(output)
    return result


def prepare_run(
    folder: str | Path,
    task: str,
    data: str | Path,
    *,
    calibration: str | Path | None = None,
    columns: Mapping[str, str] | None = None,
    batch_size: int | None = None,
    trust: Iterable[str] = (),
) -> TaskRun:
    """Return the run for a folder and a task; arguments and errors are those of `tune_folder`."""
    path, names = Path(folder), tuple(trust)
    trusted = REMOTE_CODE in names
    config = read_config(path)
    kind = choose_variant(find_task(task), config)
    accepted = check_architecture(path, config, kind.name, kind.auto_class)
    model_folder = open_folder(path, kind.processor, accepted or None, trusted)
    source = choose_source(path, kind.auto_class, trusted)
    size = kind.default_batch_size if batch_size is None else batch_size
    if size < 1:
        raise ConfigurationError(f"batch_size must be at least 1, got {size}")
    converter = MixedPrecision(trust=tuple(name for name in names if name != REMOTE_CODE))
    converter.model = source
    kind.configure(converter, model_folder, TaskData(data, calibration, columns, size))
    batches = converter.eval_dataloader
    names_of_inputs = frozenset(batches[0][0]) if isinstance(batches, TaskBatches) else None

    def finish(result: OptimizedModel) -> TaskModel:
        return TaskModel(
            result, kind, replace(model_folder, inputs=names_of_inputs), Path(data).name
        )

    return TaskRun(converter, finish)
