"""Models with bodies that are odd in one way each: what holds for all of them."""

import numpy as np
import pytest
from onnx_bodies import ODD
from onnx_nets import MACHINE, run

from neural_mp.adaptors.onnxrt.adaptor import OnnxRuntimeAdaptor
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import FP32, Precision
from neural_mp.profiling.audit import Verdict, audit_ops
from neural_mp.space import limit_to_reached, list_effective_ops


@pytest.mark.parametrize("precision", [Precision.INT8, Precision.BF16, Precision.FP16])
@pytest.mark.parametrize("odd", ODD, ids=lambda make: make.__name__)
def test_odd_models_run_as_planned_near_fp32_and_come_back(odd, precision, tmp_path):
    model, batches = odd()
    original = model.SerializeToString(deterministic=True)
    adaptor = OnnxRuntimeAdaptor()
    loaded = adaptor.load(model)
    assert loaded.obstacle is None
    space = adaptor.space(loaded, MACHINE)
    observations = adaptor.observe(loaded, batches, space)
    space = limit_to_reached(space, observations.ranges)
    chosen = {op: space.capabilities[op].config(precision) for op in space.tunable_ops}
    plan = space.resolve(PrecisionPlan({op: c or FP32 for op, c in chosen.items()}))
    converted = adaptor.convert(loaded, plan, observations, space)
    adaptor.save(converted, tmp_path)
    again = adaptor.restore(tmp_path)
    for feeds in batches:
        for expected, output, reloaded in zip(
            run(model, **feeds),
            *(outputs_of(adaptor.predict(variant, feeds)) for variant in (converted, again)),
            strict=True,
        ):
            np.testing.assert_array_equal(output, reloaded)
            error = np.linalg.norm(expected - output)
            assert error <= 0.1 * np.linalg.norm(expected)
        audit = audit_ops(
            list_effective_ops(space, plan),
            adaptor.trace_kernels(converted, feeds),
            lambda _: False,
        )
        assert {finding.verdict for finding in audit.findings} <= {Verdict.NOT_REACHED}
        ops = [op.name for op in adaptor.op_outputs.observable_ops(converted)]
        assert adaptor.op_outputs.op_outputs(converted, ops)(feeds)
        assert adaptor.op_outputs.first_non_finite(converted, feeds) is None
        assert adaptor.time_ops(converted, feeds, 1)
    assert model.SerializeToString(deterministic=True) == original


def outputs_of(result):
    return result if isinstance(result, list) else [result]
