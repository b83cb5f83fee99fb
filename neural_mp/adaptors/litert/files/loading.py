"""Loading of a model: path, bytes or object of TensorFlow → normalized graph with its signature."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from neural_mp.adaptors.common.signatures.input_spec import InputSpec
from neural_mp.adaptors.common.signatures.signature import Signature, TensorSpec
from neural_mp.adaptors.litert.files.checks import check_flatbuffer
from neural_mp.adaptors.litert.graph.normalize import normalize_tree
from neural_mp.adaptors.litert.graph.program import Program, get_known_sizes, get_numpy_dtype
from neural_mp.adaptors.litert.model import LiteRtModel
from neural_mp.adaptors.litert.runtime import Runner
from neural_mp.errors import ConversionError, ModelLoadError, one_line
from neural_mp.io.files import read_bounded, require_regular_file
from neural_mp.io.limits import MAX_FILE_BYTES
from neural_mp.util.pytree import Structure

SUFFIX = ".tflite"
#: Start of the names of outputs in signatures of Keras; the graph has an order of its own.
_OUTPUT = "output_"
_MAIN_SIGNATURE = "serving_default"


def load_model(source: object, spec: InputSpec) -> LiteRtModel:
    """Load a path, the bytes of a file, or a model of TensorFlow that is converted.

    Raises:
        ModelLoadError: the model cannot be read, converted or run.
        ConfigurationError: a given name is not an input or output of the model.
        DataError: the example does not fit the model.
    """
    content, what = _read_content(source)
    check_flatbuffer(content, what)
    tree = Program.parse(content).tree
    normalize_tree(tree)
    program = Program(tree)
    signature, notes = read_signature(program)
    signature = signature.select_ports(spec.names, spec.outputs)
    example, warnings = spec.make_feeds(signature)
    model = LiteRtModel(program, signature, example, program, warnings=(*notes, *warnings))
    try:
        model.run(model.example)
    except ConversionError as error:
        raise ModelLoadError(str(error)) from error
    return model


def _read_content(source: object) -> tuple[bytes, str]:
    """Return a flatbuffer and its name in messages."""
    if isinstance(source, bytes | bytearray):
        return bytes(source), "the model"
    if isinstance(source, str | os.PathLike) and Path(source).suffix == SUFFIX:
        path = Path(source)
        try:
            require_regular_file(path)
            return read_bounded(path, MAX_FILE_BYTES), repr(str(path))
        except OSError as error:
            raise ModelLoadError(f"{str(path)!r} cannot be read: {one_line(error)}") from error
    return convert_tensorflow(source), "the converted model"


def convert_tensorflow(source: object) -> bytes:
    """Return the flatbuffer of a Keras model, or of a SavedModel at a path.

    Concrete functions are not accepted: `from_concrete_functions` loses the weights of Keras 3
    without an error (TensorFlow 2.21).

    Raises:
        ModelLoadError: TensorFlow is missing or cannot convert the model.
    """
    try:
        import tensorflow as tf
    except ImportError as error:
        raise ModelLoadError(
            "LiteRT reads .tflite files and their bytes; other models are converted by the package "
            "tensorflow, which is not installed"
        ) from error
    is_path = isinstance(source, str | os.PathLike)
    try:
        if is_path and (Path(os.fspath(source)) / "saved_model.pb").is_file():
            converter = tf.lite.TFLiteConverter.from_saved_model(os.fspath(source))
        elif isinstance(source, tf.keras.Model):
            converter = tf.lite.TFLiteConverter.from_keras_model(source)
        else:
            raise ModelLoadError(
                f"the model must be a {SUFFIX} file, its bytes, a Keras model or the folder of a "
                f"SavedModel, got {source!r}"
            )
        return bytes(converter.convert())
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:
        # The converter raises types of its own, all of them derived from these.
        raise ModelLoadError(
            f"TensorFlow cannot convert the model for LiteRT: {one_line(error)}"
        ) from error


def read_signature(program: Program) -> tuple[Signature, list[str]]:
    """Return the inputs and outputs of the main subgraph, and notes to the user."""
    notes = []
    definitions = [d for d in program.tree.signatureDefs if (d.subgraphIndex or 0) == 0]
    keys = [bytes(d.signatureKey or b"").decode(errors="replace") for d in definitions]
    position = keys.index(_MAIN_SIGNATURE) if _MAIN_SIGNATURE in keys else 0
    if len(program.tree.signatureDefs) > 1:
        used = keys[position] if keys else "the main subgraph"
        notes.append(f"the file has {len(program.tree.signatureDefs)} signatures, of which {used!r} is tuned")
    definition = definitions[position] if definitions else None
    frees = find_free_batch(program)
    ports = []
    for indices, named in (
        (program.main.inputs, definition.inputs if definition else []),
        (program.main.outputs, definition.outputs if definition else []),
    ):
        names = {int(entry.tensorIndex): bytes(entry.name).decode() for entry in named or []}
        ordered = sorted(map(int, indices), key=lambda index: _order_name(names.get(index)))
        ports.append(
            tuple(_make_tensor_spec(program, index, names.get(index), frees) for index in ordered)
        )
    inputs, outputs = ports
    returns: Structure = list(range(len(outputs))) if len(outputs) > 1 else 0
    return Signature(inputs, outputs, returns), notes


def _order_name(name: str | None) -> int:
    """Return the number in a name of Keras for one of several outputs, else 0."""
    number = (name or "").removeprefix(_OUTPUT)
    return int(number) if number.isdecimal() and name != number else 0


def _make_tensor_spec(
    program: Program, index: int, name: str | None, frees_batch: bool
) -> TensorSpec:
    tensor = program.main.tensors[index]
    own, shape = program.tensor_name(index), get_known_sizes(tensor)
    if frees_batch and shape:
        shape = (None, *shape[1:])
    dtype = get_numpy_dtype(tensor)
    return TensorSpec(name or own, own, dtype, shape, own if name and name != own else None)


def find_free_batch(program: Program) -> bool:
    """Whether a graph for one sample runs for two, although its file fixes the first size."""
    tensors = [program.main.tensors[index] for index in program.main.inputs]
    shapes = [get_known_sizes(tensor) for tensor in tensors]
    if not shapes or not all(shape and shape[0] == 1 and None not in shape for shape in shapes):
        return False
    outputs = [int(index) for index in program.main.outputs]
    runner = Runner(program.content, [int(i) for i in program.main.inputs], outputs)
    draw = np.random.default_rng(0)
    samples = [_draw_values(draw, tensor) for tensor in tensors]
    try:
        single = runner(samples)
        double = runner([np.concatenate([array, array]) for array in samples])
    except ConversionError:
        return False
    return all(
        len(many) == 2 * len(one) and np.array_equal(many[: len(one)], one)
        for one, many in zip(single, double, strict=True)
        if one.ndim
    ) and all(one.ndim for one in single)


def _draw_values(draw: np.random.Generator, tensor: Any) -> np.ndarray[Any, Any]:
    dtype, shape = get_numpy_dtype(tensor), [int(size) for size in tensor.shape]
    if dtype is not None and dtype.kind == "f":
        return draw.random(shape).astype(dtype)
    return np.zeros(shape, dtype)
