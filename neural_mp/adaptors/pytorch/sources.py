"""Model files and `transformers` folders: library classes, and weights without code."""

from __future__ import annotations

import importlib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn
from torch.export import ExportedProgram

from neural_mp.adaptors.pytorch import storage
from neural_mp.adaptors.pytorch.pt2.safe_unpickler import read_plain
from neural_mp.errors import MissingFrameworkError, ModelLoadError, one_line
from neural_mp.io.limits import MAX_DEPTH
from neural_mp.io.readers import read_json
from neural_mp.util.validators import anything, preview

#: Configuration file of a `transformers` folder.
CONFIG = "config.json"
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
#: Key suffix of a configuration entry that may name a kernel to download and run.
_NAMES_KERNEL = "implementation"


def read_folder(folder: Path) -> nn.Module:
    """Return a `transformers` model, in the class that its configuration names.

    Raises:
        ModelLoadError: if the folder has no weights, requires code from outside the package, or
            cannot be loaded.
        MissingFrameworkError: if the package is not installed.
    """
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
        for fault in _faults(folder, config):
            raise ValueError(fault)
        # trust_remote_code: code referenced by the folder (auto_map) never runs.
        loaded: nn.Module = _class(transformers, config).from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, weights_only=True
        )
    except Exception as error:
        # The exception type depends on the defect of the folder.
        raise ModelLoadError(
            f"transformers cannot load the folder {str(folder)!r}: {one_line(error)}"
        ) from error
    return loaded.eval()


def _class(transformers: ModuleType, config: dict[str, Any]) -> Any:
    """Return the model class in a configuration, or `AutoModel` if none is named.

    Raises:
        ValueError: if the name is not a model class.
    """
    named = config.get("architectures") or [None]
    found = getattr(transformers, str(named[0]), None)
    if found is None:
        return transformers.AutoModel
    if not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)):
        raise ValueError(f"{CONFIG} must name a model class, got {preview(named[0])}")
    return found


def _faults(folder: Path, config: Any) -> Iterator[str]:
    """Yield a message for each part of a folder that would run foreign code."""
    if not isinstance(config, dict) or not isinstance(config.get("architectures", []), list | None):
        yield f"{CONFIG} is not the configuration of a model"
    if "quantization_config" in config:
        yield f"{CONFIG} describes a quantized model; give the float model"
    for key, value in _items(config, 0):
        if key.endswith(_NAMES_KERNEL) and isinstance(value, str) and "/" in value:
            yield f"{CONFIG} names the kernel {preview(value)}, which would be fetched and run"
    for name in ("adapter_config.json", "custom_generate"):
        if (folder / name).exists():
            yield f"{name} refers to another model or to code; give the module"
    for index in folder.glob("*.index.json"):
        for file in read_json(index, anything, ModelLoadError)["weight_map"].values():
            if not isinstance(file, str) or Path(file).name != file:
                yield f"{index.name} must refer to files of the folder, got {preview(file)}"
    for weights in folder.glob("*.bin"):
        # torch 2.6 takes tensor sizes from the pickle without checking the file.
        if zipfile.is_zipfile(weights):
            with weights.open("rb") as file:
                read_plain(file)


def _items(value: object, depth: int) -> Iterator[tuple[str, Any]]:
    """Yield all keys and values of nested dicts and lists."""
    if depth > MAX_DEPTH:
        raise ValueError(f"the nesting of {CONFIG} exceeds the limit of {MAX_DEPTH} levels")
    if isinstance(value, dict):
        for key, item in value.items():
            yield key, item
            yield from _items(item, depth + 1)
    elif isinstance(value, list):
        for item in value:
            yield from _items(item, depth + 1)


def read(path: Path) -> ExportedProgram | nn.Module:
    """Load the model at a path without running code from the path.

    Raises:
        ModelLoadError: if there is no complete model; the message names an alternative.
        MissingFrameworkError: if the required package is not installed.
    """
    if path.is_dir():
        return read_folder(path)
    if not path.exists():
        raise ModelLoadError(f"model file {str(path)!r} does not exist")
    if path.suffix == ".pt2":
        return storage.load_program(path)
    raise ModelLoadError(f"{str(path)!r} {_why_not(path)}")


def _why_not(path: Path) -> str:
    if path.suffix == ".safetensors":
        words = "contains weights without a model; give the nn.Module"
        config = path.with_name(CONFIG)
        return f"{words}, or the folder with {CONFIG}" if config.exists() else words
    if _is_torchscript(path):
        return (
            "is TorchScript, compiled code without a convertible graph; give the nn.Module of its "
            "source"
        )
    return (
        "is a pickle, which runs code when read; give the module itself, or save the module "
        "with torch.export.save(torch.export.export(…), 'model.pt2')"
    )


def _is_torchscript(path: Path) -> bool:
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
    return any(name.endswith("/constants.pkl") for name in names) and any(
        "/code/" in name for name in names
    )
