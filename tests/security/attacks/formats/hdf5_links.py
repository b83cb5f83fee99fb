"""HDF5 that takes arrays from elsewhere or has no end, alone and within archives of Keras."""

from __future__ import annotations

import functools
import io
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from attacks.formats.scratch import written
from attacks.hostile import Attacks

from neural_mp.api.loading import load_source

HDF5_LINKS = Attacks("HDF5 links")

#: An attack changes the opened file; it is given the folder and the name of a weight.
Change = Callable[[Any, Path, str], None]
_CHANGES: dict[str, Change] = {}


def _change(name: str) -> Callable[[Change], Change]:
    def add(change: Change) -> Change:
        _CHANGES[name] = change
        return change

    return add


@functools.cache
def _file(suffix: str) -> bytes:
    import keras

    net = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(3, name="first"), keras.layers.Dense(2)]
    )
    return written(f"net{suffix}", net.save)


def _other_file(folder: Path, name: str, shape: tuple[int, ...]) -> Path:
    """Write another HDF5 file, whose array an attacker wants to have read."""
    import h5py

    path = folder / "other.h5"
    with h5py.File(path, "w") as other:
        other[name] = np.ones(shape, np.float32)
    return path


def _without(file: Any, name: str) -> tuple[int, ...]:
    """Delete an array, and return its shape."""
    shape: tuple[int, ...] = file[name].shape
    del file[name]
    return shape


@_change("an external link to an array")
def _links_array(file: Any, folder: Path, name: str) -> None:
    import h5py

    other = _other_file(folder, "x", _without(file, name))
    file[name] = h5py.ExternalLink(str(other), "/x")


@_change("an external link to a group")
def _links_group(file: Any, folder: Path, name: str) -> None:
    import h5py

    group, _, last = name.rpartition("/")
    other = _other_file(folder, f"g/{last}", file[name].shape)
    del file[group]
    file[group] = h5py.ExternalLink(str(other), "/g")


@_change("an external link of a relative name")
def _links_neighbour(file: Any, folder: Path, name: str) -> None:
    import h5py

    _other_file(folder, "x", _without(file, name))
    file[name] = h5py.ExternalLink("other.h5", "/x")


@_change("an external link to itself")
def _links_itself(file: Any, folder: Path, name: str) -> None:
    import h5py

    _without(file, name)
    file[name] = h5py.ExternalLink(Path(file.filename).name, name)


@_change("an external link to a pipe")
def _links_pipe(file: Any, folder: Path, name: str) -> None:
    import os

    import h5py

    _without(file, name)
    os.mkfifo(folder / "pipe")
    file[name] = h5py.ExternalLink(str(folder / "pipe"), "/x")


@_change("a soft link to another weight")
def _links_softly(file: Any, folder: Path, name: str) -> None:
    import h5py

    _without(file, name)
    names = _arrays(file)
    file[name] = h5py.SoftLink(f"/{names[0]}")


@_change("a soft link to itself")
def _links_own_name(file: Any, folder: Path, name: str) -> None:
    import h5py

    _without(file, name)
    file[name] = h5py.SoftLink(f"/{name}")


@_change("a soft link to nothing")
def _links_nothing(file: Any, folder: Path, name: str) -> None:
    import h5py

    _without(file, name)
    file[name] = h5py.SoftLink("/nowhere")


@_change("a group within itself")
def _has_cycle(file: Any, folder: Path, name: str) -> None:
    group = file[name.rpartition("/")[0]]
    group["again"] = group


@_change("the root within a group")
def _has_root(file: Any, folder: Path, name: str) -> None:
    file[f"{name.rpartition('/')[0]}/root"] = file["/"]


@_change("two names of an array")
def _has_two_names(file: Any, folder: Path, name: str) -> None:
    file[f"{name}_again"] = file[name]


@_change("an array in another file")
def _is_external(file: Any, folder: Path, name: str) -> None:
    shape = _without(file, name)
    (folder / "secret.bin").write_bytes(np.ones(100, np.float32).tobytes())
    place = (str(folder / "secret.bin"), 0, 4 * int(np.prod(shape)))
    file.create_dataset(name, shape, "f4", external=[place])


@_change("an array in a device")
def _is_device(file: Any, folder: Path, name: str) -> None:
    shape = _without(file, name)
    file.create_dataset(name, shape, "f4", external=[("/dev/zero", 0, 4 * int(np.prod(shape)))])


@_change("an array of parts of other files")
def _is_virtual(file: Any, folder: Path, name: str) -> None:
    import h5py

    shape = _without(file, name)
    layout = h5py.VirtualLayout(shape, "f4")
    layout[...] = h5py.VirtualSource(str(_other_file(folder, "x", shape)), "x", shape)
    file.create_virtual_dataset(name, layout)


@_change("an array of parts of itself")
def _is_virtual_of_itself(file: Any, folder: Path, name: str) -> None:
    import h5py

    shape = _without(file, name)
    layout = h5py.VirtualLayout(shape, "f4")
    layout[...] = h5py.VirtualSource(".", name, shape)
    file.create_virtual_dataset(name, layout)


@_change("a type that is stored by name")
def _has_named_type(file: Any, folder: Path, name: str) -> None:
    file["type"] = np.dtype("f4")


@_change("an array of references")
def _has_references(file: Any, folder: Path, name: str) -> None:
    import h5py

    _without(file, name)
    file.create_dataset(name, (4, 3), h5py.ref_dtype)


@_change("an array of regions")
def _has_regions(file: Any, folder: Path, name: str) -> None:
    import h5py

    _without(file, name)
    file.create_dataset(name, (4, 3), h5py.regionref_dtype)


@_change("an array of lists")
def _has_lists(file: Any, folder: Path, name: str) -> None:
    import h5py

    _without(file, name)
    file.create_dataset(name, (4, 3), h5py.vlen_dtype(np.float32))


@_change("an array of terabytes that is not there")
def _is_huge(file: Any, folder: Path, name: str) -> None:
    _without(file, name)
    file.create_dataset(name, (2**20, 2**20), "f4", chunks=(2**10, 2**10))


@_change("zeros that are packed 1000-fold")
def _is_packed(file: Any, folder: Path, name: str) -> None:
    _without(file, name)
    file.create_dataset(name, data=np.zeros((2**12, 2**11), np.float32), compression=9)


@_change("an array of another shape")
def _has_another_shape(file: Any, folder: Path, name: str) -> None:
    _without(file, name)
    file[name] = np.ones((7, 5), np.float32)


@_change("a filter that is a plug-in")
def _has_filter(file: Any, folder: Path, name: str) -> None:
    import h5py

    shape = _without(file, name)
    space = h5py.h5s.create_simple(shape)
    options = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    options.set_chunk(shape)
    options.set_filter(h5py.h5z.FILTER_DEFLATE, h5py.h5z.FLAG_OPTIONAL, (9,))
    kind = h5py.h5t.IEEE_F32LE
    dataset = h5py.h5d.create(file.id, name.encode(), kind, space, options)
    dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, np.ones(shape, np.float32))


@_change("groups 3,000 deep")
def _is_deep(file: Any, folder: Path, name: str) -> None:
    group = file
    for _ in range(3_000):
        group = group.create_group("g")


@_change("20,000 groups")
def _is_wide(file: Any, folder: Path, name: str) -> None:
    for number in range(20_000):
        file.create_group(f"many/{number}")


@_change("no weights")
def _has_no_weights(file: Any, folder: Path, name: str) -> None:
    for array in _arrays(file):
        del file[array]


#: Changes after which a file has the same weights, or is wrong in a way that Keras reports.
_HARMLESS = ("a filter that is a plug-in", "groups 3,000 deep", "20,000 groups")


def _arrays(file: Any) -> list[str]:
    import h5py

    names: list[str] = []
    file.visititems(lambda n, item: names.append(n) if isinstance(item, h5py.Dataset) else None)
    return names


def _changed(path: Path, change: str, folder: Path) -> None:
    """Change the HDF5 file at a path."""
    import h5py

    with h5py.File(path, "r+") as file:
        name = next(n for n in _arrays(file) if file[n].ndim == 2)
        _CHANGES[change](file, folder, name)


def _is_h5(folder: Path, canary: Path, change: str) -> None:
    path = folder / "net.h5"
    path.write_bytes(_file(".h5"))
    _changed(path, change, folder)
    load_source(str(path), None, None)


def _is_keras(folder: Path, canary: Path, change: str) -> None:
    weights = folder / "model.weights.h5"
    with (
        zipfile.ZipFile(io.BytesIO(_file(".keras"))) as right,
        zipfile.ZipFile(folder / "net.keras", "w") as wrong,
    ):
        weights.write_bytes(right.read(weights.name))
        _changed(weights, change, folder)
        for name in right.namelist():
            wrong.writestr(name, weights.read_bytes() if name == weights.name else right.read(name))
    load_source(str(folder / "net.keras"), None, None)


for _kind, _play in {"an .h5 file with": _is_h5, "a .keras file with": _is_keras}.items():
    _hostile = [name for name in _CHANGES if name not in _HARMLESS]
    HDF5_LINKS.here(_kind, *_hostile)(_play)
    HDF5_LINKS.here(_kind, *_HARMLESS, refused=None)(_play)

FAMILY = HDF5_LINKS.as_family()
