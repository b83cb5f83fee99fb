"""Loss scaling for loops written with torch."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from neural_mp.core.loss_scale import DYNAMIC, LossScale, LossScaleState
from neural_mp.errors import ConfigurationError

#: The keys of a state that torch's own scaler does not have.
_COUNTERS = ("steps", "skipped_steps", "skipped_in_a_row")


class GradScaler(torch.amp.GradScaler):
    """torch's `GradScaler`, with a scale that keeps its bounds, and with counters.

    It stands in for torch's own wherever that is taken, with the same methods:

    >>> scaler.scale(loss).backward()
    >>> scaler.step(optimizer)
    >>> scaler.update()

    Args:
        device: the type of device that the gradients are on.
        loss_scale: `"dynamic"`, a number, which stays, or a `LossScale`.
        enabled: whether it does anything at all.

    Raises:
        ConfigurationError: the loss scale is none of these, or there is no such type of device.
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
            _device_type(device),
            init_scale=self.rule.initial,
            growth_factor=self.rule.factor,
            backoff_factor=1 / self.rule.factor,
            growth_interval=self.rule.growth_interval or 1,
            enabled=enabled,
        )
        self.state = self.rule.start()

    @property
    def loss_scale(self) -> float:
        """What the next loss is multiplied by; 1 if disabled."""
        return float(self.get_scale())

    @property
    def steps(self) -> int:
        """Steps that changed the weights."""
        return self.state.steps

    @property
    def skipped_steps(self) -> int:
        """Steps whose gradients were not finite."""
        return self.state.skipped_steps

    @property
    def skipped_in_a_row(self) -> int:
        """How many of the last steps were skipped, one after the other."""
        return self.state.skipped_in_a_row

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Bring the scale up to date, once all optimizers have had their step.

        Args:
            new_scale: sets the scale, whatever the gradients were.

        Raises:
            ConfigurationError: no optimizer had a step since the last update, or the new scale is
                no number above 0.
        """
        if not self.is_enabled():
            return
        found = [
            bool(value.item())
            for state in self._per_optimizer_states.values()
            for value in state["found_inf_per_device"].values()
        ]
        if new_scale is not None:
            self.state = replace(self.state, scale=_checked_scale(new_scale))
        elif found:
            self.state = self.rule.after(self.state, not any(found))
        else:
            raise ConfigurationError(
                "update was called without a step: call scaler.step(optimizer) before it"
            )
        super().update(self.state.scale)
        assert self._growth_tracker is not None  # it is made when the first loss is scaled
        self._growth_tracker.fill_(self.state.good_steps)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs; torch's own scaler takes it, too."""
        counters = {name: getattr(self.state, name) for name in _COUNTERS}
        return {**super().state_dict(), **counters} if self.is_enabled() else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where a checkpoint stopped, of this scaler or of torch's own.

        The rule stays the one that this scaler was made with, and bounds the scale.
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


def _checked_scale(new_scale: float | torch.Tensor) -> float:
    try:
        scale = float(new_scale)
    except (TypeError, ValueError, RuntimeError):
        scale = math.nan
    if not 0 < scale < math.inf:
        raise ConfigurationError(f"new_scale must be a finite number above 0, got {new_scale!r}")
    return scale


def _device_type(device: str | torch.device) -> str:
    try:
        return torch.device(device).type
    except (RuntimeError, TypeError) as error:
        raise ConfigurationError(
            f"device must be a device of torch's, such as 'cpu' or 'cuda', got {device!r}"
        ) from error
