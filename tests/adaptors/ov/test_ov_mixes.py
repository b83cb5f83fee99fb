"""OpenVINO models with any mix of INT8, BF16 and FP32 among neighbouring ops."""

from __future__ import annotations

import numpy as np
import pytest
from zoo.openvino_bodies import concatenated, excited, pooled, residual
from zoo.openvino_models import PICTURES, biased, built, convolved, drawable

from neural_mp.adaptors.openvino.adaptor import OpenVinoAdaptor
from neural_mp.adaptors.openvino.runtime import ops
from neural_mp.core.precision import Precision
from neural_mp.testing import machine, signal_to_noise

ADAPTOR = OpenVinoAdaptor()
#: Plans drawn for each body.
DRAWS = 50


def summed_with_input(x):
    """A convolution with a bias and a residual sum, without an activation between layers."""
    first = ops.add(biased(convolved(x)), x)
    return convolved(ops.add(biased(convolved(first, seed=2)), first), 8, seed=3)


def summed_with_layer(x):
    """The sum of two convolutions, read by a third."""
    total = ops.add(biased(convolved(x)), biased(convolved(ops.relu(x), seed=2)))
    return convolved(total, 8, seed=3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "body",
    [residual, summed_with_input, summed_with_layer, concatenated, excited, pooled],
    ids=lambda body: body.__name__,
)
def test_every_mix_of_precisions_computes_what_float_does(body):
    """Ops drawn into INT8, BF16 and FP32 one by one: outputs of full size, close to FP32."""
    case = built(body, PICTURES)
    model = ADAPTOR.load(case.model)
    space = ADAPTOR.space(model, machine(Precision.BF16))
    observations = ADAPTOR.observe(model, case.batches, space.restricted_to([Precision.INT8]))
    draw, tried = np.random.default_rng(0), set()
    for _ in range(DRAWS):
        plan = space.fp32_plan().replacing(
            {op.name: draw.choice(np.array(drawable(space, op), object)) for op in space.graph}
        )
        resolved = space.resolve(plan)
        if resolved in tried:
            continue
        tried.add(resolved)
        converted = ADAPTOR.convert(model, resolved, observations, space)
        for batch, expected in zip(case.batches, case.outputs, strict=True):
            predicted = ADAPTOR.predict(converted, batch)
            outputs = [*predicted] if isinstance(predicted, list | tuple) else [predicted]
            for output, reference in zip(outputs, expected, strict=True):
                assert output.shape == reference.shape, dict(resolved.effective)
                assert signal_to_noise(reference, output) > 18, dict(resolved.effective)
    assert len(tried) > 5
