"""Checkpoints of quantized layers in the formats of other tools: GPTQ, AWQ, compressed-tensors."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from neural_mp.adaptors.common.weights.grouped_weight import (
    BitOrder,
    middle_code,
    pack_words,
    unpack_codes,
)
from neural_mp.core.enums import QuantDType
from neural_mp.core.quant_spec import MX_BLOCK
from neural_mp.errors import ConversionError, ModelLoadError, did_you_mean
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

    def to_floats(self) -> NDArray[np.float32]:
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
    def config_form(self) -> tuple[int, int | None, bool]:
        """The properties that a configuration names."""
        return self.bits, self.group_size, self.is_symmetric


@dataclass(frozen=True)
class FloatLayer:
    """A dense layer with a weight in a float format, stored as in a plan.

    Attributes:
        dtype: the format.
        codes: uint8, a code or two of each row per byte.
        scales: float32 [outputs], or exponents, uint8 [outputs, blocks].
    """

    dtype: QuantDType
    codes: NDArray[np.uint8]
    scales: NDArray[Any]

    @property
    def tensors(self) -> Tensors:
        """Suffix of a name → tensor; codes of E4M3 are bytes."""
        if self.dtype is QuantDType.FP8_E4M3:
            return {"weight": self.codes, "weight_scale": self.scales.reshape(-1, 1)}
        return {"weight_packed": self.codes, "weight_scale": self.scales}

    @property
    def scheme(self) -> dict[str, Any]:
        """The part of a configuration that describes the layer."""
        is_mx = self.dtype is QuantDType.MXFP4
        kinds = {"scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"} if is_mx else {}
        return {
            "weights": {
                "num_bits": self.dtype.bits,
                "type": "float",
                "symmetric": True,
                "strategy": "group" if is_mx else "channel",
                "group_size": MX_BLOCK if is_mx else None,
                "dynamic": False,
                **kinds,
            },
            "input_activations": None,
            "output_activations": None,
            "format": "mxfp4-pack-quantized" if is_mx else "naive-quantized",
        }


def pack_compressed_tensors(
    layers: Mapping[str, IntegerLayer | FloatLayer], ignored: list[str]
) -> tuple[Tensors, dict[str, Any]]:
    """Return tensors and `quantization_config` of compressed-tensors.

    Integers are in the format `pack-quantized`; `ignored` are the dense layers that stay float.
    """
    floats = {name: layer for name, layer in layers.items() if isinstance(layer, FloatLayer)}
    integer = {name: layer for name, layer in layers.items() if isinstance(layer, IntegerLayer)}
    tensors, config = _pack_integers(integer, ignored)
    groups = config["config_groups"]
    for dtype in dict.fromkeys(layer.dtype for layer in floats.values()):
        names = [name for name, layer in floats.items() if layer.dtype is dtype]
        targets = [f"re:^{re.escape(name)}$" for name in names]
        groups[f"group_{len(groups)}"] = {"targets": targets, **floats[names[0]].scheme}
    for name, layer in floats.items():
        tensors |= {f"{name}.{suffix}": value for suffix, value in layer.tensors.items()}
    formats = list(dict.fromkeys(group["format"] for group in groups.values()))
    config["format"] = formats[0] if len(formats) == 1 else "mixed-precision"
    return tensors, config


def _pack_integers(
    layers: Mapping[str, IntegerLayer], ignored: list[str]
) -> tuple[Tensors, dict[str, Any]]:
    tensors: Tensors = {}
    groups: dict[str, Any] = {}
    for form in dict.fromkeys(layer.config_form for layer in layers.values()):
        bits, size, is_symmetric = form
        groups[f"group_{len(groups)}"] = {
            "targets": [
                f"re:^{re.escape(name)}$"
                for name, layer in layers.items()
                if layer.config_form == form
            ],
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
        tensors[f"{name}.weight_packed"] = pack_words(layer.codes, layer.bits)
        tensors[f"{name}.weight_scale"] = layer.scales
        tensors[f"{name}.weight_shape"] = np.array(layer.codes.shape, np.int64)
        if not layer.is_symmetric:
            packed = pack_words(np.ascontiguousarray(layer.zero_points.T), layer.bits)
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


def pack_gptq(
    layers: Mapping[str, IntegerLayer | FloatLayer], ignored: list[str]
) -> tuple[Tensors, dict[str, Any]]:
    """Return tensors and `quantization_config` of GPTQ checkpoints, with a form per layer.

    Raises:
        ConversionError: a layer is in a float format.
    """
    tensors: Tensors = {}
    integer: dict[str, IntegerLayer] = {}
    for name, layer in layers.items():
        if isinstance(layer, FloatLayer):
            raise ConversionError(
                f"layer {name!r} has a weight in {layer.dtype}, which gptq has no place for; set "
                f"the format to 'compressed-tensors'"
            )
        integer[name] = layer
    # The first version stores zero points less one, which 0 does not survive; gptqmodel takes its
    # asymmetric weights from files of its own only, since other writers left the one out.
    shift = int(all(layer.is_symmetric for layer in integer.values()))
    for name, layer in integer.items():
        inputs = layer.codes.shape[1]
        rows = pack_words(np.ascontiguousarray(layer.codes), layer.bits)
        tensors[f"{name}.qweight"] = np.ascontiguousarray(rows.T)
        zeros = np.ascontiguousarray(layer.zero_points.T) - np.uint8(shift)
        tensors[f"{name}.qzeros"] = pack_words(zeros, layer.bits)
        tensors[f"{name}.scales"] = np.ascontiguousarray(layer.scales.T).astype(np.float16)
        size = inputs // layer.scales.shape[1]
        tensors[f"{name}.g_idx"] = (np.arange(inputs) // size).astype(np.int32)
    (common, _), *_ = Counter(layer.config_form for layer in integer.values()).most_common()
    dynamic: dict[str, Any] = {f"-:^{re.escape(name)}$": {} for name in ignored}
    for name, layer in integer.items():
        if layer.config_form != common:
            dynamic[f"+:^{re.escape(name)}$"] = _describe_gptq_form(layer.config_form)
    config = {
        "quant_method": CheckpointFormat.GPTQ.value,
        "checkpoint_format": "gptq" if shift else "gptq_v2",
        **_describe_gptq_form(common),
        "desc_act": False,
        "lm_head": any(name.rpartition(".")[2] == "lm_head" for name in integer),
        "dynamic": dynamic,
    }
    return tensors, config


def _describe_gptq_form(form: tuple[int, int | None, bool]) -> dict[str, Any]:
    bits, size, is_symmetric = form
    return {"bits": bits, "group_size": -1 if size is None else size, "sym": is_symmetric}


#: Format → function from layers, and names of float layers, to tensors and configuration.
FORMATS: Mapping[
    CheckpointFormat,
    Callable[[Mapping[str, IntegerLayer | FloatLayer], list[str]], tuple[Tensors, dict[str, Any]]],
] = {CheckpointFormat.COMPRESSED_TENSORS: pack_compressed_tensors, CheckpointFormat.GPTQ: pack_gptq}


#: Bits per code that whole words hold.
_BITS = (2, 4, 8)
#: Outputs in a word of AutoAWQ, from the lowest bits.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def parse_integer_layers(
    quantization: Mapping[str, Any], tensors: Tensors
) -> tuple[dict[str, IntegerLayer], frozenset[str]]:
    """Return name → integer layer, and the names of the tensors that describe them.

    Args:
        quantization: `quantization_config` of the checkpoint.
        tensors: all tensors of the checkpoint, by name.

    Raises:
        ModelLoadError: the format is unknown, or a layer is incomplete or damaged.
    """
    method = str(quantization.get("quant_method"))
    if method not in _READERS:
        raise ModelLoadError(
            f"quant_method of quantization_config must be {' or '.join(_READERS)}, got {method!r}"
            f"{did_you_mean(method, _READERS)}; give the float model, and quantize it here"
        )
    suffix, parts, reader = _READERS[method]
    names = [name.removesuffix(suffix) for name in tensors if name.endswith(suffix)]
    if not names:
        raise ModelLoadError(f"a checkpoint of {method} must contain tensors {suffix!r}, got none")
    layers = {}
    for name in names:
        try:
            layers[name] = reader(quantization, {p: tensors.get(f"{name}.{p}") for p in parts})
        except (TypeError, ValueError, IndexError, AttributeError, ArithmeticError) as error:
            raise ModelLoadError(
                f"layer {name!r} of the checkpoint is incomplete or damaged: {error}"
            ) from error
    used = frozenset(f"{name}.{part}" for name in names for part in parts)
    return layers, used


def _read_compressed_tensors(
    quantization: Mapping[str, Any], layer: Mapping[str, NDArray[Any] | None]
) -> IntegerLayer:
    outputs, inputs = (int(size) for size in _get_required_array(layer, "weight_shape"))
    packed = _get_required_array(layer, "weight_packed")
    bits = _bits_per_code(inputs, packed.shape[1])
    codes = unpack_words(packed, bits, inputs)
    scales = _get_required_array(layer, "weight_scale").astype(np.float32)
    zeros = layer.get("weight_zero_point")
    if zeros is None:
        zero_points = np.full(scales.shape, middle_code(bits), np.uint8)
    else:
        zero_points = unpack_words(np.ascontiguousarray(zeros.T), bits, outputs).T
    return _validate_layer_arrays(codes, scales, zero_points, bits)


def _read_gptq(
    quantization: Mapping[str, Any], layer: Mapping[str, NDArray[Any] | None]
) -> IntegerLayer:
    packed, scales = (
        _get_required_array(layer, "qweight"),
        _get_required_array(layer, "scales").astype(np.float32).T,
    )
    bits = int(quantization["bits"])
    if bits not in _BITS:
        raise ValueError(f"bits must be one of {', '.join(map(str, _BITS))}, got {bits}")
    inputs = packed.shape[0] * (32 // bits)
    order = layer.get("g_idx")
    groups = scales.shape[1]
    if order is not None and len(order) != inputs:
        bits = _bits_per_code(len(order), packed.shape[0])
        inputs = len(order)
    codes = unpack_words(np.ascontiguousarray(packed.T), bits, inputs)
    zeros = unpack_words(
        np.ascontiguousarray(_get_required_array(layer, "qzeros")), bits, scales.shape[0]
    )
    # The first version stores zero points less one.
    shift = 0 if quantization.get("checkpoint_format") == "gptq_v2" else 1
    zero_points = (zeros.T + np.uint8(shift)).astype(np.uint8)
    layer_found = _validate_layer_arrays(codes, scales, zero_points, bits)
    if order is None or (order == np.arange(inputs) // (inputs // groups)).all():
        return layer_found
    if order.min() < 0 or order.max() >= groups:
        raise ValueError(f"g_idx must name groups from 0 to {groups - 1}")
    return replace(layer_found, groups=order.astype(np.int64))


def _read_awq(
    quantization: Mapping[str, Any], layer: Mapping[str, NDArray[Any] | None]
) -> IntegerLayer:
    version, bits = str(quantization.get("version", "gemm")), int(quantization.get("bits", 4))
    if version != "gemm" or bits != 4:
        raise ValueError(f"version must be gemm with 4 bits, got {version!r} with {bits} bits")
    scales = _get_required_array(layer, "scales").astype(np.float32)
    outputs = scales.shape[1]
    # Every word has its even outputs first.
    columns = (np.arange(0, outputs, 8)[:, None] + np.argsort(_AWQ_ORDER)).ravel()
    codes, zeros = (
        unpack_words(_get_required_array(layer, name), bits, outputs)[:, columns]
        for name in ("qweight", "qzeros")
    )
    return _validate_layer_arrays(
        np.ascontiguousarray(codes.T), scales.T, np.ascontiguousarray(zeros.T), bits
    )


def _validate_layer_arrays(
    codes: NDArray[np.uint8], scales: NDArray[np.float32], zero_points: NDArray[np.uint8], bits: int
) -> IntegerLayer:
    shape = (len(codes), scales.shape[1])
    if scales.shape != shape or zero_points.shape != shape or codes.shape[1] % scales.shape[1]:
        raise ValueError(
            f"scales {scales.shape} and zero points {zero_points.shape} do not fit codes of "
            f"{codes.shape}"
        )
    if not np.isfinite(scales).all():
        raise ValueError("scales must be finite")
    symmetric = bool((zero_points == middle_code(bits)).all())
    return IntegerLayer(codes, np.ascontiguousarray(scales), zero_points, bits, symmetric)


def _get_required_array(layer: Mapping[str, NDArray[Any] | None], name: str) -> NDArray[Any]:
    array = layer.get(name)
    if array is None:
        raise ValueError(f"{name} is missing")
    return array


def _bits_per_code(codes: int, words: int) -> int:
    """Return the bits per code, from the number of codes and of words in a row."""
    fitting = [bits for bits in _BITS if -(-codes // (32 // bits)) == words]
    if not fitting:
        raise ValueError(f"{words} words hold no {codes} codes of 2, 4 or 8 bits")
    return fitting[0]


def unpack_words(words: NDArray[Any], bits: int, columns: int) -> NDArray[np.uint8]:
    """Return the codes [rows, columns] of int32 words [rows, words]; see `pack_words`."""
    stored = np.ascontiguousarray(words.astype(np.int32)).view(np.uint8)
    return unpack_codes(stored, bits, columns, BitOrder.LOWER_FIRST)


_READERS: Mapping[
    str,
    tuple[
        str,
        tuple[str, ...],
        Callable[[Mapping[str, Any], Mapping[str, NDArray[Any] | None]], IntegerLayer],
    ],
] = {
    CheckpointFormat.COMPRESSED_TENSORS.value: (
        ".weight_packed",
        ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point"),
        _read_compressed_tensors,
    ),
    CheckpointFormat.GPTQ.value: (".qweight", ("qweight", "qzeros", "scales", "g_idx"), _read_gptq),
    "awq": (".qweight", ("qweight", "qzeros", "scales"), _read_awq),
}
