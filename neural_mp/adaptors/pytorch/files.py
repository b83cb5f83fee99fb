"""What lies at a path: an exported program, a folder of `transformers`, or what cannot be taken."""

from __future__ import annotations

import importlib
import json
import zipfile
from pathlib import Path
from typing import Any

from torch import nn
from torch.export import ExportedProgram

from neural_mp.adaptors.pytorch import storage
from neural_mp.errors import MissingFrameworkError, ModelLoadError, in_one_line

#: What a folder of `transformers` says its model is made of.
CONFIG = "config.json"
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")


def read(path: Path) -> ExportedProgram | nn.Module:
    """The model at a path; code that lies there is not run.

    Raises:
        ModelLoadError: there is none, or only a part of one; the message says what to give instead.
        MissingFrameworkError: the package that reads it is not installed.
    """
    if path.is_dir():
        return _from_folder(path)
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


def _from_folder(folder: Path) -> nn.Module:
    """A model of `transformers`, in the class that its configuration names."""
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
        named = json.loads((folder / CONFIG).read_text(encoding="utf-8")).get("architectures")
        kind = getattr(transformers, named[0], None) if named else None
        loaded: nn.Module = (kind or transformers.AutoModel).from_pretrained(
            folder, local_files_only=True
        )
    except Exception as error:
        # What it raises depends on what is wrong with the folder.
        raise ModelLoadError(
            f"transformers cannot load the folder {str(folder)!r}: {in_one_line(error)}"
        ) from error
    return loaded.eval()
