"""The models of `runtimes.py` in torch and their samples, and drawn nets by name.

Twelve nets have known architectures, and random weights of a fixed seed. Widths and depths are
those of the published nets. The package `transformers` builds the ViT, DistilBERT, ConvNeXt, Swin,
Whisper, SegFormer and wav2vec2; the others are shaped like a YOLOv8, a U-Net, a TCN and a DLRM.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.nets.case import Arrays, Case, write_onnx
from benchmarks.nets.deployed_nets import bert_base
from benchmarks.nets.drawn_nets import (
    FirstOutput,
    Recurrent,
    Residual,
    Tables,
    UNet,
    conv_block,
    draw_integers,
    draw_normal,
    drawn_case,
    temporal_net,
    with_statistics,
)
from benchmarks.nets.vision_nets import images, torch_net

_SEED = 20261128
_PICTURE, _SENTENCE_LENGTH = (3, 224, 224), 128


class _CrossStage(nn.Module):
    """Half of the channels go through bottlenecks; all results are joined, as in YOLOv8."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        half = width // 2
        self.enter = conv_block(width, width, 1, act=nn.SiLU)
        self.inner = nn.ModuleList(
            Residual(
                nn.Sequential(
                    conv_block(half, half, act=nn.SiLU), conv_block(half, half, act=nn.SiLU)
                )
            )
            for _ in range(depth)
        )
        self.leave = conv_block(width + depth * half, width, 1, act=nn.SiLU)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = list(self.enter(x).chunk(2, 1))
        for inner in self.inner:
            parts.append(inner(parts[-1]))
        return self.leave(torch.cat(parts, 1))


class _Yolo(nn.Module):
    """Stages of a detector, and a head that joins the maps of two sizes."""

    def __init__(self) -> None:
        super().__init__()
        widths = (16, 32, 64, 128, 256)
        downs = [conv_block(a, b, 3, 2, act=nn.SiLU) for a, b in pairwise(widths)]
        self.stem = conv_block(3, widths[0], 3, 2, act=nn.SiLU)
        self.stages = nn.ModuleList(
            nn.Sequential(down, _CrossStage(width, depth))
            for down, width, depth in zip(downs, widths[1:], (1, 2, 2, 1), strict=True)
        )
        self.up = nn.Upsample(scale_factor=2)
        self.merge = conv_block(widths[-1] + widths[-2], widths[-2], 1, act=nn.SiLU)
        self.heads = nn.ModuleList(nn.Conv2d(width, 84, 1) for width in widths[-2:])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        maps = [self.stem(x)]
        for stage in self.stages:
            maps.append(stage(maps[-1]))
        merged = self.merge(torch.cat([self.up(maps[-1]), maps[-2]], 1))
        inputs = (merged, maps[-1])
        boxes = [head(part) for head, part in zip(self.heads, inputs, strict=True)]
        return torch.cat([box.flatten(2) for box in boxes], 2)


def _of_transformers(
    name: str, argument: str, part: str | None = None, **sizes: Any
) -> Callable[[], nn.Module]:
    """Return the maker of a net of the package transformers, or of a part of that net."""

    def make() -> nn.Module:
        import transformers as package

        config = getattr(package, f"{name}Config")(**sizes)
        model = getattr(package, f"{name}Model")(config)
        return FirstOutput(model.get_submodule(part) if part else model, argument)

    return make


def _case(
    make: Callable[[], nn.Module],
    samples: Callable[[int, int], Arrays],
    batch: int = 1,
    names: tuple[str, ...] = ("image",),
) -> Case:
    build = partial(with_statistics, make, samples, _SEED)
    return Case(build, samples, names, (batch,), max(16, 2 * batch))


_small_pictures = partial(draw_normal, _PICTURE)
_short_sentences = partial(draw_integers, 30000, _SENTENCE_LENGTH)

ARCHITECTURES = {
    "vit_b": _case(_of_transformers("ViT", "pixel_values"), _small_pictures),
    "yolo": _case(_Yolo, partial(draw_normal, (3, 320, 320))),
    "distilbert": _case(
        _of_transformers("DistilBert", "input_ids"), _short_sentences, names=("input_ids",)
    ),
    "unet": _case(lambda: UNet(32, 3, nn.ReLU, True), partial(draw_normal, (3, 128, 128))),
    "convnext_t": _case(_of_transformers("ConvNext", "pixel_values"), _small_pictures),
    "swin_t": _case(_of_transformers("Swin", "pixel_values"), _small_pictures),
    "lstm": _case(
        lambda: Recurrent(nn.LSTM, 64, 256, 2, False),
        partial(draw_normal, (100, 64)),
        names=("sequence",),
    ),
    "whisper_encoder": _case(
        _of_transformers(
            "Whisper",
            "input_features",
            "encoder",
            d_model=384,
            encoder_layers=4,
            encoder_attention_heads=6,
            encoder_ffn_dim=1536,
        ),
        partial(draw_normal, (80, 3000)),
        names=("sound",),
    ),
    "segformer_b0": _case(_of_transformers("Segformer", "pixel_values"), _small_pictures),
    "wav2vec2": _case(
        _of_transformers("Wav2Vec2", "input_values"),
        partial(draw_normal, (16000,)),
        names=("sound",),
    ),
    "tcn": _case(partial(temporal_net, 128, 6), partial(draw_normal, (40, 400)), 16, ("sound",)),
    "dlrm": _case(lambda: Tables(26, 64, 512, 3), partial(draw_integers, 1000, 26), 64, ("ids",)),
}


def _pictures(count: int, seed: int) -> Arrays:
    return (images(count, seed),)


def _sentences(count: int, seed: int) -> Arrays:
    tokens = np.random.default_rng(seed).integers(0, 30000, (count, 128))
    return tokens, np.ones_like(tokens)


CASES = {
    "resnet50": Case(lambda: torch_net("resnet50"), _pictures, batches=(1, 32)),
    "bert": Case(bert_base, _sentences, ("input_ids", "attention_mask"), (1, 4), 16),
    "mobilenetv2": Case(lambda: torch_net("mobilenetv2"), _pictures),
    "efficientnetb0": Case(lambda: torch_net("efficientnetb0"), _pictures),
}
#: Samples for calibration, of these as many at once; the seeds of the samples of each use.
CALIBRATION, AT_ONCE = 32, 8
CALIBRATED, JUDGED, TIMED = 1, 99, 7


def case_of(name: str) -> Case:
    """Return one of the four models, of the twelve architectures, or a drawn net."""
    fixed = CASES | ARCHITECTURES
    return fixed[name] if name in fixed else drawn_case(name)


def write_source(name: str, folder: Path) -> None:
    """Write the model as ONNX, and calibration samples.

    The file takes the first batch size only where torch exports no other.
    """
    case = case_of(name)
    net, path = case.build(), folder / "fp32.onnx"
    try:
        write_onnx(net, _named(case, 2, TIMED), path)
    except torch.onnx.OnnxExporterError:
        write_onnx(net, _named(case, case.batches[0], TIMED), path, free=None)
    np.savez(folder / "calibration.npz", **_named(case, CALIBRATION, CALIBRATED))


def _named(case: Case, count: int, seed: int) -> dict[str, np.ndarray]:
    return dict(zip(case.names, case.draw(count, seed), strict=True))


def write_program(name: str, folder: Path, size: int) -> None:
    """Write the model as exported program of a batch size."""
    case = case_of(name)
    example = tuple(map(torch.from_numpy, case.draw(size, TIMED)))
    torch.export.save(torch.export.export(case.build(), example), folder / f"{size}.pt2")


def reference(name: str) -> tuple[nn.Module, np.ndarray]:
    """Return the model, and its outputs for the samples that outputs are compared on."""
    case = case_of(name)
    net, outputs = case.build(), []
    with torch.inference_mode():
        for inputs in case.cut(case.judged, JUDGED, 4):
            outputs.append(net(*map(torch.from_numpy, inputs)).numpy())
    return net, np.concatenate(outputs)


def noise(expected: Any, actual: Any) -> float:
    """Return the power of the difference, as a fraction of that of the expected values."""
    expected, actual = np.asarray(expected, np.float64), np.asarray(actual, np.float64)
    return float(np.square(expected - actual).sum() / np.square(expected).sum())
