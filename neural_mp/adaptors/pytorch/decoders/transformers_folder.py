"""Folders of `transformers`: library classes without network, and encoder-decoders in two modules.

Configurations in saved results are plain values until asked for.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import json
import logging
import mmap
import re
import sys
import threading
import zipfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as hooks

from neural_mp.adaptors.pytorch.pt2.safe_unpickler import read_plain
from neural_mp.errors import MissingFrameworkError, ModelLoadError, one_line
from neural_mp.io.limits import (
    MAX_DEPTH,
    MAX_FOLDER_WEIGHT_RATIO,
    MAX_HEADER_BYTES,
    MAX_LABELS,
    UNSAVED_ELEMENTS,
    UNSAVED_MODULES,
    UNSAVED_WEIGHTS,
)
from neural_mp.io.readers import load_json, read_json
from neural_mp.util.optional_packages import quiet_and_offline_transformers
from neural_mp.util.validators import (
    anything,
    is_integer,
    mapping_of,
    preview_value,
    record,
    string,
)

logger = logging.getLogger(__name__)

#: Configuration file of a `transformers` folder.
CONFIG = "config.json"
#: Configuration file of an adapter of `peft`, whose folder holds no model.
ADAPTER = "adapter_config.json"
_SAFETENSORS, _PICKLES = "*.safetensors", "pytorch_model*.bin"
_WEIGHTS = (_SAFETENSORS, _PICKLES)
#: File of the weights that are in one file; other names of weights start likewise.
_ONE_FILE = "model.safetensors"
#: Key of a header that names no tensor.
_NOTES = "__metadata__"
#: Key suffix of a configuration entry that may name a kernel to download and run.
_NAMES_KERNEL = "implementation"
#: Keys of a configuration that count modules with weights.
_COUNTS = re.compile(r"\w*(layers?|blocks?|depths?|stages)")
#: Keys that count the outputs of a model.
_LABELS = frozenset({"num_labels", "num_classes"})
#: Options of `from_pretrained`; code referenced by a folder (auto_map) never runs.
_SAFE = {"local_files_only": True, "trust_remote_code": False}
#: Maximum weights that a warning names.
_MAX_LISTED = 4
_State = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class _Stored:
    """Number of tensors in the files of a folder, and an upper bound of their elements."""

    tensors: int = 0
    elements: int = 0

    def __add__(self, other: _Stored) -> _Stored:
        return _Stored(self.tensors + other.tensors, self.elements + other.elements)


class _TooLargeError(Exception):
    """Raised while a model is built that its files have no weights for."""


def is_known_class(module: nn.Module | None) -> bool:
    """Whether `transformers` defines the class of a module, under a public name."""
    transformers: Any = sys.modules.get("transformers")
    kind = type(module)
    return transformers is not None and getattr(transformers, kind.__name__, None) is kind


def read_folder(
    folder: Path, quantized_elements: int = 0, state: _State | None = None
) -> nn.Module:
    """Return a `transformers` model, in the class that its configuration names.

    Args:
        folder: the folder.
        quantized_elements: upper bound of the weights that the files hold in fewer bits, which
            `transformers` does not read.
        state: name → weight, in place of the weights in the files, which are quantized; weights
            that are missing are zeros.

    Raises:
        ModelLoadError: if the folder has no weights, requires code from outside the package, or
            cannot be loaded.
        MissingFrameworkError: if the package is not installed.
    """
    if (folder / ADAPTER).exists():
        raise ModelLoadError(
            f"the folder {str(folder)!r} must hold a model, got an adapter of peft; load the "
            f"adapter by AutoPeftModelForCausalLM.from_pretrained, and give the model that "
            f"merge_and_unload() returns"
        )
    if not any(True for pattern in _WEIGHTS for _ in folder.glob(pattern)):
        raise ModelLoadError(
            f"the folder {str(folder)!r} must contain weights ({', '.join(_WEIGHTS)})"
        )
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError:
        raise MissingFrameworkError(
            f"the model in the folder {str(folder)!r} requires the package transformers; install "
            f"it with: pip install transformers"
        ) from None
    try:
        config = read_json(folder / CONFIG, anything, ModelLoadError)
        stored = _measure_stored_weights(folder) + _Stored(elements=quantized_elements)
        for fault in _iterate_folder_faults(
            folder, config, stored, may_be_quantized=state is not None
        ):
            raise ModelLoadError(f"the folder {str(folder)!r} is refused: {fault}")
        kind = _find_model_class(transformers, config)
        with quiet_and_offline_transformers():
            if state is not None:
                with _limit_modules(stored):
                    state = _add_missing_weights(kind, folder, state)
            with _limit_modules(stored):
                loaded, report = _load_model(kind, folder, state)
    except ModelLoadError:
        raise
    except Exception as error:
        # The exception type depends on the defect of the folder.
        raise ModelLoadError(
            f"transformers cannot load the folder {str(folder)!r}: {one_line(error)}"
        ) from error
    _check_weights(folder, report, may_lack=quantized_elements > 0)
    return loaded.eval()


def _check_weights(folder: Path, report: Mapping[str, Any], *, may_lack: bool) -> None:
    """Warn of weights that are missing or unused.

    Args:
        folder: the folder.
        report: the loading info of `transformers`.
        may_lack: whether the caller sets missing weights.

    Raises:
        ModelLoadError: if a weight does not have the shape that the configuration requires.
    """
    for name, actual, expected in report["mismatched_keys"]:
        raise ModelLoadError(
            f"the weight {preview_value(name)} in the folder {str(folder)!r} must have the shape "
            f"{list(expected)} that {CONFIG} requires, got {list(actual)}"
        )
    if may_lack:
        return
    for keys, consequence in (
        ("missing_keys", "are missing and get random values"),
        ("unexpected_keys", "belong to no part of the model and are not used"),
    ):
        if report[keys]:
            logger.warning(
                "%r: weights %s: %s", str(folder), consequence, _list_names(report[keys])
            )


def _list_names(names: Collection[str]) -> str:
    """Return the first names, and the number of the others."""
    listed = ", ".join(map(preview_value, sorted(names)[:_MAX_LISTED]))
    more = len(names) - _MAX_LISTED
    return f"{listed} and {more} more" if more > 0 else listed


def _load_model(kind: Any, folder: Path, state: _State | None) -> tuple[nn.Module, dict[str, Any]]:
    """Return the model, and the names of weights that do not fit."""
    # Mismatched sizes are in the info only if they are no error of the package, whose message
    # refers to a report that is hidden.
    options = {**_SAFE, "output_loading_info": True, "ignore_mismatched_sizes": True}
    loaded: tuple[nn.Module, dict[str, Any]]
    if state is None:
        loaded = kind.from_pretrained(folder, weights_only=True, **options)
        return loaded
    config = kind.config_class.from_pretrained(folder, **_SAFE)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    loaded = kind.from_pretrained(None, config=config, state_dict=dict(state), **options)
    return loaded


def _add_missing_weights(kind: Any, folder: Path, state: Mapping[str, torch.Tensor]) -> _State:
    """Return weights, and zeros for those of the model that are missing.

    `transformers` draws random values for missing weights, which take the memory of the float
    model; zeros take none until they are written to.
    """
    config = kind.config_class.from_pretrained(folder, **_SAFE)
    with torch.device("meta"):
        planned = kind(config)
    names: dict[int, list[str]] = {}
    shapes: dict[int, torch.Size] = {}
    for name, value in planned.named_parameters(remove_duplicate=False):
        names.setdefault(id(value), []).append(name)
        shapes[id(value)] = value.shape
    floats = (value.dtype for value in state.values() if value.is_floating_point())
    dtype = getattr(config, "dtype", None) or next(floats, torch.float32)
    # A weight under several names is tied where only one of them is present.
    missing = {key: tied[0] for key, tied in names.items() if state.keys().isdisjoint(tied)}
    zeros = {}
    for key, name in missing.items():
        size = shapes[key].numel() * dtype.itemsize
        # The system provides pages of their own at the first write.
        pages = torch.frombuffer(mmap.mmap(-1, max(size, 1)), dtype=torch.uint8)
        zeros[name] = pages[:size].view(dtype).view(shapes[key])
    return {**state, **zeros}


def _find_model_class(transformers: ModuleType, config: dict[str, Any]) -> Any:
    """Return the model class in a configuration, or `AutoModel` if none is named.

    Raises:
        ValueError: if the name is not a model class.
    """
    named = config.get("architectures") or [None]
    kind = getattr(transformers, str(named[0]), None)
    if kind is None:
        return transformers.AutoModel
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise ValueError(f"{CONFIG} must name a model class, got {preview_value(named[0])}")
    return kind


def _iterate_folder_faults(
    folder: Path, config: Any, stored: _Stored, *, may_be_quantized: bool = False
) -> Iterator[str]:
    """Yield a message for each part of a folder that would run foreign code or never end."""
    if not isinstance(config, dict) or not isinstance(config.get("architectures", []), list | None):
        yield f"{CONFIG} is not the configuration of a model"
    if "quantization_config" in config and not may_be_quantized:
        yield f"{CONFIG} describes a quantized model; give the float model"
    yield from iterate_entry_faults(config, stored.tensors)
    if (folder / "custom_generate").exists():
        yield "custom_generate refers to code; give the module"
    for index in folder.glob("*.index.json"):
        files = read_json(index, anything, ModelLoadError)["weight_map"].values()
        for file in files:
            if not isinstance(file, str) or Path(file).name != file:
                yield f"{index.name} must refer to files of the folder, got {preview_value(file)}"
        if index.name == f"{_ONE_FILE}.index.json" and not (folder / _ONE_FILE).is_file():
            for file in sorted({file for file in files if not (folder / file).is_file()}):
                yield f"{file}, which {index.name} names, is missing; copy the file into the folder"


def iterate_entry_faults(config: object, tensors: int) -> Iterator[str]:
    """Yield a message for each entry that names a kernel, or counts more than weights suffice."""
    for key, value in _iterate_nested_items(config, 0):
        if _NAMES_KERNEL in key and "/" in str(value):
            yield (
                f"{CONFIG} names the kernel {preview_value(value)}, which would be fetched and run"
            )
        limit = tensors + UNSAVED_WEIGHTS if _COUNTS.fullmatch(key) else None
        limit = MAX_LABELS if key in _LABELS else limit
        for count in filter(is_integer, value if isinstance(value, list) else [value]):
            if limit is not None and abs(count) > limit:
                yield (
                    f"{key} must be at most {limit} for the {tensors} weights in the files, "
                    f"got {count}"
                )


def _iterate_nested_items(value: object, depth: int) -> Iterator[tuple[str, Any]]:
    if depth > MAX_DEPTH:
        raise ValueError(f"the nesting of {CONFIG} exceeds the limit of {MAX_DEPTH} levels")
    if isinstance(value, dict):
        for key, item in value.items():
            yield key, item
            yield from _iterate_nested_items(item, depth + 1)
    elif isinstance(value, list):
        for item in value:
            yield from _iterate_nested_items(item, depth + 1)


def _measure_stored_weights(folder: Path) -> _Stored:
    """Return the sizes of all weights in the files of a folder.

    Raises:
        ModelLoadError: if a file is damaged.
    """
    total = _Stored()
    for file in sorted(folder.glob(_SAFETENSORS)):
        total += _measure_header(file)
    for file in sorted(folder.glob("*.bin")):
        # torch 2.6 takes tensor sizes from the pickle without checking the file.
        if zipfile.is_zipfile(file):
            with file.open("rb") as opened:
                value = read_plain(opened)
            values = value.values() if isinstance(value, dict) else ()
            tensors = [tensor for tensor in values if isinstance(tensor, torch.Tensor)]
            total += _Stored(len(tensors), sum(t.numel() for t in tensors))
        else:
            # Weights of torch < 1.6, which are read with weights_only.
            size = file.stat().st_size
            total += _Stored(size // MAX_DEPTH, size)
    return total


def _measure_header(file: Path) -> _Stored:
    """Return the sizes in the header of a `.safetensors` file.

    Raises:
        ModelLoadError: if the header exceeds the file or is damaged, or weights are cut off.
    """
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > min(size, MAX_HEADER_BYTES):
            raise ModelLoadError(f"{str(file)!r} is damaged: the header exceeds the file")
        try:
            header = load_json(opened.read(length))
        except ValueError as error:
            raise ModelLoadError(f"{str(file)!r} is damaged: its header {error}") from None
    if isinstance(header, dict) and file.name.startswith(Path(_ONE_FILE).stem):
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != _NOTES]
        expected = 8 + length + max(ends, default=0)
        if size != expected:
            raise ModelLoadError(
                f"{str(file)!r} is damaged: it must have {expected} bytes, got {size}; copy the "
                f"file again"
            )
    # Types of less than a byte per element exist only for quantized weights.
    return _Stored(len(header) if isinstance(header, dict) else 0, size)


@contextmanager
def _limit_modules(stored: _Stored) -> Iterator[None]:
    """Limit the modules built in this thread to those that the stored weights suffice for."""
    thread = threading.get_ident()
    counts = dict.fromkeys(("modules", "weights", "elements"), 0)
    limits: Mapping[str, int] = {
        "modules": MAX_FOLDER_WEIGHT_RATIO * stored.tensors + UNSAVED_MODULES,
        "weights": MAX_FOLDER_WEIGHT_RATIO * stored.tensors + UNSAVED_WEIGHTS,
        "elements": stored.elements + UNSAVED_ELEMENTS,
    }

    def add_count(kind: str, number: int) -> None:
        counts[kind] += number
        if threading.get_ident() == thread and counts[kind] > limits[kind]:
            raise _TooLargeError(
                f"{CONFIG} describes a model of more than {limits[kind]} {kind}, although the "
                f"files contain {stored.tensors} weights"
            )

    def count_tensor(_: nn.Module, __: str, value: torch.Tensor | None) -> None:
        add_count("weights", 1)
        add_count("elements", 0 if value is None else value.numel())

    with ExitStack() as stack:
        for handle in (
            hooks.register_module_module_registration_hook(lambda *_: add_count("modules", 1)),
            hooks.register_module_parameter_registration_hook(count_tensor),
            hooks.register_module_buffer_registration_hook(count_tensor),
        ):
            stack.callback(handle.remove)
        yield


#: Maximum bytes of a file: old versions of safetensors copy a file's weights to write them.
MAX_SHARD_BYTES = 1 << 30
_INDEX = record({"weight_map": mapping_of(string)}, {"metadata": lambda value: value})


def write_weights(file: Path, weights: Mapping[str, torch.Tensor]) -> None:
    """Write weights by name into a `.safetensors` file.

    More weights than `MAX_SHARD_BYTES` are written into shards with an index, which `transformers`
    reads in place of the file.
    """
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file

    pattern = f"{file.stem}{{suffix}}{file.suffix}"
    split = split_torch_state_dict_into_shards(
        dict(weights), filename_pattern=pattern, max_shard_size=MAX_SHARD_BYTES
    )
    for shard, names in (split.filename_to_tensors or {file.name: []}).items():
        tensors = {name: weights[name] for name in names}
        save_file(tensors, file.with_name(shard), metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        _get_index_file(file).write_text(json.dumps(index, indent=2), encoding="utf-8")


def read_weights(file: Path) -> dict[str, torch.Tensor]:
    """Return weights written by `write_weights`, mapped from their files.

    Raises:
        ModelLoadError: a file is missing or damaged.
    """
    weights: dict[str, torch.Tensor] = {}
    for shard in _list_shard_files(file):
        weights |= read_shard(shard)
    return weights


def read_shard(file: Path) -> dict[str, torch.Tensor]:
    """Return the weights of one `.safetensors` file, mapped from it.

    Raises:
        ModelLoadError: the file is missing or damaged.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        weights: dict[str, torch.Tensor] = load_file(file)
    except (OSError, SafetensorError) as error:
        raise ModelLoadError(f"{str(file)!r} cannot be read: {error}") from error
    return weights


def _list_shard_files(file: Path) -> list[Path]:
    index = _get_index_file(file)
    if file.is_file() or not index.is_file():
        return [file]
    names = set(read_json(index, _INDEX, ModelLoadError)["weight_map"].values())
    for name in names:
        if Path(name).name != name:
            raise ModelLoadError(f"{index.name} must refer to files of the folder, got {name!r}")
    return [file.with_name(name) for name in sorted(names)]


def _get_index_file(file: Path) -> Path:
    return file.with_name(f"{file.name}.index.json")


#: Entry with code outside of the package, which a configuration refers to.
_FOREIGN_CODE = "auto_map"


@dataclass(frozen=True)
class StoredConfig:
    """The values of a configuration, as a saved result has them."""

    values: Mapping[str, Any]

    def build_config(self) -> Any:
        """Return the configuration in the class of `transformers`.

        Raises:
            MissingFrameworkError: if the package is not installed.
            ModelLoadError: if the package has no such type of model, or refuses the values.
        """
        kind = self.values.get("model_type")
        try:
            classes: Any = importlib.import_module("transformers").CONFIG_MAPPING
        except ImportError:
            raise MissingFrameworkError(
                f"the configuration of a model of type {preview_value(kind)} requires the package "
                f"transformers; install it with: pip install transformers"
            ) from None
        if kind not in classes:
            raise ModelLoadError(
                f"transformers must have models of type {preview_value(kind)}, which the saved "
                f"configuration names; install the version that the model was saved with"
            )
        try:
            return classes[kind].from_dict(dict(self.values))
        except Exception as error:
            # The exception type depends on the entry.
            raise ModelLoadError(
                f"transformers refuses the saved configuration: {one_line(error)}"
            ) from error


def make_plain_config(config: Any) -> dict[str, Any]:
    """Return the values of a configuration for JSON."""
    if isinstance(config, StoredConfig):
        return dict(config.values)
    values: dict[str, Any] = json.loads(config.to_json_string())
    values.pop(_FOREIGN_CODE, None)
    return values


def read_stored_config(values: Mapping[str, Any], weights: int) -> StoredConfig:
    """Return the configuration of a saved model.

    Args:
        values: the values in the file.
        weights: number of weights of the model, which limits the layers that it names.

    Raises:
        ModelLoadError: if an entry refers to code, or counts more layers than the model can have.
    """
    entries = {key: value for key, value in values.items() if key != _FOREIGN_CODE}
    for fault in iterate_entry_faults(entries, weights):
        raise ModelLoadError(f"the configuration of the saved model is refused: {fault}")
    return StoredConfig(entries)


class Encoder(nn.Module):
    """The encoder, which returns its last states `[N, S, D]`."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(
        self, features: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the states of tokens `[N, S]`, or of features of sound `[N, F, S]`."""
        named = {} if attention_mask is None else {"attention_mask": attention_mask}
        states: torch.Tensor = self.encoder(features, **named)[0]
        return states


class Decoder(nn.Module):
    """The decoder with its output layer, without a cache."""

    def __init__(self, model: Any, takes_mask: bool) -> None:
        super().__init__()
        encoder = model.get_encoder()
        # The encoder is left out, and weights are shared with the model.
        memo: dict[int, Any] = {id(weight): weight for weight in model.parameters()}
        memo[id(encoder)] = nn.Identity()
        self.model = copy.deepcopy(model, memo)
        self.takes_mask = takes_mask

    def forward(
        self,
        tokens: torch.Tensor,
        states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the logits `[N, T, V]` of the token after each of `tokens` `[N, T]`."""
        named: dict[str, Any] = {"attention_mask": attention_mask} if self.takes_mask else {}
        outputs = self.model(
            encoder_outputs=(states,),
            decoder_input_ids=tokens,
            use_cache=False,
            return_dict=False,
            **named,
        )
        logits: torch.Tensor = outputs[0]
        return logits


def split_encoder_decoder(folder: str | Path) -> dict[str, nn.Module]:
    """Return the encoder and the decoder of a model folder.

    Raises:
        ModelLoadError: as for `read_folder`.
    """
    model: Any = read_folder(Path(folder))
    is_text = "input_ids" in inspect.signature(model.forward).parameters
    return {
        "encoder": Encoder(model.get_encoder()).eval(),
        "decoder": Decoder(model, takes_mask=is_text).eval(),
    }
