"""Files of Keras that name what is no part of a model, or take weights from other files."""

from __future__ import annotations

import functools
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from attacks.hostile import Attacks

from neural_mp.api.loading import load_source

KERAS = Attacks()


@functools.cache
def _net() -> Any:
    import keras

    layers = keras.layers
    net = keras.Sequential(
        [keras.Input((4,)), layers.Dense(3, activation="relu"), layers.Dense(2, name="last")]
    )
    net.compile("adam", "mse")
    return net


def _rewritten(folder: Path, edit: Callable[[dict[str, Any]], None]) -> Path:
    """A `.keras` file whose configuration was edited."""
    _net().save(folder / "right.keras")
    with (
        zipfile.ZipFile(folder / "right.keras") as right,
        zipfile.ZipFile(folder / "net.keras", "w") as wrong,
    ):
        for name in right.namelist():
            data = right.read(name)
            if name == "config.json":
                config = json.loads(data)
                edit(config)
                data = json.dumps(config).encode()
            wrong.writestr(name, data)
    return folder / "net.keras"


def _rewritten_h5(folder: Path, edit: Callable[[dict[str, Any]], None]) -> Path:
    import h5py

    path = folder / "net.h5"
    _net().save(path)
    with h5py.File(path, "r+") as file:
        config = json.loads(file.attrs["model_config"])
        edit(config)
        file.attrs["model_config"] = json.dumps(config)
    return path


def _touching(canary: Path) -> str:
    """The code of a function that makes the canary, as Keras keeps that of a Lambda layer."""
    import base64
    import marshal

    code = compile(f"open({str(canary)!r}, 'w').close()", "hostile", "exec")
    return base64.b64encode(marshal.dumps(code)).decode()


def _function(module: str, name: str) -> dict[str, Any]:
    return {"module": module, "class_name": "function", "config": name, "registered_name": name}


def _lambda(function: Any, **more: Any) -> dict[str, Any]:
    return {"class_name": "Lambda", "config": {"name": "l", "function": function, **more}}


def _gadgets(canary: Path) -> dict[str, dict[str, Any]]:
    """Layers that do more than compute."""
    code = {"code": _touching(canary), "defaults": None, "closure": None}
    marshalled = {"class_name": "__lambda__", "config": code}
    touch = {"module": "os", "class_name": "system", "config": {"command": f"touch {canary}"}}
    return {
        "Lambda with bytecode": _lambda(marshalled),
        "Lambda with bytecode of the old form": _lambda(
            [_touching(canary), None, None], function_type="lambda"
        ),
        "Lambda of os.system": _lambda(
            _function("os", "system"), arguments={"command": f"touch {canary}"}
        ),
        "Lambda of subprocess.run": _lambda(_function("subprocess", "run")),
        "Lambda of get_file": _lambda(
            _function("keras.utils", "get_file"),
            arguments={"fname": str(canary), "origin": "file:///etc/hostname"},
        ),
        "Lambda of enable_unsafe_deserialization": _lambda(
            _function("keras.config", "enable_unsafe_deserialization")
        ),
        "Lambda of load_model": _lambda(_function("keras.models", "load_model")),
        "Lambda of numpy.load": _lambda(_function("numpy", "load")),
        "class os.system": touch,
        "class subprocess.Popen": {
            "module": "subprocess",
            "class_name": "Popen",
            "config": {"args": ["touch", str(canary)]},
            "registered_name": "Popen",
        },
        "class of Keras that is no layer": {
            "module": "keras.callbacks",
            "class_name": "BackupAndRestore",
            "config": {"backup_dir": str(canary)},
        },
        "class of an inner module of Keras": {
            "module": "keras.src.saving.saving_lib",
            "class_name": "DiskIOStore",
            "config": {"root_path": str(canary)},
        },
        "TFSMLayer": {
            "module": "keras.layers",
            "class_name": "TFSMLayer",
            "config": {"filepath": "/etc", "name": "l"},
        },
        "TorchModuleWrapper": {
            "module": "keras.layers",
            "class_name": "TorchModuleWrapper",
            "config": {"module": "gASV", "name": "l"},
        },
        "StringLookup that reads a file": {
            "module": "keras.layers",
            "class_name": "StringLookup",
            "config": {"name": "l", "vocabulary": "/etc/hostname"},
        },
        "module that is no word": {"module": ["os"], "class_name": "Dense", "config": {}},
    }


_NAMES = tuple(_gadgets(Path("x")))


@KERAS.here("a .keras file with a", *_NAMES)
def _is_keras(folder: Path, canary: Path, name: str) -> None:
    layer = _gadgets(canary)[name]
    path = _rewritten(folder, lambda c: c["config"]["layers"].insert(1, layer))
    load_source(str(path), None, None)


@KERAS.here("an .h5 file with a", *_NAMES)
def _is_h5(folder: Path, canary: Path, name: str) -> None:
    layer = _gadgets(canary)[name]
    path = _rewritten_h5(folder, lambda c: c["config"]["layers"].insert(1, layer))
    load_source(str(path), None, None)


@KERAS.here("a .keras file in whose options is", "initializer", "loss", "build")
def _is_in_an_option(folder: Path, canary: Path, place: str) -> None:
    def edit(config: dict[str, Any]) -> None:
        call = _function("os", "system")
        if place == "loss":
            config["compile_config"]["loss"] = call
        elif place == "build":
            config["build_config"] = {"input_shape": call}
        else:
            config["config"]["layers"][1]["config"]["kernel_initializer"] = call

    load_source(str(_rewritten(folder, edit)), None, None)


@KERAS.here("a configuration that is", "nested", "no JSON", "huge")
def _is_absurd(folder: Path, canary: Path, what: str) -> None:
    _net().save(folder / "right.keras")
    texts = {"nested": b"[" * 100_000, "no JSON": b"\xff\x00", "huge": b" " * (65 * 2**20)}
    with (
        zipfile.ZipFile(folder / "right.keras") as right,
        zipfile.ZipFile(folder / "net.keras", "w") as wrong,
    ):
        wrong.writestr("model.weights.h5", right.read("model.weights.h5"))
        wrong.writestr("config.json", texts[what])
    load_source(str(folder / "net.keras"), None, None)


@KERAS.here("an archive with", "a name that leads out", "a bomb", "weights as a link")
def _is_an_archive(folder: Path, canary: Path, what: str) -> None:
    path = _rewritten(folder, lambda config: None)
    with zipfile.ZipFile(path, "a") as archive:
        if what == "a bomb":
            archive.writestr("assets/zeros", bytes(300 * 2**20), zipfile.ZIP_DEFLATED)
        elif what == "weights as a link":
            link = zipfile.ZipInfo("assets/link")
            link.external_attr = 0o120777 << 16
            archive.writestr(link, "/etc/hostname")
        else:
            archive.writestr(f"../../../../..{canary}", "ran")
    load_source(str(path), None, None)


def _with_weights(folder: Path, what: str, file: Any) -> None:
    """Put an array that is not in the file into the place of the weights of a layer."""
    import h5py

    names: list[str] = []
    file.visititems(lambda n, item: names.append(n) if isinstance(item, h5py.Dataset) else None)
    name = next(n for n in names if file[n].ndim == 2)
    shape = file[name].shape
    del file[name]
    secret = folder / "secret.bin"
    secret.write_bytes(np.ones(100, np.float32).tobytes())
    if what == "from another file":
        file.create_dataset(name, shape, "f4", external=[(str(secret), 0, 4 * shape[0] * shape[1])])
    elif what == "of a virtual layout":
        with h5py.File(folder / "other.h5", "w") as source:
            source["x"] = np.ones(shape, np.float32)
        layout = h5py.VirtualLayout(shape, "f4")
        layout[...] = h5py.VirtualSource(str(folder / "other.h5"), "x", shape)
        file.create_virtual_dataset(name, layout)
    elif what == "by a link to a file":
        with h5py.File(folder / "other.h5", "w") as source:
            source["x"] = np.ones(shape, np.float32)
        file[name] = h5py.ExternalLink(str(folder / "other.h5"), "x")
    elif what == "by a link inside":
        file[name] = h5py.SoftLink("/nowhere")
    elif what == "that are texts":
        file.create_dataset(name, shape, h5py.string_dtype())
    else:
        file.create_dataset(name, (2**20, 2**20), "f4", chunks=(2**10, 2**10), compression="gzip")


_WEIGHTS = (
    "from another file",
    "of a virtual layout",
    "by a link to a file",
    "by a link inside",
    "of a terabyte that is not there",
    "that are texts",
)


@KERAS.here("an .h5 file with weights", *_WEIGHTS)
def _has_weights(folder: Path, canary: Path, what: str) -> None:
    import h5py

    path = _rewritten_h5(folder, lambda config: None)
    with h5py.File(path, "r+") as file:
        _with_weights(folder, what, file)
    load_source(str(path), None, None)


@KERAS.here("a .keras file with weights", *_WEIGHTS)
def _has_weights_inside(folder: Path, canary: Path, what: str) -> None:
    import h5py

    _net().save(folder / "right.keras")
    with (
        zipfile.ZipFile(folder / "right.keras") as right,
        zipfile.ZipFile(folder / "net.keras", "w") as wrong,
    ):
        right.extract("model.weights.h5", folder)
        with h5py.File(folder / "model.weights.h5", "r+") as file:
            _with_weights(folder, what, file)
        wrong.write(folder / "model.weights.h5", "model.weights.h5")
        wrong.writestr("config.json", right.read("config.json"))
        wrong.writestr("metadata.json", right.read("metadata.json"))
    load_source(str(folder / "net.keras"), None, None)


@KERAS.here("an archive with weights as", "an array", "an array beside those of HDF5")
def _has_other_weights(folder: Path, canary: Path, what: str) -> None:
    _net().save(folder / "right.keras")
    np.savez(folder / "weights.npz", __root__=np.ones(3, np.float32))
    with (
        zipfile.ZipFile(folder / "right.keras") as right,
        zipfile.ZipFile(folder / "net.keras", "w") as wrong,
    ):
        wrong.writestr("config.json", right.read("config.json"))
        wrong.writestr("metadata.json", right.read("metadata.json"))
        wrong.write(folder / "weights.npz", "model.weights.npz")
        if what != "an array":
            wrong.writestr("model.weights.h5", right.read("model.weights.h5"))
    load_source(str(folder / "net.keras"), None, None)


@KERAS.here("a configuration that declares weights of a terabyte, in", ".keras", ".h5")
def _declares_weights(folder: Path, canary: Path, suffix: str) -> None:
    def edit(config: dict[str, Any]) -> None:
        config["config"]["layers"][1]["config"]["units"] = 2**37

    rewritten = _rewritten if suffix == ".keras" else _rewritten_h5
    load_source(str(rewritten(folder, edit)), None, None)


@KERAS.here("a harmless file", ".keras", ".h5", refused=False)
def _is_harmless(folder: Path, canary: Path, suffix: str) -> None:
    _net().save(folder / f"net{suffix}")
    load_source(str(folder / f"net{suffix}"), None, None)
