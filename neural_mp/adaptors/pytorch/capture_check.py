"""A captured graph beside the code it came from, where torch.export says too little or too much."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from neural_mp.adaptors.pytorch import capture
from neural_mp.adaptors.pytorch.call_signature import Call
from neural_mp.errors import DataError

logger = logging.getLogger(__name__)


def other_ways(original: nn.Module, single: Call, got: list[Any] | None) -> list[str]:
    """A warning if a batch of one is another case for the user's code than the graph's larger one.

    No bound says so: torch.export takes sizes of 0 and 1 for special without asking.

    Args:
        original: the user's module.
        single: a batch of one.
        got: what the graph gives for it; None if it does not run on it.
    """
    expected = None if got is None else _expected(original, single)
    if got is None or expected is None or _same(got, expected):
        return []
    return [
        "for a batch of one the model's code does something else than for larger batches; what "
        "was captured is what it does for those"
    ]


def result_of(module: nn.Module, call: Call) -> list[Any] | None:
    """All that a graph computes; None if it does not run."""
    try:
        with torch.no_grad():
            return list(pytree.tree_leaves(module(*call.args, **call.kwargs)))
    except Exception:
        # What a graph says of sizes or values it cannot take is of no type in particular.
        logger.debug("the graph does not run on %s", call, exc_info=True)
        return None


def _expected(original: nn.Module, call: Call) -> list[Any] | None:
    with capture.inference_mode(original):
        try:
            return list(pytree.tree_leaves(capture.run_once(original, call)))
        except DataError:
            return None


def _same(got: list[Any], expected: list[Any]) -> bool:
    return len(got) == len(expected) and all(map(_alike, got, expected))


def _alike(mine: Any, theirs: Any) -> bool:
    if not isinstance(theirs, torch.Tensor):
        return True
    if mine.shape != theirs.shape:
        return False
    if not theirs.is_floating_point():
        return True
    noise = (mine.double() - theirs.double()).norm()
    return bool(noise <= 1e-2 * theirs.double().norm()) or not bool(noise.isfinite())
