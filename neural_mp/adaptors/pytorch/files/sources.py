"""Model files and folders on disk, read without running code from them."""

from __future__ import annotations

import zipfile
from pathlib import Path

from torch import nn
from torch.export import ExportedProgram

from neural_mp.adaptors.pytorch.decoders.transformers_folder import CONFIG, read_folder
from neural_mp.adaptors.pytorch.files import storage
from neural_mp.errors import ModelLoadError

#: Suffixes of files that PyTorch writes, besides weights alone.
_OF_TORCH = (".pt2", ".pt", ".pth", ".bin", ".ckpt")


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
        reason = "contains weights without a model; give the nn.Module"
        config = path.with_name(CONFIG)
        return f"{reason}, or the folder with {CONFIG}" if config.exists() else reason
    if _is_torchscript(path):
        return (
            "is TorchScript, compiled code without a convertible graph; give the nn.Module of its "
            "source"
        )
    if path.suffix not in _OF_TORCH:
        return (
            f"is not a file of PyTorch, which end in {', '.join(_OF_TORCH)}; leave out the "
            f"framework to detect it from the file"
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
