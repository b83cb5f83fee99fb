"""Devices available to TensorFlow."""

from __future__ import annotations

import tensorflow as tf

from neural_mp.core.hardware import Device


def devices() -> list[Device]:
    """Return the CPU, the GPUs, and devices of TensorFlow plug-ins, e.g. Intel's XPU."""
    result = []
    for device in tf.config.list_physical_devices():
        kind = device.device_type.lower()
        details = tf.config.experimental.get_device_details(device) if kind != "cpu" else {}
        name = "CPU" if kind == "cpu" else details.get("device_name", device.name)
        result.append(Device("tensorflow", kind, name))
    return result
