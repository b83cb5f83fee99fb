"""Seeded inputs for models of `transformers`, by the parameters of their forward."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

#: Samples of a batch, tokens of a sequence, values of a waveform.
SAMPLES, TOKENS, WAVEFORM = 2, 12, 8000
_SIDES = (64, 32, 224)
#: Frames, rows and columns of patches.
GRID = (1, 4, 4)
Inputs = dict[str, torch.Tensor]


def input_candidates(model: nn.Module, seed: int) -> Iterator[tuple[str, Inputs]]:
    """Yield kinds of inputs that a model may run on, the most complete first."""
    maker = _Maker(model, seed)
    parameters = inspect.signature(model.forward).parameters
    main = getattr(model, "main_input_name", "input_ids")
    needed = [
        name
        for name, parameter in parameters.items()
        if parameter.default is inspect.Parameter.empty
        and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    ]
    supported = [name for name in parameters if name in RULES]
    pictured = (
        maker.pictured_text() if "pixel_values" in supported and "input_ids" in supported else None
    )
    if pictured:
        yield "text with pictures", pictured
    choices = {
        "all": [name for name in supported if name not in _RARE or name in needed],
        "main": [name for name in parameters if name in (main, *needed, *_COMPANIONS)],
        "needed": [name for name in parameters if name in (main, *needed)],
        "text": [name for name in parameters if name in ("input_ids", "attention_mask", *needed)],
        "text to text": [
            name for name in parameters if name in ("input_ids", "decoder_input_ids", *needed)
        ],
    }
    previous: list[list[str]] = []
    for side in _SIDES:
        maker.side = side
        for kind, names in choices.items():
            if any("pixel" in name or "image" in name for name in names) or side == _SIDES[0]:
                inputs = maker.inputs(names)
                shapes = [f"{name} {tuple(value.shape)}" for name, value in inputs.items()]
                if inputs and shapes not in previous:
                    previous.append(shapes)
                    yield f"{kind}, side {side}" if side != _SIDES[0] else kind, inputs
    maker.side = _SIDES[0]
    if "input_features" in supported or "input_values" in supported:
        for longer in (1, 3):
            maker.audio = longer
            yield f"audio, form {longer}", maker.inputs(choices["main"])
    try:
        yield "dummy_inputs", dict(model.dummy_inputs)
    except (AttributeError, NotImplementedError, TypeError):
        return


class _Maker:
    """Values of parameters, from the configuration.

    Attributes:
        side: of pictures, unless the configuration has one.
        audio: which of several forms of audio features is made.
    """

    def __init__(self, model: nn.Module, seed: int) -> None:
        self.model, self.config = model, model.config
        self.generator = torch.Generator().manual_seed(seed)
        self.side, self.audio = _SIDES[0], 0

    def size(self, *names: str, default: int = 0) -> int:
        """Return the first size of these names in the configuration or its parts."""
        for name in names:
            for part in _parts(self.config):
                value = getattr(part, name, None)
                value = value[0] if isinstance(value, list | tuple) and value else value
                if isinstance(value, int) and not isinstance(value, bool):
                    return value
        return default

    def inputs(self, names: list[str]) -> Inputs:
        if "input_ids" not in names:  # the length of a mask of other inputs is not known
            names = [name for name in names if name != "attention_mask"]
        values = {name: RULES[name](self) for name in names if name in RULES}
        if "grid_thw" in names:
            values["hidden_states"] = self.patches()
        return values

    def floats(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    def ids(self, limit: int = 0, tokens: int = TOKENS) -> torch.Tensor:
        vocabulary_size = limit or self.size(
            "vocab_size", "text_vocab_size", "vocabulary_size", default=64
        )
        special = {value for part in _parts(self.config) for value in _special(part)}
        free = torch.tensor(
            [token for token in range(vocabulary_size) if token not in special] or [0]
        )
        chosen = torch.randint(0, len(free), (SAMPLES, tokens), generator=self.generator)
        return free[chosen]

    def pixels(self) -> torch.Tensor:
        channels = self.size("num_channels", "in_channels", "in_chans", "num_image_channels") or 3
        height, width = self.image_size()
        frames = self.size("num_frames", "frames")
        several = (frames,) if frames > 1 and self._takes_frames() else ()
        return self.floats(SAMPLES, *several, channels, height, width)

    def _takes_frames(self) -> bool:
        return not hasattr(self.config, "image_token_id")

    def patches(self) -> torch.Tensor:
        """Return rows of pixels, as towers read that take pictures of any size."""
        side = self.size("patch_size", default=16)
        values = side * side * self.size("in_channels", "num_channels", default=3)
        values *= self.size("temporal_patch_size", default=1)
        return self.floats(SAMPLES * GRID[0] * GRID[1] * GRID[2], values)

    def image_size(self) -> tuple[int, int]:
        for part in _parts(self.config):
            for name in ("image_size", "img_size", "input_size"):
                value = getattr(part, name, None)
                if isinstance(value, int) and value > 1:
                    return value, value
                if isinstance(value, dict) and "height" in value:
                    return value["height"], value["width"]
                if isinstance(value, list | tuple) and len(value) == 2:
                    return int(value[0]), int(value[1])
        return self.side, self.side

    def spectrum(self) -> torch.Tensor:
        bins = self.size("num_mel_bins", "input_feat_per_channel", "feature_size", "n_mels")
        bins = bins or self.size("feature_projection_input_dim", default=80)
        frames = 2 * self.size("max_source_positions", default=50)
        frames = self.size("max_length", default=frames) if self.audio == 0 else frames
        if self.audio == 1:
            return self.floats(SAMPLES, 50, bins)
        if self.audio == 3:
            return self.floats(SAMPLES, 1, 100, bins)
        return self.floats(SAMPLES, bins, frames)

    def waveform(self) -> torch.Tensor:
        if self.size("num_mel_bins") and self.size("max_length"):
            return self.floats(SAMPLES, self.size("max_length"), self.size("num_mel_bins"))
        if self.audio == 3:
            return self.floats(SAMPLES, 1, WAVEFORM)
        return self.floats(SAMPLES, WAVEFORM)

    def boxes(self) -> torch.Tensor:
        limit = self.size("max_2d_position_embeddings", default=1000)
        corners = torch.randint(0, limit // 2, (SAMPLES, TOKENS, 2), generator=self.generator)
        return torch.cat([corners, corners + limit // 4], dim=-1)

    def pictured_text(self) -> Inputs | None:
        """Return ids with as many image tokens as a picture has features; None if unknown."""
        token = self.size("image_token_id", "image_token_index")
        features = getattr(self.model, "get_image_features", None)
        if not token or features is None:
            return None
        pixels = self.pixels()
        try:
            with torch.no_grad():
                embeddings = features(pixel_values=pixels)
        except Exception:  # noqa: BLE001 - models raise any type for inputs of another form
            return None
        embeddings = getattr(embeddings, "pooler_output", embeddings)
        parts = list(embeddings) if isinstance(embeddings, list | tuple) else [embeddings]
        width = parts[0].shape[-1]
        count = sum(part.numel() for part in parts) // width // SAMPLES
        ids = self.ids()
        images = torch.full((SAMPLES, count), token)
        ids = torch.cat([ids[:, :2], images, ids[:, 2:]], dim=1)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels}


def _parts(config: Any) -> Iterator[Any]:
    yield config
    for value in vars(config).values():
        if hasattr(value, "to_dict"):
            yield from _parts(value)


def _special(config: Any) -> Iterator[int]:
    for key, value in vars(config).items():
        if "token" in key and isinstance(value, int):
            yield value


def _mask(maker: _Maker) -> torch.Tensor:
    """Return a mask whose last sample is padded."""
    mask = torch.ones(SAMPLES, TOKENS, dtype=torch.long)
    mask[-1, -3:] = 0
    return mask


def _past(maker: _Maker) -> torch.Tensor:
    lags = [lag for part in _parts(maker.config) for lag in getattr(part, "lags_sequence", ())]
    length = maker.size("context_length", default=16) + max(lags, default=0)
    inputs = maker.size("num_input_channels", "input_size", default=1)
    shape = (SAMPLES, length, inputs) if inputs > 1 or maker.size("patch_length") else None
    return maker.floats(*(shape or (SAMPLES, length)))


_RULES_OF_TEXT: dict[str, Callable[[_Maker], torch.Tensor]] = {
    "input_ids": lambda maker: maker.ids(),
    "attention_mask": _mask,
    "decoder_input_ids": lambda maker: maker.ids(tokens=6),
    "bbox": lambda maker: maker.boxes(),
    "token_type_ids": lambda maker: torch.zeros(SAMPLES, TOKENS, dtype=torch.long),
    "qformer_input_ids": lambda maker: maker.ids(),
    "query_embeds": lambda maker: maker.floats(SAMPLES, 8, maker.size("hidden_size")),
    "inputs_embeds": lambda maker: maker.floats(SAMPLES, TOKENS, maker.size("hidden_size")),
    "hidden_states": lambda maker: maker.floats(SAMPLES, TOKENS, maker.size("hidden_size")),
}
_RULES_OF_PICTURES: dict[str, Callable[[_Maker], torch.Tensor]] = {
    "pixel_values": lambda maker: maker.pixels(),
    "grid_thw": lambda maker: torch.tensor([GRID] * SAMPLES),
    "pixel_values_videos": lambda maker: maker.pixels(),
    "pixel_values_images": lambda maker: maker.pixels(),
    "images": lambda maker: maker.pixels(),
    "image": lambda maker: maker.pixels(),
    "visual_feats": lambda maker: maker.floats(
        SAMPLES, 5, maker.size("visual_feat_dim", "visual_embedding_dim", default=64)
    ),
    "visual_pos": lambda maker: maker.floats(SAMPLES, 5, 4).abs(),
}
_RULES_OF_AUDIO: dict[str, Callable[[_Maker], torch.Tensor]] = {
    "input_features": lambda maker: maker.spectrum(),
    "input_values": lambda maker: maker.waveform(),
    "input_features_mask": lambda maker: torch.ones(
        SAMPLES, maker.spectrum().shape[-1], dtype=torch.long
    ),
    "audio_values": lambda maker: maker.waveform(),
    "waveform": lambda maker: maker.waveform(),
    "spectrogram": lambda maker: maker.floats(
        SAMPLES, 20, maker.size("model_in_dim", "num_mel_bins", default=80)
    ),
    "past_values": _past,
    "past_observed_mask": lambda maker: torch.ones_like(_past(maker)),
    "past_time_features": lambda maker: maker.floats(
        *_past(maker).shape[:2], maker.size("num_time_features")
    ),
    "series": lambda maker: maker.floats(SAMPLES, 32),
    "states": lambda maker: maker.floats(SAMPLES, 5, maker.size("state_dim", default=17)),
    "actions": lambda maker: maker.floats(SAMPLES, 5, maker.size("act_dim", default=4)),
    "returns_to_go": lambda maker: maker.floats(SAMPLES, 5, 1),
    "timesteps": lambda maker: torch.arange(5).repeat(SAMPLES, 1),
}
#: Parameter → value.
RULES = {**_RULES_OF_TEXT, **_RULES_OF_PICTURES, **_RULES_OF_AUDIO}
_COMPANIONS = ("attention_mask", "decoder_input_ids", "bbox")
_RARE = ("inputs_embeds", "hidden_states", "image", "token_type_ids", "pixel_values_videos")
