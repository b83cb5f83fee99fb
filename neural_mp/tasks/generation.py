"""Tasks of models that write texts token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from neural_mp.api.tuning_source import is_text, make_file_dataset, set_text_defaults
from neural_mp.data import OWN, build_dataloader
from neural_mp.data.option_checks import import_package
from neural_mp.errors import DataError
from neural_mp.tasks.declaration import Task, TaskData
from neural_mp.tasks.folders import ModelFolder
from neural_mp.tasks.rows import Row

if TYPE_CHECKING:
    from neural_mp.api.mixed_precision import MixedPrecision
    from neural_mp.api.optimized_model import OptimizedModel

#: Tokens written in a call, unless the configuration of the model or the caller says otherwise.
_NEW_TOKENS = 64


@dataclass(frozen=True)
class TextGeneration(Task):
    """A decoder, judged by its perplexity on a text, and called with the start of a text."""

    default_batch_size: ClassVar[int] = 8

    def configure(self, converter: MixedPrecision, folder: ModelFolder, data: TaskData) -> None:
        """Set data and metric of a run.

        Raises:
            DataError: the data are no text.
        """
        converter.eval_dataloader = _read_windows(folder, data.evaluation, data)
        if data.calibration is not None:
            converter.calib_dataloader = _read_windows(folder, data.calibration, data)
        converter.metric = "perplexity"
        set_text_defaults(converter)

    def answer_rows(
        self, model: OptimizedModel, folder: ModelFolder, rows: Sequence[Row], **options: Any
    ) -> list[str]:
        """Return what follows each text; `options` are those of `generate`."""
        torch = import_package("torch", "text generation", "torch")
        tokenizer, answers = folder.processor, []
        for row in rows:  # one by one, as padding at the right would be continued
            encoded = tokenizer(row.text("text"), return_tensors="pt")
            settings = {"max_new_tokens": _NEW_TOKENS, "do_sample": False} | options
            features = {name: encoded[name] for name in ("input_ids", "attention_mask")}
            with torch.no_grad():
                written = model.model.generate(**features, **settings)
            start = features["input_ids"].shape[1]
            answers.append(str(tokenizer.decode(written[0, start:], skip_special_tokens=True)))
        return answers


def _read_windows(folder: ModelFolder, path: str | Path, data: TaskData) -> Any:
    file = Path(path)
    if not is_text(file):
        raise DataError(
            f"the data of text-generation must be a .txt file, or a .jsonl file with a text in "
            f"each line, got {str(path)!r}"
        )
    dataset = make_file_dataset(file, None, folder.path)
    for options in dataset.values():
        options["key"] = (data.columns or {}).get("text", "text")
    return build_dataloader({"dataset": dataset, "batch_size": data.batch_size}, OWN)
