"""Contracts of training advice, of plans on trainable models, and of training with a plan.

In training with a plan, simulation and integer kernels compute the same numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from neural_mp.adaptors.common.optional import Training, require_part
from neural_mp.adaptors.common.simulation import TrainingSchedule
from neural_mp.adaptors.loaded_model import LoadedModel
from neural_mp.adaptors.registry import adaptor_for, find_training_for
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import Precision
from neural_mp.errors import UnknownOperatorError
from neural_mp.testing.fixtures import machine, uniform
from neural_mp.training import advise, apply_plan, first_nonfinite

FP16 = Precision.FP16


class TrainingContract:
    """Contract of an adaptor with `training`.

    Subclasses define a net of several layers, one of which overflows in float16 although its inputs
    do not.
    """

    framework: str
    #: The layer that overflows in float16.
    overflowing: str
    #: The loss of the training, as the user passes it.
    loss: Any

    @pytest.fixture
    def model(self) -> Any:
        """The net, with the same weights on every call."""
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def batch(cls) -> Any:
        """A batch: `(inputs, targets)`."""
        raise NotImplementedError

    @pytest.fixture
    def training(self, model: Any) -> Training:
        """The training part of the adaptor."""
        framework, training = find_training_for(model)
        assert framework == self.framework
        return training

    def opened(self, training: Training, model: Any, batch: Any) -> Any:
        """Open the net for training in float16 with the framework's default optimizer."""
        return training.open_trainable(model, batch, self.loss, FP16, None)

    def test_gradients_are_equal_in_two_passes_of_one_batch(self, training, model, batch):
        with self.opened(training, model, batch) as trainable:
            first, second = (trainable.gradients(batch, (), 1.0) for _ in range(2))
        assert first.is_finite
        assert all(array.dtype == np.float32 for array in first.arrays)
        assert second.noise_against(first) < 1e-6

    def test_the_loss_scale_does_not_change_the_gradients(self, training, model, batch):
        with self.opened(training, model, batch) as trainable:
            reference = trainable.gradients(batch, (), 1.0)
            scaled = trainable.gradients(batch, (), 1024.0)
        assert scaled.noise_against(reference) < 1e-6

    def test_a_layer_that_overflows_is_found_alone(self, training, model, batch):
        with self.opened(training, model, batch) as trainable:
            names = [layer.name for layer in trainable.layers]
            finite = {
                name: trainable.gradients(batch, {name}, 1.0, singly=True).is_finite
                for name in names
            }
        assert len(set(names)) == len(names) > 1
        assert [name for name in names if not finite[name]] == [self.overflowing]

    def test_steps_train_and_are_undone_at_the_end(self, training, model, batch):
        with self.opened(training, model, batch) as trainable:
            losses = [trainable.step(batch) for _ in range(10)]
        with self.opened(training, model, batch) as trainable:
            assert trainable.step(batch) == pytest.approx(losses[0], rel=1e-5)
        assert losses[-1] < losses[0]

    def test_advice_keeps_what_overflows_and_its_plan_has_an_effect(self, training, model, batch):
        advice = advise(model, [batch], self.loss, "fp16", steps=0, progress=False)
        assert self.overflowing in advice.keep
        assert advice.framework == self.framework
        planned = apply_plan(model, advice)
        traced = training.trace_numerics(planned, batch, self.loss, 1.0)
        dtypes = {layer.name: layer.dtype for layer in traced.layers}
        low = [name for name, layer in advice.layers.items() if not layer.keep]
        assert "float16" in {dtypes[name] for name in low}
        assert dtypes[self.overflowing] == "float32"

    def test_the_origin_of_inf_is_named(self, training, model, batch):
        assert first_nonfinite(model, batch, self.loss) is None
        with self.opened(training, model, batch) as trainable:
            names = [layer.name for layer in trainable.layers]
        everything = PrecisionPlan.from_dict(dict.fromkeys(names, "fp16"))
        origin = first_nonfinite(apply_plan(model, everything), batch, self.loss)
        assert origin is not None
        assert origin.layer == self.overflowing

    def test_a_plan_for_a_missing_layer_is_refused(self, training, model):
        with pytest.raises(UnknownOperatorError, match="'no such layer'"):
            training.apply_plan(model, {"no such layer": FP16})

    def test_devices_are_of_the_framework(self, training):
        assert {device.framework for device in training.devices()} <= {self.framework}


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
