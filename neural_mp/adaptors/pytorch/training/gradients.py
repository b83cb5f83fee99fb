"""Mixed-precision plans on torch modules, and gradients under them for training advice."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from neural_mp.adaptors.common.trainable import Gradients, TrainedLayer
from neural_mp.adaptors.pytorch.graph.casts import DTYPES
from neural_mp.adaptors.pytorch.training import numerics_trace
from neural_mp.adaptors.pytorch.training.autocast import is_open
from neural_mp.adaptors.pytorch.training.module_dtypes import (
    RunsIn,
    cast_floats,
    get_device_type,
    list_unit_modules,
    remove_plan,
)
from neural_mp.adaptors.pytorch.training.numerics_trace import check_module
from neural_mp.core.hardware import Device
from neural_mp.core.precision import Precision
from neural_mp.core.training_numerics import ModelTrace
from neural_mp.errors import (
    ConfigurationError,
    DataError,
    UnknownOperatorError,
    did_you_mean,
    one_line,
)


@contextmanager
def open_trainable(
    model: nn.Module, batch: object, loss: object, precision: Precision, optimizer: object
) -> Iterator[TrainableModule]:
    """Open a model for advice, in training mode; restore its state on exit."""
    numerics_trace.check_module(model)
    check_weights(model)
    if is_open() or torch.is_autocast_enabled(get_device_type(model)):
        raise ConfigurationError(
            "advise must be called outside of autocast, which is enabled here: advise itself "
            "compares 16 bits with float32"
        )
    call, targets = numerics_trace.call_of(model, batch)
    if targets is None:
        raise DataError("batches must be (inputs, targets), got a first batch without targets")
    if loss is None:
        raise ConfigurationError(
            "loss must be the loss of the training for a torch module, got None; pass e.g. "
            "loss=torch.nn.functional.cross_entropy"
        )
    with ExitStack() as undo:
        for module in model.modules():
            undo.callback(remove_plan(module))
        undo.enter_context(numerics_trace.disable_compilation())
        undo.enter_context(numerics_trace.preserve_state(model))
        undo.enter_context(torch.enable_grad())
        numerics_trace.compute_loss_value(loss, numerics_trace.run_model(model, call), targets)
        yield TrainableModule(model, batch, loss, precision, optimizer)


class TrainableModule:
    """A torch module as a `neural_mp.adaptors.common.trainable.TrainableModel`."""

    def __init__(
        self, model: nn.Module, batch: object, loss: object, precision: Precision, optimizer: object
    ) -> None:
        self._model, self._loss = model, loss
        self._dtype = get_torch_dtype(precision)
        self._units = list_unit_modules(model)
        self._optimizer = _make_optimizer(model, optimizer)
        outputs = _list_output_modules(model, self._units, batch)
        fixed = "computes outputs of the model, which stay in float32"
        self._layers = [
            TrainedLayer(name, type(module).__name__, fixed if name in outputs else "")
            for name, module in self._units.items()
        ]

    @property
    def layers(self) -> Sequence[TrainedLayer]:
        """The modules, in model order."""
        return self._layers

    def gradients(
        self, batch: object, low: Collection[str], scale: float, *, singly: bool = False
    ) -> Gradients:
        """Return the gradients of a batch with some modules in 16 bits."""
        with numerics_trace.preserve_state(self._model), _disable_dropout(self._model):
            try:
                with self._in_16_bits(low, singly):
                    return self._compute_gradients(batch, scale)
            except (DataError, ConfigurationError):
                if not low:
                    raise
                return Gradients(math.nan, [])  # some user code does not support 16 bits

    def trace(self, batch: object, low: Collection[str], scale: float) -> ModelTrace:
        """Return the numerics trace of such a pass with `singly`."""
        with self._in_16_bits(low, True), _disable_dropout(self._model):
            return numerics_trace.trace_numerics(self._model, batch, self._loss, scale)

    def step(self, batch: object) -> float:
        """Run one training step in float32; return the loss before the step."""
        call, targets = numerics_trace.call_of(self._model, batch)
        loss = numerics_trace.compute_loss_value(
            self._loss, numerics_trace.run_model(self._model, call), targets
        )
        grads = numerics_trace.compute_gradients(self._model, loss)
        originals = {parameter: parameter.grad for parameter in self._model.parameters()}
        try:
            for parameter in originals:
                parameter.grad = grads.get(parameter)
            self._optimizer.step()
        except TypeError as error:
            raise ConfigurationError(
                f"optimizer must support step() without arguments, but "
                f"{type(self._optimizer).__name__} does not ({one_line(error)}); use another "
                f"optimizer, e.g. torch.optim.SGD"
            ) from error
        finally:
            for parameter, grad in originals.items():
                parameter.grad = grad
        return float(loss.detach())

    def _compute_gradients(self, batch: object, scale: float) -> Gradients:
        call, targets = numerics_trace.call_of(self._model, batch)
        outputs = cast_floats(numerics_trace.run_model(self._model, call), torch.float32)
        loss = numerics_trace.compute_loss_value(self._loss, outputs, targets)
        grads = numerics_trace.compute_gradients(self._model, loss * scale)
        arrays = [
            _to_float32_array(grads[p]) / np.float32(scale)
            if p in grads
            else _to_float32_array(torch.zeros_like(p))
            for p in self._model.parameters()
        ]
        return Gradients(float(loss.detach()), arrays)

    @contextmanager
    def _in_16_bits(self, low: Collection[str], singly: bool) -> Iterator[None]:
        """Set precisions as `apply_plan` would; if `singly`, cast module inputs too."""
        with ExitStack() as undo:
            if low:
                undo.callback(RunsIn(self._dtype, cast_inputs=False).wrap_module(self._model))
            for name, module in self._units.items():
                if name not in low:
                    undo.callback(RunsIn(torch.float32).wrap_module(module))
                elif singly:
                    undo.callback(RunsIn(self._dtype).wrap_module(module))
            yield


def _to_float32_array(gradient: torch.Tensor) -> np.ndarray:
    if gradient.is_sparse:
        gradient = gradient.to_dense()
    if gradient.is_complex():
        gradient = torch.view_as_real(gradient.resolve_conj())
    return gradient.float().cpu().numpy()


def _make_optimizer(model: nn.Module, given: object) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(trained, 1e-3) if given is None else None
    if optimizer is None and callable(given):
        optimizer = given(trained)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigurationError(
            f"optimizer must be a function from parameters to a torch optimizer, e.g. "
            f"torch.optim.SGD or lambda p: torch.optim.SGD(p, 0.1), got {given!r}"
        )
    return optimizer


def _list_output_modules(model: nn.Module, units: dict[str, nn.Module], batch: object) -> set[str]:
    names: dict[int, str] = {}
    alive: list[Any] = []  # keeps tensors alive, as ids of freed tensors are reused

    def make_output_recorder(name: str) -> Any:
        def record_outputs(module: nn.Module, args: object, outputs: object) -> None:
            for tensor in numerics_trace.floating_tensors(outputs):
                alive.append(tensor)
                names[id(tensor)] = name

        return record_outputs

    call, _ = numerics_trace.call_of(model, batch)
    with numerics_trace.preserve_state(model), ExitStack() as undo:
        for name, module in units.items():
            undo.callback(module.register_forward_hook(make_output_recorder(name)).remove)
        outputs = numerics_trace.run_model(model, call)
    return {
        names[id(tensor)]
        for tensor in numerics_trace.floating_tensors(outputs)
        if id(tensor) in names
    }


@contextmanager
def _disable_dropout(model: nn.Module) -> Iterator[None]:
    """Disable dropout: another mask in 16 bits would look like rounding errors."""
    with ExitStack() as undo:
        undo.enter_context(_WithoutDropoutFunctions())
        for module in model.modules():
            name = "p" if isinstance(module, nn.modules.dropout._DropoutNd) else "dropout"
            value = vars(module).get(name)
            if isinstance(value, float) and value:
                undo.callback(setattr, module, name, value)
                setattr(module, name, 0.0)
        yield


class _WithoutDropoutFunctions(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if getattr(func, "__name__", "").rstrip("_123d").endswith("dropout"):
            return args[0] if args else (kwargs or {})["input"]
        return func(*args, **(kwargs or {}))


def apply_plan(model: nn.Module, plan: Mapping[str, Precision]) -> nn.Module:
    """Apply a plan to the modules of a model, in place; others inherit from their parent."""
    check_module(model)
    check_weights(model)
    modules = dict(model.named_modules(remove_duplicate=False))
    for name in plan:
        if name not in modules:
            raise UnknownOperatorError(
                f"the plan names {name!r}, which is not a module of the model"
                f"{did_you_mean(name, filter(None, modules))}"
            )
    chosen = _map_planned_modules(modules, plan)
    for module in modules.values():
        remove_plan(module)
    low = next((p for p in plan.values() if p.is_16_bit), Precision.FP32)
    whole = plan.get("", low)
    RunsIn(get_torch_dtype(whole), cast_inputs=False, cast_outputs=True).wrap_module(model)
    for module, name in chosen.items():
        precision = plan[name]
        if name and precision is not _find_inherited_precision(name, plan, whole):
            full = precision is Precision.FP32
            # Around a float32 module, autocast converts its outputs as needed; around a 16-bit
            # module, computation is in float32 and may not accept 16-bit outputs.
            RunsIn(get_torch_dtype(precision), cast_inputs=full, cast_outputs=not full).wrap_module(
                module
            )
    return model


def _map_planned_modules(
    modules: Mapping[str, nn.Module], plan: Mapping[str, Precision]
) -> dict[nn.Module, str]:
    """Return module → its name in the plan; a shared module has several names."""
    chosen: dict[nn.Module, str] = {}
    for name, precision in plan.items():
        first = chosen.setdefault(modules[name], name)
        if plan[first] is not precision:
            raise ConfigurationError(
                f"the plan must set one precision for {first!r} and {name!r}, which are the same "
                f"module, got {plan[first]} and {precision}"
            )
    return chosen


def check_weights(model: nn.Module) -> None:
    """Raise `ConfigurationError` unless some weights are float32, as mixed precision requires."""
    floats = {p.dtype for p in model.parameters() if p.is_floating_point()}
    if floats and torch.float32 not in floats:
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in floats))
        raise ConfigurationError(
            f"weights must be float32 in mixed-precision training, got {names}; call "
            f"model.float() first"
        )


def get_torch_dtype(precision: Precision) -> torch.dtype:
    """Return the torch dtype of BF16, FP16 or FP32."""
    return DTYPES.get(precision, torch.float32)


def _find_inherited_precision(
    name: str, plan: Mapping[str, Precision], low: Precision
) -> Precision:
    while name:
        name = name.rpartition(".")[0]
        if name in plan:
            return plan[name]
    return low


def list_devices() -> list[Device]:
    """Return the CPU and the devices of torch's accelerator, if any."""
    result = [Device("pytorch", "cpu", "CPU")]
    if not torch.accelerator.is_available():
        return result
    accelerator = torch.accelerator.current_accelerator()
    kind = accelerator.type if accelerator is not None else "cuda"
    named = getattr(getattr(torch, kind, None), "get_device_name", None)
    for index in range(torch.accelerator.device_count()):
        result.append(Device("pytorch", kind, named(index) if named else f"{kind}:{index}"))
    return result
