"""Key-value caches in INT8, with a scale for each head and token.

A hook on the user's model replaces the layers of the empty cache of a call, so that `generate` with
all of its modes and calls of the model itself store keys and values as integers. Layers with a
sliding window keep the window; states of other layers, such as those of Mamba, stay as they are,
and so does what a decoder keeps of its encoder.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import nn

from neural_mp.adaptors.pytorch.graph.model import TorchModel
from neural_mp.errors import ConversionError

#: Largest code.
_LIMIT = 127
#: Scale of a row of zeros.
_MIN_SCALE = torch.finfo(torch.bfloat16).tiny
#: Tokens that memory is allocated for at once, in single steps of decoding.
_TOKENS_PER_STEP = 16
_CACHE = "past_key_values"


def quantize_rows(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes, int8 [..., channels], and scales, bfloat16 [..., 1], of rows of floats."""
    floats = values.float()
    scales = floats.abs().amax(-1, keepdim=True) / _LIMIT
    scales = scales.clamp_(min=_MIN_SCALE).to(torch.bfloat16)
    codes = (floats / scales.float()).round_().clamp_(-_LIMIT, _LIMIT)
    return codes.to(torch.int8), scales


@dataclass
class _Rows:
    """Keys or values as integers: codes [batch, heads, tokens, channels], one scale a row."""

    codes: torch.Tensor
    scales: torch.Tensor
    dtype: torch.dtype
    length: int = 0

    @staticmethod
    def like(values: torch.Tensor) -> _Rows:
        """Return no rows, for values of this type and these sizes."""
        codes, scales = quantize_rows(values[..., :0, :1])
        shape = (*values.shape[:-2], 0, values.shape[-1])
        return _Rows(codes.new_empty(shape), scales, values.dtype)

    def append(self, values: torch.Tensor) -> None:
        """Store the rows of further tokens."""
        end = self.length + values.shape[-2]
        if end > self.codes.shape[-2]:
            few = values.shape[-2] < _TOKENS_PER_STEP
            capacity = -(-end // _TOKENS_PER_STEP) * _TOKENS_PER_STEP if few else end
            self.codes, self.scales = (
                _enlarge(held, capacity) for held in (self.codes, self.scales)
            )
        codes, scales = quantize_rows(values)
        self.codes[..., self.length : end, :] = codes
        self.scales[..., self.length : end, :] = scales
        self.length = end

    def read(self) -> torch.Tensor:
        """Return the values of all tokens."""
        codes, scales = (part[..., : self.length, :] for part in (self.codes, self.scales))
        return codes.float().mul_(scales.float()).to(self.dtype)

    def select_tokens(self, first: int, end: int) -> None:
        """Keep the tokens of a range only."""
        parts = (self.codes, self.scales)
        self.codes, self.scales = (part[..., first:end, :].clone() for part in parts)
        self.length = end - first

    def change_batch(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace the sequences by those that `change` selects."""
        self.codes, self.scales = change(self.codes), change(self.scales)

    @property
    def nbytes(self) -> int:
        """Bytes of the allocated memory."""
        return self.codes.nbytes + self.scales.nbytes


def _enlarge(rows: torch.Tensor, tokens: int) -> torch.Tensor:
    larger = rows.new_zeros((*rows.shape[:-2], tokens, rows.shape[-1]))
    larger[..., : rows.shape[-2], :] = rows
    return larger


class _IntegerStates:
    """Base of layers of a cache whose states are restored where they are read."""

    _rows: tuple[_Rows, _Rows] | None = None
    is_initialized: bool

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Prepare for states of this type and these sizes."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self._rows = _Rows.like(key_states), _Rows.like(value_states)
        self.is_initialized = True

    @property
    def keys(self) -> torch.Tensor | None:
        """Restored keys [batch, heads, tokens, channels]; None before the first call."""
        return None if self._rows is None else self._rows[0].read()

    @keys.setter
    def keys(self, value: torch.Tensor | None) -> None:
        if value is not None:
            raise ConversionError(
                "keys of an INT8 cache must be given to its update; set kv_cache='float' for code "
                "that writes to the cache itself"
            )
        self._rows = None

    @property
    def values(self) -> torch.Tensor | None:
        """Restored values [batch, heads, tokens, channels]; None before the first call."""
        return None if self._rows is None else self._rows[1].read()

    @values.setter
    def values(self, value: torch.Tensor | None) -> None:
        self.keys = value

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return sum(rows.nbytes for rows in self._rows or ())

    def _store(
        self, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._rows is None:
            self.lazy_initialization(key_states, value_states)
        assert self._rows is not None
        for rows, states in zip(self._rows, (key_states, value_states), strict=True):
            rows.append(states)
        return self._rows[0].read(), self._rows[1].read()

    def _select_tokens(self, first: int, end: int) -> None:
        for rows in self._rows or ():
            rows.select_tokens(first, end)

    @property
    def _length(self) -> int:
        return 0 if self._rows is None else self._rows[0].length

    def _change_batch(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        for rows in self._rows or ():
            rows.change_batch(change)

    def reset(self) -> None:
        """Forget all states."""
        self._rows, self.is_initialized = None, False
        if hasattr(self, "cumulative_length"):
            self.cumulative_length = 0

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Reorder the sequences, for a search with beams."""
        self._change_batch(lambda rows: rows.index_select(0, beam_idx))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence."""
        self._change_batch(lambda rows: rows.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the sequences of these indices."""
        self._change_batch(lambda rows: rows[indices, ...])


@cache
def _layer_classes() -> tuple[type[Any], type[Any]]:
    """Return the classes of layers: of all tokens, and of those in a sliding window."""
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    class Int8Layer(_IntegerStates, DynamicLayer):
        """Keys and values of all tokens."""

        def update(self, key_states: Any, value_states: Any, *_: Any, **__: Any) -> Any:
            return self._store(key_states, value_states)

        def get_seq_length(self) -> int:
            return self._length

        def crop(self, tokens_to_remove: int) -> None:
            if self.is_initialized and tokens_to_remove:
                self._select_tokens(0, max(self._length - abs(tokens_to_remove), 0))

    class Int8SlidingWindowLayer(_IntegerStates, DynamicSlidingWindowLayer):
        """Keys and values of the last tokens."""

        def update(self, key_states: Any, value_states: Any, *_: Any, **__: Any) -> Any:
            restored = self._store(key_states, value_states)
            self.cumulative_length += key_states.shape[-2]
            if not self.record_past:
                self._limit_tokens(0)
                return restored
            visible = self.sliding_window - 1 + key_states.shape[-2]
            return tuple(states[..., -visible:, :] for states in restored)

        def crop(self, tokens_to_remove: int) -> None:
            if self.is_initialized:
                self._limit_tokens(abs(tokens_to_remove))
                self.cumulative_length -= abs(tokens_to_remove)

        def _limit_tokens(self, removed: int) -> None:
            """Keep the window that ends before some removed tokens."""
            end = max(self._length - removed, 0)
            first = max(end - self.sliding_window + 1, 0)
            if (first, end) != (0, self._length):
                self._select_tokens(first, end)

    return Int8Layer, Int8SlidingWindowLayer


def make_integer_layers(cache: Any) -> None:
    """Replace the layers of an empty cache by layers that store integers, in place."""
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    whole, sliding = _layer_classes()
    for index, layer in enumerate(cache.layers):
        if layer.is_initialized:
            continue
        if type(layer) is DynamicLayer:
            cache.layers[index] = whole()
        elif type(layer) is DynamicSlidingWindowLayer:
            cache.layers[index] = sliding(layer.sliding_window)
            cache.layers[index].record_past = layer.record_past
    if cache.layer_class_to_replicate is DynamicLayer:
        cache.layer_class_to_replicate = whole


def make_int8_cache(config: Any) -> Any:
    """Return an empty `DynamicCache` for a configuration of a decoder, which stores integers."""
    from transformers import DynamicCache

    cache = DynamicCache(config=config.get_text_config(decoder=True))
    make_integer_layers(cache)
    return cache


def count_cache_bytes(cache: Any) -> int:
    """Return the bytes that a cache of `transformers` holds."""
    layers = getattr(cache, "self_attention_cache", cache).layers
    total = 0
    for layer in layers:
        if isinstance(layer, _IntegerStates):
            total += layer.nbytes
        else:
            total += sum(state.nbytes for state in (layer.keys, layer.values) if state is not None)
    return total


def _replace_cache(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Give a call of the model a cache of integers, unless the call uses none."""
    from transformers.cache_utils import DynamicCache, EncoderDecoderCache

    passed = kwargs.get(_CACHE)
    own = passed.self_attention_cache if isinstance(passed, EncoderDecoderCache) else passed
    if isinstance(own, DynamicCache):
        make_integer_layers(own)
        return None
    uses_cache = kwargs.get("use_cache")
    if uses_cache is None:
        config = module.config.get_text_config(decoder=True)
        uses_cache = getattr(config, "use_cache", False)
    if passed is not None or not uses_cache or module.config.is_encoder_decoder:
        return None
    return args, {**kwargs, _CACHE: make_int8_cache(module.config)}


def enable_int8_cache(model: TorchModel) -> TorchModel:
    """Return a model of `transformers` whose conversions keep keys and values in INT8.

    Raises:
        ConversionError: the model is not captured layer by layer, or has no key-value cache.
    """
    shell = model.shell
    if shell is None or not hasattr(shell, "generate"):
        raise ConversionError(
            "kv_cache='int8' requires a decoder of transformers that is converted layer by layer, "
            "got another model; set capture='layers', or remove kv_cache"
        )
    if _CACHE not in inspect.signature(shell.forward).parameters:
        raise ConversionError(
            f"kv_cache='int8' requires a model with a key-value cache, but "
            f"{type(shell).__name__} has none; remove kv_cache"
        )
    return replace(model, int8_cache=True)


def use_int8_cache(module: nn.Module) -> None:
    """Let calls of a decoder of `transformers` keep keys and values in INT8, in place."""
    module.register_forward_pre_hook(_replace_cache, with_kwargs=True)
