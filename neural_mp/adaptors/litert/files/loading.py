"""Loading of a model: path, bytes or object of TensorFlow → normalized graph with its signature.

Files mostly fix the batch size to one sample, although the runtime resizes.
"""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Iterator
from contextlib import redirect_stdout
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from neural_mp.adaptors.common.signatures.input_spec import InputSpec
from neural_mp.adaptors.common.signatures.signature import Signature, TensorSpec
from neural_mp.adaptors.litert.files.checks import check_flatbuffer, read_flatbuffer
from neural_mp.adaptors.litert.graph.normalize import normalize_tree
from neural_mp.adaptors.litert.graph.program import (
    Program,
    get_known_sizes,
    get_numpy_dtype,
    get_sizes,
)
from neural_mp.adaptors.litert.model import LiteRtModel
from neural_mp.adaptors.litert.runtime import Runner
from neural_mp.errors import ConversionError, ModelLoadError, one_line
from neural_mp.util.optional_packages import install_command
from neural_mp.util.pytree import Array, Structure, tree_leaves


def free_batch(program: Program) -> Program | None:
    """Return a graph for one sample as a graph for any number; None if the graph fixes others.

    Constant sizes of reshapes lose their batch size. Samples of a batch must have the results that
    they have alone, bit for bit.
    """
    inputs = [program.main.tensors[index] for index in program.main.inputs]
    shapes = [get_sizes(tensor) for tensor in inputs]
    is_free = any(-1 in (tensor.shapeSignature or ()) for tensor in inputs)
    if is_free or not shapes or not all(shape and shape[0] == 1 for shape in shapes):
        return None
    freed = program.copy()
    for op in freed.iterate_ops():
        if freed.op_type(op) == "RESHAPE":
            _free_reshape(freed, op)
    return freed if _runs_for_two(freed, inputs) else None


def _free_reshape(program: Program, op: Any) -> None:
    """Leave the first size of a reshape to the runtime, if it is that of one sample."""
    tensors = program.main.tensors
    source, result = tensors[op.inputs[0]], tensors[op.outputs[0]]
    sizes = get_sizes(result)
    if len(op.inputs) < 2 or sizes[:1] != (1,) or get_sizes(source)[:1] != (1,):
        return
    constant = program.get_constant(int(op.inputs[1]))
    if constant is None or -1 in constant:
        return
    # Other ops may read the constant.
    buffer, tensor = schema.BufferT(), schema.TensorT()
    buffer.data = np.frombuffer(np.array([-1, *sizes[1:]], np.int32).tobytes(), np.uint8)
    program.tree.buffers.append(buffer)
    tensor.name, tensor.type = bytes(result.name) + b"/sizes", schema.TensorType.INT32
    tensor.shape, tensor.buffer = [len(sizes)], len(program.tree.buffers) - 1
    tensors.append(tensor)
    op.inputs = [op.inputs[0], len(tensors) - 1]
    if op.builtinOptions is not None:
        op.builtinOptions.newShape = [-1, *sizes[1:]]


def _runs_for_two(program: Program, inputs: list[Any]) -> bool:
    """Whether two samples have the results that they have one by one."""
    indices, fetched = (
        list(map(int, ends)) for ends in (program.main.inputs, program.main.outputs)
    )
    runner = Runner(program.content, indices, fetched)
    draw = np.random.default_rng(0)
    samples = [[_draw_values(draw, tensor) for tensor in inputs] for _ in range(2)]
    try:
        singles = [runner(sample) for sample in samples]
        batch = runner([np.concatenate(pair) for pair in zip(*samples, strict=True)])
    except ConversionError:
        return False
    return all(
        result.ndim and np.array_equal(result, np.concatenate(parts))
        for result, *parts in zip(batch, *singles, strict=True)
    )


def _draw_values(draw: np.random.Generator, tensor: Any) -> Array:
    dtype, sizes = get_numpy_dtype(tensor), get_sizes(tensor)
    if dtype is not None and dtype.kind == "f":
        return draw.random(sizes).astype(dtype)
    return np.zeros(sizes, dtype)


SUFFIX = ".tflite"
#: Start of the names of outputs in signatures of Keras; the graph has an order of its own.
_OUTPUT = "output_"
_MAIN_SIGNATURE = "serving_default"
_TORCH_MODULE = "torch.nn.modules.module"


def load_model(source: object, spec: InputSpec) -> LiteRtModel:
    """Load a path, the bytes of a file, or a model of TensorFlow that is converted.

    Raises:
        ModelLoadError: the model cannot be read, converted or run.
        ConfigurationError: a given name is not an input or output of the model.
        DataError: the example does not fit the model.
    """
    program, freed = _read_program(source, spec.example)
    signature, notes = read_signature(program, freed)
    names = spec.names or _list_keras_inputs(source, signature)
    signature = signature.select_ports(names, spec.outputs)
    example, warnings = spec.make_feeds(signature)
    model = LiteRtModel(program, signature, example, program, warnings=(*notes, *warnings))
    try:
        model.run(model.example)
    except ConversionError as error:
        raise ModelLoadError(str(error)) from error
    return model


def _list_keras_inputs(source: object, signature: Signature) -> tuple[str, ...]:
    """Return the inputs in the order of a Keras model, which its file does not keep."""
    names = tuple(tensor.name for tensor in getattr(source, "inputs", None) or ())
    return names if set(names) == {port.name for port in signature.inputs} else ()


def _read_program(source: object, example: object) -> tuple[Program, bool]:
    """Return the normalized graph of a source, and whether its batch size was freed.

    Of several conversions of a model, the first whose batch size can be freed, or else the last.
    """
    for content in _iterate_contents(source, example):
        tree = Program.parse(content).tree
        normalize_tree(tree)
        program = Program(tree)
        freed = free_batch(program)
        if freed is not None:
            return freed, True
    return program, False


def _iterate_contents(source: object, example: object) -> Iterator[bytes]:
    """Yield checked flatbuffers of a source, the fastest first."""
    if isinstance(source, str | os.PathLike) and Path(source).suffix == SUFFIX:
        yield read_flatbuffer(Path(source))
    elif isinstance(source, bytes | bytearray):
        check_flatbuffer(bytes(source), "the model")
        yield bytes(source)
    else:
        is_module = any(base.__module__ == _TORCH_MODULE for base in type(source).__mro__)
        contents = convert_torch(source, example) if is_module else convert_tensorflow(source)
        for content in contents:
            check_flatbuffer(content, "the converted model")
            yield content


def convert_torch(module: Any, example: object) -> Iterator[bytes]:
    """Yield the flatbuffer of a PyTorch module for one sample of an example.

    Raises:
        ModelLoadError: a package is missing or cannot convert the module, or there is no example.
    """
    try:
        import litert_torch
        import torch
    except ImportError as error:
        raise ModelLoadError(
            f"PyTorch models are converted for LiteRT by the package litert-torch, which cannot be "
            f"imported ({one_line(error)}); run {install_command('litert-torch')}, or set "
            f"runtime='openvino' in place of framework for another runtime"
        ) from error
    if example is None:
        raise ModelLoadError(
            "a PyTorch model is converted for LiteRT with an example, got none; set inputs to "
            "example arrays, or give data"
        )
    inputs = tuple(torch.as_tensor(np.asarray(leaf)[:1]) for leaf in tree_leaves(example))
    try:
        with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
            file = Path(folder) / f"model{SUFFIX}"
            litert_torch.convert(deepcopy(module).eval(), inputs).export(str(file))
            content = file.read_bytes()
    except Exception as error:
        raise ModelLoadError(f"litert-torch cannot convert the model: {one_line(error)}") from error
    yield content


def convert_tensorflow(source: object) -> Iterator[bytes]:
    """Yield flatbuffers of a Keras model, or of a SavedModel at a path.

    A Keras model is converted for a single sample, in case that the result runs for more: with a
    free size, the converter computes sizes by ops of their own, which split the graph of the
    runtime. Concrete functions are not accepted: `from_concrete_functions` loses the weights of
    Keras 3 without an error (TensorFlow 2.21).

    Raises:
        ModelLoadError: TensorFlow is missing or cannot convert the model.
    """
    try:
        import tensorflow as tf
        from tensorflow.lite.python.convert_phase import ConverterError
    except ImportError as error:
        raise ModelLoadError(
            "LiteRT reads .tflite files and their bytes; other models are converted by the package "
            "tensorflow, which is not installed"
        ) from error
    folder = Path(source) if isinstance(source, str | os.PathLike) else None
    try:
        if folder is not None and (folder / "saved_model.pb").is_file():
            yield _convert_silently(tf.lite.TFLiteConverter.from_saved_model(str(folder)))
        elif isinstance(source, tf.keras.Model):
            for model in filter(None, (_fix_batch(source), source)):
                yield _convert_keras(model)
        else:
            raise ModelLoadError(
                f"the model must be a {SUFFIX} file, its bytes, a Keras model or the folder of a "
                f"SavedModel, got {source!r}; for other models of TensorFlow, set "
                f"runtime='litert' in place of framework"
            )
    except (ConverterError, RuntimeError, ValueError, TypeError, AttributeError) as error:
        hints = (hint for text, hint in _HINTS.items() if text in str(error))
        raise ModelLoadError(
            f"{next(hints, '')}TensorFlow cannot convert the model for LiteRT: {one_line(error)}"
        ) from error


#: Part of a message of TensorFlow's converter → the way out.
_HINTS = {
    "TensorListReserve": "recurrent layers must have a fixed batch size, e.g. "
    "keras.Input(…, batch_size=1), or unroll=True: ",
    "Missing Switch": "models with loops must be converted as given; set framework='litert' in "
    "place of runtime: ",
}


def read_signature(program: Program, frees_batch: bool) -> tuple[Signature, list[str]]:
    """Return the inputs and outputs of the main subgraph, and notes to the user.

    With `frees_batch`, their first size is free, whatever the file says.
    """
    notes = []
    definitions = [d for d in program.tree.signatureDefs if (d.subgraphIndex or 0) == 0]
    keys = [bytes(d.signatureKey or b"").decode(errors="replace") for d in definitions]
    position = keys.index(_MAIN_SIGNATURE) if _MAIN_SIGNATURE in keys else 0
    if len(program.tree.signatureDefs) > 1:
        used = keys[position] if keys else "the main subgraph"
        notes.append(
            f"the file has {len(program.tree.signatureDefs)} signatures, of which {used!r} is tuned"
        )
    definition = definitions[position] if definitions else None
    ports = []
    for indices, named in (
        (program.main.inputs, definition.inputs if definition else []),
        (program.main.outputs, definition.outputs if definition else []),
    ):
        names = {int(entry.tensorIndex): bytes(entry.name).decode() for entry in named or []}
        positions = {index: position for position, index in enumerate(names)}
        if indices is program.main.inputs:  # in the order of positional arguments
            positions = {}
        ordered = sorted(
            map(int, indices),
            key=lambda index: _order_name(names.get(index), positions.get(index, 0)),
        )
        ports.append(
            tuple(
                _make_tensor_spec(program, index, names.get(index), frees_batch)
                for index in ordered
            )
        )
    inputs, outputs = ports
    returns: Structure = list(range(len(outputs))) if len(outputs) > 1 else 0
    return Signature(inputs, outputs, returns), notes


def _convert_keras(model: Any) -> bytes:
    """Return the flatbuffer of a Keras model.

    TensorFlow's own way to a SavedModel takes lists of inputs only; other structures end in another
    error than their own (TensorFlow 2.21).
    """
    import keras
    import tensorflow as tf

    is_list = not getattr(model, "inputs", None) or isinstance(
        model.input, list | keras.KerasTensor
    )
    if is_list:
        return _convert_silently(tf.lite.TFLiteConverter.from_keras_model(model))
    signature = keras.tree.map_structure(
        lambda port: tf.TensorSpec(port.shape, port.dtype, port.name), model.input
    )
    archive = keras.export.ExportArchive()
    archive.track(model)
    archive.add_endpoint("serve", partial(model.__call__, training=False), [signature])
    with tempfile.TemporaryDirectory() as folder:
        archive.write_out(folder, verbose=False)
        return _convert_silently(tf.lite.TFLiteConverter.from_saved_model(folder))


def _convert_silently(converter: Any) -> bytes:
    """Return the flatbuffer of a converter, without the tensors that Keras prints on exporting."""
    with redirect_stdout(io.StringIO()):
        return bytes(converter.convert())


def _fix_batch(model: Any) -> Any:
    """Return a Keras model for one sample; None unless only the size of the batch is free."""
    import keras

    inputs = getattr(model, "inputs", None) if model.built else None  # none if subclassed
    if not inputs or any(
        tensor.shape[0] is not None or None in tensor.shape[1:] for tensor in inputs
    ):
        return None
    fixed = [
        keras.Input(batch_shape=(1, *tensor.shape[1:]), dtype=tensor.dtype, name=tensor.name)
        for tensor in inputs
    ]
    structure = keras.tree.pack_sequence_as(model.input, fixed)
    return keras.Model(structure, model(structure))


def _order_name(name: str | None, position: int) -> int:
    """Return the number in a name of Keras for one of several outputs, else the position."""
    number = (name or "").removeprefix(_OUTPUT)
    return int(number) if number.isdecimal() and name != number else position


def _make_tensor_spec(
    program: Program, index: int, name: str | None, frees_batch: bool
) -> TensorSpec:
    tensor = program.main.tensors[index]
    own, shape = program.tensor_name(index), get_known_sizes(tensor)
    if frees_batch and shape:
        shape = (None, *shape[1:])
    dtype = get_numpy_dtype(tensor)
    return TensorSpec(name or own, own, dtype, shape, own if name and name != own else None)
