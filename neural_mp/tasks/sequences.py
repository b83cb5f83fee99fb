"""Tasks of models that write texts token by token: decoders, and encoder-decoders.

The two graphs of an encoder-decoder are judged by the texts that they write together.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from neural_mp.api.tuning_source import is_text, make_file_dataset, set_text_defaults
from neural_mp.data import OWN, build_dataloader
from neural_mp.data.option_checks import import_package
from neural_mp.errors import ConfigurationError, DataError, ModelLoadError
from neural_mp.io.readers import read_json
from neural_mp.metrics import convert_to_metric
from neural_mp.metrics.texts import decode_ids
from neural_mp.tasks.declaration import Encoded, Task, TaskData
from neural_mp.tasks.folders import ModelFolder
from neural_mp.tasks.rows import Row
from neural_mp.util.pytree import convert_to_numpy
from neural_mp.util.validators import anything, is_integer, mapping_of

if TYPE_CHECKING:
    from neural_mp.api.mixed_precision import MixedPrecision
    from neural_mp.api.optimized_model import OptimizedModel

#: Tokens of a text, unless the configuration or the caller says otherwise.
_NEW_TOKENS = 64
#: Multiple to which the tokens of the decoder are padded: few lengths, none of which is 1.
_STEP = 8
_GENERATION = "generation_config.json"


@dataclass(frozen=True, kw_only=True)
class SequenceTask(Task):
    """A task of an encoder-decoder.

    Attributes:
        encode: folder and rows → inputs of the encoder, the first of which are its features.
        metric: the metric of texts.
    """

    encode: Callable[[ModelFolder, Sequence[Row]], Encoded]
    metric: str
    target: str

    def configure(self, converter: MixedPrecision, folder: ModelFolder, data: TaskData) -> None:
        """Set the two graphs, and the function that runs them on the data.

        Raises:
            DataError: the data are damaged or do not fit the task.
            ConfigurationError: there is data for calibration, which are those of evaluation.
        """
        if data.calibration is not None:
            raise ConfigurationError(
                f"calibration must be unset for {self.name}, whose two graphs are calibrated in "
                f"the evaluation"
            )
        rows = self.read_rows(data.evaluation, data.columns)
        for row in rows:
            row.text(self.target)
        self.encode(folder, rows[:1])  # raises what is wrong with the preprocessing
        parts: Any = importlib.import_module(
            "neural_mp.adaptors.pytorch.decoders.transformers_folder"
        )
        converter.model = parts.split_encoder_decoder(folder.path)
        converter.eval_func = SequenceScore(self, folder, tuple(rows), data.batch_size)

    def answer_rows(
        self, model: OptimizedModel, folder: ModelFolder, rows: Sequence[Row], **options: Any
    ) -> list[str]:
        """Return the text of each row; options are `max_new_tokens` and, of speech, `language`."""
        return self.write_texts(model.model, folder, rows, **options)

    def write_texts(
        self,
        parts: Mapping[str, Callable[..., Any]],
        folder: ModelFolder,
        rows: Sequence[Row],
        *,
        max_new_tokens: int | None = None,
        language: str = "en",
    ) -> list[str]:
        """Return the most likely text of each row, token by token."""
        features = list(self.encode(folder, rows).inputs.values())
        states = convert_to_numpy(parts["encoder"](*features))
        settings = GenerationSettings.from_folder(folder, language)
        limit = max_new_tokens or settings.max_new_tokens
        width = len(settings.prefix) + limit
        ids = np.full((len(rows), width), settings.padding, np.int64)
        ids[:, : len(settings.prefix)] = settings.prefix
        ended = np.zeros(len(rows), bool)
        for end in range(len(settings.prefix), width):
            length = min(-(-end // _STEP) * _STEP, width)
            tokens = np.full((len(rows), length), settings.padding, np.int64)
            tokens[:, :end] = ids[:, :end]
            logits = convert_to_numpy(parts["decoder"](tokens, states, *features[1:]))
            ids[:, end] = settings.choose(logits[:, end - 1], end)
            ids[ended, end] = settings.padding
            ended |= np.isin(ids[:, end], settings.ends)
            if ended.all():
                break
        written = ids[:, len(settings.prefix) :]
        tokenizer = getattr(folder.processor, "tokenizer", folder.processor)
        return decode_ids(tokenizer, written, merged=False)


@dataclass(frozen=True)
class SequenceScore:
    """The metric of the texts that the parts of an encoder-decoder write, as `eval_func`."""

    task: SequenceTask
    folder: ModelFolder
    rows: tuple[Row, ...] = field(repr=False)
    batch_size: int

    @property
    def higher_is_better(self) -> bool:
        """The direction of the metric."""
        return bool(convert_to_metric(self.task.metric).higher_is_better)  # type: ignore[attr-defined]

    @property
    def __name__(self) -> str:
        return self.task.metric

    def __call__(self, parts: Mapping[str, Callable[..., Any]]) -> float:
        """Return the metric over all rows."""
        metric = convert_to_metric(self.task.metric)
        metric.reset()
        for start in range(0, len(self.rows), self.batch_size):
            rows = self.rows[start : start + self.batch_size]
            texts = self.task.write_texts(parts, self.folder, rows)
            metric.update(texts, [row.text(self.task.target) for row in rows])
        return float(metric.result())


@dataclass(frozen=True)
class GenerationSettings:
    """The tokens that a text starts and ends with.

    Attributes:
        prefix: the first tokens of the decoder.
        ends: tokens that end a text.
        padding: token after the end.
        forced: the first token after the prefix; None for the most likely one.
        suppressed: tokens never written.
        suppressed_first: tokens not written first.
        max_new_tokens: largest number of tokens.
    """

    prefix: tuple[int, ...]
    ends: tuple[int, ...]
    padding: int
    forced: int | None = None
    suppressed: tuple[int, ...] = ()
    suppressed_first: tuple[int, ...] = ()
    max_new_tokens: int = _NEW_TOKENS

    @classmethod
    def from_folder(cls, folder: ModelFolder, language: str) -> GenerationSettings:
        """Return the settings of `generation_config.json`, else of `config.json`.

        Raises:
            ModelLoadError: neither names the first token.
            DataError: the model does not know the language.
        """
        file = folder.path / _GENERATION
        values = dict(folder.config)
        if file.is_file():
            stored = read_json(file, mapping_of(anything), ModelLoadError)
            values |= {key: value for key, value in stored.items() if value is not None}
        start: Any = values.get("decoder_start_token_id")
        ends = values.get("eos_token_id")
        start = values.get("bos_token_id") if start is None else start
        if not is_integer(start):
            raise ModelLoadError(
                f"the folder {str(folder.path)!r} must set decoder_start_token_id, the first token "
                f"of a text, in {_GENERATION}"
            )
        padding = values.get("pad_token_id")
        end_tokens = tuple(ends if isinstance(ends, list) else [] if ends is None else [ends])
        positions: Any = values.get("max_target_positions")
        positions = positions or values.get("max_position_embeddings")
        prefix = (int(start), *_list_language_tokens(values, language))
        limit = positions - len(prefix) if is_integer(positions) else _NEW_TOKENS
        return cls(
            prefix,
            end_tokens,
            int(padding if padding is not None else (*end_tokens, 0)[0]),
            values.get("forced_bos_token_id"),
            tuple(values.get("suppress_tokens") or ()),
            tuple(values.get("begin_suppress_tokens") or ()),
            max(1, min(_NEW_TOKENS, limit)),
        )

    def choose(self, logits: np.ndarray, position: int) -> np.ndarray:
        """Return the next token `[N]` by logits `[N, V]` at a position."""
        is_first = position == len(self.prefix)
        if is_first and self.forced is not None:
            return np.full(len(logits), self.forced)
        scores = logits.astype(np.float32)
        excluded = (*self.suppressed, *(self.suppressed_first if is_first else ()))
        scores[:, list(excluded)] = -np.inf
        return np.asarray(scores.argmax(axis=1))


def _list_language_tokens(values: Mapping[str, Any], language: str) -> list[int]:
    """Return the tokens of language and task that Whisper expects after the first."""
    languages, tokens = values.get("lang_to_id"), []
    if isinstance(languages, Mapping):
        if f"<|{language}|>" not in languages:
            known = ", ".join(key.strip("<|>") for key in list(languages)[:10])
            raise DataError(f"language must be one of the model's ({known}, …), got {language!r}")
        tokens = [languages[f"<|{language}|>"], values["task_to_id"]["transcribe"]]
    without_times = values.get("no_timestamps_token_id")
    return [*tokens, *([] if without_times is None else [without_times])]


@dataclass(frozen=True)
class TextGeneration(Task):
    """A decoder, judged by its perplexity on a text, and called with the start of a text."""

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
