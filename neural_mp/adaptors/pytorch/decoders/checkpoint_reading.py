"""Checkpoints of `transformers` with quantized layers, written here or by other tools."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from neural_mp.adaptors.common.weights.checkpoint_formats import IntegerLayer
from neural_mp.adaptors.common.weights.checkpoint_layers import integer_layers
from neural_mp.adaptors.pytorch.decoders.transformers_folder import CONFIG, read_folder
from neural_mp.errors import ModelLoadError
from neural_mp.io.readers import read_json
from neural_mp.util.pytree import as_numpy
from neural_mp.util.validators import anything

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
        tensors |= _read(file)
    layers, used = integer_layers(
        quantization, {name: as_numpy(value.detach()) for name, value in tensors.items()}
    )
    state = {name: value for name, value in tensors.items() if name not in used}
    dtype = next((v.dtype for v in state.values() if v.is_floating_point()), torch.float32)
    for name, layer in layers.items():
        state[f"{name}.weight"] = torch.from_numpy(layer.floats()).to(dtype)
    size = sum(file.stat().st_size for file in files)
    return read_folder(folder, _WEIGHTS_PER_BYTE * size, state), layers


def _read(file: Path) -> Mapping[str, Any]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors: Mapping[str, Any] = load_file(file)
    except (OSError, SafetensorError) as error:
        raise ModelLoadError(f"{str(file)!r} cannot be read: {error}") from error
    return tensors
