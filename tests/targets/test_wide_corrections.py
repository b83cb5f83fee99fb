"""A corrected bias beside activations of 16 bits: the weight of 8 bits is rounded all the same."""

from dataclasses import replace

import numpy as np
import pytest
from onnx_nets import graph, op
from test_qdq_models import Planned

from neural_mp.core.precision import OpConfig, Precision
from neural_mp.errors import PlanError
from neural_mp.targets import Widths

BIAS_CORRECTION = ("bias_correction",)


def test_mean_error_of_a_weight_beside_wide_activations_is_removed():
    draw = np.random.default_rng(2)
    constants = {
        "w": draw.normal(size=(4, 4, 3, 3)).astype(np.float32) + np.float32(0.01),
        "b": draw.normal(size=4).astype(np.float32),
    }
    nodes = [op("Relu", "x", "positive"), op("Conv", "positive w b", "y")]
    net = graph(nodes, {"x": ["batch", 4, 8, 8]}, ["y"], constants, opset=21)
    sizes = np.array([1, 2, 3, 0.01])[:, None, None]
    data = [(sizes * draw.uniform(0, 1, (8, 4, 8, 8))).astype(np.float32) for _ in range(2)]
    planned = Planned(net, "qnn", data)
    widths = {Widths.from_config(config): config for config in planned.space.choices("y")}
    wide = widths[Widths.W8A16]
    expected = planned.adaptor.predict(planned.held, data[0])
    before, after = (
        np.abs(
            (planned.adaptor.predict(planned.converted(configs), data[0]) - expected).mean(
                (0, 2, 3)
            )
        )
        for configs in ({"y": wide}, {"y": replace(wide, corrections=BIAS_CORRECTION)})
    )
    assert after.max() < 0.3 * before.max()


def test_other_corrections_are_for_8_bits_alone():
    assert OpConfig(Precision.INT16, corrections=BIAS_CORRECTION).corrections == BIAS_CORRECTION
    with pytest.raises(PlanError, match="'equalize' requires precision int8, got int16"):
        OpConfig(Precision.INT16, corrections=("equalize", *BIAS_CORRECTION))
