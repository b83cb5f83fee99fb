"""Hostile archives of PyTorch: each a real program, with what an attacker adds or changes."""

from __future__ import annotations

import io
import json
import pickle
import shutil
import subprocess
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from attacks.hostile_programs import PROGRAMS, Edit
from attacks.hostile_transformers import Touch, lying_tensor
from torch import nn

#: Case → (the real file, where the hostile one goes, the canary).
Maker = Callable[[Path, Path, Path], None]
_ROOT = "net"


class Net(nn.Module):
    """A net with a parameter, a buffer, a constant and a size of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("scale", torch.ones(3))
        self.shift = torch.zeros(3)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.layer(x.reshape(x.shape[0] * 1, 4)) * self.scale + self.shift
        return {"scores": torch.cat([y, y]), "best": y.argmax(1)}


def real_file(folder: Path) -> Path:
    """A program with a free batch, as its owner saves it."""
    path = folder / f"{_ROOT}.pt2"
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(Net().eval(), (torch.ones(4, 4),), dynamic_shapes=({0: batch},))
    torch.export.save(program, path)
    return path


def _carries(pickled: object) -> bytes:
    return pickle.dumps(pickled, protocol=2)


def rewritten(
    source: Path,
    target: Path,
    change: Callable[[str, bytes], bytes] = lambda _, content: content,
    added: dict[str, bytes] | None = None,
    method: int = zipfile.ZIP_STORED,
) -> None:
    """Copy an archive with members changed and added (below its folder)."""
    with (
        warnings.catch_warnings(),
        zipfile.ZipFile(source) as old,
        zipfile.ZipFile(target, "w", method) as new,
    ):
        warnings.simplefilter("ignore")  # of duplicates
        root = old.namelist()[0].partition("/")[0]
        for name in old.namelist():
            new.writestr(name, change(name.partition("/")[2], old.read(name)))
        for name, content in (added or {}).items():
            new.writestr(f"{root}/{name}" if not name.startswith("!") else name[1:], content)


def _program(edit: Edit) -> Maker:
    def make(source: Path, target: Path, canary: Path) -> None:
        code = f"__import__('pathlib').Path({str(canary)!r}).touch()"

        def change(name: str, content: bytes) -> bytes:
            if name != "models/model.json":
                return content
            program = json.loads(content)
            changed = edit(program, code)
            return (changed if isinstance(changed, str) else json.dumps(program)).encode()

        rewritten(source, target, change)

    return make


def _with(added: Callable[[Path], dict[str, bytes]]) -> Maker:
    return lambda source, target, canary: rewritten(source, target, added=added(canary))


def _replaced(member: str, content: Callable[[Path], bytes]) -> Maker:
    def make(source: Path, target: Path, canary: Path) -> None:
        rewritten(source, target, lambda name, old: content(canary) if name == member else old)

    return make


def _payload(member: str, change: Callable[[dict[str, Any]], None]) -> Maker:
    """The list of tensors of a kind, changed."""

    def changed(name: str, content: bytes) -> bytes:
        if name != member:
            return content
        listed = json.loads(content)
        for where in listed["config"].values():
            change(where)
        return json.dumps(listed).encode()

    return lambda source, target, _: rewritten(source, target, changed)


def _pickled_weight(member: str, file: str, prefix: str) -> Maker:
    """A tensor that is said to be pickled, and whose pickle makes a file."""

    def make(source: Path, target: Path, canary: Path) -> None:
        def change(name: str, content: bytes) -> bytes:
            if name != member:
                return content
            listed = json.loads(content)
            for where in listed["config"].values():
                where.update(use_pickle=True, path_name=prefix)
            return json.dumps(listed).encode()

        rewritten(source, target, change, {file: _carries(Touch(canary))})

    return make


def library(canary: Path) -> bytes:
    """A shared library that makes a file when it is opened, where there is a compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return b"\x7fELF" + bytes(100)
    code = f"""#include <stdio.h>
__attribute__((constructor)) static void open_it(void) {{
  FILE *f = fopen("{canary}", "w"); if (f) fclose(f); }}"""
    path = canary.with_suffix(".so")
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-x", "c", "-", "-o", str(path)],
        input=code.encode(),
        check=True,
        capture_output=True,
    )
    content = path.read_bytes()
    path.unlink()
    return content


def _library_at(*names: str) -> Maker:
    def added(canary: Path) -> dict[str, bytes]:
        described = {"AOTI_DEVICE_KEY": "cpu"}
        metadata = {
            "data/aotinductor/model/w_metadata.json": json.dumps(described).encode(),
            "data/aotinductor/model/w.wrapper_metadata.json": json.dumps(described).encode(),
        }
        return {**(metadata if "aotinductor" in names[0] else {})} | {
            name: library(canary) for name in names
        }

    return _with(added)


def _prepended(source: Path, target: Path, canary: Path) -> None:
    """A whole hostile archive, with the real one behind it."""
    hostile = target.with_suffix(".first")
    CASES["expression in a size"](source, hostile, canary)
    target.write_bytes(hostile.read_bytes() + source.read_bytes())
    hostile.unlink()


def _doubled(source: Path, target: Path, canary: Path) -> None:
    """The program twice: first the hostile one, then the real one."""
    hostile = target.with_suffix(".first")
    CASES["expression in a size"](source, hostile, canary)
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(hostile) as bad:
        name = next(n for n in old.namelist() if n.endswith("models/model.json"))
        rewritten(hostile, target, added={"!" + name: old.read(name)})
        assert bad.read(name)
    hostile.unlink()


def _other_header(source: Path, target: Path, _: Path) -> None:
    """A member called one thing at its place and another in the directory."""
    content = bytearray(source.read_bytes())
    start = content.index(b"models/model.json")
    content[start : start + 6] = b"modelz"
    target.write_bytes(content)


def _lying_record(source: Path, target: Path, canary: Path) -> None:
    """Example inputs whose pickle says they are larger than the file holds."""
    lying = lying_tensor(((torch.ones(4, 4),), {}))
    _replaced(_INPUTS, lambda _: lying)(source, target, canary)


def _bomb(source: Path, target: Path, _: Path) -> None:
    added = {"extra/zeros": bytes(2**28)}
    rewritten(source, target, added=added, method=zipfile.ZIP_DEFLATED)


def _set(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda where: where["tensor_meta"].update(changes)


_WEIGHTS = "data/weights/model_weights_config.json"
_CONSTANTS = "data/constants/model_constants_config.json"
_INPUTS = "data/sample_inputs/model.pt"
_HUGE = [{"as_int": 2**40}]

#: Case → how its file is made.
CASES: dict[str, Maker] = {
    **{name: _program(edit) for name, edit in PROGRAMS.items()},
    "library of AOTInductor": _library_at(
        "data/aotinductor/model/w.so", "data/aotinductor/model/w.wrapper.so"
    ),
    "library in extra files": _library_at("extra/libm.so.6"),
    "library among weights": _library_at("data/weights/weight_9.so"),
    "library under an innocent name": _library_at("extra/notes.txt"),
    "pickle as example inputs": _replaced(_INPUTS, lambda canary: _carries(Touch(canary))),
    "pickle as weights of old": _with(lambda c: {"data/weights/model.pt": _carries(Touch(c))}),
    "pickle as constants of old": _with(lambda c: {"data/constants/model.pt": _carries(Touch(c))}),
    "weight said to be pickled": _pickled_weight(_WEIGHTS, "data/weights/weight_8", "weight_8"),
    "constant said to be pickled": _pickled_weight(
        _CONSTANTS, "data/constants/tensor_8", "tensor_8"
    ),
    "opaque object": _pickled_weight(_CONSTANTS, "data/constants/opaque_obj_0", "opaque_obj_0"),
    "custom object": _pickled_weight(_CONSTANTS, "data/constants/custom_obj_0", "custom_obj_0"),
    "torch.save with an object": _replaced(_INPUTS, lambda canary: _saved(Touch(canary))),
    "program twice": _doubled,
    "archive before the archive": _prepended,
    "local header of another name": _other_header,
    "bomb": _bomb,
    "member that leads out": _with(lambda _: {"../../../../tmp/evil": b"1"}),
    "absolute member": _with(lambda _: {"!/etc/evil": b"1"}),
    "huge size": _payload(_WEIGHTS, _set(sizes=_HUGE * 2, strides=[{"as_int": 0}] * 2)),
    "size past the values": _payload(_WEIGHTS, _set(sizes=_HUGE, strides=[{"as_int": 1}])),
    "offset past the values": _payload(_WEIGHTS, _set(storage_offset={"as_int": 2**40})),
    "negative stride": _payload(_WEIGHTS, _set(strides=[{"as_int": -(2**40)}] * 2)),
    "negative offset": _payload(_CONSTANTS, _set(storage_offset={"as_int": -4096})),
    "weight that leads out": _payload(
        _WEIGHTS, lambda where: where.update(path_name="../../../../../etc/passwd")
    ),
    "example inputs that lie": _lying_record,
}


def _saved(value: Any) -> bytes:
    written = io.BytesIO()
    torch.save(((value,), {}), written)
    return written.getvalue()
