"""Search for the layers that must stay in float32 during 16-bit training, and plans on models.

Also devices for training, and the origin of NaN and Inf.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from neural_mp.adaptors import registry
from neural_mp.adaptors.common.trainable import Gradients, TrainableModel
from neural_mp.adaptors.registry import find_training_for
from neural_mp.core.hardware import Device, detect
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import OpConfig, Precision, parse_precisions
from neural_mp.core.training_numerics import NonFinite, first_non_finite
from neural_mp.errors import ConfigurationError, DataError, TrainingError
from neural_mp.tuning.evaluation.batches import Batches
from neural_mp.util.validators import integer_between, positive_float, validate_option
from neural_mp.util.verbosity import shows_progress

#: Gradient comparisons per run. Initial weights alone mislead: some problems appear only later,
#: others disappear.
_NUM_GRADIENT_PROBES = 10
#: Factor below the limit at which the combined noise of a set of layers counts as harmless.
_HARMLESS = 10
#: Maximum number of kept layers that are each tested again in 16 bits.
_PRUNED = 16
#: Minimum number of kept layers for a warning, if they are at least a third of all.
_MANY_KEPT_LAYERS = 4
_TASK = "finding layers to keep in float32"
#: Loss scales, tried in order until the gradients are finite. BF16 needs none.
_SCALES = {Precision.FP16: (2.0**10, 1.0, 2.0**-7), Precision.BF16: (1.0,)}


def apply_plan(model: object, plan: PrecisionPlan | Advice | str | Path) -> Any:
    """Make a model train by a plan: some layers in 16 bits, the others in float32.

    Weights stay in float32. A Keras model gets dtype policies per layer, even if already built or
    compiled; if a layer runs in float16, the optimizer scales the loss. A torch module gets hooks
    that run the module under `torch.autocast` and exclude single modules; outputs are float32,
    and the training loop scales the loss (`GradScaler`). A previous plan is replaced.

    Args:
        model: a Keras model or a torch module; changed in place.
        plan: layer → precision, as returned by `advise`, or its YAML file. A name may denote a
            layer with sublayers; an entry for a sublayer takes precedence. Layers without an
            entry keep their policy in Keras; in torch they follow the enclosing layer.

    Returns:
        The model.

    Raises:
        UnknownFrameworkError: the model is neither a Keras model nor a torch module.
        UnknownOperatorError: the plan names a layer that the model does not have.
        ConfigurationError: the plan contains INT8, or both BF16 and FP16.
        PlanError: the file is not a plan.
    """
    _, training = find_training_for(model)
    if isinstance(plan, Advice):
        plan = plan.plan
    elif isinstance(plan, str | Path):
        plan = PrecisionPlan.load(plan)
    if not isinstance(plan, PrecisionPlan):
        raise ConfigurationError(
            f"plan must be an Advice, a PrecisionPlan or the path of a plan file, got {plan!r}"
        )
    wrong = [name for name, precision in plan.precisions.items() if precision is Precision.INT8]
    if wrong:
        raise ConfigurationError(
            f"plans for training may use bf16, fp16 and fp32, got int8 for {wrong[0]!r}"
        )
    low = {precision for precision in plan.precisions.values() if precision.is_16_bit}
    if len(low) > 1:
        raise ConfigurationError(
            "plans for training may use one 16-bit precision, got both bf16 and fp16"
        )
    return training.apply_plan(model, plan.precisions)


def first_nonfinite(
    model: object, batch: object, loss: object = None, *, loss_scale: float = 1.0
) -> NonFinite | None:
    """Return the first layer that turns finite numbers into NaN or Inf, forward or backward.

    The model runs in training mode, and its state is restored. For torch, call under the same
    `autocast` as the training.

    Args:
        model: a Keras model or a torch module.
        batch: `(inputs, targets)` or inputs alone.
        loss: the training loss, needed for the backward pass. Keras: a loss, its name, or a
            function of targets and outputs; default: the loss that the model was compiled with.
            torch: a function of outputs and targets.
        loss_scale: the factor applied to the loss in training.

    Returns:
        The origin, with `layer` and `words`; None if all numbers are finite.

    Raises:
        UnknownFrameworkError: the model is neither a Keras model nor a torch module.
        ConfigurationError: the loss is not a loss, or returns more than one number.
        DataError: the batch does not fit the model.
    """
    _, training = find_training_for(model)
    return first_non_finite(training.trace_numerics(model, batch, loss, loss_scale))


def devices() -> tuple[Device, ...]:
    """Return the devices that the frameworks in use can access; `str` describes a device.

    Query the frameworks that are already imported. If none is, import all installed frameworks,
    which takes some seconds.
    """
    return tuple(device for part in registry.list_training_parts() for device in part.devices())


def is_gpu_available() -> bool:
    """Whether a framework in use can access a GPU: CUDA, XPU or any `torch.accelerator`."""
    return any(device.is_accelerator for device in devices())


@dataclass(frozen=True)
class LayerAdvice:
    """Advice for one layer.

    Attributes:
        name, kind: name and class of the layer.
        keep: whether the layer must stay in float32.
        reason: the reason, as text.
        noise: largest ‖g₁₆ − g₃₂‖² / ‖g₃₂‖² of the model's gradients with only this layer in
            16 bits; infinite if they were not finite, NaN if the layer was never tested alone.
        step: training step at which `noise` was measured.
    """

    name: str
    kind: str
    keep: bool = False
    reason: str = ""
    noise: float = math.nan
    step: int = 0


@dataclass(frozen=True)
class Advice:
    """Layers to keep in float32.

    Attributes:
        precision: BF16 or FP16, for all other layers.
        layers: layer → advice, in the model's order.
        noise: largest gradient noise with the advice applied.
        steps: number of float32 training steps.
        passes: number of forward and backward passes, including training steps.
        framework: `tensorflow` or `pytorch`.
        warnings: further remarks.
    """

    precision: Precision
    layers: Mapping[str, LayerAdvice]
    noise: float
    steps: int
    passes: int
    framework: str = ""
    warnings: tuple[str, ...] = ()

    @property
    def keep(self) -> tuple[str, ...]:
        """The layers that must stay in float32."""
        return tuple(layer.name for layer in self.layers.values() if layer.keep)

    @property
    def plan(self) -> PrecisionPlan:
        """The advice as a plan, for `apply_plan` and YAML files."""
        low, high = OpConfig(self.precision), OpConfig(Precision.FP32)
        return PrecisionPlan(
            {layer.name: high if layer.keep else low for layer in self.layers.values()}
        )

    def save_plan(self, path: str | Path) -> None:
        """Write the plan to a YAML file.

        Raises:
            PlanError: the file cannot be written.
        """
        self.plan.save(path, framework=self.framework)

    @property
    def table(self) -> Table:
        """One row per layer: training precision and reason."""
        table = Table(title=str(self), title_justify="left")
        for heading in ("layer", "class", "trained in", "noise", "because"):
            table.add_column(heading, overflow="fold")
        for layer in self.layers.values():
            runs = Text("fp32", "yellow") if layer.keep else Text(self.precision.value, "green")
            noise = "" if math.isnan(layer.noise) else f"{layer.noise:.2g}"
            table.add_row(layer.name, layer.kind, runs, noise, layer.reason)
        return table

    def __str__(self) -> str:
        layers = ", ".join(self.keep) or "no layer"
        return f"{self.precision}: keep {layers} of {len(self.layers)} in float32"


def advise(
    model: object,
    batches: object,
    loss: object = None,
    precision: str | Precision = Precision.BF16,
    *,
    steps: int = 100,
    limit: float = 0.01,
    optimizer: object = None,
    progress: bool = True,
) -> Advice:
    """Find the layers that must stay in float32 while the others are trained in 16 bits.

    The model is trained in float32 for some steps. At the first step and at regular intervals,
    the gradients with all layers in 16 bits are compared with those in float32. If they differ by
    more than `limit`, layers are tested alone in 16 bits, and those with the highest noise stay in
    float32 until the rest is within the limit. Layers that compute the model's outputs are always
    kept. The model's state is restored at the end.

    Cost: `steps` steps, two passes at each of eleven points, and a few more passes for every
    layer that exceeds the limit.

    Args:
        model: a Keras model or a torch module.
        batches: a loader, list or generator of `(inputs, targets)`; restarted if shorter than
            `steps`.
        loss: the training loss. Keras: a loss, its name, or a function of targets and outputs;
            default: the loss that the model was compiled with. torch: a function of outputs and
            targets.
        precision: `bf16` or `fp16`.
        steps: number of float32 training steps; 0 examines the current weights only.
        limit: largest accepted gradient noise ‖g₁₆ − g₃₂‖² / ‖g₃₂‖².
        optimizer: Keras: an optimizer; default: a copy of the compiled one, else Adam. torch: a
            function from parameters to an optimizer; default: Adam with learning rate 0.001.
        progress: whether to show a progress bar.

    Raises:
        UnknownFrameworkError: the model is neither a Keras model nor a torch module.
        ConfigurationError: an option is out of bounds, or the loss returns several numbers.
        DataError: the data are empty or do not fit the model.
        TrainingError: gradients are non-finite or random even in float32.
    """
    chosen = _validate_options(precision, steps, limit)
    framework, training = find_training_for(model)
    stream = _repeat_batches(batches, steps)
    first = next(stream)
    stream = itertools.chain([first], stream)
    with training.open_trainable(model, first, loss, chosen, optimizer) as trainable:
        console = Console(stderr=True)
        hidden = not (progress and shows_progress() and console.is_terminal)
        with Progress(console=console, transient=True, disable=hidden) as bar:
            task = bar.add_task(_TASK, total=steps + 1)
            search = _Search(
                trainable,
                chosen,
                limit,
                lambda count: bar.update(task, description=f"{_TASK}, pass {count}"),
            )
            for step, batch in zip(range(steps + 1), stream, strict=False):
                if step * _NUM_GRADIENT_PROBES % max(steps, 1) < _NUM_GRADIENT_PROBES:
                    search.probe_gradients(batch, step)
                if step < steps:
                    search.train_step(batch, step)
                bar.advance(task)
    return search.build_advice(steps, framework, _list_emulation_warnings(chosen))


@dataclass
class _Search:
    """State of the search.

    Attributes:
        trainable: the model.
        precision: the 16-bit precision.
        limit: largest accepted gradient noise.
        layers: layer → advice so far.
        passes: number of passes so far.
        noise: largest noise with the kept layers in float32.
        all_low_noise: largest finite noise before layers were kept at a step.
        on_pass: called with the number of passes after every pass that compares.
    """

    trainable: TrainableModel
    precision: Precision
    limit: float
    on_pass: Callable[[int], None]
    layers: dict[str, LayerAdvice] = field(default_factory=dict)
    passes: int = 0
    noise: float = 0.0
    all_low_noise: float = 0.0

    def __post_init__(self) -> None:
        self.layers = {
            layer.name: LayerAdvice(layer.name, layer.kind, bool(layer.fixed), layer.fixed)
            for layer in self.trainable.layers
        }
        if not self.layers:
            raise ConfigurationError("the model must have layers to train, got none")

    @property
    def low_precision_layers(self) -> set[str]:
        return {name for name, layer in self.layers.items() if not layer.keep}

    def train_step(self, batch: object, step: int) -> None:
        self.passes += 1
        loss = self.trainable.step(batch)
        if not math.isfinite(loss):
            raise TrainingError(
                f"the loss must be finite in float32, got {loss:g} at step {step}; correct the "
                f"model, the data or the learning rate"
            )

    def probe_gradients(self, batch: object, step: int) -> None:
        """Compare gradients; keep the necessary layers in float32."""
        reference = self.trainable.gradients(batch, (), 1.0)
        self.passes += 1
        if not reference.is_finite:
            location = first_non_finite(self.trainable.trace(batch, (), 1.0))
            raise TrainingError(
                f"gradients must be finite in float32, but are not at step {step}"
                + (f": {location}" if location else "")
            )

        def measure_gradient_noise(low: Collection[str], singly: bool = False) -> float:
            return self._compute_finite_gradients(batch, low, singly).noise_against(reference)

        total = measure_gradient_noise(self.low_precision_layers)
        if total > self.limit:
            self._check_deterministic(reference, batch)
            if math.isfinite(total):
                self.all_low_noise = max(self.all_low_noise, total)
            total = self._keep_noisy_layers(measure_gradient_noise, batch, step)
        self.noise = max(self.noise, total)

    def _check_deterministic(self, reference: Gradients, batch: object) -> None:
        again = self.trainable.gradients(batch, (), 1.0).noise_against(reference)
        self.passes += 1
        if again > self.limit:
            raise TrainingError(
                f"gradients must be equal in two float32 passes of one batch, but differ by "
                f"{100 * math.sqrt(again):.2g}%: a custom layer of the model draws random numbers; "
                f"disable them or fix their seed for advise"
            )

    def _keep_noisy_layers(self, noise_of: Callable[..., float], batch: object, step: int) -> float:
        """Keep layers until the rest is within the limit; return the remaining noise."""
        isolated: dict[str, float] = {}
        low = self.low_precision_layers
        self._measure_isolated(noise_of, [name for name in self.layers if name in low], isolated)
        for name, noise in isolated.items():
            previous = self.layers[name]
            if not noise <= previous.noise:
                self.layers[name] = replace(previous, noise=noise, step=step)
            if math.isinf(noise):
                self._keep_layer(name, self._why_not_finite(name, batch))
        worst = sorted(self.low_precision_layers, key=lambda name: -isolated.get(name, 0.0))
        for name in self._fewest_layers_to_keep(noise_of, worst):
            noise = isolated.get(name, 0.0)
            reason = f"in {self.precision}, {_describe_noise(noise)}"
            if not noise > self.limit:
                reason += "; all layers together exceed the limit"
            self._keep_layer(name, reason)
        return float(noise_of(self.low_precision_layers))

    def _measure_isolated(
        self, noise_of: Callable[..., float], names: list[str], isolated: dict[str, float]
    ) -> None:
        """Measure the noise of layers alone in 16 bits, except sets that are harmless together.

        Usually only few layers exceed the limit, so bisection saves passes: a few for each of
        these layers, not one for every layer.
        """
        if not names:
            return
        noise = noise_of(set(names), singly=True)
        if len(names) == 1:
            isolated[names[0]] = noise
        elif noise > self.limit / _HARMLESS:
            middle = len(names) // 2
            self._measure_isolated(noise_of, names[:middle], isolated)
            self._measure_isolated(noise_of, names[middle:], isolated)

    def _fewest_layers_to_keep(self, noise_of: Callable[..., float], worst: list[str]) -> list[str]:
        low = self.low_precision_layers

        def is_within_limit(retained: Collection[str]) -> bool:
            return bool(noise_of(low.difference(retained)) <= self.limit)

        least, most = 0, len(worst)
        while least < most:
            middle = (least + most) // 2
            if is_within_limit(worst[:middle]):
                most = middle
            else:
                least = middle + 1
        retained = worst[:most]
        if len(retained) > _PRUNED:
            return retained
        for name in reversed(retained[:-1]):  # drop layers kept only for their rank
            rest = [layer for layer in retained if layer != name]
            if is_within_limit(rest):
                retained = rest
        return retained

    def _compute_finite_gradients(
        self, batch: object, low: Collection[str], singly: bool
    ) -> Gradients:
        """Return gradients at the first loss scale at which they are finite, if any."""
        for scale in _SCALES[self.precision]:
            gradients = self.trainable.gradients(batch, low, scale, singly=singly)
            self.passes += 1
            self.on_pass(self.passes)
            if gradients.is_finite or not math.isfinite(gradients.loss):
                break
        return gradients

    def _keep_layer(self, name: str, reason: str) -> None:
        self.layers[name] = replace(self.layers[name], keep=True, reason=reason)

    def _why_not_finite(self, name: str, batch: object) -> str:
        scale = _SCALES[self.precision][-1]
        self.passes += 1
        try:
            location = first_non_finite(self.trainable.trace(batch, {name}, scale))
        except (DataError, ConfigurationError) as error:
            return f"in {self.precision}, {error}"
        if location is None:
            return f"in {self.precision}, gradients are not finite"
        return location.message

    def build_advice(self, steps: int, framework: str, warnings: tuple[str, ...]) -> Advice:
        layers = dict(self.layers)
        for name, layer in self.layers.items():
            if not layer.reason:
                if math.isnan(layer.noise):
                    effect = "hardly changes the gradients even together with other layers"
                    reason = f"in 16 bits, {effect}"
                else:
                    reason = f"alone in 16 bits, {_describe_noise(layer.noise)}"
                layers[name] = replace(layer, reason=reason)
        warnings += self._many_are_kept()
        return Advice(self.precision, layers, self.noise, steps, self.passes, framework, warnings)

    def _many_are_kept(self) -> tuple[str, ...]:
        """Return a warning if many layers are kept, but all layers in 16 bits are usable."""
        n = sum(layer.keep for layer in self.layers.values())
        if n < _MANY_KEPT_LAYERS or n * 3 < len(self.layers) or self.all_low_noise == 0:
            return ()
        # Rounded up to one significant digit, strictly above the noise.
        step = 10 ** math.floor(math.log10(self.all_low_noise))
        limit = (math.floor(self.all_low_noise / step) + 1) * step
        return (
            f"many layers are kept in float32: {n} of {len(self.layers)}. With all layers in 16 "
            f"bits, the noise of the gradients is {self.all_low_noise:.2g} (limit: "
            f"{self.limit:g}), which many models tolerate; with limit={limit:g}, only layers that "
            f"break training are kept",
        )


def _describe_noise(noise: float) -> str:
    """Describe noise as text; its square root is relative to the gradients' size."""
    return f"changes the gradients by {100 * math.sqrt(noise):.2g}%"


def _validate_options(precision: str | Precision, steps: object, limit: object) -> Precision:
    precisions = parse_precisions(precision)
    if len(precisions) != 1 or precisions[0] not in _SCALES:
        raise ConfigurationError(f"precision must be bf16 or fp16, got {precision!r}")
    validate_option("steps", integer_between(0), steps)
    validate_option("limit", positive_float, limit)
    return precisions[0]


def _repeat_batches(batches: object, steps: int) -> Iterator[Any]:
    """Repeat the batches forever; an iterator is first read into a list, as far as needed."""
    if isinstance(batches, Iterator):
        batches = list(itertools.islice(batches, steps + 1))
    source = Batches(batches, "batches")
    while True:
        yield from source


def _list_emulation_warnings(precision: Precision) -> tuple[str, ...]:
    support = detect().support(precision, "gpu" if is_gpu_available() else "cpu")
    if support.native:
        return ()
    return (
        f"{precision} is emulated on this machine ({support.reason}), so training in float32 is "
        f"faster here",
    )
