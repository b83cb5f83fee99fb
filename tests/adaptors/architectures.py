"""Ten architectures people deploy, small and with random weights, each with inputs to run it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Architecture:
    """A model and how it is called.

    Attributes:
        build: makes the module, in evaluation mode.
        inputs: batch size → what it is called with: a dict by keyword, else positional.
        capturable: whether its graph can be captured at all.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[int], Any]
    capturable: bool = True


def tokens(vocabulary: int, length: int = 12) -> Callable[[int], dict[str, torch.Tensor]]:
    def inputs(batch: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(
            0, vocabulary, (batch, length), generator=torch.Generator().manual_seed(0)
        )
        mask = torch.ones(batch, length, dtype=torch.long)
        mask[0, length // 2 :] = 0
        return {"input_ids": ids, "attention_mask": mask}

    return inputs


def images(size: int, channels: int = 3) -> Callable[[int], torch.Tensor]:
    def inputs(batch: int) -> torch.Tensor:
        return torch.randn(batch, channels, size, size, generator=torch.Generator().manual_seed(0))

    return inputs


def bert() -> nn.Module:
    from transformers import BertConfig, BertModel

    return BertModel(
        BertConfig(
            vocab_size=60,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            max_position_embeddings=32,
        )
    )


def gpt2() -> nn.Module:
    """Weights of the head are tied to the embedding's."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=60,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=32,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            image_size=32,
            patch_size=8,
            num_labels=10,
        )
    )


def mobilenet() -> nn.Module:
    from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

    return MobileNetV2ForImageClassification(
        MobileNetV2Config(depth_multiplier=0.25, image_size=32, num_labels=10)
    )


def resnet() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(
        ResNetConfig(
            embedding_size=8, hidden_sizes=[16, 24, 32, 48], depths=[1, 2, 1, 1], num_labels=10
        )
    )


def double_convolution(channels_in: int, channels_out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(inplace=True),
        nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    """Two levels; one goes up by a transposed convolution, the other by interpolation."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = double_convolution(3, 8), double_convolution(8, 16)
        self.middle = double_convolution(16, 32)
        self.up = nn.ConvTranspose2d(32, 16, 2, 2)
        self.up2, self.up1 = double_convolution(32, 16), double_convolution(24, 8)
        self.out = nn.Conv2d(8, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.down1(x)
        second = self.down2(F.max_pool2d(first, 2))
        x = self.middle(F.max_pool2d(second, 2))
        x = self.up2(torch.cat([second, self.up(x)], 1))
        x = F.interpolate(x, scale_factor=2.0, mode="bilinear", align_corners=False)
        return torch.sigmoid(self.out(self.up1(torch.cat([first, x], 1))))


class Tagger(nn.Module):
    """A two-way LSTM over words; gives the tags and the last state."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(60, 16)
        self.lstm = nn.LSTM(16, 24, num_layers=2, bidirectional=True, batch_first=True)
        self.drop, self.tags = nn.Dropout(0.2), nn.Linear(48, 7)

    def forward(self, words: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        states, (hidden, cell) = self.lstm(self.words(words))
        return self.tags(self.drop(states)), {"hidden": hidden, "cell": cell}


def llama() -> nn.Module:
    """Rotary positions, RMS norms, grouped keys and values, gated layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=60,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=64,
            max_position_embeddings=32,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


class AutoEncoder(nn.Module):
    """Strided convolutions down, transposed ones up, a flat code between."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 8, 3, 2, 1), nn.LeakyReLU(0.1), nn.Conv2d(8, 16, 3, 2, 1), nn.ELU()
        )
        self.code, self.back = nn.Linear(16 * 16, 12), nn.Linear(12, 16 * 16)
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(16, 8, 4, 2, 1), nn.PReLU(8), nn.ConvTranspose2d(8, 1, 4, 2, 1)
        )

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        code = self.code(self.encoder(x).flatten(1))
        image = self.decoder(F.relu(self.back(code)).unflatten(1, (16, 4, 4)))
        return {"code": code, "image": torch.sigmoid(image)}


class EarlyExit(nn.Module):
    """Leaves after the first layers where those are sure enough: a branch on a tensor's value."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU())
        self.early, self.late = nn.Linear(8, 10), nn.Linear(8, 10)
        self.rest = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        scores = self.early(x.mean((2, 3)))
        if scores.softmax(1).max() > 0.9:
            return scores
        return self.late(self.rest(x).mean((2, 3)))


ARCHITECTURES = {
    "bert": Architecture(bert, tokens(60)),
    "gpt2": Architecture(gpt2, tokens(60)),
    "vit": Architecture(vit, images(32)),
    "mobilenet_v2": Architecture(mobilenet, images(32)),
    "resnet": Architecture(resnet, images(32)),
    "unet": Architecture(UNet, images(16)),
    "lstm_tagger": Architecture(Tagger, lambda batch: tokens(60)(batch)["input_ids"]),
    "llama": Architecture(llama, tokens(60)),
    "autoencoder": Architecture(AutoEncoder, images(16, 1)),
    "early_exit": Architecture(EarlyExit, images(8, 1), capturable=False),
}


def build(name: str) -> nn.Module:
    """The named architecture, seeded, with batch norms as a trained net has them."""
    torch.manual_seed(0)
    module = ARCHITECTURES[name].build().eval()
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d):
            with torch.no_grad():
                part.running_mean.normal_(0, 0.1)
                part.running_var.uniform_(0.8, 1.2)
    return module
