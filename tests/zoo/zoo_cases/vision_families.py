"""One net of each family of torchvision and timm, with random weights."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from zoo_cases.case import NotBuiltError, ZooCase

SAMPLES = 2
#: Samples whose statistics batch norms keep: 16 pictures, and fewer videos.
STATISTICS_SAMPLES, MAX_STATISTICS_VALUES = 16, 2**22
#: Frames, height and width of the videos of nets of one size.
_VIDEO = (8, 64, 64)
#: Form of inputs → shape of a sample of each input, tried in this order.
_FORMS = {
    "side 64": ((3, 64, 64),),
    "side 96": ((3, 96, 96),),
    "side 224": ((3, 224, 224),),
    "video of 8 frames": ((3, *_VIDEO),),
    "video of 16 frames": ((3, 16, 64, 64),),
    "video of 16 frames, side 224": ((3, 16, 224, 224),),
    "two pictures": ((3, 128, 128), (3, 128, 128)),
}
MAX_PARAMETERS = 150_000_000
#: Start of torchvision's error without its compiled ops, whatever the form of the inputs.
_NO_OPS = "Couldn't load custom C++ ops"
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
    """Return the smallest net of each family and version, by its name."""
    models = import_torchvision().models
    families: dict[tuple[str, bool], list[str]] = {}
    for name in models.list_models():
        family = models.get_model_builder(name).__module__
        families.setdefault((family, "_v2_" in name), []).append(name)
    return sorted(min(names, key=_size_of_name) for names in families.values())


def timm_names() -> list[str]:
    """Return the smallest net of each family, by its name."""
    timm = _timm()
    return sorted(
        min(names, key=_size_of_name)
        for names in (timm.list_models(module=module) for module in timm.list_modules())
        if names
    )


def _size_of_name(name: str) -> tuple[int, int, str]:
    rank = next((number for number, part in enumerate(_SMALL) if part in name), len(_SMALL))
    return rank, len(name), name


def build_torchvision(name: str, seed: int, batches: int) -> ZooCase:
    """Return a net of torchvision.

    Raises:
        NotBuiltError: the net takes no inputs of the forms tried.
    """
    models = import_torchvision().models

    def make() -> nn.Module:
        options: dict[str, Any] = {}
        if name.startswith(_WITH_BACKBONE):
            options["weights_backbone"] = None
        if name.startswith(_RESIZING):
            options |= {"min_size": _DETECTION_SIDE, "max_size": _DETECTION_SIDE}
        if "rcnn" in name:  # random weights propose as many boxes as allowed
            options |= {"rpn_post_nms_top_n_test": 64, "box_detections_per_img": 8}
        with _small_videos():
            net: nn.Module = models.get_model(name, weights=None, **options)
        return net

    return _case(make, seed, batches)


@contextmanager
def _small_videos() -> Iterator[None]:
    """Build multiscale vision transformers for small videos: the usual ones take minutes."""
    module = importlib.import_module("torchvision.models.video.mvit")
    build: Any = module.MViT

    def build_small(**options: Any) -> nn.Module:
        frames, *sides = _VIDEO
        net: nn.Module = build(**{**options, "temporal_size": frames, "spatial_size": tuple(sides)})
        return net

    with mock.patch.object(module, "MViT", build_small):
        yield


#: Detectors that resize pictures themselves, to a side of 800 unless another is set, and that side.
_RESIZING = ("fasterrcnn", "fcos", "keypointrcnn", "maskrcnn", "retinanet")
_DETECTION_SIDE = 128
_WITH_BACKBONE = (
    *_RESIZING,
    "ssd",
    "deeplab",
    "fcn",
    "lraspp",
)


def build_timm(name: str, seed: int, batches: int) -> ZooCase:
    """Return a net of timm.

    Raises:
        NotBuiltError: the net takes no inputs of the forms tried.
    """
    timm = _timm()
    return _case(lambda: timm.create_model(name, pretrained=False), seed, batches)


def import_torchvision() -> Any:
    """Return torchvision, whose compiled ops may belong to another build of torch.

    The Python part declares shape functions of two ops even if the compiled ops do not load.

    Raises:
        ModuleNotFoundError: torchvision is not installed.
    """
    package = importlib.util.find_spec("torchvision")
    for folder in package.submodule_search_locations or () if package else ():
        for library in Path(folder).glob("_C*.so"):
            with suppress(OSError):
                torch.ops.load_library(library)
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            torch.library.define(f"torchvision::{name}", schema)
    importlib.import_module("torchvision.models")
    return importlib.import_module("torchvision")


def _timm() -> Any:
    import_torchvision()
    return importlib.import_module("timm")


def _case(make: Callable[[], nn.Module], seed: int, batches: int) -> ZooCase:
    torch.manual_seed(seed)
    net = make().eval()
    count = sum(weight.numel() for weight in net.parameters())
    if count > MAX_PARAMETERS:
        raise NotBuiltError(f"{count / 1e6:.0f} million parameters")
    reasons: list[str] = []
    for form, shapes in _FORMS.items():
        data = [tuple(torch.randn(SAMPLES, *shape) for shape in shapes) for _ in range(batches)]
        inputs = data if len(shapes) > 1 else [batch[0] for batch in data]
        try:
            _run(net, inputs[0])
            _normalize(net, tuple(_statistics_sample(shape) for shape in shapes))
        except Exception as error:  # noqa: BLE001 - nets raise any type for another size
            reasons.append(f"{form}: {' '.join(str(error).split())[:160]}")
            if _NO_OPS in reasons[-1]:
                break
            continue
        return ZooCase(net, inputs, partial(_run, net), form)
    raise NotBuiltError("; ".join(reasons))


def _statistics_sample(shape: tuple[int, ...]) -> torch.Tensor:
    count = min(STATISTICS_SAMPLES, max(SAMPLES, MAX_STATISTICS_VALUES // math.prod(shape)))
    return torch.randn(count, *shape)


def _normalize(net: nn.Module, batch: Any) -> None:
    """Let batch norms keep the statistics of a batch: with those of no data, signals vanish."""
    norms = [norm for norm in net.modules() if isinstance(norm, nn.modules.batchnorm._BatchNorm)]
    if not norms:
        return
    for norm in norms:
        norm.train()
        norm.momentum = 1.0
    with suppress(ValueError):  # one value per channel has no variance
        _run(net, batch)
    net.eval()


def _run(net: nn.Module, batch: Any) -> Any:
    tensors = batch if isinstance(batch, tuple) else (batch,)
    clones = [tensor.clone() for tensor in tensors]
    with torch.no_grad():
        return net(*clones)
