"""Devices available for training, as reported by the frameworks."""

from __future__ import annotations

from neural_mp.adaptors import registry
from neural_mp.core.hardware import Device


def devices() -> tuple[Device, ...]:
    """Return the devices that the frameworks in use can access; `str` describes a device.

    Query the frameworks that are already imported. If none is, import all installed frameworks,
    which takes some seconds.
    """
    return tuple(device for part in registry.training_parts() for device in part.devices())


def is_gpu_available() -> bool:
    """Whether a framework in use can access a GPU: CUDA, XPU or any `torch.accelerator`."""
    return any(device.is_accelerator for device in devices())
