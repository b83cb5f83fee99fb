"""What there is to train on, asked of the frameworks themselves."""

from __future__ import annotations

import importlib
import importlib.util
import sys

from neural_mp.adaptors.detect import FRAMEWORKS
from neural_mp.core.hardware import Device

#: The frameworks that models are trained with.
TRAINING_FRAMEWORKS = ("pytorch", "tensorflow")


def devices() -> tuple[Device, ...]:
    """The devices that the frameworks in use reach; each prints in words.

    Frameworks that are imported already are asked. Where none is, all that are installed are
    imported and asked, which takes some seconds.
    """
    packages = {name: FRAMEWORKS[name].package for name in TRAINING_FRAMEWORKS}
    asked = [name for name, package in packages.items() if package in sys.modules]
    if not asked:
        asked = [name for name, package in packages.items() if importlib.util.find_spec(package)]
    homes = [f"{FRAMEWORKS[name].home}.training.devices" for name in asked]
    return tuple(device for home in homes for device in importlib.import_module(home).devices())


def is_gpu_available() -> bool:
    """Whether a framework in use reaches a GPU: of CUDA, XPU or whatever `torch.accelerator` is."""
    return any(device.is_accelerator for device in devices())
