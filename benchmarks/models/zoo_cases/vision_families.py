"""Nets of torchvision, and one net of each family of timm, with random weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from zoo_cases.case import NotBuiltError, ZooCase

SAMPLES = 2
#: Sides of pictures, tried in this order.
_SIDES = (64, 96, 224)
MAX_PARAMETERS = 60_000_000
#: Words of the names of small nets, the smallest first.
_SMALL = (
    "atto",
    "femto",
    "pico",
    "nano",
    "tiny",
    "_xxs",
    "_xs",
    "_050",
    "_b0",
    "small",
    "18",
    "_s",
)


def torchvision_names() -> list[str]:
    """Return the nets of torchvision, without those that need optical flow or video."""
    from torchvision import models

    return sorted(models.list_models())


def timm_names() -> list[str]:
    """Return the smallest net of each family, by its name."""
    import timm

    return sorted(
        min(names, key=_size_of_name)
        for names in (timm.list_models(module=module) for module in timm.list_modules())
        if names
    )


def _size_of_name(name: str) -> tuple[int, int, str]:
    rank = next((number for number, word in enumerate(_SMALL) if word in name), len(_SMALL))
    return rank, len(name), name


def build_torchvision(name: str, seed: int, batches: int) -> ZooCase:
    """Return a net of torchvision.

    Raises:
        NotBuiltError: the net takes no pictures of the sizes tried.
    """
    from torchvision import models

    def make() -> nn.Module:
        backbone = {"weights_backbone": None} if name.startswith(_WITH_BACKBONE) else {}
        made: nn.Module = models.get_model(name, weights=None, **backbone)
        return made

    return _case(make, seed, batches)


_WITH_BACKBONE = (
    "fasterrcnn",
    "fcos",
    "keypointrcnn",
    "maskrcnn",
    "retinanet",
    "ssd",
    "deeplab",
    "fcn",
    "lraspp",
)


def build_timm(name: str, seed: int, batches: int) -> ZooCase:
    """Return a net of timm.

    Raises:
        NotBuiltError: the net takes no pictures of the sizes tried.
    """
    import timm

    return _case(lambda: timm.create_model(name, pretrained=False), seed, batches)


def _case(make: Callable[[], nn.Module], seed: int, batches: int) -> ZooCase:
    with torch.device("meta"):
        count = sum(weight.numel() for weight in make().parameters())
    if count > MAX_PARAMETERS:
        raise NotBuiltError(f"{count / 1e6:.0f} million parameters")
    torch.manual_seed(seed)
    net = make().eval()
    reasons: list[str] = []
    for side in _SIDES:
        data = [torch.randn(SAMPLES, 3, side, side) for _ in range(batches)]
        try:
            with torch.no_grad():
                net(data[0])
        except Exception as error:  # noqa: BLE001 - nets raise any type for another size
            reasons.append(f"side {side}: {' '.join(str(error).split())[:160]}")
            continue

        def run(batch: torch.Tensor) -> Any:
            with torch.no_grad():
                return net(batch.clone())

        return ZooCase(net, data, run, f"side {side}")
    raise NotBuiltError("; ".join(reasons))
