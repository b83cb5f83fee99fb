"""Small nets whose best plan can be found by trying all, and what verdicts and plans are held to.

Weights are random, and accuracy is not asked for: what is compared is speed. Each net has at most
seven layers that may be in INT8.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.nets.drawn_nets import Residual
from benchmarks.nets.vision_nets import exported
from neural_mp import MixedPrecision

#: Samples of a batch, where a net does not say.
_BATCH = 8


@dataclass(frozen=True)
class Known:
    """A net and the size of one sample.

    Attributes:
        build: makes the net.
        sample: the sizes of one sample.
        batch: samples of a batch.
        onnx: whether the net runs in ONNX Runtime, as torch exports it.
    """

    build: Callable[[], nn.Module]
    sample: tuple[int, ...]
    batch: int = _BATCH
    onnx: bool = False

    def inputs(self) -> torch.Tensor:
        """Return one batch, the same on every call."""
        draw = torch.Generator().manual_seed(0)
        return torch.randn(self.batch, *self.sample, generator=draw)

    def model(self) -> Any:
        """Return the model as a user would give it."""
        torch.manual_seed(0)
        net = self.build().eval()
        return exported(net, self.inputs().numpy()) if self.onnx else net

    def converter(self, workspace: Path) -> MixedPrecision:
        """Return what tunes the net for speed, with nothing taken from earlier runs."""
        result = MixedPrecision(precisions="int8", cache=False, workspace=workspace)
        result.model = self.model()
        result.calib_dataloader = [(self.inputs().numpy(), torch.zeros(self.batch).numpy())]
        result.eval_func = _always_right
        return result


def _always_right(model: Any) -> float:
    return 1.0


class _Gate(nn.Module):
    """Squeeze and excite."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.squeeze, self.excite = nn.Conv2d(width, width // 4, 1), nn.Conv2d(width // 4, width, 1)

    def forward(self, x: Any) -> Any:
        means = x.mean((2, 3), keepdim=True)
        return x * self.excite(F.silu(self.squeeze(means))).sigmoid()


class _Attention(nn.Module):
    """A block of a transformer: attention of four heads, and a feed-forward net."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Any) -> Any:
        width = x.shape[-1]
        parts = self.qkv(self.norm(x)).unflatten(-1, (3, 4, width // 4)).permute(2, 0, 3, 1, 4)
        weights = (parts[0] @ parts[1].transpose(-1, -2) / (width // 4) ** 0.5).softmax(-1)
        x = x + self.out((weights @ parts[2]).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.after(x))))


class _Sines(nn.Module):
    """A function of every value, which INT8 does nothing for."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    def forward(self, x: Any) -> Any:
        for _ in range(self.times):
            x = torch.sin(x * 1.1)
        return x


def _convs(*widths: int, size: int = 3) -> nn.Sequential:
    layers: list[nn.Module] = []
    for arriving, leaving in pairwise(widths):
        layers += [nn.Conv2d(arriving, leaving, size, padding=size // 2), nn.ReLU()]
    return nn.Sequential(*layers)


def _wide() -> nn.Module:
    """Wide 1-D convolutions, the first of one channel and kernel 512."""
    return nn.Sequential(
        nn.Conv1d(1, 128, 512, 4, padding=256),
        nn.ReLU(),
        nn.MaxPool1d(2),
        nn.Conv1d(128, 32, 64, padding=32),
        nn.ReLU(),
        nn.MaxPool1d(2),
        nn.Conv1d(32, 32, 64, padding=32),
        nn.ReLU(),
        nn.AdaptiveAvgPool1d(4),
        nn.Flatten(),
        nn.Linear(128, 48),
    )


def _gated() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, 2, 1),
        nn.SiLU(),
        nn.Conv2d(32, 32, 3, padding=1, groups=32),
        nn.SiLU(),
        _Gate(32),
        nn.Conv2d(32, 64, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


def _depthwise() -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, 2, 1), nn.ReLU6()]
    for _ in range(2):
        layers += [nn.Conv2d(32, 32, 3, padding=1, groups=32), nn.ReLU6(), nn.Conv2d(32, 32, 1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


def _residual() -> nn.Module:
    block = (nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1))
    return nn.Sequential(_convs(3, 32), Residual(nn.Sequential(*block)), nn.ReLU(), _convs(32, 64))


def _dense(*widths: int, between: type[nn.Module] = nn.ReLU) -> nn.Module:
    layers: list[nn.Module] = []
    for arriving, leaving in pairwise(widths):
        layers += [nn.Linear(arriving, leaving), between()]
    return nn.Sequential(*layers[:-1])


def _uneven() -> nn.Module:
    """One large product between small ones, with functions of every value around them."""
    return nn.Sequential(
        nn.Linear(64, 64), _Sines(2), nn.Linear(64, 1024), nn.GELU(), nn.Linear(1024, 64)
    )


def _tie() -> nn.Module:
    """Nearly all of the time is in functions that stay in FP32."""
    return nn.Sequential(nn.Linear(64, 512), _Sines(24), nn.Linear(512, 8))


NETS: Mapping[str, Known] = {
    "wide": Known(_wide, (1, 1024)),
    "gated": Known(_gated, (3, 64, 64)),
    "depthwise": Known(_depthwise, (3, 64, 64)),
    "residual": Known(_residual, (3, 32, 32)),
    "mlp": Known(lambda: _dense(512, 1024, 1024, 512, 10), (512,), 64),
    "transformer": Known(lambda: _Attention(128), (64, 128)),
    "tiny": Known(lambda: _dense(16, 16, 16, 16, 4), (16,)),
    "uneven": Known(_uneven, (64, 64)),
    "wide-onnx": Known(_wide, (1, 1024), onnx=True),
    "gated-onnx": Known(_gated, (3, 64, 64), onnx=True),
    "residual-onnx": Known(_residual, (3, 32, 32), onnx=True),
    "transformer-onnx": Known(lambda: _Attention(128), (64, 128), onnx=True),
}
#: A net that INT8 makes clearly faster, one that gains nothing to speak of, one that loses.
VERDICTS: Mapping[str, Known] = {
    "win": Known(lambda: _dense(1024, 1024, 1024, 1024, 10), (1024,), 64),
    "tie": Known(_tie, (64,), 512),
    "loss": Known(lambda: _dense(8, 8, 8, 8, between=nn.Tanh), (8,)),
}


@contextlib.contextmanager
def busy_core(enabled: bool) -> Iterator[None]:
    """Keep one core busy for a while."""
    if not enabled:
        yield
        return
    process = multiprocessing.get_context("spawn").Process(target=_spin, daemon=True)
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


def _spin() -> None:
    while True:
        pass


@contextlib.contextmanager
def workspace() -> Iterator[Path]:
    """A folder for one run."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)
