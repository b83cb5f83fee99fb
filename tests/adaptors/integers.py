"""Quantization and convolution in numpy integers: the reference for integer kernels."""

from __future__ import annotations

import numpy as np
from machine import CONVOLUTION, DENSE, machine, weight_limit_here

from neural_mp.adaptors.pytorch.adaptor import PyTorchAdaptor
from neural_mp.core.precision import Precision
from neural_mp.testing import uniform

INT8 = Precision.INT8

MACHINE = machine()


def lowered(module, inputs):
    """All in INT8, calibrated on its own input; the model and its ranges."""
    adaptor = PyTorchAdaptor()
    model = adaptor.load(module, example=inputs)
    space = adaptor.space(model, MACHINE)
    observed = adaptor.observe(model, [inputs], space)
    converted = adaptor.convert(model, space.resolve(uniform(space, INT8)), observed, space)
    return adaptor.predict(converted, inputs), observed, converted, space


def parameters(observed, tensor):
    low, high = observed.ranges[tensor]["minmax"]
    scale = max((max(high, 0) - min(low, 0)) / 255, 1e-8)
    return scale, round(-min(low, 0) / scale)


def integers(values, scale, zero_point):
    steps = np.floor(values.astype(np.float64) / scale + zero_point + 0.5)
    return np.clip(steps, 0, 255).astype(np.int64)


def integer_weight(weight, kernel=None, limit=None):
    """Whole numbers and the step of every output, as far as the kernel is right with them here."""
    kernel = kernel or (DENSE if weight.ndim == 2 else CONVOLUTION)
    limit = limit or weight_limit_here("pytorch", kernel)
    # Scales are stored in float32: with more digits, what lies between two steps goes elsewhere.
    weight = weight.detach().numpy().astype(np.float32)
    scale = (np.abs(weight).reshape(len(weight), -1).max(1) / limit).astype(np.float32)
    column = scale.reshape(-1, *[1] * (weight.ndim - 1))
    integers = np.clip(np.round(weight / column), -limit, limit).astype(np.int64)
    return integers, scale.astype(np.float64)


def convolve(x, w, stride, padding, dilation, groups):
    """Plain integer convolution, in int64."""
    n, _, height, width = x.shape
    out_channels, per_group, kernel_h, kernel_w = w.shape
    x = np.pad(x, ((0, 0), (0, 0), (padding, padding), (padding, padding)))
    out_h = (height + 2 * padding - dilation * (kernel_h - 1) - 1) // stride + 1
    out_w = (width + 2 * padding - dilation * (kernel_w - 1) - 1) // stride + 1
    result = np.zeros((n, out_channels, out_h, out_w), np.int64)
    for channel in range(out_channels):
        first = channel // (out_channels // groups) * per_group
        for i in range(kernel_h):
            for j in range(kernel_w):
                top, left = i * dilation, j * dilation
                patch = x[
                    :,
                    first : first + per_group,
                    top : top + stride * (out_h - 1) + 1 : stride,
                    left : left + stride * (out_w - 1) + 1 : stride,
                ]
                result[:, channel] += np.einsum("nchw,c->nhw", patch, w[channel, :, i, j])
    return result
