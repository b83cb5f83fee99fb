"""Checkpoints of quantized layers in the formats of other tools, and the module that users get."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.fx import Node

from neural_mp.adaptors.common.weights.checkpoint_formats import (
    FORMATS,
    CheckpointFormat,
    FloatLayer,
    IntegerLayer,
    parse_integer_layers,
)
from neural_mp.adaptors.common.weights.grouped_weight import CodedGroups, GroupedWeight, middle_code
from neural_mp.adaptors.pytorch.converted_module import wrap_as_module
from neural_mp.adaptors.pytorch.decoders.experts import SplitExperts
from neural_mp.adaptors.pytorch.decoders.transformers_folder import (
    CONFIG,
    is_known_class,
    read_folder,
    read_shard,
    write_weights,
)
from neural_mp.adaptors.pytorch.files.layer_storage import save_settings
from neural_mp.adaptors.pytorch.graph import graph_edit as fx
from neural_mp.adaptors.pytorch.graph import qdq_ops as ops
from neural_mp.adaptors.pytorch.graph import quantizable_ops as layers
from neural_mp.adaptors.pytorch.graph.float_weights import RESTORING, dequantize_mxfp4
from neural_mp.adaptors.pytorch.graph.model import Part, TorchModel
from neural_mp.adaptors.pytorch.graph.stand_ins import is_table, read_layer_values
from neural_mp.core.enums import QuantDType
from neural_mp.errors import ConversionError, ModelLoadError
from neural_mp.io.readers import read_json
from neural_mp.util.pytree import convert_to_numpy
from neural_mp.util.validators import anything

#: Bits of layers that both formats hold.
_BITS = (4, 8)
#: Offsets further than this from whole steps have no zero point.
_MOST_REST = 0.1


def export_checkpoint(
    model: TorchModel, folder: Path, form: CheckpointFormat, *, for_transformers: bool = False
) -> None:
    """Write a checkpoint in the format of another tool.

    Embeddings are written as floats, with the values that the model computes with. With
    `for_transformers`, layers have the forms that its `from_pretrained` reads without options.

    Raises:
        ConversionError: the model's class is not of `transformers`, no dense layer has an integer
            weight, or the format cannot hold the weight of a layer.
    """
    shell: Any = model.shell
    if shell is None or not is_known_class(shell):
        raise ConversionError(
            "a checkpoint requires a model of transformers that was converted layer by layer; set "
            "capture = 'layers'"
        )
    if any(isinstance(module, SplitExperts) for module in shell.modules()):
        raise ConversionError(
            f"a checkpoint of {form} of a mixture of experts is not supported; use save"
        )
    integer: dict[str, IntegerLayer | FloatLayer] = {}
    state = {name: value.detach() for name, value in shell.state_dict().items()}
    for path, part in model.converted_parts.items():
        is_dense = type(shell.get_submodule(path)) is nn.Linear
        weight = _find_weight_node(part)
        if weight is not None and is_dense:
            layer = _make_layer(path, part, weight, form)
            integer[path] = layer
            if for_transformers and not _loads_exactly(layer, shell.dtype):
                raise ConversionError(
                    f"layer {path!r} has a weight in {QuantDType.MXFP4}, which from_pretrained of "
                    f"transformers restores in bfloat16, but the model is in {shell.dtype}; "
                    f"convert the model in bfloat16, or use OptimizedModel.save_pretrained"
                )
            if for_transformers and isinstance(layer, IntegerLayer) and not layer.is_symmetric:
                raise ConversionError(
                    f"layer {path!r} has an asymmetric weight, which from_pretrained of "
                    f"transformers does not read; set the weight to 'int4 symmetric per_group 32', "
                    f"or use OptimizedModel.save_pretrained for vLLM"
                )
            del state[f"{path}.weight"]
        elif weight is not None:
            table = shell.get_submodule(path)
            state[f"{path}.weight"] = read_layer_values(table, part.portable, "weight")
    if not integer:
        raise ConversionError(
            f"a checkpoint of {form} requires a dense layer with a weight in 4 or 8 bits, found "
            f"none; use save, or the model's own save_pretrained"
        )
    dense = [name for name, module in shell.named_modules() if type(module) is nn.Linear]
    tensors, quantization = FORMATS[form](integer, [d for d in dense if d not in integer])
    folder.mkdir(parents=True, exist_ok=True)
    # `transformers` ties again what has one name only; a head in integers is one of its own.
    layers_in_integers = map(shell.get_submodule, model.converted_parts)
    head = shell.get_output_embeddings()
    stays_tied = not any(layer is head or is_table(layer) for layer in layers_in_integers)
    entries = {} if stays_tied else {"tie_word_embeddings": False}
    save_settings(shell, folder, quantization_config=quantization, **entries)
    dtype = next(shell.parameters()).dtype
    packed = {name: torch.from_numpy(value) for name, value in tensors.items()}
    for name, value in packed.items():
        if name.endswith(".weight_scale") and value.is_floating_point():
            packed[name] = value.to(dtype)
        elif name.endswith(".weight"):
            packed[name] = value.view(torch.float8_e4m3fn)
    tensors = _unshare_memory(state, keeps_copies=not stays_tied)
    write_weights(folder / "model.safetensors", {**tensors, **packed})


def _unshare_memory(
    state: dict[str, torch.Tensor], *, keeps_copies: bool
) -> dict[str, torch.Tensor]:
    """Return weights that share no memory, as safetensors requires.

    Further names of a weight get copies, or are left out.
    """
    pointers: set[int] = set()
    tensors = {}
    for name, value in state.items():
        is_tied = value.data_ptr() in pointers
        pointers.add(value.data_ptr())
        if not is_tied or keeps_copies:
            tensors[name] = value.clone().contiguous() if is_tied else value.contiguous()
    return tensors


def _loads_exactly(layer: IntegerLayer | FloatLayer, dtype: torch.dtype) -> bool:
    is_mxfp4 = isinstance(layer, FloatLayer) and layer.dtype is QuantDType.MXFP4
    return dtype is torch.bfloat16 or not is_mxfp4


def _find_weight_node(part: Part) -> Node | None:
    """Return the node that restores the weight of the only layer of a part; None for a float."""
    for node in part.portable.graph.nodes:
        if node.target in layers.WEIGHTED:
            weight = fx.get_arguments(node)["weight"]
            stored = (ops.dequantize_grouped, ops.dequantize_weight, *RESTORING)
            return weight if weight.target in stored else None
    return None


def _make_layer(
    path: str, part: Part, weight: Node, form: CheckpointFormat
) -> IntegerLayer | FloatLayer:
    if any(node.target is torch.ops.aten.mul.Tensor for node in part.portable.graph.nodes):
        raise ConversionError(
            f"layer {path!r} scales its inputs (awq), which {form} has no place for; set the "
            f"rounding of its weight to 'gptq' or 'rtn'"
        )
    nodes = (source for source in weight.args if isinstance(source, Node))
    values = [fx.get_attribute(part.portable, str(node.target)).detach() for node in nodes]
    if weight.target in RESTORING:
        is_mx = weight.target is dequantize_mxfp4
        dtype = QuantDType.MXFP4 if is_mx else QuantDType.FP8_E4M3
        return FloatLayer(dtype, *(value.numpy() for value in values))
    if weight.target is ops.dequantize_weight:
        integers, scales = (value.numpy() for value in values)
        codes = (integers.astype(np.int16) + middle_code(8)).astype(np.uint8)
        zeros = np.full((len(codes), 1), middle_code(8), np.uint8)
        return IntegerLayer(codes, scales.reshape(-1, 1).astype(np.float32), zeros, 8, True)
    bits = int(weight.args[3]) if len(weight.args) > 3 else 4
    if bits not in _BITS:
        raise ConversionError(
            f"layer {path!r} has a weight in {bits} bits, {form} requires 4 or 8; leave int{bits} "
            f"out of the precisions"
        )
    scales, offsets = (value.float().numpy() for value in values[1:])
    codes = ops.unpack_stored_codes(values[0], bits).numpy()
    groups = CodedGroups(codes, scales, offsets)
    stored = GroupedWeight(groups, codes.shape[1] // scales.shape[1], bits)
    if np.abs(stored.steps - np.rint(stored.steps)).max() > _MOST_REST:
        raise ConversionError(
            f"layer {path!r} has offsets between the codes (hqq), {form} requires whole zero "
            f"points; set the rounding of its weight to 'gptq' or 'rtn'"
        )
    zeros = stored.zero_points
    return IntegerLayer(codes, scales, zeros, bits, bool((zeros == middle_code(bits)).all()))


#: Weights per word of a checkpoint, at most.
_WEIGHTS_PER_BYTE = 4


def read_checkpoint(folder: Path) -> tuple[nn.Module, Mapping[str, IntegerLayer]]:
    """Return the model with its weights as floats, and its integer layers by name.

    Raises:
        ModelLoadError: a file is missing or damaged, or the format is not supported.
    """
    config = read_json(folder / CONFIG, anything, ModelLoadError)
    quantization = config.get("quantization_config") if isinstance(config, dict) else None
    if not isinstance(quantization, dict):
        raise ModelLoadError(f"{str(folder / CONFIG)!r} must have a quantization_config")
    files = sorted(folder.glob("*.safetensors"))
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        tensors |= read_shard(file)
    layers, used = parse_integer_layers(
        quantization, {name: convert_to_numpy(value.detach()) for name, value in tensors.items()}
    )
    state = {name: value for name, value in tensors.items() if name not in used}
    dtype = next((v.dtype for v in state.values() if v.is_floating_point()), torch.float32)
    for name, layer in layers.items():
        state[f"{name}.weight"] = torch.from_numpy(layer.to_floats()).to(dtype)
    size = sum(file.stat().st_size for file in files)
    return read_folder(folder, _WEIGHTS_PER_BYTE * size, state), layers


def build_user_module(model: TorchModel) -> nn.Module:
    """Return the converted model as a module.

    `save_pretrained`, `num_parameters` and `resize_token_embeddings` of a model of `transformers`
    are its own; the model keeps its class.
    """
    module = wrap_as_module(model)
    if model.shell is not None and model.converted_parts and is_known_class(model.shell):
        for name, method in _make_methods(module, model).items():
            # Not by type: the class is the user's. Copies of the module share the methods.
            object.__setattr__(module, name, method)
    return module


def _make_methods(module: Any, model: TorchModel) -> dict[str, Any]:
    shell: Any = model.shell
    # Without results cached in the model, which hold the module.
    source, rows = replace(model), _count_rows(module)

    def save_pretrained(save_directory: str | Path, **options: Any) -> None:
        """Write a checkpoint in the format of compressed-tensors, which `from_pretrained` reads.

        Raises:
            ConversionError: the format cannot hold the model, or an option is not supported.
        """
        _refuse_options("save_pretrained", {"push_to_hub", "state_dict"}, options)
        try:
            form, folder = CheckpointFormat.COMPRESSED_TENSORS, Path(save_directory)
            export_checkpoint(source, folder, form, for_transformers=True)
        except ConversionError as error:
            raise ConversionError(
                f"{error}; or write the result by OptimizedModel.save, and load it by "
                f"neural_mp.load"
            ) from None

    def num_parameters(**options: Any) -> int:
        """Return the number of weights of the original model."""
        return int(shell.num_parameters(**options))

    def resize_token_embeddings(new_num_tokens: int | None = None, *_: Any, **__: Any) -> None:
        """Refuse another number of tokens.

        Raises:
            ConversionError: the number differs from that of the model.
        """
        if new_num_tokens not in (None, rows):
            raise ConversionError(
                f"the embeddings of a converted model must keep their {rows} tokens, got "
                f"{new_num_tokens}; resize those of the original model and convert it once more"
            )

    return {
        "save_pretrained": save_pretrained,
        "num_parameters": num_parameters,
        "resize_token_embeddings": resize_token_embeddings,
    }


def _count_rows(module: Any) -> int | None:
    """Return the number of tokens of the embeddings; None without embeddings."""
    try:
        table = module.get_input_embeddings()
    except NotImplementedError:
        return None  # as models of images
    return getattr(table, "num_embeddings", None)


def _refuse_options(method: str, names: set[str], options: Mapping[str, Any]) -> None:
    refused = sorted(name for name in names if options.get(name))
    if refused:
        raise ConversionError(
            f"{method} of a converted model takes no {refused[0]}; leave it out, and upload the "
            f"folder with huggingface_hub"
        )
