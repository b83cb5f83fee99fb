"""Checkpoints of quantized layers in the formats of other tools: GPTQ and compressed-tensors."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from neural_mp.adaptors.common.weights.code_packing import packed_words
from neural_mp.util.string_enum import StringEnum

Tensors: TypeAlias = dict[str, NDArray[Any]]


class CheckpointFormat(StringEnum):
    """Format of a checkpoint: value of `quant_method` in `quantization_config`."""

    COMPRESSED_TENSORS = "compressed-tensors"
    GPTQ = "gptq"


@dataclass(frozen=True)
class IntegerLayer:
    """A dense layer with an integer weight: weight = (code - zero point) · scale.

    Attributes:
        codes: uint8 [outputs, inputs], 0 to 2^bits - 1.
        scales: float32 [outputs, groups].
        zero_points: uint8 [outputs, groups].
        bits: bits per code.
        is_symmetric: whether all zero points are the middle code.
        groups: group of each input, where these are in another order (`desc_act`); else None.
    """

    codes: NDArray[np.uint8]
    scales: NDArray[np.float32]
    zero_points: NDArray[np.uint8]
    bits: int
    is_symmetric: bool
    groups: NDArray[np.int64] | None = None

    @property
    def group_size(self) -> int | None:
        """Number of inputs per scale; None for one scale per output."""
        groups = self.scales.shape[1]
        return None if groups == 1 and self.bits == 8 else int(self.codes.shape[1] // groups)

    def floats(self) -> NDArray[np.float32]:
        """Return the weight [outputs, inputs]."""
        inputs = self.codes.shape[1]
        groups = self.groups
        if groups is None:
            groups = np.arange(inputs) // (inputs // self.scales.shape[1])
        scales, zeros = (
            values.astype(np.float32)[:, groups] for values in (self.scales, self.zero_points)
        )
        return (self.codes.astype(np.float32) - zeros) * scales

    @property
    def form(self) -> tuple[int, int | None, bool]:
        """The properties that a configuration names."""
        return self.bits, self.group_size, self.is_symmetric


def compressed_tensors(
    layers: Mapping[str, IntegerLayer], ignored: list[str]
) -> tuple[Tensors, dict[str, Any]]:
    """Return tensors and `quantization_config` of the format `pack-quantized`.

    `ignored` are the dense layers that stay float.
    """
    tensors: Tensors = {}
    groups: dict[str, Any] = {}
    for form in dict.fromkeys(layer.form for layer in layers.values()):
        bits, size, is_symmetric = form
        groups[f"group_{len(groups)}"] = {
            "targets": [_exactly(name) for name, layer in layers.items() if layer.form == form],
            "weights": {
                "num_bits": bits,
                "type": "int",
                "symmetric": is_symmetric,
                "strategy": "channel" if size is None else "group",
                "group_size": size,
                "dynamic": False,
            },
            "input_activations": None,
            "output_activations": None,
            "format": "pack-quantized",
        }
    for name, layer in layers.items():
        tensors[f"{name}.weight_packed"] = packed_words(layer.codes, layer.bits)
        tensors[f"{name}.weight_scale"] = layer.scales
        tensors[f"{name}.weight_shape"] = np.array(layer.codes.shape, np.int64)
        if not layer.is_symmetric:
            packed = packed_words(np.ascontiguousarray(layer.zero_points.T), layer.bits)
            tensors[f"{name}.weight_zero_point"] = np.ascontiguousarray(packed.T)
    config = {
        "quant_method": CheckpointFormat.COMPRESSED_TENSORS.value,
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": ignored,
        "kv_cache_scheme": None,
    }
    return tensors, config


def gptq(layers: Mapping[str, IntegerLayer], ignored: list[str]) -> tuple[Tensors, dict[str, Any]]:
    """Return tensors and `quantization_config` of GPTQ checkpoints, with a form per layer."""
    tensors: Tensors = {}
    # The first version stores zero points less one, which 0 does not survive; gptqmodel takes its
    # asymmetric weights from files of its own only, since other writers left the one out.
    shift = int(all(layer.is_symmetric for layer in layers.values()))
    for name, layer in layers.items():
        inputs = layer.codes.shape[1]
        rows = packed_words(np.ascontiguousarray(layer.codes), layer.bits)
        tensors[f"{name}.qweight"] = np.ascontiguousarray(rows.T)
        zeros = np.ascontiguousarray(layer.zero_points.T) - np.uint8(shift)
        tensors[f"{name}.qzeros"] = packed_words(zeros, layer.bits)
        tensors[f"{name}.scales"] = np.ascontiguousarray(layer.scales.T).astype(np.float16)
        size = inputs // layer.scales.shape[1]
        tensors[f"{name}.g_idx"] = (np.arange(inputs) // size).astype(np.int32)
    (common, _), *_ = Counter(layer.form for layer in layers.values()).most_common()
    dynamic: dict[str, Any] = {f"-:^{re.escape(name)}$": {} for name in ignored}
    for name, layer in layers.items():
        if layer.form != common:
            dynamic[f"+:^{re.escape(name)}$"] = _gptq_form(layer.form)
    config = {
        "quant_method": CheckpointFormat.GPTQ.value,
        "checkpoint_format": "gptq" if shift else "gptq_v2",
        **_gptq_form(common),
        "desc_act": False,
        "lm_head": any(name.rpartition(".")[2] == "lm_head" for name in layers),
        "dynamic": dynamic,
    }
    return tensors, config


def _gptq_form(form: tuple[int, int | None, bool]) -> dict[str, Any]:
    bits, size, is_symmetric = form
    return {"bits": bits, "group_size": -1 if size is None else size, "sym": is_symmetric}


#: Format → function from layers, and names of float layers, to tensors and configuration.
FORMATS: Mapping[
    CheckpointFormat,
    Callable[[Mapping[str, IntegerLayer], list[str]], tuple[Tensors, dict[str, Any]]],
] = {
    CheckpointFormat.COMPRESSED_TENSORS: compressed_tensors,
    CheckpointFormat.GPTQ: gptq,
}


def _exactly(name: str) -> str:
    return f"re:^{re.escape(name)}$"
