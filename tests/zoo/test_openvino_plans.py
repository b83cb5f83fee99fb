"""Plans of precisions drawn at random, mixed around residual sums, run as planned."""

from __future__ import annotations

import numpy as np
import pytest
from zoo import openvino_cases
from zoo.harness import signal_to_noise
from zoo.openvino_models import drawable

from neural_mp.adaptors.loaded_model import LoadedModel
from neural_mp.adaptors.openvino.adaptor import OpenVinoAdaptor
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import Precision
from neural_mp.profiling.audit import audit_model
from neural_mp.space import list_effective_ops
from neural_mp.testing import machine

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_runs")]

CASES = {case.name: case for case in openvino_cases.cases()}
MIXED = (
    "Add, residual",
    "Concat",
    "Split",
    "MVN",
    "Softmax, attention",
    "AvgPool",
    "Multiply, squeeze and excitation",
    "GroupConvolution",
    "Add, with its terms as outputs",
    "LSTMSequence",
    "LSTMSequence of any size, reversed",
    "LSTMSequence, two-way",
    "GRUSequence",
    "GRUSequence, reset of the state",
    "Gather, embedding",
)


@pytest.mark.parametrize("name", MIXED)
def test_a_mixed_plan_runs_as_planned(name):
    built = CASES[name].build()
    adaptor = OpenVinoAdaptor()
    model = adaptor.load(built.model)
    space = adaptor.space(model, machine(Precision.BF16, Precision.FP16))
    observations = adaptor.observe(model, built.batches, space)
    drawn = np.random.default_rng(0)
    for _ in range(4):
        plan = PrecisionPlan(
            {
                op.name: configs[drawn.integers(len(configs))]
                for op in space.graph
                if len(configs := drawable(space, op)) > 1
            }
        )
        resolved = space.resolve(plan)
        # Weights in 4 bits have a noise of about 20 dB in each of several layers.
        least = 15 if Precision.INT4 in plan.counts() else 20
        converted = adaptor.convert(model, resolved, observations, space)
        for batch, expected in zip(built.batches, built.outputs, strict=True):
            actual = adaptor.predict(converted, batch)
            actual = actual if isinstance(actual, list) else [actual]
            for ours, theirs in zip(actual, expected, strict=True):
                assert signal_to_noise(theirs, ours) > least, resolved.effective
        audit = audit_model(LoadedModel(adaptor, converted), list_effective_ops(space, resolved))
        actual = [(op.name, op.planned.precision, op.ran_in, op.kernels) for op in audit.findings]
        assert audit.holds, actual
