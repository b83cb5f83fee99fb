"""Folders of `transformers` models converted layer by layer.

Beside the files of `transformers` (configuration, and `.safetensors` files of the weights that
stay), a folder holds one program per form of converted layer, and the constants of all layers.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from neural_mp.adaptors.common.named_graphs import read_details, write_details
from neural_mp.adaptors.common.weights.grouped_weight import (
    decode_offset_bytes,
    encode_offset_bytes,
)
from neural_mp.adaptors.pytorch.capture.module_capture import copy_module
from neural_mp.adaptors.pytorch.decoders.experts import split_experts
from neural_mp.adaptors.pytorch.decoders.transformers_folder import (
    is_known_class,
    read_folder,
    read_weights,
    write_weights,
)
from neural_mp.adaptors.pytorch.files import storage
from neural_mp.adaptors.pytorch.graph import graph_edit as fx
from neural_mp.adaptors.pytorch.graph import qdq_ops as ops
from neural_mp.adaptors.pytorch.graph.call_signature import CallArgs, call_signature
from neural_mp.adaptors.pytorch.graph.int8_cache import use_int8_cache
from neural_mp.adaptors.pytorch.graph.model import WHOLE, Part, TorchModel
from neural_mp.adaptors.pytorch.kernels.float_kernels import list_marked_kernels
from neural_mp.adaptors.pytorch.kernels.lowering import lower_to_kernels
from neural_mp.errors import ConversionError, ModelLoadError
from neural_mp.util.validators import boolean, integer_between, list_of, mapping_of, record, string

LAYERS_FILE = "layers.json"
_CONSTANTS_FILE = "layers.safetensors"
_WEIGHTS_FILE = "model.safetensors"
#: Files of a tokenizer, copied from the folder that a model was loaded from.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "chat_template.jinja",
)
#: Upper bound of weights per byte of a folder, as codes have 4 bits.
_WEIGHTS_PER_BYTE = 2


def save_model(model: TorchModel, folder: Path) -> None:
    """Write a model converted layer by layer into a folder.

    Raises:
        ConversionError: the model's class is not of `transformers`, or the model takes other values
            than tensors.
    """
    shell: Any = model.shell
    if not is_known_class(shell):
        raise ConversionError(
            "a model converted module by module cannot be saved, as its own code runs between the "
            "modules, unless transformers defines its class; save the plan with save_plan and "
            "convert the model again"
        )
    call = model.example
    inputs = {**dict(zip(model.signature.parameters, call.args, strict=False)), **call.kwargs}
    example = {name: _get_tensor_shape(value) for name, value in inputs.items()}
    forms: dict[object, tuple[int, str]] = {}
    layers: dict[str, dict[str, object]] = {}
    constants: dict[str, torch.Tensor] = {}
    for path, part in model.converted_parts.items():
        key = _describe_graph_form(part.portable)
        if key not in forms:
            forms[key] = len(forms), path
            program = _get_program_folder(folder, forms[key][0])
            program.mkdir()
            standalone = TorchModel({WHOLE: part}, part.example, call_signature(part.portable))
            storage.save_model(standalone, program)
        else:
            stored = _list_constant_tensors(part.portable) | _encode_offset_bytes(part.portable)
            constants |= {f"{path}/{n}": value.contiguous() for n, value in stored.items()}
        layers[path] = {"program": forms[key][0], "like": forms[key][1]}
    write_weights(folder / _CONSTANTS_FILE, constants)
    save_settings(shell, folder)
    write_weights(folder / _WEIGHTS_FILE, _list_unconverted_weights(shell, layers))
    details: dict[str, object] = {"layers": layers, "example": example}
    details |= {"inputs": model.signature.names}
    details |= {"int8_cache": True} if model.int8_cache else {}
    write_details(folder / LAYERS_FILE, details)


def restore_model(folder: Path) -> TorchModel:
    """Return a model written by `save_model`.

    Raises:
        ModelLoadError: a file is missing or damaged.
    """
    details = read_details(folder / LAYERS_FILE, _DETAILS)
    sizes = (file.stat().st_size for file in folder.rglob("*") if file.is_file())
    weights = read_weights(folder / _WEIGHTS_FILE)
    shell = copy_module(read_folder(folder, _WEIGHTS_PER_BYTE * sum(sizes), weights))
    split_experts(shell)
    _set_weights(shell, weights)
    constants = read_weights(folder / _CONSTANTS_FILE)
    programs: dict[int, Part] = {}
    parts = {}
    for path, layer in details["layers"].items():
        number, like = layer["program"], layer["like"]
        if number not in programs:
            programs[number] = storage.restore_model(_get_program_folder(folder, number)).parts[
                WHOLE
            ]
        try:
            shell.get_submodule(path)
        except AttributeError:
            raise ModelLoadError(
                f"{LAYERS_FILE} must name layers of {type(shell).__name__}, got {path!r}"
            ) from None
        parts[path] = _restore_layer(programs[number], path, like, constants)
    # Expanded, as a file may name any size.
    kwargs = {
        name: fx.make_placeholder(entry["shape"], entry["dtype"])
        for name, entry in details["example"].items()
    }
    signature = call_signature(shell, tuple(details["inputs"]))
    int8_cache = bool(details.get("int8_cache"))
    if int8_cache:
        use_int8_cache(shell)
    return TorchModel(parts, CallArgs((), kwargs), signature, shell, int8_cache=int8_cache)


def _restore_layer(part: Part, path: str, like: str, constants: Mapping[str, torch.Tensor]) -> Part:
    """Return the layer at `path`, of the form of the layer `like`."""
    if path == like:
        return replace(part, is_converted=True)
    portable = fx.copy_graph_shallowly(part.portable)
    expected = _list_constant_tensors(part.portable)
    keys = {name: f"{path}/{name}" for name in expected}
    available = {name: constants[key] for name, key in keys.items() if key in constants}
    _restore_offsets(portable, available)
    for name, stored in expected.items():
        value = available.get(name)
        if value is None or (value.shape, value.dtype) != (stored.shape, stored.dtype):
            raise ModelLoadError(
                f"{_CONSTANTS_FILE} must contain {keys[name]!r} as {stored.dtype} "
                f"{list(stored.shape)}; the folder is incomplete or damaged"
            )
        parent, _, leaf = name.rpartition(".")
        holder = portable.get_submodule(parent)
        holder._parameters.pop(leaf, None)
        holder._buffers[leaf] = value
    for node in portable.graph.nodes:
        if fx.OP_NAME in node.meta:
            node.meta[fx.OP_NAME] = path + str(node.meta[fx.OP_NAME]).removeprefix(like)
        if node.op == "get_attr":
            value = fx.get_attribute(portable, str(node.target))
            node.meta["val"] = fx.make_placeholder(value.shape, value.dtype)
    portable.recompile()
    return Part(portable, lower_to_kernels(portable), part.example, True)


def _get_program_folder(folder: Path, number: int) -> Path:
    return folder / f"layer_{number}"


def _describe_graph_form(module: GraphModule) -> object:
    shapes = (
        (name, v.shape, v.dtype) for name, v in sorted(_list_constant_tensors(module).items())
    )
    # Programs check the number of axes of their inputs.
    inputs = (n.meta["val"] for n in module.graph.nodes if n.op == "placeholder")
    axes = tuple(getattr(value, "ndim", None) for value in inputs)
    return module.code, axes, tuple(list_marked_kernels(module).values()), *shapes


def _list_constant_tensors(module: GraphModule) -> dict[str, torch.Tensor]:
    named = (*module.named_parameters(), *module.named_buffers())
    return {name: value.detach() for name, value in named}


def _encode_offset_bytes(module: GraphModule) -> dict[str, torch.Tensor]:
    """Return the offsets of groups that a byte holds, as int8, by name.

    They take as many bytes as the scales otherwise: a sixth of a layer in 2 bits.
    """
    result = {}
    for name, (scales, bits) in _list_grouped_offsets(module).items():
        offsets, steps = fx.get_attribute(module, name), fx.get_attribute(module, scales)
        parts = encode_offset_bytes((offsets.float() / steps.float()).numpy(), bits)
        integers = torch.from_numpy(parts).round().to(torch.int8)
        if torch.equal(_decode_offset_bytes(integers, steps, bits), offsets):
            result[name] = integers
    return result


def _restore_offsets(module: GraphModule, given: dict[str, torch.Tensor]) -> None:
    """Replace the int8 offsets among the constants of a layer by those of the scales' type."""
    for name, (scales, bits) in _list_grouped_offsets(module).items():
        integers, steps = given.get(name), given.get(scales)
        if integers is None or steps is None or integers.shape != steps.shape:
            continue
        if integers.dtype is torch.int8:
            given[name] = _decode_offset_bytes(integers, steps, bits)


def _decode_offset_bytes(held: torch.Tensor, scales: torch.Tensor, bits: int) -> torch.Tensor:
    steps = torch.from_numpy(decode_offset_bytes(held.float().numpy(), bits))
    return (steps * scales.float()).to(scales.dtype)


def _list_grouped_offsets(module: GraphModule) -> dict[str, tuple[str, int]]:
    """Return the name of offsets → name of the scales, and bits of the codes."""
    nodes = (node for node in module.graph.nodes if node.target is ops.dequantize_grouped)
    arguments = (fx.get_arguments(node) for node in nodes)
    return {str(a["offsets"].target): (str(a["scales"].target), a["bits"]) for a in arguments}


def _get_tensor_shape(value: object) -> dict[str, Any]:
    if not isinstance(value, torch.Tensor):
        raise ConversionError(
            f"inputs of a saved model must be tensors, got {type(value).__name__}; calibrate with "
            f"tensors only"
        )
    return {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}


def _list_unconverted_weights(
    shell: nn.Module, layers: Mapping[str, object]
) -> dict[str, torch.Tensor]:
    weights: dict[int, tuple[str, torch.Tensor]] = {}
    for name, value in shell.state_dict().items():
        if name.rpartition(".")[0] not in layers:
            weights.setdefault(value.data_ptr(), (name, value))
    return {name: value.contiguous() for name, value in weights.values()}


def _set_weights(shell: nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Set weights by name, which `transformers` skips if a tied weight is missing."""
    own = shell.state_dict()
    with torch.no_grad():
        for name in own.keys() & weights.keys():
            own[name].copy_(weights[name])


def save_settings(shell: Any, folder: Path, **entries: object) -> None:
    """Write the configuration of a `transformers` model, with changed entries, and its tokenizer.

    The files of the tokenizer are copied from the folder of the model, if there are any.
    """
    config = copy.deepcopy(shell.config)
    config.architectures = [type(shell).__name__]
    for name, value in entries.items():
        setattr(config, name, value)
    config.save_pretrained(folder)
    if getattr(shell, "generation_config", None) is not None:
        shell.generation_config.save_pretrained(folder)
    source = Path(str(shell.config._name_or_path or ""))
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


_SIZE = integer_between(0)
_DETAILS = record(
    {
        "layers": mapping_of(record({"program": _SIZE, "like": string})),
        "example": mapping_of(record({"shape": list_of(_SIZE), "dtype": storage.parse_dtype})),
        "inputs": list_of(string),
    },
    {"int8_cache": boolean},
)
