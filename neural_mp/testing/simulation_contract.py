"""Contract of training with a plan: simulation and integer kernels compute the same numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from neural_mp.adaptors.common.optional import require_part
from neural_mp.adaptors.common.simulation import TrainingSchedule
from neural_mp.adaptors.loaded_model import LoadedModel
from neural_mp.adaptors.registry import adaptor_for
from neural_mp.core.precision import Precision
from neural_mp.testing.fixtures import machine, uniform


@dataclass(frozen=True)
class SimulatedCase:
    """A net with one type of layer, and random inputs.

    Attributes:
        net: the net in FP32.
        inputs: batches of inputs; the first one calibrates.
        precision: the precision of the plan.
        steps: largest difference, in steps of 1/127 of the largest output.
        apart: fraction of outputs that may differ: values between two integers, of which float
            kernels that sum in another order choose the other one.
    """

    net: Any
    inputs: Sequence[Any]
    precision: Precision = Precision.INT8
    steps: float = 1.0
    apart: float = 0.01


class SimulationContract:
    """Contract of an adaptor with `simulation`; subclasses define nets and two functions."""

    @pytest.fixture(scope="class")
    @classmethod
    def cases(cls) -> Mapping[str, SimulatedCase]:
        """Type of layer → net; the outputs are those of a quantized tensor or of a layer."""
        raise NotImplementedError

    def outputs(self, simulated: Any, inputs: Any) -> np.ndarray:
        """Return the outputs of a simulation in inference mode."""
        raise NotImplementedError

    def train(self, simulated: Any, batches: Sequence[Any]) -> None:
        """Change the weights and scales of a simulation by some training steps."""
        raise NotImplementedError

    def test_simulation_and_integer_kernels_agree(
        self, layer: str, cases: Mapping[str, SimulatedCase]
    ) -> None:
        """Agreement holds for all inputs, before and after training."""
        case = cases[layer]
        adaptor = adaptor_for(case.net)
        native = adaptor.load(case.net, example=case.inputs[0])
        space = adaptor.space(native, machine(Precision.BF16))
        plan = space.resolve(uniform(space, case.precision))
        assert plan.has_low_precision
        tunable = LoadedModel(adaptor, native).in_space(space, lambda: iter(case.inputs[:1]))
        tunable = tunable.with_calibration(case.inputs[:1])
        offered = require_part(adaptor.simulation, adaptor.framework, "training with a plan")
        simulated = tunable.simulate_plan(plan, TrainingSchedule())
        self.agree(simulated, tunable.convert_by_plan(plan), case)
        self.train(simulated, case.inputs[:1])
        self.agree(simulated, LoadedModel(adaptor, offered.finished(simulated)), case)

    def agree(self, simulated: Any, converted: LoadedModel[Any], case: SimulatedCase) -> None:
        """Assert that no output differs by more than its steps, and almost none by as much."""
        for inputs in case.inputs:
            expected = self.outputs(simulated, inputs)
            actual = np.asarray(converted(inputs), np.float32)
            span = float(np.abs(expected).max())
            assert span > 0
            difference = np.abs(expected - actual) / span
            assert float(difference.max()) < case.steps / 127
            assert float((difference > 1e-4).mean()) <= case.apart
