"""What lies at a path: an exported program, a folder of `transformers`, or what cannot be taken."""

from __future__ import annotations

import zipfile
from pathlib import Path

from torch import nn
from torch.export import ExportedProgram

from neural_mp.adaptors.pytorch import storage
from neural_mp.adaptors.pytorch.transformers_folder import CONFIG, read_folder
from neural_mp.errors import ModelLoadError


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
