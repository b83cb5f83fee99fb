"""Storage of models in folders and single files."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Mapping
from pathlib import Path

import onnx
import onnx_ir as ir
from google.protobuf import text_format

from neural_mp.adaptors.common.named_graphs import (
    CONVERTED,
    LATER,
    collect_graph_details,
    read_details,
    restore_example_inputs,
    write_details,
)
from neural_mp.adaptors.common.signatures.boundary import Boundary
from neural_mp.adaptors.common.signatures.signature import Signature
from neural_mp.adaptors.onnxrt.files.loading import parse_program_graph, read_file
from neural_mp.adaptors.onnxrt.graph.edit import list_nested_graphs
from neural_mp.adaptors.onnxrt.graph.opset import find_version_in, get_onnx_opset
from neural_mp.adaptors.onnxrt.graph.protos import (
    read_raw_bytes,
    save_program,
    serialize_to_message,
    write_with_weights,
)
from neural_mp.adaptors.onnxrt.graph.sessions import (
    CPU,
    MESSAGE_LIMIT,
    PLAIN,
    Runner,
    check_provider,
    count_constant_bytes,
)
from neural_mp.adaptors.onnxrt.kernel_check import KernelCheck
from neural_mp.adaptors.onnxrt.model import OnnxModel, Origin
from neural_mp.errors import ConversionError, ModelLoadError, one_line
from neural_mp.io.files import use_utf8_path
from neural_mp.util.validators import boolean, non_negative_integer, record, string

MODEL_FILE, DETAILS_FILE = "model.onnx", "neural_mp_onnx.json"


def save_model(model: OnnxModel, folder: Path) -> None:
    """Write the model and its metadata."""
    save_file(model, folder / MODEL_FILE, {})
    details = {**collect_graph_details(model), "opset": model.opset}
    if model.provider != CPU:
        details["provider"] = model.provider
    write_details(folder / DETAILS_FILE, details)


def add_metadata(folder: Path, metadata: Mapping[str, str]) -> None:
    """Add metadata to the model in a folder; messages that follow each other are merged."""
    added = onnx.ModelProto()
    onnx.helper.set_model_props(added, dict(metadata))
    with (folder / MODEL_FILE).open("ab") as file:
        file.write(added.SerializeToString())


def restore_model(folder: Path, provider: str) -> OnnxModel:
    """Read back the files of `save_model`, for the provider that they were made for by default.

    Raises:
        ConfigurationError: the installed ONNX Runtime does not have the provider.
        ModelLoadError: the files are missing, truncated or tampered with.
    """
    source = read_file(folder / MODEL_FILE)
    program = parse_program_graph(source)
    signature, details = read_details(
        folder / DETAILS_FILE, lambda value: (Signature.from_dict(value), _DETAILS(value))
    )
    provider = check_provider(provider or details.get("provider", CPU))
    origin = Origin.from_program(source.folder, program)
    try:
        Runner(program, source.folder, provider, level=PLAIN)
    except ConversionError as error:
        raise ModelLoadError(f"{str(folder / MODEL_FILE)!r} is damaged: {error}") from error
    return OnnxModel(
        program,
        signature,
        restore_example_inputs(signature, details),
        None if details["converted"] else program,
        details["ops"],
        details.get("results", {}),
        counts=details["counts"],
        origin=origin,
        opset=details["opset"],
        provider=provider,
        kernel_check=None if details["converted"] or provider != CPU else KernelCheck(program),
    )


_LATER = {**LATER, "provider": string}
_DETAILS = record({**CONVERTED, "opset": non_negative_integer, "converted": boolean}, _LATER)


def transfer_file(model: OnnxModel, folder: Path) -> Path:
    """Write a model for another runtime; return the file."""
    path = folder / MODEL_FILE
    save_file(model, path, {})
    return path


def model_boundary(model: OnnxModel) -> Boundary:
    """Return the calls of a model."""
    return Boundary("onnxrt", model.signature)


def save_file(model: OnnxModel, path: Path, metadata: Mapping[str, str]) -> None:
    """Write and check the model alone; an existing file stays until the new one is complete.

    The model may read its weights from that very file.

    Raises:
        ConversionError: ONNX's checker rejects the model.
    """
    if model.origin is not None:
        model.origin.check_unchanged()
    program = model.active_graph
    if metadata:
        program = program.clone()
        program.metadata_props.update(metadata)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        complete = Path(scratch) / path.name
        _write_program(program, complete)
        for file in Path(scratch).iterdir():
            file.replace(path.parent / file.name)


def dump_graph(model: OnnxModel, path: Path) -> tuple[Path, ...]:
    """Write the model, and its message as text without values of initializers."""
    binary, text = path.with_suffix(".onnx"), path.with_suffix(".pbtxt")
    save_file(model, binary, {})
    message = serialize_to_message(model.active_graph)
    for tensor in message.graph.initializer:
        tensor.ClearField("raw_data")
        del tensor.external_data[:]
    text.write_text(text_format.MessageToString(message), encoding="utf-8")
    return binary, text


def _write_program(program: ir.Model, path: Path) -> None:
    values = program.graph.initializers.values()
    if sum(map(count_constant_bytes, values)) > MESSAGE_LIMIT:
        save_program(program, path, f"{path.name}.data")
    else:
        weights = {str(v.name): v.const_value for v in values if v.const_value is not None}
        write_with_weights(serialize_to_message(program), weights, path)
    outputs = [value for part in list_nested_graphs(program.graph) for value in part.outputs]
    if not all(value.shape is not None for value in outputs):
        return  # the checker requires the rank of outputs
    opset, nodes = get_onnx_opset(program), program.graph.all_nodes()
    if not all(node.domain or find_version_in(node.op_type, opset) for node in nodes):
        return  # ops of ONNX Runtime in ONNX's domain, e.g. SimplifiedLayerNormalization
    try:
        with use_utf8_path(path) as file:
            onnx.checker.check_model(str(file))
    except onnx.checker.ValidationError as error:
        raise ConversionError(f"ONNX's checker rejects the model: {one_line(error)}") from error


def to_message(model: OnnxModel) -> onnx.ModelProto:
    """Return the model as a message, including all weights."""
    message = serialize_to_message(model.active_graph)
    for tensor in message.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            value = model.active_graph.graph.initializers[tensor.name].const_value
            assert value is not None
            del tensor.external_data[:]
            tensor.ClearField("data_location")
            tensor.raw_data = read_raw_bytes(value)
    return message


def model_fingerprint(model: OnnxModel) -> str:
    """Return a digest of all nodes and weights, independent of the weights' files."""
    program = model.active_graph
    bare = serialize_to_message(program)
    del bare.graph.initializer[:]
    running = hashlib.sha256(bare.SerializeToString(deterministic=True))
    for name, value in sorted(program.graph.initializers.items()):
        running.update(name.encode())
        tensor = value.const_value
        if tensor is not None:
            is_text = tensor.dtype is ir.DataType.STRING
            running.update(
                repr(tensor.numpy().tolist()).encode() if is_text else read_raw_bytes(tensor)
            )
    return running.hexdigest()
