"""LSTM layers: eligibility, and two layers that the plugin would give one kernel."""

import numpy as np
import pytest

from neural_mp.adaptors.loaded_model import LoadedModel
from neural_mp.adaptors.openvino.adaptor import OpenVinoAdaptor
from neural_mp.adaptors.openvino.runtime import ops, ov
from neural_mp.core.precision import Precision
from neural_mp.profiling.audit import audited
from neural_mp.space import planned_ops
from neural_mp.testing import machine, signal_to_noise, uniform

F32 = np.float32
BATCH, STEPS, SIZE = 2, 6, 32


def drawn(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(F32)


def lstm(x, direction: str = "forward", steps: int = STEPS, seed: int = 0, **options):
    """An LSTM over [batch, steps, size]."""
    ways = 2 if direction == "bidirectional" else 1
    zeros = ops.constant(np.zeros((BATCH, ways, SIZE), F32))
    lengths = ops.constant(np.full(BATCH, steps, np.int64))
    weights = [drawn(ways, 4 * SIZE, SIZE, seed=seed + place) * F32(0.1) for place in (0, 1)]
    bias = drawn(ways, 4 * SIZE, seed=seed + 2)
    return ops.lstm_sequence(x, zeros, zeros, lengths, *weights, bias, SIZE, direction, **options)


def is_lstm(node) -> bool:
    return node.get_type_name() == "LSTMSequence"


def of(build) -> ov.Model:
    given = ops.parameter([BATCH, STEPS, SIZE], F32, name="x")
    return ov.Model([build(given).output(0)], [given], "recurrent")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"direction": "bidirectional"}, "a single direction"),
        ({"clip": 1.0}, "neither clipping"),
        ({"activations": ["sigmoid", "relu", "tanh"]}, "neither clipping nor other activations"),
        ({"steps": 3}, "sequences of one length"),
    ],
)
def test_an_lstm_without_an_integer_kernel_has_a_reason(options, reason):
    adaptor = OpenVinoAdaptor()
    model = adaptor.load(of(lambda x: lstm(x, **options)))
    kernels = adaptor.kernels(model, machine())
    (found,) = (kernels[op].int8 for op, node in model.structure.nodes.items() if is_lstm(node))
    assert reason in found
    assert any("LSTM" in warning for warning in model.warnings)


def test_lstms_of_the_same_sizes_have_their_own_scales_on_every_cpu():
    def stacked(x):
        first = ops.squeeze(lstm(x).output(0), np.array([1]))
        return lstm(first, seed=7)

    adaptor = OpenVinoAdaptor()
    images = drawn(BATCH, STEPS, SIZE, seed=3) * F32(3)
    model = adaptor.load(of(stacked), example=images)
    space = adaptor.space(model, machine())
    plan = space.resolve(uniform(space, Precision.INT8))
    converted = adaptor.convert(model, plan, adaptor.observe(model, [images], space), space)
    portable = adaptor.portability.with_reduced_range(converted)
    assert not adaptor.portability.full_range_kernels(portable)
    expected = adaptor.predict(model, images)
    for made in (converted, portable):
        assert signal_to_noise(expected, adaptor.predict(made, images)) > 25
        audit = audited(LoadedModel(adaptor, made), planned_ops(space, plan))
        assert audit.holds
        ran = [op.ran_in for op in audit.ops if op.planned.type == "LSTMSequence"]
        assert ran == [Precision.INT8, Precision.INT8]
