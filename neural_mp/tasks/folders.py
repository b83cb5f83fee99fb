"""Model folders of Hugging Face: configuration, preprocessing and weights, without network."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from neural_mp.data.option_checks import import_package
from neural_mp.errors import ConfigurationError, ModelLoadError, one_line
from neural_mp.io.readers import read_json
from neural_mp.util.optional_packages import quiet_and_offline_transformers
from neural_mp.util.validators import anything, is_integer, list_of, mapping_of, preview_value

CONFIG = "config.json"
#: Name among the trusted ones that allows code in a model folder to run.
REMOTE_CODE = "remote_code"
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
_ONNX_FILES = ("model.onnx", "onnx/model.onnx")
#: Files of the words of a tokenizer.
_VOCABULARIES = ("tokenizer.json", "vocab*", "*.model", "*.tiktoken")
#: Files of preprocessing and configuration, which a result keeps.
_KEPT = ("*.json", "*.txt", "*.model", "*.jinja", "*_*/config.json")
_NOT_KEPT = ("*.index.json", "neural_mp*.json", "details.json", "task.json")
MAX_KEPT_BYTES = 1 << 28
#: Tokens of a text, where the model allows more.
MAX_TOKENS = 512
#: Auto classes whose mapping has another name.
_IRREGULAR = {
    "AutoModelForSeq2SeqLM": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM",
    "AutoModelForSpeechSeq2Seq": "MODEL_FOR_SPEECH_SEQ_2_SEQ",
}
_POOLING_MODES = {"cls": "cls_token", "mean": "mean_tokens", "max": "max_tokens"}


@dataclass(frozen=True)
class Pooling:
    """The steps of sentence-transformers after the encoder.

    Attributes:
        mode: `cls`, `mean` or `max`.
        normalized: whether vectors are scaled to length 1.
    """

    mode: str = "mean"
    normalized: bool = False


@dataclass(frozen=True)
class ModelFolder:
    """A folder written by `save_pretrained`, without its weights.

    Attributes:
        path: the folder.
        config: contents of `config.json`.
        processor: tokenizer, image processor or feature extractor of `transformers`.
        inputs: names of the inputs that the model accepts; None if any.
    """

    path: Path
    config: Mapping[str, Any]
    processor: Any = field(repr=False)
    inputs: frozenset[str] | None = None

    @cached_property
    def labels(self) -> list[str]:
        """Names of the classes, by index."""
        names = self.config.get("id2label") or {}
        count = self.config.get("num_labels") or len(names) or 2
        by_index = {str(key): str(value) for key, value in names.items()}
        return [by_index.get(str(index), f"LABEL_{index}") for index in range(int(count))]

    @cached_property
    def pooling(self) -> Pooling:
        """The steps after the encoder: those in `modules.json`, else the mean.

        Raises:
            ModelLoadError: a step is not supported, or a file is damaged.
        """
        file = self.path / "modules.json"
        if not file.is_file():
            return Pooling()
        mode, normalized = "mean", False
        modules = read_json(file, list_of(mapping_of(anything)), ModelLoadError)
        for module in modules:
            kind = str(module.get("type")).rpartition(".")[2]
            if kind == "Pooling":
                mode = _read_pooling_mode(self.path / str(module.get("path", "1_Pooling")) / CONFIG)
            elif kind == "Normalize":
                normalized = True
            elif kind != "Transformer":
                raise ModelLoadError(
                    f"modules.json must list Transformer, Pooling and Normalize, got "
                    f"{preview_value(kind)}; steps with weights are not supported"
                )
        return Pooling(mode, normalized)

    @cached_property
    def max_tokens(self) -> int:
        """The largest number of tokens of a text."""
        limits = [MAX_TOKENS, getattr(self.processor, "model_max_length", MAX_TOKENS)]
        positions: Any = self.config.get("max_position_embeddings")
        if is_integer(positions) and positions > 1:
            padding = self.config.get("pad_token_id") or 0
            # RoBERTa and its kin number positions from the padding token on.
            limits.append(positions - (padding + 1 if padding else 0))
        sentences = self.path / "sentence_bert_config.json"
        if sentences.is_file():
            value = read_json(sentences, mapping_of(anything), ModelLoadError).get("max_seq_length")
            limits += [value] if is_integer(value) else []
        return int(min(limits))

    def select_inputs(self, features: Mapping[str, Any]) -> dict[str, Any]:
        """Return those features that the model accepts."""
        names = self.inputs
        return {name: values for name, values in features.items() if names is None or name in names}

    def list_kept_files(self) -> list[Path]:
        """Return the files of configuration and preprocessing, relative to the folder."""
        files = {file for pattern in _KEPT for file in self.path.glob(pattern) if file.is_file()}
        excluded = {file for pattern in _NOT_KEPT for file in self.path.glob(pattern)}
        return sorted(
            file.relative_to(self.path)
            for file in files - excluded
            if file.stat().st_size <= MAX_KEPT_BYTES
        )


def open_folder(
    path: str | Path, processor: str, inputs: frozenset[str] | None, trust: bool = False
) -> ModelFolder:
    """Return the configuration and the preprocessing of a folder.

    Args:
        path: the folder.
        processor: auto class of `transformers`, `AutoTokenizer`.
        inputs: names of the inputs that the model accepts; None if any.
        trust: whether code in the folder may run.

    Raises:
        ConfigurationError: there is no such folder.
        ModelLoadError: a file is missing or damaged, or would run code from the folder.
        MissingFrameworkError: transformers is not installed.
    """
    folder = Path(path)
    config = read_config(folder)
    if "auto_map" in config and not trust:
        raise ModelLoadError(
            f"{CONFIG} of the folder {str(path)!r} refers to code in the folder (auto_map), which "
            f"runs only if {REMOTE_CODE!r} is trusted: trust=({REMOTE_CODE!r},) or --trust "
            f"{REMOTE_CODE}"
        )
    transformers = import_package("transformers", "a model folder", "text")
    has_words = any(True for pattern in _VOCABULARIES for _ in folder.glob(pattern))
    if processor in ("AutoTokenizer", "AutoProcessor") and not has_words:
        # `transformers` would return a tokenizer without words.
        raise ModelLoadError(
            f"the folder {str(path)!r} must have the files of a tokenizer "
            f"({', '.join(_VOCABULARIES)}), got none; save the tokenizer with save_pretrained"
        )
    try:
        with quiet_and_offline_transformers():
            loaded = getattr(transformers, processor).from_pretrained(
                folder, local_files_only=True, trust_remote_code=trust
            )
    except Exception as error:
        # The exception type depends on the defect of the folder.
        what = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", processor.removeprefix("Auto")).lower()
        raise ModelLoadError(
            f"the folder {str(path)!r} must have the files of the {what}, which cannot be loaded: "
            f"{one_line(error)}; save them with save_pretrained"
        ) from error
    return ModelFolder(folder, config, loaded, inputs)


def read_config(folder: Path) -> dict[str, Any]:
    """Return the contents of `config.json`.

    Raises:
        ConfigurationError: there is no such folder.
        ModelLoadError: the file is missing or damaged.
    """
    if not folder.is_dir():
        raise ConfigurationError(f"there is no model folder {str(folder)!r}")
    if not (folder / CONFIG).is_file():
        raise ModelLoadError(
            f"the folder {str(folder)!r} must contain {CONFIG}, as save_pretrained writes"
        )
    return dict(read_json(folder / CONFIG, mapping_of(anything), ModelLoadError))


def list_model_classes(auto_class: str) -> dict[str, tuple[str, ...]]:
    """Return the type of a model → names of its classes for an auto class of `transformers`."""
    auto: Any = importlib.import_module("transformers.models.auto.modeling_auto")
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", auto_class.removeprefix("Auto")).upper()
    words = _IRREGULAR.get(auto_class, words)
    names = getattr(auto, f"{words}_MAPPING_NAMES")
    return {kind: name if isinstance(name, tuple) else (name,) for kind, name in names.items()}


def check_architecture(
    folder: Path, config: Mapping[str, Any], task: str, auto_class: str
) -> frozenset[str]:
    """Check that the model of a folder has the head of a task; return the names of its inputs.

    Raises:
        ModelLoadError: the folder names no class, or one of another task.
    """
    transformers = import_package("transformers", "a model folder", "text")
    architectures = config.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and architectures else None
    classes = list_model_classes(auto_class)
    if "auto_map" in config:  # trusted, as its caller has checked
        return frozenset()
    if not any(name in names for names in classes.values()):
        suitable = classes.get(str(config.get("model_type")), ())
        hint = f", e.g. {suitable[0]}" if suitable else ""
        raise ModelLoadError(
            f"the folder {str(folder)!r} must hold a model of {task}{hint}, got "
            f"{preview_value(name)} in architectures of {CONFIG}; choose the task of this model, "
            f"or train the head first"
        )
    forward = inspect.signature(getattr(transformers, str(name)).forward)
    return frozenset(forward.parameters)


def choose_source(folder: Path, auto_class: str, trust: bool) -> Any:
    """Return the model to tune: the folder, an ONNX file in it, or the module of trusted code.

    Raises:
        ModelLoadError: the folder has no weights, or trusted code fails.
    """
    if trust and "auto_map" in read_config(folder):
        transformers = import_package("transformers", "a model folder", "text")
        try:
            kind = getattr(transformers, auto_class)
            return kind.from_pretrained(
                folder, local_files_only=True, trust_remote_code=True, weights_only=True
            ).eval()
        except Exception as error:
            raise ModelLoadError(
                f"the code in the folder {str(folder)!r} fails: {one_line(error)}"
            ) from error
    if any(True for pattern in _WEIGHTS for _ in folder.glob(pattern)):
        return str(folder)
    onnx_file = next((folder / name for name in _ONNX_FILES if (folder / name).is_file()), None)
    if onnx_file is None:
        names = ", ".join((*_WEIGHTS, *_ONNX_FILES))
        raise ModelLoadError(f"the folder {str(folder)!r} must contain weights ({names})")
    return str(onnx_file)


def _read_pooling_mode(file: Path) -> str:
    """Return the pooling mode in a configuration of sentence-transformers."""
    values = read_json(file, mapping_of(anything), ModelLoadError)
    if values.get("pooling_mode") in _POOLING_MODES:
        return str(values["pooling_mode"])
    modes = [mode for mode, key in _POOLING_MODES.items() if values.get(f"pooling_mode_{key}")]
    if len(modes) != 1:
        raise ModelLoadError(
            f"{str(file)!r} must set one of the pooling modes {', '.join(_POOLING_MODES)}, got "
            f"{', '.join(modes) or 'none or another'}"
        )
    return modes[0]
