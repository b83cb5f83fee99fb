"""Loading of models (path or object → canonicalized graph with its signature), and their storage.

Models are stored in folders and single files; `.xml` files are untrusted and checked.
"""

from __future__ import annotations

import hashlib
import logging
import math
import tempfile
from collections.abc import Mapping
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any
from xml.parsers import expat

import numpy as np

from neural_mp.adaptors.common.capabilities import stays_in_fp32
from neural_mp.adaptors.common.named_graphs import (
    CONVERTED,
    LATER,
    collect_graph_details,
    read_details,
    restore_example_inputs,
    write_details,
)
from neural_mp.adaptors.common.signatures.input_spec import InputSpec
from neural_mp.adaptors.common.signatures.signature import Signature, TensorSpec
from neural_mp.adaptors.openvino.graph.edit import (
    get_known_sizes,
    get_op_type,
    give_stable_names,
    iterate_op_nodes,
    name_of,
)
from neural_mp.adaptors.openvino.graph.recurrent import (
    find_stepwise_obstacle,
    has_integer_kernel,
    resets_product,
    split_directions,
)
from neural_mp.adaptors.openvino.model import OpenVinoModel
from neural_mp.adaptors.openvino.ops import Role, has_role
from neural_mp.adaptors.openvino.runtime import get_core, get_numpy_dtype, ov
from neural_mp.errors import ConversionError, ModelLoadError, one_line
from neural_mp.io.files import read_bounded, require_regular_file
from neural_mp.io.limits import MAX_FILE_BYTES, MAX_TENSOR_AXES
from neural_mp.util.pytree import Structure
from neural_mp.util.validators import MOST_STREAMS, boolean, integer_between, optional, record

MODEL_FILE, DETAILS_FILE = "model.xml", "neural_mp_openvino.json"
logger = logging.getLogger(__name__)

#: Files that OpenVINO itself reads, without running code from them.
_FILES = (".onnx", ".pb", ".pbtxt", ".tflite")
#: Op of ONNX Runtime that OpenVINO computes for one sequence only.
_ATTENTION = b"GroupQueryAttention"
#: Files of other frameworks that are checked and read by these, and reach OpenVINO by transfer.
_TRANSFERRED = (".pt2", ".keras", ".h5", ".hdf5")


def save_model(model: OpenVinoModel, folder: Path) -> None:
    """Write the model and its metadata."""
    save_file(model, folder / MODEL_FILE, {})
    write_details(folder / DETAILS_FILE, {**collect_graph_details(model), "streams": model.streams})


def restore_model(folder: Path) -> OpenVinoModel:
    """Read back the files of `save_model`.

    Raises:
        ModelLoadError: the files are missing, truncated or tampered with.
    """
    signature, details = read_details(folder / DETAILS_FILE, _parse_details)
    path = folder / MODEL_FILE
    check_xml(path)
    try:
        program = get_core().read_model(path)
    except (RuntimeError, ValueError) as error:
        raise ModelLoadError(f"{str(path)!r} is damaged: {one_line(error)}") from error
    _check_ports(program, signature, path)
    return OpenVinoModel(
        program,
        signature,
        restore_example_inputs(signature, details),
        None if details["converted"] else program,
        details["ops"],
        details.get("results", {}),
        counts=details["counts"],
        streams=details.get("streams"),
    )


def _parse_details(value: object) -> tuple[Signature, dict[str, Any]]:
    return Signature.from_dict(value), _DETAILS(value)


_STREAMS = {"streams": optional(integer_between(1, MOST_STREAMS))}
_DETAILS = record({**CONVERTED, "converted": boolean}, {**LATER, **_STREAMS})


def _check_ports(program: ov.Model, signature: Signature, path: Path) -> None:
    names = {name_of(port.get_node()) for port in (*program.inputs, *program.outputs)}
    missing = [
        port.tensor for port in (*signature.inputs, *signature.outputs) if port.tensor not in names
    ]
    if missing:
        raise ModelLoadError(f"{str(path)!r} lacks {missing[0]!r}, which {DETAILS_FILE} names")


def save_file(model: OpenVinoModel, path: Path, metadata: Mapping[str, str]) -> None:
    """Write the model alone, as `.xml` and `.bin`; existing files stay until both are complete."""
    program = model.active_graph
    if metadata:
        program = program.clone()
        for key, value in metadata.items():
            program.set_rt_info(value, ["neural_mp", key])
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        complete = Path(scratch) / path.name
        ov.save_model(program, complete, compress_to_fp16=False)
        find_weights_file(complete).replace(find_weights_file(path))
        complete.replace(path)


def dump_graph(model: OpenVinoModel, path: Path) -> tuple[Path, ...]:
    """Write the model; its `.xml` is text."""
    file = path.with_suffix(".xml")
    save_file(model, file, {})
    return find_weights_file(file), file


def program_digest(program: ov.Model) -> str:
    """Return a digest of all nodes and weights."""
    running = hashlib.sha256()
    constants: dict[str, str] = {}
    for node in sorted(program.get_ops(), key=name_of):
        if has_role(node, Role.CONSTANT):
            continue
        inputs = [
            _identify_graph_output(port.get_source_output(), constants) for port in node.inputs()
        ]
        attributes = sorted((key, str(value)) for key, value in node.get_attributes().items())
        running.update(repr((name_of(node), get_op_type(node), attributes, inputs)).encode())
    return running.hexdigest()


def _identify_graph_output(output: ov.Output, constants: dict[str, str]) -> tuple[str, int]:
    """Return the name of a computed result, or the digest of a constant, whose name may vary."""
    node = output.get_node()
    if not has_role(node, Role.CONSTANT):
        return name_of(node), output.get_index()
    name = name_of(node)
    if name not in constants:
        kind = f"{node.get_element_type()} {list(node.get_output_shape(0))}"
        content = np.ascontiguousarray(node.get_data()).view(np.uint8)
        constants[name] = hashlib.sha256(kind.encode() + content.tobytes()).hexdigest()
    return constants[name], 0


#: Bits of the element types that constants of a file may have.
_BITS = {
    **dict.fromkeys(("f64", "i64", "u64"), 64),
    **dict.fromkeys(("f32", "i32", "u32"), 32),
    **dict.fromkeys(("f16", "bf16", "i16", "u16"), 16),
    **dict.fromkeys(("i8", "u8", "boolean", "f8e4m3", "f8e5m2", "f8e8m0"), 8),
    **dict.fromkeys(("i4", "u4", "nf4", "f4e2m1"), 4),
    "u6": 6,
    "u3": 3,
    **dict.fromkeys(("u2", "i2"), 2),
    **dict.fromkeys(("u1", "bin"), 1),
}
#: Start of the versions of OpenVINO's own ops; extension ops come from libraries, never loaded.
_OPSET = "opset"


def find_weights_file(path: Path) -> Path:
    """Return the file with the weights of an `.xml` file."""
    return path.with_suffix(".bin")


def check_xml(path: Path) -> None:
    """Check that a file declares no entities and that its constants lie within the weights.

    Raises:
        ModelLoadError: the file is missing, malformed or refers outside of its weights.
    """
    weights = find_weights_file(path)
    try:
        text = read_bounded(path, MAX_FILE_BYTES)
        require_regular_file(weights)
        size = weights.stat().st_size if weights.exists() else 0
    except OSError as error:
        raise ModelLoadError(f"{str(path)!r} cannot be read: {error}") from error
    _Checks(path, size).check_text(text)


class _Checks:
    """The checks of one file, with weights of `size` bytes."""

    def __init__(self, path: Path, size: int) -> None:
        self._path, self._size, self._at_root, self._layer = path, size, True, ""

    def check_text(self, text: bytes) -> None:
        parser = expat.ParserCreate()
        parser.StartDoctypeDeclHandler = self._reject_doctype
        parser.EntityDeclHandler = self._reject_doctype
        parser.StartElementHandler = self._enter_element
        try:
            parser.Parse(text, True)
        except expat.ExpatError as error:
            raise self._load_error(f"is not valid XML: {error}") from None

    def _load_error(self, what: str) -> ModelLoadError:
        return ModelLoadError(f"{str(self._path)!r} {what}")

    def _reject_doctype(self, *_: object) -> None:
        raise self._load_error("declares a document type or entities, which model files never do")

    def _enter_element(self, tag: str, attributes: dict[str, str]) -> None:
        if self._at_root and tag != "net":
            raise self._load_error(
                f"must hold a 'net', got {tag!r}; give the .xml file of OpenVINO"
            )
        self._at_root = False
        if tag == "layer":
            self._layer = attributes.get("name", "")
            version = attributes.get("version", "opset1")
            if not version.startswith(_OPSET):
                raise self._load_error(
                    f"holds the op {self._layer!r} of {version!r}, which is none of OpenVINO's own "
                    f"and needs a library; libraries are never loaded from files"
                )
        elif tag == "data" and "offset" in attributes and "size" in attributes:
            self._check_constant(attributes)

    def _check_constant(self, attributes: dict[str, str]) -> None:
        try:
            offset, size = (int(attributes[key]) for key in ("offset", "size"))
            shape = [int(part) for part in attributes.get("shape", "").split(",") if part.strip()]
        except ValueError:
            raise self._load_error(f"has a malformed constant in {self._layer!r}") from None
        if min(offset, size, *shape, 0) < 0 or offset + size > self._size:
            raise self._load_error(
                f"reads bytes {offset} to {offset + size} for {self._layer!r}, but its weights "
                f"have {self._size} bytes; copy the .bin file that belongs to it"
            )
        kind = attributes.get("element_type", "")
        if kind == "string":
            return
        if kind not in _BITS or len(shape) > MAX_TENSOR_AXES:
            raise self._load_error(f"has a constant of unknown type {kind!r} in {self._layer!r}")
        if math.prod(shape) * _BITS[kind] > 8 * size:
            raise self._load_error(
                f"has a constant of shape {shape} and type {kind} in {self._layer!r}, but only "
                f"{size} bytes for it"
            )


def load_model(source: object, spec: InputSpec) -> OpenVinoModel:
    """Load an `openvino.Model`, a path, or an object that OpenVINO converts.

    The latter, e.g. an `nn.Module`, needs example inputs.

    Raises:
        ModelLoadError: OpenVINO cannot read the model.
    """
    original = _read_source(source, spec)
    _check_attention(source, original)
    program = original.clone()
    canonicalize_graph(program)
    signature = read_signature(program).select_ports(spec.names, spec.outputs)
    example, warnings = spec.make_feeds(signature)
    notes = (*warnings, *_float_recurrent_notes(program))
    model = OpenVinoModel(program, signature, example, program, warnings=notes)
    _check_example_runs(model)
    return model


def _read_source(source: object, spec: InputSpec) -> ov.Model:
    if isinstance(source, ov.Model):
        return source
    try:
        if isinstance(source, str | Path):
            return _read_file(Path(source))
        return ov.convert_model(source, example_input=spec.example)
    except (OSError, RuntimeError, ValueError, TypeError) as error:
        # The frontends raise types of their own, all of them derived from these.
        raise ModelLoadError(f"OpenVINO cannot read the model: {one_line(error)}") from error


def _read_file(path: Path) -> ov.Model:
    require_regular_file(path)
    if path.suffix == ".xml":
        check_xml(path)
        return get_core().read_model(path)
    if path.suffix in _FILES or (path / "saved_model.pb").is_file():
        return ov.convert_model(path)
    if path.suffix in _TRANSFERRED or (path / "config.json").is_file():
        raise ModelLoadError(
            f"{str(path)!r} must be read by its own framework before OpenVINO; set runtime = "
            f"'openvino' in place of framework = 'openvino'"
        )
    raise ModelLoadError(
        f"{str(path)!r} must be a file of OpenVINO (.xml), ONNX or TensorFlow, got "
        f"{path.suffix or 'no suffix'!r}; load the model in its framework and give the object"
    )


def _check_attention(source: object, program: ov.Model) -> None:
    """Check that a file with fused attention of ONNX Runtime is for one sequence at a time.

    OpenVINO 2026.4 reads the lengths of further sequences as one number, writes beyond its buffers
    and may end the process, even in a later model.

    Raises:
        ModelLoadError: the file has such an op and inputs for several sequences.
    """
    if not isinstance(source, str | Path) or Path(source).suffix != ".onnx":
        return
    shapes = [shape for shape in map(get_known_sizes, program.inputs) if shape]
    if all(shape[0] == 1 for shape in shapes):
        return
    with Path(source).open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as content:
        has_attention = content.find(_ATTENTION) >= 0
    if has_attention:
        raise ModelLoadError(
            f"OpenVINO computes {_ATTENTION.decode()} for one sequence at a time only, and the "
            f"first axis of the inputs is not 1; run the model in ONNX Runtime, or set that axis "
            f"to 1 in the file"
        )


def canonicalize_graph(program: ov.Model) -> None:
    """Fold batch norms and constants, split directions, and give stable names, in place."""
    types = frozenset(map(get_op_type, program.get_ops()))
    try:
        from openvino._offline_transformations import apply_moc_transformations
    except ImportError:
        logger.debug("no common transformations in this version", exc_info=True)
    else:
        apply_moc_transformations(program, True)
    give_stable_names(program, types)
    if split_directions(program):
        give_stable_names(program, types)


def read_signature(program: ov.Model) -> Signature:
    """Return the inputs and outputs of a graph."""
    inputs = tuple(_make_tensor_spec(port, name_of(port.get_node())) for port in program.inputs)
    outputs = tuple(
        _make_tensor_spec(output, min(output.get_names(), default=f"output_{index}"))
        for index, output in enumerate(program.outputs)
    )
    returns: Structure = list(range(len(outputs))) if len(outputs) > 1 else 0
    return Signature(inputs, outputs, returns)


def _make_tensor_spec(output: ov.Output, name: str) -> TensorSpec:
    first = min(output.get_names(), default="") or name
    tensor, dtype = name_of(output.get_node()), get_numpy_dtype(output.get_element_type())
    return TensorSpec(
        first, tensor, dtype, get_known_sizes(output), name if first != name else None
    )


def _check_example_runs(model: OpenVinoModel) -> None:
    try:
        model.run(model.example)
    except ConversionError as error:
        raise ModelLoadError(f"OpenVINO cannot run the model: {error}") from error


def _float_recurrent_notes(program: ov.Model) -> tuple[str, ...]:
    recurrent = (node for node in iterate_op_nodes(program) if has_role(node, Role.RECURRENT))
    # The weights of a GRU may be stored in INT8, step by step.
    types = (
        get_op_type(node)
        for node in recurrent
        if not has_integer_kernel(node)
        and not (resets_product(node) and find_stepwise_obstacle(node) is None)
    )
    return stays_in_fp32(types, "", "no plan quantizes it in OpenVINO", "FP32 or 16 bits")
