"""Loading of a model: path or object → canonicalized graph with its signature."""

from __future__ import annotations

import logging
from mmap import ACCESS_READ, mmap
from pathlib import Path

from neural_mp.adaptors.common.capabilities import stays_in_fp32
from neural_mp.adaptors.common.signatures.input_spec import InputSpec
from neural_mp.adaptors.common.signatures.signature import Signature, TensorSpec
from neural_mp.adaptors.openvino.files.storage import check_xml
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
from neural_mp.io.files import require_regular_file
from neural_mp.util.pytree import Structure

logger = logging.getLogger(__name__)

#: Files that OpenVINO itself reads, without running code from them.
_FILES = (".onnx", ".pb", ".pbtxt", ".tflite")
#: Op of ONNX Runtime that OpenVINO computes for one sequence only.
_ATTENTION = b"GroupQueryAttention"
#: Files of other frameworks that are checked and read by these, and reach OpenVINO by transfer.
_TRANSFERRED = (".pt2", ".keras", ".h5", ".hdf5")


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
