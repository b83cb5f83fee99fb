"""Times of single runs from the averages that the plugin reports."""

from itertools import pairwise

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as ops
from ov_nets import as_openvino
from torch import nn

from neural_mp.adaptors.openvino.profiler import separate_single_runs, time_ops
from neural_mp.adaptors.openvino.runtime import Runner
from neural_mp.adaptors.registry import get_adaptor_named


def averages(runs):
    """Return what the plugin reports after each run: whole microseconds, rounded down."""
    return [sum(runs[:count]) // count for count in range(1, len(runs) + 1)]


def test_a_slow_run_is_not_seen_in_the_others():
    runs = [9000, 400, 410, 7000, 390, 405, 400]
    times = separate_single_runs(averages(runs))
    assert np.abs(np.subtract(times, runs)).max() <= len(runs)


@pytest.mark.parametrize("microseconds", [1, 3, 8, 20])
def test_short_kernels_are_timed_without_their_first_run(microseconds):
    times = separate_single_runs(averages([10 * microseconds, *[microseconds] * 6]))
    assert times[1:] == pytest.approx([microseconds] * 6, abs=1.2)


def test_reported_times_are_averages_over_all_runs():
    """If single runs were reported, or times of all threads, their sum would not fit."""
    net = as_openvino(nn.Sequential(nn.Conv2d(1, 64, 3), nn.Conv2d(64, 64, 3), nn.Flatten()))
    batch = np.zeros((64, 1, 8, 8), np.float32)
    runner, reported = Runner(net, profiled=True), []
    for _ in range(12):
        runner([batch])
        kernels = runner.executed_kernels()
        reported.append(sum(kernel.microseconds or 0 for kernel in kernels) * (len(reported) + 1))
    executed = sum(kernel.microseconds is not None for kernel in kernels)
    slack = executed * len(reported)
    assert all(b > a - slack for a, b in pairwise(reported))
    model = get_adaptor_named("openvino").load(net, example=batch)
    for runs in time_ops(model, batch, 5).values():
        assert len(runs) == 5
        assert min(runs) >= 0


LENGTH, HEADS, SIZE = 256, 4, 32


def attention_net():
    """Attention of which the plugin makes one kernel, with the transposes around."""
    inputs = ops.parameter([1, LENGTH, HEADS * SIZE], np.float32, "x")
    draw = np.random.default_rng(0)

    def heads(name):
        weight = draw.standard_normal((HEADS * SIZE, HEADS * SIZE)).astype(np.float32)
        rows = ops.matmul(inputs, ops.constant(weight / 11), False, False)
        parts = ops.reshape(rows, ops.constant(np.array([1, LENGTH, HEADS, SIZE])), False)
        return ops.transpose(parts, ops.constant(np.array([0, 2, 1, 3])), name=name)

    heads_of = [heads(name) for name in ("queries", "keys", "values")]
    mixed = ops.scaled_dot_product_attention(*heads_of, name="attention")
    merged = ops.transpose(mixed, ops.constant(np.array([0, 2, 1, 3])), name="merged")
    return ov.Model([merged], [inputs], "net")


def test_the_time_of_attention_is_not_that_of_a_transpose():
    batch = np.random.default_rng(1).standard_normal((1, LENGTH, HEADS * SIZE)).astype(np.float32)
    model = get_adaptor_named("openvino").load(attention_net(), example=batch)
    seconds = {op: np.median(runs) for op, runs in time_ops(model, batch, 5).items()}
    moving = max(seconds[op] for op in ("queries", "keys", "values", "merged"))
    assert seconds["attention"] > moving
