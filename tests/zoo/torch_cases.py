"""Cases of PyTorch: a model, two batches of unequal size, and what the module itself computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from zoo.harness import Built, Case, flat

#: Samples in the calibration batches: two sizes, as a model is free to take any.
SAMPLES = (4, 3)
#: Makes the inputs of a batch of so many samples.
Inputs = Callable[[int], Any]
#: Options of cases that have no graph as a whole. A result that holds user code is not saved.
BY_MODULES: dict[str, Any] = {"options": {"capture": "modules"}, "savable": False}

_STEMS = {2: nn.Linear, 3: nn.Conv1d, 4: nn.Conv2d, 5: nn.Conv3d}


class Behind(nn.Module):
    """A layer behind one that runs in INT8, which takes the first input.

    Args:
        layer: what is shown.
        width: channels of the first input, or its features.
        rank: number of axes of the first input.
    """

    def __init__(self, layer: nn.Module, width: int, rank: int) -> None:
        super().__init__()
        stem = _STEMS[rank]
        self.stem = stem(width, width) if stem is nn.Linear else stem(width, width, 1)
        self.layer = layer

    def forward(self, x: torch.Tensor, *arguments: Any) -> Any:
        return self.layer(self.stem(x), *arguments)


def floats(*shape: int, dtype: torch.dtype = torch.float32) -> Inputs:
    """Normally distributed inputs, shaped so behind the axis of samples."""
    return lambda samples: torch.randn(samples, *shape).to(dtype)


def integers(bound: int, *shape: int) -> Inputs:
    """Integers from 0 up to a bound, excluded."""
    return lambda samples: torch.randint(0, bound, (samples, *shape))


def several(*inputs: Inputs) -> Inputs:
    """A tuple of inputs."""
    return lambda samples: tuple(make(samples) for make in inputs)


def built(module: nn.Module, inputs: Inputs, options: Mapping[str, Any] | None = None) -> Built:
    """A case's model with its batches and the module's own outputs."""
    module = module.eval()
    batches = [inputs(samples) for samples in SAMPLES]
    return Built(module, batches, [outputs_of(module, batch) for batch in batches], options)


def outputs_of(module: nn.Module, batch: Any) -> list[np.ndarray]:
    """Return the outputs of a module itself, as arrays."""
    copied = torch.utils._pytree.tree_map(
        lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, batch
    )
    with torch.no_grad():
        match copied:
            case dict():
                outputs = module(**copied)
            case tuple():
                outputs = module(*copied)
            case _:
                outputs = module(copied)
    return flat(outputs)


def case(
    name: str,
    module: Callable[[], nn.Module],
    inputs: Inputs,
    options: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Case:
    """A case of a whole module; other arguments go to `Case`."""
    return Case(name, lambda: built(module(), inputs, options), **settings)


def layer(name: str, make: Callable[[], nn.Module], *shape: int, **settings: Any) -> Case:
    """A case of a layer behind one that runs in INT8, for inputs of this shape."""
    return case(name, lambda: Behind(make(), shape[0], len(shape) + 1), floats(*shape), **settings)


def loss(
    name: str, make: Callable[[], nn.Module], width: int, *targets: Inputs, **settings: Any
) -> Case:
    """A case of a loss of what an INT8 layer gives, and of targets."""
    inputs = several(floats(width), *targets)
    return case(name, lambda: Behind(make(), width, 2), inputs, **settings)
