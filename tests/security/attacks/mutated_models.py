"""Saved models of the three frameworks with one thing changed, in a key or in bytes."""

from __future__ import annotations

import gzip
import hashlib
import json
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from attacks.mutants import broken, mutants

import neural_mp
from neural_mp import MixedPrecision
from neural_mp.common import DataLoader
from neural_mp.core.criterion import ExitPolicy
from neural_mp.util.pytree import tree_leaves

_MANIFEST, _PLAN, _RECORD, _PAGE = "neural_mp.json", "plan.yaml", "run.json.gz", "report.html"
_DETAILS = ("details.json", "neural_mp_onnx.json", "neural_mp_openvino.json")
_SHAPE = (4, 1, 8, 8)


def prepare_pytorch(folder: Path) -> None:
    """A net of two layers."""
    _save(_torch_net(), folder, _SHAPE)


def prepare_onnx(folder: Path) -> None:
    """The same net as an ONNX file."""
    from attacks.attacked_nets import as_onnx

    _save(as_onnx(_torch_net()), folder, _SHAPE)


def prepare_openvino(folder: Path) -> None:
    """The same net in OpenVINO."""
    import onnx
    from attacks.attacked_nets import as_onnx

    from neural_mp.adaptors.openvino.runtime import ov

    onnx.save(as_onnx(_torch_net()), folder / "net.onnx")
    _save(ov.convert_model(folder / "net.onnx"), folder, _SHAPE)


def prepare_tensorflow(folder: Path) -> None:
    """A Keras net of two layers."""
    import keras

    keras.utils.set_random_seed(0)
    parts = [
        keras.layers.Conv2D(4, 3, activation="relu"),
        keras.layers.Flatten(),
        keras.layers.Dense(10),
    ]
    net = keras.Sequential([keras.Input((8, 8, 1)), *parts])
    _save(net, folder, (4, 8, 8, 1))


def _torch_net() -> Any:
    import torch
    from torch import nn

    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10)).eval()


def _save(net: Any, folder: Path, shape: tuple[int, ...]) -> None:
    data = np.random.default_rng(0).random(shape).astype(np.float32)
    result = MixedPrecision(
        model=net,
        precisions="int8",
        calib_dataloader=DataLoader([(sample, 0) for sample in data], batch_size=len(data)),
        exit_policy=ExitPolicy(performance_only=True),
        workspace=folder / "workspace",
    ).fit()
    result.save(folder / "saved")
    np.save(folder / "inputs.npy", data)


@dataclass(frozen=True)
class _Saved:
    """A saved model in memory."""

    files: dict[str, bytes]
    inputs: Any

    @classmethod
    def read(cls, folder: Path) -> _Saved:
        home = folder / "saved"
        files = {
            file.relative_to(home).as_posix(): file.read_bytes()
            for file in sorted(home.rglob("*"))
            if file.is_file()
        }
        return cls(files, np.load(folder / "inputs.npy"))

    @property
    def details(self) -> str:
        return next(name for name in _DETAILS if name in self.files)

    @property
    def models(self) -> list[str]:
        metadata = {_MANIFEST, _PLAN, _RECORD, _PAGE, self.details}
        return [name for name in self.files if name not in metadata]


def attacks(
    folder: Path, scratch: Path, seed: int, count: int
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Name and call of each attack."""
    saved = _Saved.read(folder)
    drawn = random.Random(f"models {seed}")
    trees = {
        saved.details: mutants(json.loads(saved.files[saved.details]), f"details {seed}", count),
        _MANIFEST: mutants(json.loads(saved.files[_MANIFEST]), f"manifest {seed}", count),
        _PLAN: mutants(yaml.safe_load(saved.files[_PLAN]), f"plan {seed}", count),
        _RECORD: mutants(json.loads(gzip.decompress(saved.files[_RECORD])), f"run {seed}", count),
    }
    names = (saved.details, _MANIFEST, _PLAN, _RECORD, "files")
    for _ in range(count):
        name = drawn.choices(names, (35, 20, 10, 10, 25))[0]
        if name == "files":
            case, files = _changed_files(saved, drawn)
            sound = all(files.get(model) == saved.files[model] for model in saved.models)
        else:
            case, tree = next(trees[name])
            files, sound = {**saved.files, name: _written(name, tree)}, True
            case = f"{name}: {case}"
        # Whoever damages a file on purpose writes its digest anew.
        if name != _MANIFEST and drawn.random() < 0.9:
            files = _signed(files)
            case += ", signed"
        yield case, _call(scratch, saved, files, sound, alike=sound and name != saved.details)


def _written(name: str, tree: Any) -> bytes:
    if name == _PLAN:
        return str(yaml.safe_dump(tree, sort_keys=False)).encode()
    text = json.dumps(tree).encode()
    return gzip.compress(text) if name == _RECORD else text


def _changed_files(saved: _Saved, drawn: random.Random) -> tuple[str, dict[str, bytes]]:
    files = dict(saved.files)
    name = drawn.choice([*saved.models, *saved.models, *files])
    kind = drawn.choice(("bytes", "bytes", "bytes", "missing", "swapped"))
    if kind == "bytes":
        kind, files[name] = broken(files[name], drawn)
    elif kind == "missing":
        del files[name]
    else:
        second = drawn.choice(sorted(files))
        files[name], files[second] = files[second], files[name]
        kind = f"swapped with {second}"
    return f"{name}: {kind}", files


def _signed(files: dict[str, bytes]) -> dict[str, bytes]:
    """The files with their own digests in the manifest, where it can be read."""
    try:
        manifest = json.loads(files[_MANIFEST])
        contents = {name: data for name, data in files.items() if name != _MANIFEST}
        manifest["files"] = {n: hashlib.sha256(data).hexdigest() for n, data in contents.items()}
    except (KeyError, ValueError, TypeError):
        return files
    return {**files, _MANIFEST: json.dumps(manifest).encode()}


def _call(
    scratch: Path, saved: _Saved, files: dict[str, bytes], sound: bool, alike: bool
) -> Callable[[], object]:
    """Load the model and run it.

    Args:
        scratch: where to write it.
        saved: as it was.
        files: as they are now.
        sound: whether the weights are as they were, so that outputs must be finite.
        alike: whether the outputs have the form that they had.
    """

    def call() -> None:
        home = scratch / "model"
        shutil.rmtree(home, ignore_errors=True)
        for name, data in files.items():
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            (home / name).write_bytes(data)
        result = neural_mp.load(home)
        outputs = [leaf for leaf in tree_leaves(result(saved.inputs)) if leaf is not None]
        if alike:
            shapes = [np.shape(output) for output in outputs]
            assert shapes == [(len(saved.inputs), 10)], f"the outputs are of shapes {shapes}"
        if sound:
            assert all(np.isfinite(np.asarray(o)).all() for o in outputs), "outputs not finite"

    return call
