"""Configurations of `transformers` with few layers, narrow widths and small images."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

#: Sizes of vocabularies and of positions that larger ones are cut to.
MAX_VOCABULARY, MAX_POSITIONS = 256, 128
#: Layers of each stack, and of each stage of a pyramid.
LAYERS, STAGE_LAYERS = 2, 1
#: Sides of images that larger ones are cut to, unless the patches are larger.
MAX_IMAGE_SIDE = 64

_WIDTH = re.compile(
    r"(^|_)(hidden_size|hidden_sizes|d_model|n_embd|embed_dim|embed_dims|dim|dims|d_embed|emb_dim|"
    r"hidden_dim|embedding_size|projection_dim|projection_size|channels|num_channels_list|width|"
    r"hidden_channels|d_kv|head_dim|d_ff|ffn_dim|intermediate_size|n_inner|dim_feedforward|rank|"
    r"intermediate_dim|out_hidden_size|feature_size|output_dim|lora_rank|inner_dim|proj_dim|"
    r"dim_head|embeddings_size|state_size|size_per_head|encoder_dim|decoder_dim|lru_width|"
    r"embedding_dim|fusion_hidden_size|neck_hidden_sizes|mid_channels|out_channels|d_inner)$"
)
_NOT_WIDTH = re.compile(r"(num_channels|in_channels|image|patch|vocab|kernel|window|position)")
_HIDDEN = re.compile(
    r"^(hidden_size|d_model|n_embd|embed_dim|dim|hidden_dim|embedding_size|emb_dim|d_embed|"
    r"decoder_hidden_size|encoder_hidden_size|cross_attention_hidden_size|word_embed_proj_dim|"
    r"projection_dim|out_hidden_size|encoder_dim|decoder_dim|output_dim|decoder_embed_dim|"
    r"text_embed_dim|d_embedding|embedding_dim|qformer_hidden_size)$"
)
_INNER = re.compile(
    r"(intermediate_size|ffn_dim|d_ff|n_inner|dim_feedforward|intermediate_dim|ffn_hidden_size|"
    r"encoder_ffn_dim|ffn_inner_dim|feed_forward_size|intermediate_size_mlp|mlp_hidden_size)$"
)
_HEADS = re.compile(r"(num_attention_heads|num_heads|n_head|n_heads|attention_heads|num_head)$")
_LAYERS = re.compile(
    r"(^|_)(layers|num_layers|num_hidden_layers|n_layer|n_layers|depth|num_blocks|layer_num|"
    r"num_hidden_groups|encoder_layers|decoder_layers|block_num)$"
)
_STAGES = re.compile(r"(^|_)(depths|layers|num_blocks|num_layers|depth|block_repeats)$")
_EXPERTS = re.compile(r"(num_experts|num_local_experts|n_routed_experts|moe_num_experts)$")
_CHOSEN = re.compile(
    r"(num_experts_per_tok(en)?|moe_top_?k|moe_k|top_k_experts|experts_per_token)$"
)
_GROUPS = re.compile(r"^(n_group|topk_group|num_expert_group)$")
_VOCODER = re.compile(r"^upsample_initial_channels?$")
_TOKEN = re.compile(r"token_id(s|x)?$|_token_index$|token_ids?$|_id$|_token$")
_VOCABULARY = re.compile(r"vocab_size|vocabulary_size|codebook_size|num_embeddings$")
_POSITIONS = re.compile(
    r"^(max_position_embeddings|n_positions|n_ctx|max_seq_len|max_sequence_length|context_length|"
    r"max_target_positions|model_max_length|max_seq_length|max_position|max_length)$"
)
_IMAGE = re.compile(r"^(image_size|img_size|input_size|image_resolution|size|crop_size)$")


_CHOSEN_STAGES = re.compile(r"^(out_features|out_indices|stage_names|_out_)")
#: Values that have no default.
_REQUIRED = {"prediction_length": 8}


@dataclass(frozen=True)
class Shrinking:
    """A way to shrink a configuration.

    Attributes:
        name: in results.
        divisor: of all widths, so that their ratios stay; 0 sets the usual widths to fixed values.
        layers: of each stack.
        cuts_layers: whether stacks are cut.
    """

    name: str
    divisor: int
    layers: int = LAYERS
    cuts_layers: bool = True


#: Ways in the order tried: an architecture need not take fixed widths.
SHRINKINGS = (
    Shrinking("fixed", 0),
    Shrinking("eighth", 8),
    Shrinking("quarter", 4),
    Shrinking("four layers", 8, 4),
    Shrinking("half", 2),
    Shrinking("eighth, all layers", 8, cuts_layers=False),
    Shrinking("layers", 1),
    Shrinking("default", 1, cuts_layers=False),
)


def shrunk(config: Any, shrinking: Shrinking) -> dict[str, Any]:
    """Return the arguments of a smaller configuration of the same class."""
    plain = {key: value for key, value in vars(config).items() if not key.startswith("_")}
    stack = next((v for k, v in plain.items() if _LAYERS.search(k) and isinstance(v, int)), 0)
    sizes = _Sizes(shrinking, _patch_of(plain), stack)
    changed: dict[str, Any] = {}
    ids = iter(range(MAX_VOCABULARY - 1, 0, -1))
    for key, value in plain.items():
        if hasattr(value, "to_dict"):
            own = value.to_diff_dict() if hasattr(value, "to_diff_dict") else {}
            if value.model_type != "timm_backbone":  # stages are cut, so the chosen ones change
                own = {name: part for name, part in own.items() if not _CHOSEN_STAGES.search(name)}
            changed[key] = own | {"model_type": value.model_type} | shrunk(value, shrinking)
            continue
        smaller = _REQUIRED.get(key) if value is None else sizes.of(key, value)
        if smaller is None and _TOKEN.search(key):
            smaller = _token(value, ids)
        if smaller is not None and smaller != value:
            changed[key] = smaller
    return changed | _sections({**plain, **changed})


def _sections(plain: dict[str, Any]) -> dict[str, Any]:
    """Return rotary parameters whose sections add up to half of the width of a head."""
    sections = (plain.get("rope_parameters") or {}).get("mrope_section")
    heads = plain.get("num_attention_heads") or 1
    width = plain.get("head_dim") or (plain.get("hidden_size") or 0) // heads
    if not sections or not width or sum(sections) <= width // 2:
        return {}
    parts = [part * (width // 2) // sum(sections) for part in sections]
    parts[0] += width // 2 - sum(parts)
    return {"rope_parameters": {**plain["rope_parameters"], "mrope_section": parts}}


def _token(value: Any, ids: Iterator[int]) -> Any:
    if isinstance(value, bool):
        return None
    if isinstance(value, int) and value >= MAX_VOCABULARY:
        return next(ids)
    if isinstance(value, list) and any(isinstance(v, int) and v >= MAX_VOCABULARY for v in value):
        return [next(ids) for _ in value]
    return None


def _patch_of(plain: dict[str, Any]) -> int:
    patch = next((plain[key] for key in ("patch_size", "tubelet_size") if plain.get(key)), 1)
    numbers = _numbers(patch)
    return max(numbers) if numbers else 1


def _numbers(value: Any) -> list[int]:
    if isinstance(value, int):
        return [value]
    if isinstance(value, list | tuple):
        return [number for item in value for number in _numbers(item)]
    return []


@dataclass(frozen=True)
class _Sizes:
    way: Shrinking
    patch: int
    stack: int

    def of(self, key: str, value: Any) -> Any:
        """Return the smaller value of an attribute; None to keep the value."""
        if isinstance(value, bool) or value is None:
            return None
        if isinstance(value, int):
            return self._number(key, value)
        if isinstance(value, list | tuple) and value:
            return self._several(key, list(value))
        return None

    def _number(self, key: str, value: int) -> int | None:
        limits = (
            (_VOCABULARY, MAX_VOCABULARY),
            (_POSITIONS, MAX_POSITIONS),
            (_IMAGE, max(MAX_IMAGE_SIDE, 2 * self.patch)),
            (_EXPERTS, 4),
            (_CHOSEN, 2),
            (_GROUPS, 1),
            (_VOCODER, 64),
        )
        for kind, limit in limits:
            if kind.search(key):
                return min(value, limit) if self.way.name != "default" else None
        if self.way.cuts_layers and _LAYERS.search(key):
            return min(value, self.way.layers)
        return self._narrow(key, value)

    def _narrow(self, key: str, value: int) -> int | None:
        if not self.way.divisor:
            return _fixed(key, value)
        if _WIDTH.search(key) and not _NOT_WIDTH.search(key) and value >= 8 * self.way.divisor:
            return max(value // self.way.divisor // 8, 1) * 8
        return None

    def _several(self, key: str, values: list[Any]) -> list[Any] | None:
        if self.way.cuts_layers and 2 < len(values) == self.stack > self.way.layers:
            return _covering(values, self.way.layers)
        if not all(isinstance(value, int) and not isinstance(value, bool) for value in values):
            return None
        if self.way.cuts_layers and _STAGES.search(key):
            return [min(value, STAGE_LAYERS) for value in values]
        if _IMAGE.search(key):
            return [min(value, max(MAX_IMAGE_SIDE, 2 * self.patch)) for value in values]
        divisor = self.way.divisor or 4
        if _WIDTH.search(key) and not _NOT_WIDTH.search(key):
            return [value // divisor if value >= 4 * divisor else value for value in values]
        return None


def _fixed(key: str, value: int) -> int | None:
    """Return a usual narrow width, or number of heads."""
    if "key_value" in key or key.endswith("num_kv_heads"):
        return min(value, 2)
    table = ((_HEADS, 4), (_HIDDEN, 64), (_INNER, 128))
    for kind, limit in table:
        if kind.search(key):
            return min(value, limit)
    if key.endswith("head_dim") or key == "d_kv":
        return min(value, 16)
    return None


def _covering(values: list[Any], count: int) -> list[Any]:
    """Return some values of a list in order, of as many kinds as possible."""
    first = [index for index, value in enumerate(values) if value not in values[:index]][-count:]
    rest = [index for index in range(len(values)) if index not in first]
    return [values[index] for index in sorted((*first, *rest[: count - len(first)]))]
