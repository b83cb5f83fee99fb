"""Model storage in the format of `torch.export`; code from files never runs.

Sizes that the model's code rounds are written as functions that `torch.export.save` can write.
"""

from __future__ import annotations

import builtins
import logging
import math
import operator
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from neural_mp.adaptors.common.named_graphs import read_details, write_details
from neural_mp.adaptors.pytorch.capture.canonicalize import views_to_reshapes
from neural_mp.adaptors.pytorch.capture.graph_capture import silence_export_logs, use_export
from neural_mp.adaptors.pytorch.converted_module import make_standalone_form
from neural_mp.adaptors.pytorch.decoders.transformers_folder import (
    make_plain_config,
    read_stored_config,
)
from neural_mp.adaptors.pytorch.graph import graph_edit as fx
from neural_mp.adaptors.pytorch.graph import qdq_ops as ops
from neural_mp.adaptors.pytorch.graph.call_signature import CallArgs, call_signature
from neural_mp.adaptors.pytorch.graph.dynamic_shapes import Sizes, from_plain, to_plain, watch_sizes
from neural_mp.adaptors.pytorch.graph.model import WHOLE, Part, TorchModel
from neural_mp.adaptors.pytorch.graph.output_classes import (
    list_absent_fields,
    with_named_outputs,
    with_plain_containers,
)
from neural_mp.adaptors.pytorch.kernels.float_kernels import list_marked_kernels, mark_kernels
from neural_mp.adaptors.pytorch.kernels.lowering import lower_to_kernels
from neural_mp.adaptors.pytorch.pt2.archive import read_program
from neural_mp.adaptors.pytorch.versions import make_unguarded_module
from neural_mp.core.precision import FLOAT_KERNELS
from neural_mp.errors import ConversionError, ModelLoadError, NeuralMPError, one_line
from neural_mp.util.validators import (
    anything,
    boolean,
    invalid_value_error,
    list_of,
    mapping_of,
    one_of,
    record,
    string,
)

logger = logging.getLogger(__name__)

PROGRAM_FILE = "model.pt2"
DETAILS_FILE = "details.json"
_CHUNK_BYTES = 1 << 20
#: Reshape op after export → op type before.
_RESHAPED = dict.fromkeys(("view", "_unsafe_view"), "reshape")


def save_model(model: TorchModel, folder: Path) -> None:
    """Write the portable form of a whole model and the names of its ops into a folder.

    Raises:
        ConversionError: if the model cannot be written.
    """
    output = next(node for node in model.portable_graph.graph.nodes if node.op == "output")
    texts = [leaf for leaf in pytree.tree_leaves(output.args) if isinstance(leaf, str)]
    if texts:
        raise ConversionError(
            f"outputs must be tensors in torch.export's format, got the text {texts[0]!r}; do not "
            f"return texts"
        )
    try:
        plain, named = with_plain_containers(with_storable_sizes(model.portable_graph))
        program, sizes = use_export(plain, _make_zero_tensors(model.example), _keep_unchanged)
        # One stored value for each input: a batch can be larger than the weights.
        program.example_inputs = pytree.tree_map_only(
            torch.Tensor,
            lambda x: x.new_zeros(()).expand(x.shape) if x.layout is torch.strided else x,
            program.example_inputs,
        )
        _write_compressed(program, folder / PROGRAM_FILE)
    except (RuntimeError, ValueError, TypeError) as error:
        raise ConversionError(f"the converted model cannot be written: {error}") from error
    details: dict[str, object] = {
        "ops": _map_op_names(model.portable_graph.graph, program.graph),
        "inputs": model.signature.names,
        "parameters": model.signature.parameters,
        "named_outputs": named,
        "absent_outputs": list_absent_fields(model.portable_graph) if named else [],
        "sizes": to_plain(sizes),
        "dtype": str(model.signature.dtype).removeprefix("torch."),
        "compiles": model.compiles,
        "kernels": list_marked_kernels(model.portable_graph),
    }
    if model.config is not None:
        details["config"] = make_plain_config(model.config)
    write_details(folder / DETAILS_FILE, details)


def save_file(model: TorchModel, path: Path, metadata: Mapping[str, str]) -> None:
    """Write a program that `torch.export.load` reads and runs without this package.

    Pairs are those of `torch.ops.quantized_decomposed`, which torch's compiler for x86 fuses into
    integer kernels; without the compiler, the program computes in float.

    Raises:
        ConversionError: the model has several parts, or ops that torch lacks.
    """
    if model.shell is not None:
        raise ConversionError(
            "a .pt2 file holds one graph, but the model is converted module by module; save a "
            "folder"
        )
    module, _ = with_plain_containers(
        with_storable_sizes(make_standalone_form(model.portable_graph))
    )
    try:
        program, _ = use_export(module, _make_zero_tensors(model.example), _keep_unchanged)
        # PyTorch ends the process at a path that is not UTF-8.
        with silence_export_logs(), path.open("wb") as file:
            torch.export.save(program, file, extra_files=dict(metadata))
    except (RuntimeError, ValueError, TypeError) as error:
        raise ConversionError(f"the converted model cannot be written: {error}") from error


def _keep_unchanged(program: ExportedProgram, sizes: Sizes) -> tuple[ExportedProgram, Sizes]:
    return program, sizes


def _write_compressed(program: ExportedProgram, path: Path) -> None:
    """Write a program with its texts compressed, which exceed the weights of a small layer.

    Weights stay as they are: codes hardly shrink, and would load more slowly.
    """
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        plain = Path(scratch) / path.name
        # PyTorch ends the process at a path that is not UTF-8.
        with silence_export_logs(), plain.open("wb") as file:
            torch.export.save(program, file)
        with zipfile.ZipFile(plain) as source, zipfile.ZipFile(path, "w") as target:
            for member in source.infolist():
                copied = zipfile.ZipInfo(member.filename)
                copied.file_size = member.file_size
                if member.filename.endswith(".json") or "/sample_inputs/" in member.filename:
                    copied.compress_type = zipfile.ZIP_DEFLATED
                with source.open(member) as content, target.open(copied, "w") as room:
                    shutil.copyfileobj(content, room, _CHUNK_BYTES)


def _make_zero_tensors(example: CallArgs) -> CallArgs:
    """Return example inputs of zeros: files store them, and must not contain user data."""
    return example.with_plain_containers().map_leaves(
        lambda leaf: torch.zeros_like(leaf) if isinstance(leaf, torch.Tensor) else leaf
    )


def _map_op_names(graph: Graph, exported: Graph) -> dict[str, str]:
    """Return node of the exported graph → op name in the original graph.

    Export keeps the order of ops but renumbers some nodes: additions share a counter with size
    arithmetic.
    """
    source, target = ([n for n in g.nodes if n.op == "call_function"] for g in (graph, exported))
    source, target = ([n for n in nodes if fx.has_tensors(n)] for nodes in (source, target))
    kinds, target_kinds = (
        [_RESHAPED.get(fx.get_op_type(n), fx.get_op_type(n)) for n in ns] for ns in (source, target)
    )
    blocks = SequenceMatcher(None, kinds, target_kinds, autojunk=False).get_matching_blocks()
    pairs = ((source[b.a + i], target[b.b + i]) for b in blocks for i in range(b.size))
    return {copied.name: node.meta[fx.OP_NAME] for node, copied in pairs if fx.OP_NAME in node.meta}


def dump_graph(model: TorchModel, path: Path) -> tuple[Path, ...]:
    """Write the code of every graph as text, and the program if the model is one graph."""
    files = [path.with_suffix(".txt")]
    codes = [f"# {name or 'model'}\n{part.portable.code}" for name, part in model.parts.items()]
    files[0].write_text("\n".join(codes), encoding="utf-8")
    if model.shell is None:
        files.append(path.with_suffix(".pt2"))
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            save_model(model, Path(scratch))
            (Path(scratch) / PROGRAM_FILE).replace(files[-1])
    return tuple(files)


def restore_model(folder: Path) -> TorchModel:
    """Restore a saved model, and lower it to integer kernels."""
    file = folder / PROGRAM_FILE
    program = load_program(file)
    details = read_details(folder / DETAILS_FILE, _DETAILS)
    names = details["ops"]
    with convert_read_errors(file):
        portable = make_unguarded_module(program)
        watch_sizes(portable, details["sizes"])
        for node in portable.graph.nodes:
            if node.name in names:
                node.meta[fx.OP_NAME] = names[node.name]
        mark_kernels(portable, details.get("kernels", {}))
        views_to_reshapes(portable)  # Export turns reshapes back into views.
        portable.recompile()
        if details.get("named_outputs"):
            portable = with_named_outputs(portable, details.get("absent_outputs", []))
        base = call_signature(portable, details["inputs"])
        example = get_export_example(program)
        listed = details.get("parameters") or base.parameters
        # Keywords that a forward takes by `**kwargs` are not among its parameters.
        parameters = tuple(dict.fromkeys((*listed, *example.kwargs)))
        signature = replace(base, dtype=details["dtype"], parameters=parameters)
        whole = Part(portable, lower_to_kernels(portable), example)
        values = details.get("config")
        config = None if values is None else read_stored_config(values, len(portable.state_dict()))
    compiles = details.get("compiles", False)
    return TorchModel({WHOLE: whole}, example, signature, compiles=compiles, config=config)


def parse_dtype(value: object) -> torch.dtype:
    """Validate the name of a `torch.dtype`."""
    result = getattr(torch, string(value), None)
    if not isinstance(result, torch.dtype):
        raise invalid_value_error("the name of a torch.dtype", value)
    return result


_DETAILS = record(
    {
        "ops": mapping_of(string),
        "inputs": list_of(string),
        "sizes": from_plain,
        "dtype": parse_dtype,
    },
    # Absent in files of earlier versions.
    {
        "parameters": list_of(string),
        "named_outputs": boolean,
        "absent_outputs": list_of(string),
        "compiles": boolean,
        "kernels": mapping_of(one_of(FLOAT_KERNELS)),
        "config": mapping_of(anything),
    },
)


def get_export_example(program: ExportedProgram) -> CallArgs:
    """Return the inputs a program was exported with.

    Raises:
        ModelLoadError: if the program has no example inputs.
    """
    if program.example_inputs is None:
        raise ModelLoadError(
            "the exported program must hold example inputs; export the model with example inputs"
        )
    args, kwargs = program.example_inputs
    return CallArgs(tuple(args), dict(kwargs))


def load_program(path: Path) -> ExportedProgram:
    """Read a program written by `torch.export.save`, without running code from the file.

    Raises:
        ModelLoadError: if the file is missing, damaged, or has other contents.
    """
    assert ops.quantize is not None  # The file may use the custom ops, which must be registered.
    if not path.is_file():
        raise ModelLoadError(f"model file {str(path)!r} does not exist")
    with convert_read_errors(path), silence_export_logs():
        return read_program(path)


@contextmanager
def convert_read_errors(path: Path) -> Iterator[None]:
    """Convert errors to `ModelLoadError` with the file name; pass on `NeuralMPError`.

    Raises:
        ModelLoadError: for any other exception.
    """
    try:
        yield
    except NeuralMPError:
        raise
    except Exception as error:
        # Loaders raise the errors of their parsers: KeyError, RuntimeError, JSON errors…
        logger.debug("reading %s failed", path, exc_info=True)
        raise ModelLoadError(
            f"{str(path)!r} is no program that torch.export.save wrote, or is damaged: "
            f"{one_line(error)}"
        ) from error


#: Largest number below 1, and the gap between it and 1.
_BELOW_ONE, _GAP = 1 - 2**-53, 2**-53


def with_storable_sizes(module: GraphModule) -> GraphModule:
    """Return the graph with rounded sizes in functions that files can hold; equal in value."""
    if not any(_find_form_writer(node) for node in module.graph.nodes):
        return module
    rewritten = fx.copy_graph_shallowly(module)
    for node in list(rewritten.graph.nodes):
        form = _find_form_writer(node)
        if form is not None:
            with rewritten.graph.inserting_before(node):
                written = form(_Writer(rewritten.graph), node.all_input_nodes[0])
            node.replace_all_uses_with(written)
            rewritten.graph.erase_node(node)
    rewritten.graph.eliminate_dead_code()
    rewritten.graph.lint()
    rewritten.recompile()
    return rewritten


def _find_form_writer(node: Node) -> Callable[[_Writer, Node], Node] | None:
    """Return the function that writes the form of a node for files; None if none is needed."""
    if node.op != "call_function" or any(value is not None for value in node.args[1:]):
        return None
    return _FORMS.get(node.target)


@dataclass(frozen=True)
class _Writer:
    graph: Graph

    def call(self, function: Callable[..., Any], *args: Node | float) -> Node:
        return self.graph.call_function(function, args)

    def write_magnitude(self, value: Node) -> Node:
        return self.call(torch.sym_max, value, self.call(operator.neg, value))

    def write_floor(self, value: Node) -> Node:
        quotient = _integer_quotient_operands(value)
        if quotient is not None:
            return self.call(operator.floordiv, *quotient)
        return self.call(operator.neg, self.write_ceil(self.call(operator.neg, value)))

    def write_ceil(self, value: Node) -> Node:
        quotient = _integer_quotient_operands(value)
        if quotient is not None:
            dividend, divisor = quotient
            down = self.call(operator.floordiv, self.call(operator.neg, dividend), divisor)
            return self.call(operator.neg, down)
        whole = self.call(math.trunc, value)
        rest = self.call(operator.sub, value, whole)
        more = self.call(math.trunc, self.call(operator.add, rest, _BELOW_ONE))
        return self.call(operator.add, whole, more)

    def write_round(self, value: Node) -> Node:
        """Write Python's rounding: halves to the even neighbour."""
        low = self.write_floor(value)
        odd = self.call(operator.mod, low, 2)
        rest = self.call(operator.sub, value, low)
        # A half is raised to 1 if the lower neighbour is odd, else to the number below 1.
        even_gap = self.call(operator.mul, self.call(operator.sub, 1, odd), _GAP)
        raised = self.call(operator.sub, self.call(operator.add, rest, 0.5), even_gap)
        return self.call(operator.add, low, self.call(math.trunc, raised))


def _integer_quotient_operands(value: Node) -> tuple[Any, Any] | None:
    if value.target is not operator.truediv:
        return None
    operands = [arg.meta.get("val") if isinstance(arg, Node) else arg for arg in value.args]
    if not all(isinstance(part, int | torch.SymInt) for part in operands):
        return None
    dividend, divisor = value.args
    return dividend, divisor


_FORMS: Mapping[object, Callable[[_Writer, Node], Node]] = {
    math.ceil: _Writer.write_ceil,
    math.floor: _Writer.write_floor,
    builtins.round: _Writer.write_round,
    operator.abs: _Writer.write_magnitude,
    builtins.abs: _Writer.write_magnitude,
}
