"""Channels scaled in the constants of layers, and where that changes nothing."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from neural_mp.adaptors.common.weights.cross_layer_scaling import (
    LayerParams,
    LayerRescale,
    find_scaling_groups,
    round_int8_weight,
)
from neural_mp.core.graph import Op, OpGraph

KINDS = {
    "relu": "relu",
    "leaky": "leaky_relu",
    "threshold": "leaky_relu",
    "same": "identity",
    "max_pool": "max_pool",
    "avg_pool": "avg_pool",
    "tanh": "tanh",
    "add": "add",
}


class SharedCases:
    """A weight of 4 outputs and 6 inputs, in the orders and groups that frameworks have."""

    #: Name → shape of the weight, axis of outputs, axis of inputs, groups.
    WEIGHTS: Mapping[str, tuple[tuple[int, ...], int, int, int]] = {
        "dense": ((4, 6), 0, 1, 1),
        "dense transposed": ((6, 4), 1, 0, 1),
        "convolution": ((4, 6, 3, 2), 0, 1, 1),
        "convolution channels last": ((3, 2, 6, 4), 3, 2, 1),
        "convolution over one axis": ((4, 6, 5), 0, 1, 1),
        "two groups": ((4, 3, 3, 2), 0, 1, 2),
        "two groups channels last": ((3, 2, 3, 4), 3, 2, 2),
        "depthwise": ((6, 1, 3, 3), 0, 1, 6),
        "depthwise, two of each": ((12, 1, 2, 2), 0, 1, 6),
        "depthwise channels last, two of each": ((2, 2, 1, 12), 3, 2, 6),
    }

    @pytest.fixture(params=WEIGHTS, ids=lambda name: name.replace(" ", "_"))
    def layer(self, request) -> LayerParams:
        shape, outputs, inputs, groups = self.WEIGHTS[request.param]
        weight = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
        return LayerParams("layer", lambda: weight, outputs, inputs, groups)

    def places(self, layer: LayerParams) -> list[tuple[tuple[int, ...], int, int]]:
        """Every place in the weight, with its output channel and its input channel."""
        assert layer.inputs is not None
        shape = layer.weight().shape
        entries = []
        for index in np.ndindex(shape):
            output = index[layer.outputs]
            group = output * layer.groups // shape[layer.outputs]
            entries.append((index, output, group * shape[layer.inputs] + index[layer.inputs]))
        return entries

    def channels(self, layer: LayerParams) -> tuple[int, int]:
        """How many outputs and inputs it has."""
        entries = self.places(layer)
        return max(output for _, output, _ in entries) + 1, max(i for *_, i in entries) + 1


class TestChange(SharedCases):
    def test_every_weight_is_multiplied_by_its_output_and_its_input(self, layer):
        drawn = np.random.default_rng(1)
        outputs, inputs = (drawn.uniform(0.1, 9, count) for count in self.channels(layer))
        changed = LayerRescale(outputs=outputs, inputs=inputs).rescale_weight(layer)
        expected = np.array(layer.weight())
        for index, output, in_channel in self.places(layer):
            expected[index] *= outputs[output] * inputs[in_channel]
        np.testing.assert_allclose(changed, expected, rtol=1e-5)
        assert changed.dtype == layer.weight().dtype

    def test_the_limits_are_the_largest_weights_of_a_channel(self, layer):
        weight, entries = np.abs(layer.weight()), self.places(layer)
        outputs, inputs = (np.zeros(count) for count in self.channels(layer))
        for index, output, _ in entries:
            outputs[output] = max(outputs[output], weight[index])
        for index, output, in_channel in entries:  # as shares: every output has steps of its own
            inputs[in_channel] = max(inputs[in_channel], weight[index] / outputs[output])
        np.testing.assert_allclose(layer.max_output_weights(), outputs, rtol=1e-6)
        np.testing.assert_allclose(layer.max_input_weights(), inputs, rtol=1e-6)

    def test_how_large_an_output_is_says_nothing_about_what_is_read(self, layer):
        scales = np.random.default_rng(1).uniform(0.001, 1000, self.channels(layer)[0])
        scaled = LayerRescale(outputs=scales).rescale_weight(layer)
        changed = replace(layer, weight=lambda: scaled)
        np.testing.assert_allclose(
            changed.max_input_weights(), layer.max_input_weights(), rtol=1e-5
        )

    def test_a_matrix_has_every_weight_once_by_group_output_and_input(self, layer):
        matrix = layer.as_matrix()
        outputs, inputs = self.channels(layer)
        groups = layer.groups
        assert matrix.shape[:3] == (groups, outputs // groups, inputs // groups)
        taps: dict[tuple[int, int], list[float]] = {}
        for index, output, in_channel in self.places(layer):
            taps.setdefault((output, in_channel), []).append(layer.weight()[index])
        for (output, in_channel), values in taps.items():
            group, column = divmod(in_channel, inputs // groups)
            row = matrix[group, output % (outputs // groups), column]
            np.testing.assert_array_equal(np.sort(row), np.sort(values))

    def test_nothing_asked_changes_nothing(self, layer):
        np.testing.assert_array_equal(LayerRescale().rescale_weight(layer), layer.weight())


def test_a_bias_is_multiplied_and_then_shifted():
    bias = np.array([1.0, 2, 3], np.float32)
    change = LayerRescale(outputs=np.array([2.0, 4, 8]), shift=np.array([0.5, 0, -1]))
    np.testing.assert_array_equal(change.rescale_bias(bias, 3), [2.5, 8, 23])
    assert change.rescale_bias(bias, 3).dtype == np.float32


def test_in_the_place_of_no_bias_there_is_the_shift():
    np.testing.assert_array_equal(
        LayerRescale(shift=np.array([1.0, 2])).rescale_bias(None, 2), [1, 2]
    )


def test_a_normalization_has_one_weight_a_channel():
    norm = LayerParams("norm", lambda: np.array([3.0, -4, 0], np.float32))
    np.testing.assert_array_equal(norm.max_output_weights(), [3, 4, 0])
    scaled = LayerRescale(outputs=np.array([2.0, 0.5, 7])).rescale_weight(norm)
    np.testing.assert_array_equal(scaled, [6, -2, 0])


@pytest.mark.parametrize("limit", [127, 63])
def test_a_rounded_weight_has_steps_of_its_own_for_every_output(limit):
    matrix = np.random.default_rng(0).standard_normal((2, 3, 5, 4))
    matrix[0, 1], matrix[1, 2] = 0, 1e-3 * matrix[1, 2]
    rounded = round_int8_weight(matrix, limit)
    for group, row in np.ndindex(2, 3):
        values = matrix[group, row]
        step = float(np.float32(np.abs(values).max() / limit)) or 1.0
        steps = [[round(value / step) for value in tap] for tap in values]
        np.testing.assert_allclose(rounded[group, row], np.array(steps) * step, rtol=1e-12)


def dense(result: str, inputs: int | None = 1, axis: int = -1, pooled: bool = False) -> LayerParams:
    return LayerParams(result, lambda: np.ones((2, 2), np.float32), 0, inputs, 1, axis, pooled)


def links(text: str, outputs: str, layers: Mapping[str, LayerParams], keepers: Any = ()) -> list:
    """The links of a graph written as `name: type of inputs`, one op after another."""
    ops = []
    for line in text.split(","):
        name, _, rest = line.strip().partition(": ")
        kind, _, inputs = rest.partition(" of ")
        ops.append(Op(name, kind, tuple(inputs.split()), quantize_agnostic=kind.endswith("pool")))
    graph = OpGraph(ops, ["x"], outputs.split())
    groups = find_scaling_groups(graph, KINDS, layers, keepers)
    return [(link.producer, set(link.consumers), set(link.tensors)) for link in groups]


A_AND_B = {"a": dense("a"), "b": dense("b")}


@pytest.mark.parametrize("kind", ["relu", "leaky", "same"])
def test_what_gives_twice_as_much_for_twice_the_input_is_passed(kind):
    groups = links(f"a: dense of x, r: {kind} of a, b: dense of r", "b", A_AND_B)
    assert groups == [("a", {"b"}, {"a", "r"})]


@pytest.mark.parametrize("kind", ["tanh", "threshold", "unheard_of"])
def test_what_does_not_is_not(kind):
    assert not links(f"a: dense of x, r: {kind} of a, b: dense of r", "b", A_AND_B)


def test_all_readers_are_scaled_together():
    layers = {**A_AND_B, "c": dense("c")}
    groups = links("a: dense of x, r: relu of a, b: dense of r, c: dense of r", "b c", layers)
    assert groups == [("a", {"b", "c"}, {"a", "r"})]
    groups = links("a: dense of x, r: relu of a, b: dense of r, c: dense of a", "b c", layers)
    assert groups == [("a", {"b", "c"}, {"a", "r"})]


@pytest.mark.parametrize(
    "graph",
    [
        "a: dense of x, r: relu of a, b: dense of r, s: add of b r",
        "a: dense of x, s: add of a x, b: dense of s",
        "a: dense of x, r: relu of a, b: dense of r, t: tanh of a",
    ],
)
def test_one_that_reads_otherwise_forbids_it(graph):
    assert not links(graph, "b", A_AND_B)


@pytest.mark.parametrize("output", ["a", "r"])
def test_what_leaves_the_graph_stays_as_it_is(output):
    assert not links("a: dense of x, r: relu of a, b: dense of r", f"b {output}", A_AND_B)


def test_layers_in_a_row_are_linked_one_by_one():
    layers = {**A_AND_B, "c": dense("c")}
    groups = links("a: dense of x, b: dense of a, r: relu of b, c: dense of r", "c", layers)
    assert groups == [("a", {"b"}, {"a"}), ("b", {"c"}, {"b", "r"})]


def test_the_addition_of_a_bias_belongs_to_the_layer():
    layers = {"a": dense("bias"), "b": dense("b")}
    graph = "a: dense of x, bias: add of a, r: relu of bias, b: dense of r"
    assert links(graph, "b", layers) == [("a", {"b"}, {"bias", "r"})]
    assert not links(f"{graph}, t: tanh of a", "b", layers)  # which reads it without the bias
    assert not links(graph, "b bias", layers)


def test_a_normalization_writes_and_does_not_read():
    layers = {"n": dense("n", inputs=None), "b": dense("b")}
    assert links("n: norm of x, b: dense of n", "b", layers) == [("n", {"b"}, {"n"})]
    assert not links("b: dense of x, n: norm of b", "n", layers)


@pytest.mark.parametrize("kind", ["max_pool", "avg_pool"])
def test_pooling_is_passed_where_it_leaves_channels_apart(kind):
    graph = f"a: conv of x, p: {kind} of a, b: conv of p"
    apart = {name: dense(name, axis=-3, pooled=True) for name in "ab"}
    assert links(graph, "b", apart) == [("a", {"b"}, {"a", "p"})]
    assert not links(graph, "b", A_AND_B)


def test_channels_have_to_be_on_one_axis():
    layers = {"a": dense("a", axis=-3), "b": dense("b", axis=-1)}
    assert not links("a: conv of x, r: relu of a, b: dense of r", "b", layers)


def test_reshaping_is_passed_where_it_keeps_the_channels():
    graph = "a: dense of x, s: reshape of a, b: dense of s"
    assert not links(graph, "b", A_AND_B)
    assert links(graph, "b", A_AND_B, keepers={"s"}) == [("a", {"b"}, {"a", "s"})]
