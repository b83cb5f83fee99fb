"""A model that OpenVINO compiles to outputs of other shapes never runs."""

from __future__ import annotations

from ov_nets import read

from neural_mp import MixedPrecision
from neural_mp.core.precision import Precision
from neural_mp.core.trial import Outcome
from neural_mp.testing.onnx_graphs import drawn_graph

#: Seed of a graph with a Gather of a scalar index between an INT8 convolution and a product.
SCALAR_INDEX = 2


def test_a_plan_compiled_to_another_shape_is_a_failed_trial():
    drawn = drawn_graph(SCALAR_INDEX)
    tuner = MixedPrecision(
        model=read(drawn.model), precisions="int8", framework="openvino", cache=False
    )
    tuner.exit_policy = {"performance_only": True}
    tuner.calib_dataloader = [drawn.feeds]
    result = tuner()
    assert any("output of shape" in warning for warning in result.report.warnings)
    assert not any(config.precision is Precision.INT8 for config in result.plan.values())
    (trial,) = result.trials
    assert trial.outcome is Outcome.FAILED
    assert "output of shape" in trial.error
