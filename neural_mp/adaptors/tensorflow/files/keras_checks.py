"""Checks of Keras files before Keras reads them.

Keras files name the classes and functions that a model consists of. Allowed are those of Keras that
compute, and those that the user's code has registered.
"""

from __future__ import annotations

import inspect
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from functools import cache, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from neural_mp.errors import ModelLoadError, one_line
from neural_mp.io.archives import open_checked_archive
from neural_mp.io.limits import (
    MAX_COMPRESSION_RATIO,
    MAX_FILE_BYTES,
    MAX_HDF5_OBJECTS,
    RATIO_EXEMPT_ARRAY_BYTES,
    RATIO_EXEMPT_MODEL_BYTES,
    count_excess_bytes,
)
from neural_mp.io.readers import load_json

if TYPE_CHECKING:
    import h5py


def check_hdf5(file: Path | BinaryIO, shown: str) -> tuple[dict[str, Any], int]:
    """Check that all arrays of a file, called `shown` in errors, are stored in the file itself.

    Returns:
        The attributes of the root group, and the total size of all arrays in memory.

    Raises:
        ModelLoadError: an array refers to another file, is larger than the data present, or is not
            numeric; or the file is damaged.
    """
    import h5py

    try:
        with h5py.File(file, "r") as opened:
            arrays: list[Any] = []
            for fault in _faults_of_hdf5(opened, arrays):
                raise ModelLoadError(f"{shown} is refused: {fault}. Save the model again")
            return dict(opened.attrs), sum(array.nbytes for array in arrays)
    except (OSError, ValueError, RuntimeError, KeyError, TypeError, RecursionError) as error:
        raise ModelLoadError(f"{shown} is not an HDF5 file, or damaged: {error}") from error


def _faults_of_hdf5(opened: h5py.Group, arrays: list[Any]) -> Iterator[str]:
    """Yield the faults of a file as text; add its arrays to a list."""
    import h5py

    waiting, visited = [opened], set()
    while waiting:
        group = waiting.pop()
        for name in group:
            where = f"{group.name.rstrip('/')}/{name}"
            if not isinstance(group.get(name, getlink=True), h5py.HardLink):
                yield f"{where!r} is a link to another object"
            item = group[name]
            address = h5py.h5o.get_info(item.id).addr
            if address in visited:
                yield f"{where!r} is stored under two names"
            visited.add(address)
            if len(visited) > MAX_HDF5_OBJECTS:
                yield f"number of objects exceeds the limit of {MAX_HDF5_OBJECTS}"
            if isinstance(item, h5py.Group):
                waiting.append(item)
            elif isinstance(item, h5py.Dataset):
                arrays.append(item)
                yield from _faults_of_array(item, where)
            else:
                yield f"{where!r} is neither a group nor an array"
    excess = count_excess_bytes((array.nbytes, array.id.get_storage_size()) for array in arrays)
    if excess > RATIO_EXEMPT_ARRAY_BYTES:
        yield f"arrays of {excess} bytes are far larger than what is in the file"


def _faults_of_array(array: h5py.Dataset, where: str) -> Iterator[str]:
    if array.external or array.is_virtual:
        yield f"the array {where!r} is stored in another file"
    if array.dtype.hasobject:
        yield f"the array {where!r} contains strings or lists instead of numbers"
    stored = array.id.get_storage_size()
    if array.nbytes > max(RATIO_EXEMPT_MODEL_BYTES, MAX_COMPRESSION_RATIO * stored):
        yield f"the array {where!r} has {array.nbytes} bytes, but only {stored} are in the file"


_CONFIG, _WEIGHTS = "config.json", ".h5"
#: Weights that Keras reads if there is no HDF5 file, but never writes automatically.
_OTHER_WEIGHTS = "model.weights.npz"
#: Allowed parts of a model: base classes of Keras.
_KINDS = (
    "Layer",
    "Operation",
    "Model",
    "Initializer",
    "constraints.Constraint",
    "Regularizer",
    "Loss",
    "Metric",
    "Optimizer",
    "Quantizer",
    "DTypePolicy",
    "dtype_policies.DTypePolicyMap",
    "optimizers.schedules.LearningRateSchedule",
    "random.SeedGenerator",
    "quantizers.QuantizationConfig",
)
#: Layers that run code in the file, or read another file.
_HARMFUL = ("TFSMLayer", "TorchModuleWrapper", "JaxLayer", "FlaxLayer")
#: Modules whose functions only compute.
_FUNCTIONS = (
    "keras.activations",
    "keras.constraints",
    "keras.initializers",
    "keras.losses",
    "keras.metrics",
    "keras.ops",
    "keras.regularizers",
)
#: Names that Keras writes for values that JSON cannot represent.
_VALUES = (
    "__keras_tensor__",
    "__tensor__",
    "__numpy__",
    "__bytes__",
    "__ellipsis__",
    "__slice__",
    "__tuple__",
    "TensorShape",
    "TypeSpec",
    "CompositeTensor",
)
#: Layer options that name a file to read.
_FILES = ("vocabulary", "idf_weights")


def check_keras_file(path: Path) -> int:
    """Check that a `.keras` or `.h5` file names only allowed parts of a model.

    Returns:
        Size of the weights in bytes.

    Raises:
        ModelLoadError: the file names anything else, refers to weights in other files, or is
            damaged.
    """
    shown = repr(str(path))
    if path.suffix == ".keras":
        texts, nbytes = _texts_of_archive(path, shown)
    else:
        attributes, nbytes = check_hdf5(path, shown)
        configs = [attributes.get(name) for name in ("model_config", "training_config")]
        texts = [text for text in configs if isinstance(text, bytes | str)]
    for text in texts:
        try:
            for fault in _faults_of_config(load_json(text), ()):
                raise ModelLoadError(
                    f"{shown} cannot be read as a Keras model: {fault}. Pass a model with custom "
                    f"layers as an object, or register their classes with "
                    f"keras.saving.register_keras_serializable before"
                )
        except (ValueError, RecursionError) as error:
            raise ModelLoadError(
                f"{shown} cannot be read as a Keras model: its configuration is damaged: "
                f"{one_line(error)}"
            ) from error
    return nbytes


def _texts_of_archive(path: Path, shown: str) -> tuple[list[bytes | str], int]:
    """Return the configuration in a `.keras` file and the size of its checked weights."""
    nbytes = 0
    with open_checked_archive(path) as archive:
        names = archive.namelist()
        if _OTHER_WEIGHTS in names:
            raise ModelLoadError(
                f"{shown} is refused: weights must be in an .h5 file, got {_OTHER_WEIGHTS!r}; save "
                f"the model again"
            )
        for name in names:
            if name.endswith(_WEIGHTS):
                # Random access to HDF5 is slow within a compressed archive.
                with archive.open(name) as packed, tempfile.TemporaryFile() as file:
                    shutil.copyfileobj(packed, file)
                    nbytes += check_hdf5(file, f"{name!r} in {shown}")[1]
        if _CONFIG not in names:
            return [], nbytes  # Keras itself reports the missing configuration
        if archive.getinfo(_CONFIG).file_size > MAX_FILE_BYTES:
            raise ModelLoadError(
                f"{shown} is refused: its configuration exceeds the limit of {MAX_FILE_BYTES} bytes"
            )
        return [archive.read(_CONFIG)], nbytes


def _faults_of_config(config: object, inside: tuple[str, ...]) -> Iterator[str]:
    if isinstance(config, list):
        for item in config:
            yield from _faults_of_config(item, inside)
        return
    if not isinstance(config, Mapping):
        return
    if "class_name" in config:
        yield from _faults_of_object(config)
    for key, value in config.items():
        if key in _FILES and isinstance(value, str):
            yield f"the option {key} reads the file {value!r}"
        yield from _faults_of_config(value, (*inside, key))


def _faults_of_object(config: Mapping[str, Any]) -> Iterator[str]:
    name, module = config["class_name"], config.get("module")
    if not isinstance(name, str) or not isinstance(module, str | None):
        yield f"the configuration names the class {name!r} of module {module!r}"
    elif name == "__typespec__":
        name, module = str(config.get("spec_name")), str(module)
        if not (module.startswith("tensorflow.") and name.endswith("Spec")):
            yield f"the configuration names {name!r} of module {module!r}"
    elif name in _VALUES or _is_registered_by_user(config):
        return
    elif name == "function":
        named = config.get("config")
        # Keras resolves names of no module, or of `builtins`, among its own only.
        is_own = module is None or module == "builtins"
        if not isinstance(named, str) or not (
            is_own or (module in _FUNCTIONS and named.isidentifier())
        ):
            yield f"the configuration names the function {named!r} of module {module!r}"
    elif name == "Lambda":
        options = config.get("config")
        function = options.get("function") if isinstance(options, Mapping) else None
        if not isinstance(function, Mapping) or function.get("class_name") != "function":
            yield "a Lambda layer runs code that is in the file"
    elif not _is_allowed_class(name, module):
        where = "" if module is None else f" of module {module!r}"
        yield f"the class {name!r}{where} is neither registered nor part of Keras"


def _is_registered_by_user(config: Mapping[str, Any]) -> bool:
    """Whether the user's code registered the named object, which Keras prefers to its own."""
    import keras

    names = [config["class_name"], config.get("registered_name")]
    if config["class_name"] == "function":
        names = [config.get("config")]
    return any(
        isinstance(name, str) and keras.saving.get_registered_object(name) is not None
        for name in names
    )


def _is_allowed_class(name: str, module: str | None) -> bool:
    if not name.isidentifier() or name in _HARMFUL:
        return False
    if module is None:
        return name in _list_allowed_classes()
    if module.partition(".")[0] != "keras":
        return False
    if module in sys.modules:  # nothing is imported
        return _is_part_class(getattr(sys.modules[module], name, None))
    return _is_part_class(_resolve_attribute(f"{module}.{name}".removeprefix("keras.")))


#: Modules in which classes of legacy files, which name no module, are looked up.
_PLACES = (
    "layers",
    "models",
    "initializers",
    "regularizers",
    "constraints",
    "losses",
    "metrics",
    "optimizers",
    "optimizers.schedules",
    "dtype_policies",
    "src.models.functional",
    "quantizers",
)


@cache
def _list_allowed_classes() -> frozenset[str]:
    """Return the names of the allowed classes in `_PLACES`: of the classes and of their exports.

    Legacy files have the name of the class, which may differ from the exported one.
    """
    modules = (_resolve_attribute(path) for path in _PLACES)
    members = [item for module in modules if module is not None for item in vars(module).items()]
    return frozenset(
        alias for name, kind in members if _is_part_class(kind) for alias in (name, kind.__name__)
    ) - frozenset(_HARMFUL)


def _resolve_attribute(path: str) -> Any:
    """Return an attribute of the Keras package by its path; None if missing."""
    import keras

    return reduce(lambda parent, part: getattr(parent, part, None), path.split("."), keras)


def _is_part_class(kind: object) -> bool:
    bases = tuple(base for base in map(_resolve_attribute, _KINDS) if isinstance(base, type))
    return inspect.isclass(kind) and issubclass(kind, bases)
