"""INT8 forms of OpenVINO: products of computed matrices, scales per channel, gates and means."""

from __future__ import annotations

import numpy as np
import pytest
from zoo.openvino_bodies import excited, pooled_by_mean, product, products
from zoo.openvino_models import (
    F32,
    PICTURES,
    SIGNALS,
    STEPS,
    biased,
    built,
    convolved,
    grouped,
    transposed,
    weight,
)

from neural_mp.adaptors.loaded_model import LoadedModel
from neural_mp.adaptors.openvino.adaptor import OpenVinoAdaptor
from neural_mp.adaptors.openvino.capabilities import find_kernels
from neural_mp.adaptors.openvino.graph.edit import get_op_type
from neural_mp.adaptors.openvino.layer_params import full_range_kernels, with_reduced_range
from neural_mp.adaptors.openvino.runtime import Runner, ops, ov
from neural_mp.core.int8_accumulation import Int8Accumulation, KernelKind
from neural_mp.core.precision import FP32, Precision
from neural_mp.profiling.audit import Verdict, audit_model
from neural_mp.space import list_effective_ops
from neural_mp.testing import machine, signal_to_noise

ADAPTOR = OpenVinoAdaptor()


class Converted:
    """A model with all ops in INT8 that can be, but for those of one type."""

    def __init__(self, source, in_float=None):
        self.given = source
        self.model = ADAPTOR.load(source.model)
        space = ADAPTOR.space(self.model, machine()).restricted_to([Precision.INT8])
        self.seen = ADAPTOR.observe(self.model, source.batches, space)
        plan = space.fastest_plan()
        floats = {op.name: FP32 for op in space.graph if op.type == in_float and op.name in plan}
        resolved = space.resolve(plan.replacing(floats))
        self.result = ADAPTOR.convert(self.model, resolved, self.seen, space)
        self.audit = audit_model(
            LoadedModel(ADAPTOR, self.result), list_effective_ops(space, resolved)
        )

    def fidelity(self, result):
        """Return the least SQNR over batches, in dB."""
        pairs = zip(self.given.batches, self.given.outputs, strict=True)
        return min(
            signal_to_noise(expected[0], ADAPTOR.predict(result, batch))
            for batch, expected in pairs
        )

    def ran(self, kind):
        """Return the precisions that the ops of a type ran in."""
        return [op.ran_in for op in self.audit.ops if op.planned.type == kind]


def by_channel(x):
    """A depthwise convolution whose input has channels of very different sizes."""
    sizes = np.logspace(-3, 0, 16, dtype=F32).reshape(1, -1, 1, 1)
    first = ops.swish(biased(convolved(x)))
    kernel = ops.multiply(grouped_weight(), F32(1) / sizes.reshape(-1, 1, 1, 1, 1))
    depthwise = ops.group_convolution(
        ops.multiply(first, sizes), kernel, [1, 1], [1, 1], [1, 1], [1, 1]
    )
    return convolved(ops.relu(depthwise), 8, size=1, seed=3)


def grouped_weight():
    drawn = np.random.default_rng(5).normal(size=(16, 1, 1, 3, 3)) / 3
    return ops.constant(drawn.astype(F32))


@pytest.fixture(scope="module")
def attention():
    return Converted(built(products, STEPS))


@pytest.mark.usefixtures("exact_products")
def test_products_of_computed_matrices_run_in_int8(attention):
    assert attention.audit.holds, attention.audit.findings
    assert set(attention.ran("MatMul")) == {Precision.INT8}
    assert attention.fidelity(attention.result) > 25


def test_products_of_computed_matrices_stay_in_float_where_accumulation_saturates(attention):
    saturating = dict.fromkeys(KernelKind, Int8Accumulation.SATURATING)
    offered = find_kernels(attention.model, saturating)
    refused = [kernel.int8 for kernel in offered.values() if "computed" in str(kernel.int8)]
    assert len(refused) == 2
    assert all("saturates" in reason for reason in refused)


@pytest.mark.usefixtures("exact_products")
def test_a_portable_model_has_no_products_of_bytes(attention):
    assert KernelKind.DENSE in full_range_kernels(attention.result)
    portable = with_reduced_range(attention.result)
    assert full_range_kernels(portable) == frozenset()
    assert attention.fidelity(portable) > 20


def attended(mask=False, causal=False):
    """Return the body of attention of two heads as one op, between layers."""

    def body(x):
        def split_heads(seed):
            parts = ops.reshape(product(x, weight(32, 32, seed=seed)), [0, 0, 2, 16], True)
            return ops.transpose(parts, [0, 2, 1, 3])

        biases = [4 * weight(1, 1, 6, 6, seed=7)] if mask else []
        mixed = ops.scaled_dot_product_attention(
            *map(split_heads, (1, 2, 3)), *biases, causal=causal
        )
        return product(ops.reshape(ops.transpose(mixed, [0, 2, 1, 3]), [0, 0, 32], True))

    return body


@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize(
    "options", [{}, {"mask": True}, {"causal": True}], ids=["plain", "mask", "causal"]
)
def test_attention_multiplies_queries_by_keys_in_int8(options):
    converted = Converted(built(attended(**options), STEPS))
    assert converted.audit.holds, converted.audit.findings
    assert converted.ran("ScaledDotProductAttention") == [Precision.INT8]
    assert converted.fidelity(converted.result) > 25
    alone = Converted(built(attended(**options), STEPS), in_float="MatMul")
    assert alone.ran("ScaledDotProductAttention") == [Precision.INT8]
    assert alone.fidelity(alone.result) > 30
    assert full_range_kernels(alone.result) == {KernelKind.DENSE}
    portable = with_reduced_range(alone.result)
    assert full_range_kernels(portable) == frozenset()
    assert alone.fidelity(portable) > 25


def expected_attention(queries, keys, values, mask=0.0, scale=None):
    """Return attention in float64, with queries and keys rounded to int8 of up to ±4."""
    step = 4 / 127
    queries, keys = (np.clip(np.rint(x / step), -128, 127) * step for x in (queries, keys))
    scale = queries.shape[-1] ** -0.5 if scale is None else scale
    scores = np.exp(queries.astype(np.float64) @ np.swapaxes(keys, -1, -2) * scale + mask)
    return scores / scores.sum(-1, keepdims=True) @ values


@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize("is_free", [False, True], ids=["fixed", "free"])
@pytest.mark.parametrize(
    ("shape", "keys", "options"),
    [
        ((1, 2, 49, 32), 49, {}),
        ((2, 3, 16, 24), 40, {"mask": (16, 40)}),
        ((2, 1, 7, 17), 9, {"mask": (2, 1, 7, 9)}),
        ((1, 4, 130, 64), 130, {"causal": True}),
        ((3, 2, 1, 8), 70, {"mask": (3, 1, 1, 70), "scale": 0.5}),
    ],
    ids=["plain", "mask of two axes", "odd sizes", "causal", "one query"],
)
def test_attention_of_rounded_queries_and_keys_is_that_of_integers(shape, keys, options, is_free):
    random, (samples, heads, rows, width) = np.random.default_rng(1), shape
    sizes = [shape, *[(samples, heads, keys, width)] * 2]
    arrays = [random.normal(size=size).astype(F32) for size in sizes]
    mask = np.where(random.random(options.get("mask", (1,))) < 0.3, F32(-1e4), F32(0))
    arrays += [mask] if "mask" in options else []
    inputs = [
        ops.parameter([-1, *array.shape[1:2], -1, -1] if is_free and array.ndim == 4 else
                      [*array.shape], F32, name=f"x{index}")
        for index, array in enumerate(arrays)
    ]  # fmt: skip
    ends = [np.array(end, F32) for end in (-4 * 128 / 127, 4)]
    factors = [ops.fake_quantize(x, *ends, *ends, 256) for x in inputs[:2]]
    rest = [*inputs[2:], *([F32(options["scale"])] if "scale" in options else [])]
    mixed = ops.scaled_dot_product_attention(*factors, *rest, causal=options.get("causal", False))
    runner = Runner(ov.Model([mixed], inputs, "attention"))
    assert any(kernel.is_integer for kernel in runner.executed_kernels())
    hidden = np.triu(np.full((rows, keys), -np.inf), 1) if "causal" in options else mask
    expected = expected_attention(*arrays[:3], hidden, options.get("scale"))
    (actual,) = runner(arrays)
    assert signal_to_noise(expected, actual) > 60


def test_a_depthwise_convolution_reads_one_scale_per_channel():
    converted = Converted(built(by_channel, PICTURES))
    assert converted.audit.holds, converted.audit.findings
    assert set(converted.ran("GroupConvolution")) == {Precision.INT8}
    nodes = converted.result.program.get_ops()
    sizes = [n.input_value(1).get_shape() for n in nodes if get_op_type(n) == "FakeQuantize"]
    assert [list(shape) for shape in sizes].count([1, 16, 1, 1]) == 1
    # One scale for all channels would lose the small ones, which count as much as the others.
    assert converted.fidelity(converted.result) > 25


def test_a_tensor_that_other_ops_read_too_has_one_scale():
    def shared(x):
        first = ops.relu(biased(convolved(x)))
        return ops.concat([grouped(first, 16), convolved(first, seed=2)], 1)

    converted = Converted(built(shared, PICTURES))
    nodes = converted.result.program.get_ops()
    sizes = [n.input_value(1).get_shape() for n in nodes if get_op_type(n) == "FakeQuantize"]
    assert all(np.prod(list(shape)) == 1 for shape in sizes)


def test_a_gate_multiplies_an_int8_tensor():
    converted = Converted(built(excited, PICTURES))
    assert converted.audit.holds, converted.audit.findings
    assert converted.ran("Multiply") == [Precision.INT8]
    assert converted.fidelity(converted.result) > 25


def test_a_mean_over_positions_is_written_in_int8():
    converted = Converted(built(pooled_by_mean, PICTURES))
    assert converted.audit.holds, converted.audit.findings
    assert converted.ran("ReduceMean") == [Precision.INT8]
    assert converted.fidelity(converted.result) > 25


def summed_signals(x):
    """A residual sum of sequences between convolutions."""
    first = ops.relu(biased(convolved(x, axes=1), axes=1))
    second = ops.relu(biased(convolved(first, axes=1, seed=2), axes=1))
    return convolved(ops.relu(ops.add(first, second)), 8, axes=1, size=1, seed=3)


def test_sums_of_convolved_sequences_run_in_int8():
    converted = Converted(built(summed_signals, SIGNALS))
    assert converted.audit.holds, converted.audit.findings
    assert Precision.INT8 in converted.ran("Add")
    assert converted.fidelity(converted.result) > 25


def test_a_sum_left_in_float_between_int8_layers_equals_float():
    """The plugin reads bytes in the same kernel that computes the sum in float."""
    converted = Converted(built(summed_signals, SIGNALS), in_float="Add")
    assert converted.audit.holds, converted.audit.findings
    assert Verdict.EQUAL_INT8 in [op.verdict for op in converted.audit.ops]
    assert converted.fidelity(converted.result) > 25


@pytest.mark.parametrize("activation", [ops.relu, ops.tanh], ids=["positive", "signed"])
def test_transposed_convolutions_run_in_int8(activation):
    """Their kernels take no zero points, so a signed input is stored as int8."""
    first = Converted(
        built(lambda x: convolved(transposed(activation(convolved(x))), 8, size=1), PICTURES)
    )
    assert first.audit.holds, first.audit.findings
    assert first.ran("ConvolutionBackpropData") == [Precision.INT8]
    assert first.fidelity(first.result) > 25


def test_transposed_convolutions_with_strides_beyond_the_kernel_stay_in_float():
    """OpenVINO leaves values between the products undefined in INT8."""

    def spread(x):
        kernel = weight(16, 16, 2, 2)
        return convolved(ops.convolution_backprop_data(ops.relu(convolved(x)), kernel, [3, 3]))

    converted = Converted(built(spread, PICTURES))
    assert converted.audit.holds, converted.audit.findings
    assert converted.ran("ConvolutionBackpropData") == [Precision.FP32]
    assert converted.fidelity(converted.result) > 25


def test_a_skip_into_a_concatenation_is_quantized_in_the_kernel_that_computes_it():
    """As in a U-Net: the next convolution and the concatenation read the same integers."""

    def skipping(x):
        skip = ops.relu(biased(convolved(x)))
        deeper = ops.relu(biased(convolved(skip, seed=2)))
        joined = ops.concat([ops.relu(biased(convolved(deeper, seed=3))), skip], 1)
        kernel = weight(8, 32, 1, 1)
        return ops.convolution(joined, kernel, [1, 1], [0, 0], [0, 0], [1, 1])

    converted = Converted(built(skipping, PICTURES))
    assert converted.audit.holds, converted.audit.findings
    kernels = Runner(converted.result.program).executed_kernels()
    separate = {"Subgraph", "FakeQuantize", "Eltwise"}
    conversions = [op for kernel in kernels if kernel.type in separate for op in kernel.ops]
    assert conversions == ["x0/quantize"]
    assert converted.fidelity(converted.result) > 25
