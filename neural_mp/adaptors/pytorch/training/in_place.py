"""Training of the user's own module with the rounding of a plan, made at its first call.

Scripts of other tools build the optimizer from the module before any data are seen. The module
therefore keeps its parameters, and its calls run a simulation that reads these same parameters.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from neural_mp.adaptors.pytorch.capture.module_capture import inputs_of_call
from neural_mp.adaptors.pytorch.training.simulated_module import SimulatedModule
from neural_mp.errors import ConfigurationError, DataError

logger = logging.getLogger(__name__)


class InPlaceTraining:
    """A module whose calls run its simulation, which the first call makes.

    Args:
        module: the user's module; `restore_forward` restores its calls.
        make: module, inputs of its first call as a batch → its simulation.

    Attributes:
        simulation: the simulation; None before the first call.
        untrained: paths of the module's trainable parameters that the simulation does not read.
    """

    def __init__(self, module: nn.Module, make: Callable[[nn.Module, Any], Any]) -> None:
        if "forward" in vars(module):
            raise ConfigurationError(
                "the model must have the forward method of its class, got another one set on the "
                "object; prepare a model once, and before other tools replace its forward"
            )
        self.module, self._make = module, make
        self.simulation: SimulatedModule | None = None
        self.untrained: tuple[str, ...] = ()
        self._install_forward()

    def forward(self, *args: object, **kwargs: object) -> Any:
        """Run the simulation, in the mode of the module."""
        if self.simulation is None:
            self._begin_simulation(args, kwargs)
        assert self.simulation is not None
        if self.simulation.training != self.module.training:
            self.simulation.train(self.module.training)
        return self.simulation(*args, **kwargs)

    def simulated_module(self) -> SimulatedModule:
        """Return the simulation.

        Raises:
            DataError: the module was not called yet.
        """
        if self.simulation is None:
            raise DataError(
                "the prepared model must be called on a batch at least once before it is "
                "converted, got no call; train it, or run it on a batch"
            )
        return self.simulation

    def restore_forward(self) -> None:
        """Let calls of the module run its own code again."""
        vars(self.module).pop("forward", None)

    def _install_forward(self) -> None:
        vars(self.module)["forward"] = self.forward

    def _begin_simulation(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.restore_forward()
        try:
            simulation = self._make(self.module, inputs_of_call(self.module, args, kwargs))
            self.untrained = share_parameters(simulation, self.module)
            self.simulation = simulation
            if self.untrained:
                logger.warning(
                    "not trained, as a batch norm is folded into its layer, or as the captured "
                    "graphs do not read it: %s",
                    ", ".join(self.untrained),
                )
        finally:
            self._install_forward()


def share_parameters(simulation: SimulatedModule, module: nn.Module) -> tuple[str, ...]:
    """Let a simulation read the parameters and statistics of the module that it was made from.

    Constants that the capture made, such as a weight with a batch norm folded into it that is not
    trained, stay copies.

    Returns:
        The paths of the module's trainable parameters that the simulation does not read.
    """
    state = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    shared: set[int] = set()
    for path, part in simulation.source.parts.items():
        graph = simulation.get_part(path)
        for name, origin in part.origins.items():
            own = state.get(origin)
            parent, _, leaf = name.rpartition(".")
            holder = graph.get_submodule(parent)
            copy = getattr(holder, leaf, None)  # None if a norm took the weight over
            if (
                own is not None
                and isinstance(copy, torch.Tensor)
                and (own.dtype, own.shape) == (copy.dtype, copy.shape)
                and torch.equal(own, copy)
            ):
                setattr(holder, leaf, own)
                shared.add(id(own))
    trained = [(name, own) for name, own in module.named_parameters() if own.requires_grad]
    return tuple(name for name, own in trained if id(own) not in shared)
