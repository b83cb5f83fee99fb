"""Hostile folders of `transformers`, and hostile files of the other kinds that models lie in."""

from __future__ import annotations

import io
import json
import pickle
import struct
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

#: (a sound folder, the code that makes the canary, the canary) → the folder made hostile.
Spoiler = Callable[[Path, str, Path], None]
#: (where the file goes without its suffix, the canary) → the file.
OtherMaker = Callable[[Path, Path], Path]

_WEIGHTS = "model.safetensors"
_PICKLED = "pytorch_model.bin"


def real_folder(folder: Path) -> Path:
    """An encoder as `save_pretrained` leaves it."""
    import transformers

    config = transformers.BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
    )
    transformers.BertModel(config).eval().save_pretrained(folder / "bert")
    return folder / "bert"


class Touch:
    """An object whose unpickling makes a file."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return Path.touch, (self.canary,)


def _configured(**changes: Any) -> Spoiler:
    def spoil(folder: Path, code: str, canary: Path) -> None:
        for name in ("evil", "modeling_evil", "configuration_evil"):
            (folder / f"{name}.py").write_text(f"{code}\nclass Evil: pass\n")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **changes}))

    return spoil


def _pickled(folder: Path, code: str, canary: Path) -> None:
    (folder / _WEIGHTS).unlink()
    torch.save({"embeddings.word_embeddings.weight": Touch(canary)}, folder / _PICKLED)


def _old_pickle(folder: Path, code: str, canary: Path) -> None:
    (folder / _WEIGHTS).unlink()
    (folder / _PICKLED).write_bytes(pickle.dumps(Touch(canary), protocol=2))


def _both(folder: Path, code: str, canary: Path) -> None:
    torch.save({"a": Touch(canary)}, folder / _PICKLED)
    _header(folder, b"not a header")


def _lying(folder: Path, code: str, canary: Path) -> None:
    """Weights that say that they are larger than their file."""
    (folder / _WEIGHTS).unlink()
    (folder / _PICKLED).write_bytes(lying_tensor({"pooler.dense.bias": torch.ones(4, 4)}))


def lying_tensor(value: Any) -> bytes:
    """A tensor of 16 values, whose pickle says that they are 2³⁰."""
    honest, lying = io.BytesIO(), io.BytesIO()
    torch.save(value, honest)
    with zipfile.ZipFile(honest) as old, zipfile.ZipFile(lying, "w") as new:
        for name in old.namelist():
            content = old.read(name)
            if name.endswith("data.pkl"):
                content = content.replace(b"K\x10", b"J\x00\x00\x00\x40")
                content = content.replace(b"K\x04K\x04", b"J\x00\x00\x00\x10K\x04")
            new.writestr(name, content)
    return lying.getvalue()


def _header(folder: Path, header: bytes) -> None:
    (folder / _WEIGHTS).write_bytes(struct.pack("<Q", len(header)) + header)


def _safetensors(entry: dict[str, Any]) -> Spoiler:
    def spoil(folder: Path, code: str, canary: Path) -> None:
        _header(folder, json.dumps({"pooler.dense.bias": entry}).encode())

    return spoil


def _endless_header(folder: Path, code: str, canary: Path) -> None:
    (folder / _WEIGHTS).write_bytes(struct.pack("<Q", 2**62) + b"{}")


def _index(folder: Path, code: str, canary: Path) -> None:
    (folder / _WEIGHTS).unlink()
    torch.save({"a": Touch(canary)}, folder.parent / "outside.bin")
    index = {"metadata": {}, "weight_map": {"pooler.dense.bias": "../outside.bin"}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    (folder / "pytorch_model-00001-of-00001.bin").write_bytes(b"")


def _generates(folder: Path, code: str, canary: Path) -> None:
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(
        f"{code}\ndef generate(*a, **k): pass\n"
    )


_MAP = {name: "evil.Evil" for name in ("AutoConfig", "AutoModel", "AutoModelForMaskedLM")}

#: What is spoilt in a folder → how.
FOLDERS: dict[str, Spoiler] = {
    "code of its own": _configured(auto_map=_MAP, architectures=["Evil"], model_type="evil"),
    "code of its own for a known model": _configured(auto_map=_MAP),
    "class that is a module": _configured(architectures=["os.system"]),
    "class that is a function": _configured(architectures=["is_torch_available"]),
    "class that is no model": _configured(architectures=["BertConfig"]),
    "class that is a list": _configured(architectures=[["BertModel"]]),
    "kernel from elsewhere": _configured(attn_implementation="evil/kernel"),
    "private kernel from elsewhere": _configured(_attn_implementation="evil/kernel"),
    "quantized by code": _configured(quantization_config={"quant_method": "hqq", "evil": "x"}),
    "pickled weights": _pickled,
    "weights that are a pickle": _old_pickle,
    "pickled weights beside others": _both,
    "weights that lie": _lying,
    "weights past the file": _safetensors(
        {"dtype": "F32", "shape": [2**20], "data_offsets": [0, 2**22]}
    ),
    "weights of a negative size": _safetensors(
        {"dtype": "F32", "shape": [-4], "data_offsets": [16, 0]}
    ),
    "header without end": _endless_header,
    "index that leads out": _index,
    "code that generates": _generates,
}


def _torchscript(path: Path, canary: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.script(nn.Linear(2, 2)).save(str(path.with_suffix(".pt")))
    return path.with_suffix(".pt")


def _plain_pickle(suffix: str) -> OtherMaker:
    def make(path: Path, canary: Path) -> Path:
        path.with_suffix(suffix).write_bytes(pickle.dumps(Touch(canary), protocol=2))
        return path.with_suffix(suffix)

    return make


def _saved_by_torch(suffix: str) -> OtherMaker:
    def make(path: Path, canary: Path) -> Path:
        torch.save(Touch(canary), path.with_suffix(suffix))
        return path.with_suffix(suffix)

    return make


def _alone(path: Path, canary: Path) -> Path:
    file = path.with_suffix(".safetensors")
    file.write_bytes(struct.pack("<Q", 2**62) + b"{}")
    return file


#: What lies at a path → how it is made.
OTHERS: dict[str, OtherMaker] = {
    "TorchScript": _torchscript,
    "pickle": _plain_pickle(".pt"),
    "pickle called a program": _plain_pickle(".pt2"),
    "pickle of weights": _plain_pickle(".pth"),
    "torch.save": _saved_by_torch(".pt"),
    "torch.save called a program": _saved_by_torch(".pt2"),
    "safetensors alone": _alone,
}
