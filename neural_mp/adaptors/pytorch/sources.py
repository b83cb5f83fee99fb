"""Folders of `transformers`: a model of a class that the package has, and weights that are data."""

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

#: What a folder of `transformers` says its model is made of.
CONFIG = "config.json"
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
#: Where a configuration may name a kernel, which is fetched and run.
_NAMES_KERNEL = "implementation"


def read_folder(folder: Path) -> nn.Module:
    """A model of `transformers`, in the class that its configuration names.

    Raises:
        ModelLoadError: the folder has no weights, asks for code that is not the package's own, or
            cannot be loaded.
        MissingFrameworkError: the package is not installed.
    """
    if not any(True for pattern in _WEIGHTS for _ in folder.glob(pattern)):
        raise ModelLoadError(
            f"the folder {str(folder)!r} holds {CONFIG} but no weights ({', '.join(_WEIGHTS)})"
        )
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError:
        raise MissingFrameworkError(
            f"the folder {str(folder)!r} is a model of the package transformers, which is not "
            f"installed; install it with: pip install transformers"
        ) from None
    try:
        config = read_json(folder / CONFIG, anything, ModelLoadError)
        for fault in _faults(folder, config):
            raise ValueError(fault)
        # Where it names code of its own (auto_map), that is not run.
        loaded: nn.Module = _class(transformers, config).from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, weights_only=True
        )
    except Exception as error:
        # What it raises depends on what is wrong with the folder.
        raise ModelLoadError(
            f"transformers cannot load the folder {str(folder)!r}: {one_line(error)}"
        ) from error
    return loaded.eval()


def _class(transformers: ModuleType, config: dict[str, Any]) -> Any:
    """The class of models that a configuration names; the one for its kind, where it names none.

    Raises:
        ValueError: what it names is no class of models.
    """
    named = config.get("architectures") or [None]
    found = getattr(transformers, str(named[0]), None)
    if found is None:
        return transformers.AutoModel
    if not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)):
        raise ValueError(f"{CONFIG} names {preview(named[0])}, which is no class of models")
    return found


def _faults(folder: Path, config: Any) -> Iterator[str]:
    """What in a folder would have code run that the package does not have itself, in words."""
    if not isinstance(config, dict) or not isinstance(config.get("architectures", []), list | None):
        yield f"{CONFIG} does not describe a model"
    if "quantization_config" in config:
        yield f"{CONFIG} describes a quantized model; give the one it was made from"
    for key, value in _items(config, 0):
        if key.endswith(_NAMES_KERNEL) and isinstance(value, str) and "/" in value:
            yield f"{CONFIG} asks for the kernel {preview(value)}, which would be fetched and run"
    for name in ("adapter_config.json", "custom_generate"):
        if (folder / name).exists():
            yield f"it holds {name}, which leads to another model or to code; give the module"
    for index in folder.glob("*.index.json"):
        for file in read_json(index, anything, ModelLoadError)["weight_map"].values():
            if not isinstance(file, str) or Path(file).name != file:
                yield f"{index.name} leads out of the folder, to {preview(file)}"
    for weights in folder.glob("*.bin"):
        # The reader of torch 2.6 takes sizes from the pickle, whatever the file holds.
        if zipfile.is_zipfile(weights):
            with weights.open("rb") as file:
                read_plain(file)


def _items(value: object, depth: int) -> Iterator[tuple[str, Any]]:
    """All keys and values of nested dicts and lists."""
    if depth > MAX_DEPTH:
        raise ValueError(f"{CONFIG} is nested too deeply")
    if isinstance(value, dict):
        for key, item in value.items():
            yield key, item
            yield from _items(item, depth + 1)
    elif isinstance(value, list):
        for item in value:
            yield from _items(item, depth + 1)


def read(path: Path) -> ExportedProgram | nn.Module:
    """The model at a path; code that lies there is not run.

    Raises:
        ModelLoadError: there is none, or only a part of one; the message says what to give instead.
        MissingFrameworkError: the package that reads it is not installed.
    """
    if path.is_dir():
        return read_folder(path)
    if not path.exists():
        raise ModelLoadError(f"there is no model file {str(path)!r}")
    if path.suffix == ".pt2":
        return storage.load_program(path)
    raise ModelLoadError(f"{str(path)!r} {_why_not(path)}")


def _why_not(path: Path) -> str:
    if path.suffix == ".safetensors":
        words = "holds weights alone, without the model they belong to; give the nn.Module"
        beside = path.with_name(CONFIG)
        return f"{words}, or the folder with {CONFIG}" if beside.exists() else words
    if _is_torchscript(path):
        return (
            "is TorchScript, compiled code that cannot be taken apart; give the nn.Module it was "
            "made from"
        )
    return (
        "is a pickle, and reading a pickle runs code from it; give the module itself, or save it "
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
