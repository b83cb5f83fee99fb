"""Loss scaling for torch training loops."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from neural_mp.core.training_numerics import DYNAMIC, LossScale, LossScaleState
from neural_mp.errors import ConfigurationError

#: State keys that torch's own scaler does not have.
_COUNTERS = ("steps", "skipped_steps", "skipped_in_a_row")


class GradScaler(torch.amp.GradScaler):
    """torch's `GradScaler` with a bounded scale and step counters.

    Accepted in place of torch's own scaler, with the same methods:

    >>> scaler.scale(loss).backward()
    >>> scaler.step(optimizer)
    >>> scaler.update()

    Args:
        device: device type of the gradients.
        loss_scale: `"dynamic"`, a number (constant scale), or a `LossScale`.
        enabled: whether to scale at all.

    Raises:
        ConfigurationError: if the loss scale or the device type is invalid.
    """

    def __init__(
        self,
        device: str | torch.device = "cpu",
        loss_scale: str | float | LossScale = DYNAMIC,
        *,
        enabled: bool = True,
    ) -> None:
        self.rule = LossScale.read(loss_scale)
        super().__init__(
            _parse_device_type(device),
            init_scale=self.rule.initial,
            growth_factor=self.rule.factor,
            backoff_factor=1 / self.rule.factor,
            growth_interval=self.rule.growth_interval or 1,
            enabled=enabled,
        )
        self.state = self.rule.start()

    @property
    def loss_scale(self) -> float:
        """Factor for the next loss; 1 if disabled."""
        return float(self.get_scale())

    @property
    def steps(self) -> int:
        """Number of steps that changed the weights."""
        return self.state.steps

    @property
    def skipped_steps(self) -> int:
        """Number of steps skipped for non-finite gradients."""
        return self.state.skipped_steps

    @property
    def skipped_in_a_row(self) -> int:
        """Number of steps skipped in a row up to now."""
        return self.state.skipped_in_a_row

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Update the scale after the steps of all optimizers.

        Args:
            new_scale: sets the scale, regardless of the gradients.

        Raises:
            ConfigurationError: if there was no step since the last update, or the new scale is not
                a finite number above 0.
        """
        if not self.is_enabled():
            return
        overflows = [
            bool(value.item())
            for state in self._per_optimizer_states.values()
            for value in state["found_inf_per_device"].values()
        ]
        if new_scale is not None:
            self.state = replace(self.state, scale=_check_new_scale(new_scale))
        elif overflows:
            self.state = self.rule.after(self.state, not any(overflows))
        else:
            raise ConfigurationError(
                "update() must follow a step, got none since the last update; call "
                "scaler.step(optimizer) first"
            )
        super().update(self.state.scale)
        assert self._growth_tracker is not None  # set when the first loss is scaled
        self._growth_tracker.fill_(self.state.good_steps)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint; torch's own scaler accepts it too."""
        counters = {name: getattr(self.state, name) for name in _COUNTERS}
        return {**super().state_dict(), **counters} if self.is_enabled() else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from a checkpoint of this scaler or of torch's own.

        Keeps the rule of this scaler, which bounds the restored scale.
        """
        if not self.is_enabled():
            return
        super().load_state_dict(state_dict)
        scale = min(max(state_dict["scale"], self.rule.minimum), self.rule.maximum)
        counters = {name: int(state_dict.get(name, 0)) for name in _COUNTERS}
        self.state = LossScaleState(scale, int(state_dict["_growth_tracker"]), **counters)
        self._init_scale = scale
        if self._scale is not None:
            self._scale.fill_(scale)
        self.set_growth_factor(self.rule.factor)
        self.set_backoff_factor(1 / self.rule.factor)
        self.set_growth_interval(self.rule.growth_interval or 1)


def _check_new_scale(new_scale: float | torch.Tensor) -> float:
    try:
        scale = float(new_scale)
    except (TypeError, ValueError, RuntimeError):
        scale = math.nan
    if not 0 < scale < math.inf:
        raise ConfigurationError(f"new_scale must be a finite number above 0, got {new_scale!r}")
    return scale


def _parse_device_type(device: str | torch.device) -> str:
    try:
        return torch.device(device).type
    except (RuntimeError, TypeError) as error:
        raise ConfigurationError(
            f"device must be a torch device, e.g. 'cpu' or 'cuda', got {device!r}"
        ) from error
