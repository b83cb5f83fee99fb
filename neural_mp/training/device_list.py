"""Devices available for training, as reported by the frameworks."""

from __future__ import annotations

import importlib
import importlib.util
import sys

from neural_mp.adaptors.detect import FRAMEWORKS
from neural_mp.core.hardware import Device

#: Frameworks with training support.
TRAINING_FRAMEWORKS = ("pytorch", "tensorflow")


def devices() -> tuple[Device, ...]:
    """Return the devices that the frameworks in use can access; `str` describes a device.

    Query the frameworks that are already imported. If none is, import all installed frameworks,
    which takes some seconds.
    """
    packages = {name: FRAMEWORKS[name].package for name in TRAINING_FRAMEWORKS}
    asked = [name for name, package in packages.items() if package in sys.modules]
    if not asked:
        asked = [name for name, package in packages.items() if importlib.util.find_spec(package)]
    homes = [f"{FRAMEWORKS[name].home}.training.devices" for name in asked]
    return tuple(device for home in homes for device in importlib.import_module(home).devices())


def is_gpu_available() -> bool:
    """Whether a framework in use can access a GPU: CUDA, XPU or any `torch.accelerator`."""
    return any(device.is_accelerator for device in devices())
