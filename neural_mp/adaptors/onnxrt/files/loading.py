"""Loading of a model: path or object → canonicalized graph with its signature.

Every rewriting of a model is compared with a run of the original graph.
"""

from __future__ import annotations

import logging
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError

from neural_mp.adaptors.common.capabilities import stays_in_fp32
from neural_mp.adaptors.common.signatures.input_spec import InputSpec, in_parts
from neural_mp.adaptors.common.signatures.signature import Array, Signature, TensorSpec
from neural_mp.adaptors.onnxrt.canonicalize import canonicalize_graph
from neural_mp.adaptors.onnxrt.graph.edit import (
    GraphNames,
    computes_same,
    correct_declarations,
    get_known_sizes,
    iterate_all_constants,
    name_nodes,
)
from neural_mp.adaptors.onnxrt.graph.file_checks import check_model
from neural_mp.adaptors.onnxrt.graph.opset import LEAST_OPSET, get_onnx_opset
from neural_mp.adaptors.onnxrt.graph.protos import (
    parse_program_message,
    read_without_weights,
    save_program,
    without_sparse,
)
from neural_mp.adaptors.onnxrt.graph.sessions import CPU, PLAIN, Runner
from neural_mp.adaptors.onnxrt.graph.subgraphs import in_order
from neural_mp.adaptors.onnxrt.kernel_check import KernelCheck
from neural_mp.adaptors.onnxrt.kernels.ops import FLOAT_RECURRENT, is_quantize
from neural_mp.adaptors.onnxrt.model import OnnxModel, Origin
from neural_mp.adaptors.onnxrt.source_quantization import bypass_source_quantization
from neural_mp.adaptors.onnxrt.subgraph_outputs import with_outputs
from neural_mp.errors import ConversionError, ModelLoadError, one_line
from neural_mp.util.pytree import list_float_arrays, tree_leaves
from neural_mp.util.text import with_article

logger = logging.getLogger(__name__)

#: ONNX Runtime's names of element types that differ from ONNX's.
_CALLED = {"float": "FLOAT", "double": "DOUBLE"}
_TENSOR = re.compile(r"tensor\((\w+)\)")


def note_runtime_types(program: ir.Model, folder: Path | None, provider: str) -> None:
    """Set types and shapes that ONNX cannot infer, in place: mostly of ONNX Runtime's own ops."""
    unknown = {
        str(value.name): value
        for node in program.graph
        for value in node.outputs
        if value.name and value.type is None
    }
    if not unknown:
        return
    try:
        runner = Runner(with_outputs(program, unknown), folder, provider, level=PLAIN)
    except (ConversionError, ValueError):
        logger.debug("ONNX Runtime reports no types", exc_info=True)
        return
    for output in runner.session.get_outputs():
        kind = _TENSOR.fullmatch(output.type)
        value = unknown.get(output.name)
        if value is None or kind is None:
            continue
        dtype = _CALLED.get(kind[1], kind[1].upper())
        if dtype in ir.DataType.__members__:
            value.dtype = ir.DataType[dtype]
            if output.shape:  # unknown shapes are reported as empty, like those of scalars
                value.shape = ir.Shape(output.shape)


#: ONNX Runtime's error for a model with an unsupported IR version.
_NEWEST_VERSION = re.compile(r"max supported IR version: (\d+)")
#: In-memory weights from this size on are moved to a file.
_SPILL_MIN_BYTES = 50_000_000
_QUANTIZATION_READ = (
    "the model is quantized already: its scales are the ranges of its tensors, and its float ops "
    "are planned"
)
_QUANTIZATION_KEPT = (
    "the model is quantized already, and its outputs differ without its own quantization, which "
    "stays"
)


@dataclass(frozen=True)
class _Read:
    """A parsed file, the folder of its external data, and an owner of that folder."""

    proto: onnx.ModelProto
    folder: Path
    held: Any = None


def load_model(source: object, spec: InputSpec, provider: str) -> OnnxModel:
    """Load a model from a path, a message, or a serialized message.

    Raises:
        ModelLoadError: the model is unreadable or incomplete, or ONNX Runtime rejects it.
        ConfigurationError: a given name is not an input or output of the model.
        DataError: the example does not fit the model.
    """
    file = _read_source(source)
    original, program = parse_program_graph(file), parse_program_graph(file)
    origin = Origin.from_program(file.folder, original)
    signature = read_signature(original).select_ports(spec.names, spec.outputs)
    folder = origin.folder if origin else None
    runner = _start_runner(original, program, folder, provider)
    _keep_outputs(program, signature)
    feeds, unsure = spec.make_feeds(signature)
    reference = Reference.from_runner(runner, original, signature, feeds)
    del runner  # two sessions at a time would double the memory
    obstacle = quantized = None
    try:
        warnings = _canonicalize_and_check(program, reference, folder, provider)
        program, quantized, notes = _read_quantization(program, reference, folder, provider)
        warnings += notes
        if get_onnx_opset(program) < LEAST_OPSET:
            obstacle = "it has no operators of the ai.onnx domain"
    except ConversionError as error:
        obstacle, warnings, program = str(error), [], parse_program_graph(file)
        name_nodes(program)
        _keep_outputs(program, signature)
    if obstacle is not None:
        warnings.append(f"no op of the model can be converted: {obstacle}")
    return OnnxModel(
        program,
        signature,
        feeds,
        original,
        warnings=(*warnings, *unsure),
        origin=origin,
        opset=get_onnx_opset(program),
        obstacle=obstacle,
        provider=provider,
        held=file.held,
        quantized=quantized,
        kernel_check=KernelCheck(program) if provider == CPU and obstacle is None else None,
    )


def _start_runner(
    original: ir.Model, program: ir.Model, folder: Path | None, provider: str
) -> Runner:
    """Return a session of a model without optimization.

    The `onnx` package writes its own newest IR version into every model, which an older runtime
    rejects regardless of content. In that case, the version is lowered in place to the newest
    supported one; the runtime then reports unsupported content by name.

    Raises:
        ModelLoadError: ONNX Runtime rejects the model.
    """
    try:
        return Runner(original, folder, provider, level=PLAIN)
    except ConversionError as error:
        newest = _NEWEST_VERSION.search(str(error))
        if newest is None or original.ir_version <= int(newest[1]):
            raise ModelLoadError(str(error)) from error
        original.ir_version = program.ir_version = int(newest[1])
        return _start_runner(original, program, folder, provider)


def _canonicalize_and_check(
    program: ir.Model, reference: Reference, folder: Path | None, provider: str
) -> list[str]:
    """Canonicalize a graph, in place; check that results stay equal; return notes to the user.

    Raises:
        ConversionError: the graph cannot be converted.
    """
    try:
        warnings = canonicalize_graph(program, folder)
    except ConversionError:
        raise
    except Exception as error:
        # The exceptions of onnx-ir passes vary.
        logger.debug("canonicalization failed", exc_info=True)
        raise ConversionError(f"its graph cannot be canonicalized: {one_line(error)}") from error
    try:
        # A session of a long graph takes longer than all else.
        is_unchanged = computes_same(program, reference.original)
        prepared = None if is_unchanged else Runner(program, folder, provider, level=PLAIN)
    except ConversionError as error:
        raise ConversionError(f"its canonicalized graph is invalid: {error}") from error
    note_runtime_types(program, folder, provider)
    try:
        if prepared is not None:
            reference.check_outputs(prepared, folder, provider)
    except ConversionError as error:
        previous, current = get_onnx_opset(reference.original), get_onnx_opset(program)
        changed = f"opset {previous} cannot be changed to {current}"
        unequal = "its canonicalized graph is not equal to the original"
        raise ConversionError(f"{changed if previous != current else unequal}: {error}") from error
    nodes = (node for node in in_order(program.graph) if not node.domain)
    slow = (node.op_type for node in nodes if node.op_type in FLOAT_RECURRENT)
    return [*warnings, *stays_in_fp32(slow, "", "ONNX Runtime has no integer kernel for it")]


def _read_quantization(
    program: ir.Model, reference: Reference, folder: Path | None, provider: str
) -> tuple[ir.Model, ir.Model | None, list[str]]:
    """Return the graph of the float ops of a quantized model, the graph itself, and notes.

    Without quantization, or if only that makes the outputs what they are, the graph stays.
    """
    if not any(map(is_quantize, in_order(program.graph))):
        return program, None, []
    bare = program.clone()
    if not bypass_source_quantization(bare, GraphNames(bare.graph)):
        return program, None, []
    try:
        matches = reference.is_near(Runner(bare, folder, provider, level=PLAIN))
    except ConversionError:
        logger.debug("the float graph fails", exc_info=True)
        matches = False
    if not matches:
        return program, None, [_QUANTIZATION_KEPT]
    return bare, program, [_QUANTIZATION_READ]


def _read_source(source: object) -> _Read:
    if isinstance(source, str | Path):
        return read_file(Path(source))
    proto = source
    if isinstance(source, bytes | bytearray):
        proto = onnx.ModelProto()
        try:
            proto.ParseFromString(bytes(source))
        except DecodeError as error:
            raise ModelLoadError(f"the model must be a serialized ONNX model: {error}") from error
    elif isinstance(source, ir.Model):
        return _write_temporary_files(source)
    if not isinstance(proto, onnx.ModelProto):
        raise ModelLoadError(
            f"the model must be a path, a ModelProto or its bytes, got "
            f"{with_article(type(source).__name__)}"
        )
    _require_graph(proto, "the model given")
    if any(t.data_location == onnx.TensorProto.EXTERNAL for t in proto.graph.initializer):
        raise ModelLoadError(
            "the model given has external weights in an unknown folder; give the path of the model "
            "or load the weights with onnx.external_data_helper.load_external_data_for_model"
        )
    if proto.ByteSize() < _SPILL_MIN_BYTES:
        return _Read(proto, Path())
    return _write_temporary_files(
        parse_program_message(onnx.ModelProto.FromString(proto.SerializeToString()))
    )


def _write_temporary_files(program: ir.Model) -> _Read:
    directory = tempfile.TemporaryDirectory()
    path = Path(directory.name) / "model.onnx"
    save_program(program, path, "model.data")
    return _Read(read_without_weights(path), path.parent, directory)


def read_file(path: Path) -> _Read:
    """Read a file without its weights.

    Raises:
        ModelLoadError: the file is missing, truncated or not an ONNX model.
    """
    if not path.is_file():
        raise ModelLoadError(f"model file {str(path)!r} does not exist")
    try:
        proto = read_without_weights(path)
    except (DecodeError, OSError, UnicodeDecodeError) as error:
        raise ModelLoadError(
            f"{str(path)!r} is not an ONNX model, or is damaged: {one_line(error)}"
        ) from error
    _require_graph(proto, repr(str(path)))
    check_model(proto, path)
    return _Read(proto, path.parent.absolute())


def _require_graph(proto: onnx.ModelProto, what: str) -> None:
    if not proto.HasField("graph") or not (proto.graph.node or proto.graph.output):
        raise ModelLoadError(f"{what} is not an ONNX model: the graph is missing")
    if not proto.graph.output:
        raise ModelLoadError(f"{what} has no outputs")


def parse_program_graph(file: _Read) -> ir.Model:
    """Return the graph of a parsed file; raise `ModelLoadError` if the graph is broken."""
    dense = without_sparse(file.proto)
    try:
        # Passes of onnx-ir rename initializers in the original message.
        proto = onnx.ModelProto()
        proto.CopyFrom(dense)
        program = parse_program_message(proto)
    except Exception as error:
        # Its exceptions vary.
        logger.debug("the graph is invalid", exc_info=True)
        raise ModelLoadError(f"the graph of the model is invalid: {one_line(error)}") from error
    for tensor in iterate_all_constants(program):
        if isinstance(tensor, ir.ExternalTensor):
            tensor.base_dir = file.folder
    correct_declarations(program)
    return program


def read_signature(program: ir.Model) -> Signature:
    """Return the inputs and outputs of a graph."""
    fed = [value for value in program.graph.inputs if not value.is_initializer()]
    outputs = tuple(map(_make_tensor_spec, program.graph.outputs))
    returns = 0 if len(outputs) == 1 else list(range(len(outputs)))
    return Signature(tuple(map(_make_tensor_spec, fed)), outputs, returns)


def _make_tensor_spec(value: ir.Value) -> TensorSpec:
    """Return the spec of an input or output; ONNX Runtime judges one without a type."""
    name = str(value.name)
    if not isinstance(value.type, ir.TensorType) or value.dtype in (None, ir.DataType.UNDEFINED):
        return TensorSpec(name, name, None, None)
    dtype = np.dtype(object) if value.dtype is ir.DataType.STRING else value.dtype.numpy()
    return TensorSpec(name, name, np.dtype(dtype), get_known_sizes(value))


def _keep_outputs(program: ir.Model, signature: Signature) -> None:
    outputs = signature.output_tensors
    for value in [v for v in program.graph.outputs if v.name not in outputs]:
        program.graph.outputs.remove(value)


#: Samples on which a canonicalized graph is run next to the original.
_COMPARED_SAMPLES = 2
#: Largest difference of equal outputs, relative to their largest value.
_TOLERANCE = 1e-3
#: Largest noise, over the signal, of a model that is quantized already.
_MAX_SOURCE_NSR = 0.1
#: Relative change of inputs that only rounding would show.
_NUDGE_RATIO = 2.0**-20


@dataclass(frozen=True)
class Reference:
    """The results of the original graph on a few samples.

    Attributes:
        original: the original graph.
        feeds: the samples.
        outputs: the tensors to compare.
        results: their values; None if the original fails, e.g. on synthetic inputs.
    """

    original: ir.Model
    feeds: dict[str, Array]
    outputs: list[str]
    results: list[Any] | None

    @classmethod
    def from_runner(
        cls, runner: Runner, original: ir.Model, signature: Signature, feeds: dict[str, Array]
    ) -> Reference:
        """Run the original graph on the first samples of a batch."""
        few = next(in_parts(feeds, signature.count_samples(feeds), _COMPARED_SAMPLES))
        outputs = signature.output_tensors
        try:
            return cls(original, few, outputs, runner(few, outputs))
        except ConversionError:
            return cls(original, few, outputs, None)

    def check_outputs(self, prepared: Runner, folder: Path | None, provider: str) -> None:
        """Check that a rewritten graph yields the same.

        Raises:
            ConversionError: the rewritten graph fails, or its outputs differ.
        """
        if self.results is None:
            return
        outputs = prepared(self.feeds, self.outputs)
        if not _are_outputs_close(outputs, self.results) and self._is_stable(folder, provider):
            raise ConversionError("the outputs differ")

    def is_near(self, bare: Runner) -> bool:
        """Whether a graph without the model's quantization yields the same, up to its noise."""
        if self.results is None:
            return True
        outputs = bare(self.feeds, self.outputs)
        for result, expected in zip(
            list_float_arrays(outputs), list_float_arrays(self.results), strict=True
        ):
            error, signal = np.square(result - expected).sum(), np.square(expected).sum()
            if not error <= _MAX_SOURCE_NSR * signal:
                return False
        return True

    def _is_stable(self, folder: Path | None, provider: str) -> bool:
        """Whether the original graph yields the same after a change of rounding.

        Random ops never do, and a sorted or thresholded output may not.
        """
        nudged = {
            name: array * array.dtype.type(1 + _NUDGE_RATIO)
            if isinstance(array, np.ndarray) and array.dtype.kind == "f"
            else array
            for name, array in self.feeds.items()
        }
        optimized = Runner(self.original, folder, provider)
        return self.results is not None and _are_outputs_close(
            optimized(nudged, self.outputs), self.results
        )


def _are_outputs_close(actual: list[Any], expected: list[Any]) -> bool:
    """Whether outputs agree, including the tensors within sequences and maps."""
    lhs, rhs = (list(map(np.asarray, tree_leaves(outputs))) for outputs in (actual, expected))
    return len(lhs) == len(rhs) and all(map(_are_arrays_close, lhs, rhs))


def _are_arrays_close(actual: Array, expected: Array) -> bool:
    """Whether two arrays agree up to rounding, relative to the largest value."""
    if actual.shape != expected.shape:
        return False
    if expected.dtype.kind not in "fV":  # bfloat16 is of kind V in numpy
        return bool(np.array_equal(actual, expected))
    output, target = actual.astype(np.float64), expected.astype(np.float64)
    largest = np.abs(target, where=np.isfinite(target), out=np.zeros_like(target)).max(initial=0.0)
    return np.allclose(output, target, _TOLERANCE, _TOLERANCE * largest, equal_nan=True)
