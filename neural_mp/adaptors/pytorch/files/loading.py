"""Loading of user models, in memory or in files: captured, canonicalized graphs."""

from __future__ import annotations

import copy
import zipfile
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node
from torch.nn.parameter import is_lazy

from neural_mp.adaptors.common.capabilities import stays_in_fp32
from neural_mp.adaptors.common.signatures.input_spec import InputSpec
from neural_mp.adaptors.pytorch.capture import graph_capture
from neural_mp.adaptors.pytorch.capture.canonicalize import (
    canonicalize_graph,
    drop_updates,
    dropped_update_warning,
)
from neural_mp.adaptors.pytorch.capture.module_capture import (
    CapturedParts,
    capture_layers,
    capture_modules,
    copy_module,
)
from neural_mp.adaptors.pytorch.capture.taken_paths import run_graph_outputs, warn_of_other_paths
from neural_mp.adaptors.pytorch.capture.trial_run import at_least_two, find_exceeded_limits, try_out
from neural_mp.adaptors.pytorch.converted_module import ConvertedModule
from neural_mp.adaptors.pytorch.decoders.experts import (
    list_whole_experts,
    run_all_experts,
    split_experts,
)
from neural_mp.adaptors.pytorch.decoders.transformers_folder import (
    CONFIG,
    is_known_class,
    read_folder,
)
from neural_mp.adaptors.pytorch.files import storage
from neural_mp.adaptors.pytorch.graph import dynamic_shapes
from neural_mp.adaptors.pytorch.graph import graph_edit as fx
from neural_mp.adaptors.pytorch.graph.call_signature import (
    CallArgs,
    CallSignature,
    call_signature,
    resize_batch,
)
from neural_mp.adaptors.pytorch.graph.model import WHOLE, Part, TorchModel
from neural_mp.adaptors.pytorch.graph.quantizable_ops import INTEGER_LAYERS
from neural_mp.adaptors.pytorch.graph.recurrent import RECURRENT_TYPES, find_recurrent_obstacle
from neural_mp.adaptors.pytorch.pt2.op_allowlist import is_allowed
from neural_mp.core.enums import Capture
from neural_mp.errors import ConfigurationError, ModelLoadError
from neural_mp.util.text import format_count

#: Maximum number of parts that a warning lists.
_MAX_NAMED_PARTS = 8
#: Reason why an op that runs nested graphs stays in FP32.
RUNS_BODIES = "it runs nested graphs, which are not converted"


def runs_bodies(node: Node) -> bool:
    """Whether an op runs nested graphs."""
    return isinstance(node.target, torch._ops.HigherOrderOperator)


def left_in_bodies(module: GraphModule) -> list[str]:
    """Return a warning for every op whose nested graphs hold layers."""
    warnings: list[str] = []
    for node in module.graph.nodes:
        if runs_bodies(node):
            types = (
                (inner.target, fx.get_op_type(inner))
                for inner in _iterate_nested_nodes(module, node)
            )
            warnings += stays_in_fp32(
                (kind for op, kind in types if op in INTEGER_LAYERS or kind in RECURRENT_TYPES),
                f"within the op {str(node.meta.get(fx.OP_NAME, node.name))!r}",
                "only the main graph is converted",
            )
    return warnings


def _iterate_nested_nodes(module: GraphModule, node: Node) -> Iterator[Node]:
    for source in node.all_input_nodes:
        body = fx.get_attribute(module, str(source.target)) if source.op == "get_attr" else None
        if isinstance(body, GraphModule):
            for inner in body.graph.nodes:
                yield inner
                if runs_bodies(inner):
                    yield from _iterate_nested_nodes(body, inner)


def load_model(source: object, spec: InputSpec, how: Capture) -> TorchModel:
    """Capture a module, or load an exported program or its file."""
    if isinstance(source, str | Path):
        path, source = Path(source), read_source(Path(source))
        if isinstance(source, ExportedProgram):
            with storage.convert_read_errors(path):
                return _from_program(source, spec.example)
    if isinstance(source, ExportedProgram):
        return _from_program(source, spec.example)
    if isinstance(source, torch.jit.ScriptModule):
        raise ModelLoadError("the model must not be TorchScript; give the nn.Module of its source")
    if any(kind.__module__.partition(".")[0] == "peft" for kind in type(source).__mro__):
        raise ModelLoadError(
            "the model must not hold adapters of peft; give the model with its adapters merged: "
            "model.merge_and_unload()"
        )
    if isinstance(source, ConvertedModule):
        raise ModelLoadError("the model is already converted; give the original model")
    _require_values(source)
    signature = call_signature(source, spec.names)
    unknown = [name for name in spec.names if name not in signature.parameters]
    if unknown:
        raise ConfigurationError(
            f"inputs must name parameters of {type(source).__name__}.forward "
            f"({', '.join(signature.parameters)}), got {unknown[0]!r}"
        )
    module = _without_inference_tensors(source)
    call, inferred = _choose_example_call(module, signature, spec.example)
    if how == Capture.MODULES:
        model = _capture_in_parts(module, call, signature, capture_modules, "module")
    elif how == Capture.LAYERS:
        model = _capture_in_parts(module, call, signature, capture_layers, "layer")
    else:
        model = _assemble_model(graph_capture.capture_module(module, call), call, signature, module)
    config = getattr(source, "config", None) if is_known_class(source) else None
    warnings = (*inferred, *model.warnings)
    return replace(model, warnings=warnings, config=config, original=source)


def _without_inference_tensors(source: nn.Module) -> nn.Module:
    """Return the module, or a copy if its weights were made under `torch.inference_mode`.

    Such tensors can be neither exported nor saved.
    """
    tensors = (*source.parameters(), *source.buffers())
    memo: dict[int, Any] = {id(value): value.clone() for value in tensors if value.is_inference()}
    for value in source.parameters():
        if id(value) in memo:
            memo[id(value)] = nn.Parameter(memo[id(value)], requires_grad=False)
    return copy.deepcopy(source, memo) if memo else source


def _require_values(source: nn.Module) -> None:
    """Check that all weights have values.

    Raises:
        ModelLoadError: if a weight has no shape yet, or is on the meta device.
    """
    for name, value in (*source.named_parameters(), *source.named_buffers()):
        if is_lazy(value):
            raise ModelLoadError(
                f"the weights of {type(source).__name__} must be initialized, but {name!r} has no "
                f"shape yet: run the model once, then load its trained weights"
            )
        if value.is_meta:
            raise ModelLoadError(
                f"the weights of {type(source).__name__} must have values, but {name!r} is on the "
                f"meta device: move the model by to_empty(device='cpu'), then load its weights"
            )


def _choose_example_call(
    source: nn.Module, signature: CallSignature, example: object
) -> tuple[CallArgs, tuple[str, ...]]:
    """Return the call to capture with, and a warning if its inputs were inferred."""
    if example is not None:
        return signature.call(example), ()
    call = graph_capture.guess_example_call(source)
    warning = (
        f"without data, the model was captured with an inferred input, {call}; set inputs to an "
        f"example tensor for other inputs"
    )
    return call, (warning,)


def _capture_in_parts(
    source: nn.Module,
    call: CallArgs,
    signature: CallSignature,
    capture_parts: Callable[[nn.Module, CallArgs], CapturedParts],
    kind: str,
) -> TorchModel:
    call = at_least_two(call)
    shell, parts, warnings = copy_module(source), {}, []
    if kind == "layer":
        split_experts(shell)
    with run_all_experts(shell):
        captured = capture_parts(shell, call)
    for path, (graph, example) in captured.graphs.items():
        module, dropped = _canonicalize_graph(graph, path)
        parts[path] = Part(module, module, example)
        warnings += dropped
    warnings.append(
        f"{type(source).__name__} is converted {kind} by {kind} ({_list_parts(parts, kind)}); ops "
        f"between these {kind}s are not converted"
    )
    warnings += captured.warnings
    exceeded = find_exceeded_limits(shell, call)
    if exceeded:  # and yet the model runs, as with rotary positions
        warnings.append(f"the model was not trained for inputs of this length: {exceeded}")
    whole = list_whole_experts(shell)
    if whole:
        shown = _list_parts(whole, "weight")
        warnings.append(f"the weights of experts in a form of their own stay as they are: {shown}")
    attributes, buffers = _list_stateful_names(shell, call, parts) if kind == "module" else ([], [])
    warnings += [*_lost_change_warnings(attributes), *map(dropped_update_warning, buffers)]
    model = TorchModel(parts, call, signature, shell, source, tuple(warnings))
    return replace(model, keeps_state=bool(attributes or buffers))


def _list_parts(names: Collection[str], kind: str) -> str:
    return ", ".join(names) if len(names) <= _MAX_NAMED_PARTS else format_count(len(names), kind)


def _list_stateful_names(
    shell: nn.Module, call: CallArgs, parts: Iterable[str]
) -> tuple[list[str], list[str]]:
    """Return the attributes and buffers outside of parts that carry state from call to call."""
    run = try_out(shell, call)
    inside = tuple(f"{path}." for path in parts)
    attributes, buffers = (
        [name for name in names if not name.startswith(inside)] for names in (run.kept, run.buffers)
    )
    return attributes, buffers


def _canonicalize_graph(module: GraphModule, path: str = WHOLE) -> tuple[GraphModule, list[str]]:
    """Canonicalize a captured graph in place; return the graph and warnings.

    Warnings cover dropped updates of the model's own state, and layers that stay in FP32.
    """
    notes = module.meta.get(graph_capture.NOTES, ())
    attributes = [
        f"{path}.{n}" if path else n for n in module.meta.get(graph_capture.KEPT_STATE, ())
    ]
    warnings = [*notes, *drop_updates(module), *_lost_change_warnings(attributes)]
    prepared = canonicalize_graph(module, path)
    floats: dict[str, list[str]] = {}
    for node in fx.map_op_nodes(prepared).values():
        why = (
            find_recurrent_obstacle(prepared, node)
            if fx.get_op_type(node) in RECURRENT_TYPES
            else None
        )
        if why is not None:
            floats.setdefault(why, []).append(fx.get_op_type(node))
    for why, kinds in floats.items():
        warnings += stays_in_fp32(kinds, "", why)
    return prepared, [*warnings, *left_in_bodies(prepared), *_untrusted_op_warnings(prepared)]


def _untrusted_op_warnings(module: GraphModule) -> list[str]:
    targets = {n.target for n in module.graph.nodes if isinstance(n.target, torch._ops.OpOverload)}
    named = [target._schema.name.partition("::") for target in targets]
    names = sorted({f"{library}.{op}" for library, _, op in named if not is_allowed(library, op)})
    if not names:
        return []
    listed = ", ".join(map(repr, names))
    return [
        f"files may call {listed} only if the user trusts them; load a saved result by "
        f"neural_mp.load(path, trust=[{listed}])"
    ]


def _lost_change_warnings(names: Sequence[str]) -> list[str]:
    if not names:
        return []
    shown, more = ", ".join(map(repr, names[:_MAX_NAMED_PARTS])), len(names) - _MAX_NAMED_PARTS
    listed = f"{shown} and {more} more" if more > 0 else shown
    subject, verb = (
        ("attribute", "keeps its value") if len(names) == 1 else ("attributes", "keep their values")
    )
    return [f"{subject} {listed}, which the model changes in its runs, {verb} in converted models"]


def _assemble_model(
    module: GraphModule, call: CallArgs, signature: CallSignature, original: nn.Module | None
) -> TorchModel:
    module, warnings = _canonicalize_graph(module)
    inputs = module.meta[dynamic_shapes.SIZES]
    if original is None:
        inputs = dynamic_shapes.map_axes(inputs, lambda axis: replace(axis, exported=True))
        dynamic_shapes.watch_sizes(module, inputs)
    firsts = [axes[0] for axes in inputs if isinstance(axes, tuple) and axes]
    fixed = [axis.least for axis in firsts if axis.least == axis.largest]
    if fixed:
        sizes = ", ".join(map(str, fixed))
        if original is None:
            first = signature.parameters[0] if signature.parameters else "x"
            warnings.append(
                f"the program was exported with a fixed batch size of {sizes}; for batches of any "
                f"size, {dynamic_shapes.how_to_export_open(0, first)}"
            )
        else:
            warnings.append(f"the batch size is fixed to {sizes}, as torch.export captured it")
    single = resize_batch(call, 1)
    got = run_graph_outputs(module, single)
    small = resize_batch(call, 2) if call.batch_size is not None else call
    # A graph that fails for one sample may still run for two.
    if not fixed and (got is not None or run_graph_outputs(module, small) is not None):
        call = small
    if original is not None:
        warnings.extend(warn_of_other_paths(original, single, got))
    whole = Part(module, module, call)
    return TorchModel({WHOLE: whole}, call, signature, original=original, warnings=tuple(warnings))


def _from_program(program: ExportedProgram, example: object) -> TorchModel:
    call = storage.get_export_example(program)
    module = graph_capture.graph_of_given(program)
    signature = call_signature(module)
    if example is not None:
        signature.check_call(signature.call(example, like=call), call)
    return _assemble_model(module, call, signature, None)


#: Suffixes of files that PyTorch writes, besides weights alone.
_OF_TORCH = (".pt2", ".pt", ".pth", ".bin", ".ckpt")


def read_source(path: Path) -> ExportedProgram | nn.Module:
    """Load the model at a path without running code from the path.

    Raises:
        ModelLoadError: if there is no complete model; the message names an alternative.
        MissingFrameworkError: if the required package is not installed.
    """
    if path.is_dir():
        return read_folder(path)
    if not path.exists():
        raise ModelLoadError(f"model file {str(path)!r} does not exist")
    if path.suffix == ".pt2":
        return storage.load_program(path)
    raise ModelLoadError(f"{str(path)!r} {_explain_unreadable_file(path)}")


def _explain_unreadable_file(path: Path) -> str:
    if path.suffix == ".safetensors":
        reason = "contains weights without a model; give the nn.Module"
        config = path.with_name(CONFIG)
        return f"{reason}, or the folder with {CONFIG}" if config.exists() else reason
    if _is_torchscript(path):
        return (
            "is TorchScript, compiled code without a convertible graph; give the nn.Module of its "
            "source"
        )
    if path.suffix not in _OF_TORCH:
        return (
            f"is not a file of PyTorch, which end in {', '.join(_OF_TORCH)}; leave out the "
            f"framework to detect it from the file"
        )
    return (
        "is a pickle, which runs code when read; give the module itself, or save the module "
        "with torch.export.save(torch.export.export(…), 'model.pt2')"
    )


def _is_torchscript(path: Path) -> bool:
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
    return any(name.endswith("/constants.pkl") for name in names) and any(
        "/code/" in name for name in names
    )
