"""Runs of a user's module on example inputs, after which the module is as before."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from neural_mp.adaptors.pytorch.graph.call_signature import CallArgs, resize_batch
from neural_mp.adaptors.pytorch.graph.module_state import ModuleState, preserve_module_state
from neural_mp.errors import DataError
from neural_mp.util.system.watched_thread import watch_calls

logger = logging.getLogger(__name__)

#: Batch size for trial runs.
_PROBE_BATCH_SIZE = 2


@dataclass(frozen=True)
class TrialRun:
    """A run of a module and its effects on the module.

    Attributes:
        call: the call to capture: that of the run, or a larger one that the module accepts.
        outputs: the outputs of the run.
        changed: names of attributes and variables that the run changed, without buffers.
        buffers: names of buffers that the run changed.
        written: ids of tensors other than buffers that the run wrote to.
        kept: the names among `changed` that outputs of later runs may depend on: those that every
            run changes, or all of `changed` if a second run has other outputs.
    """

    call: CallArgs
    outputs: Any
    changed: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    written: tuple[int, ...] = ()
    kept: tuple[str, ...] = ()

    @property
    def fills_caches(self) -> bool:
        """Whether the run only filled attributes that later runs read."""
        return bool(self.changed) and not self.kept


def run_once(module: nn.Module, call: CallArgs) -> Any:
    """Run a module on copies of the inputs, then restore its state.

    Raises:
        DataError: if the module does not run on the inputs.
    """
    with preserve_module_state(module):
        return run_in_place(module, call)


def try_out(module: nn.Module, call: CallArgs) -> TrialRun:
    """Run a module on a batch of at least two samples, or of one if it accepts only one.

    Raises:
        DataError: if the module does not run on these inputs.
    """
    several = at_least_two(call)
    try:
        return _run_on_few(module, several)
    except DataError:
        if several is call:
            raise
        return _run_trial(module, call)


def _run_on_few(module: nn.Module, call: CallArgs) -> TrialRun:
    """Run a module once, on few samples if possible: a batch may be large.

    Raises:
        DataError: if the module does not run on the whole batch either.
    """
    if call.batch_size is not None and call.batch_size > _PROBE_BATCH_SIZE:
        try:
            run = _run_trial(module, resize_batch(call, _PROBE_BATCH_SIZE))
        except DataError:
            logger.debug("the model fails on %d samples", _PROBE_BATCH_SIZE, exc_info=True)
        else:
            return replace(run, call=call)
    return _run_trial(module, call)


def _run_trial(module: nn.Module, call: CallArgs) -> TrialRun:
    with preserve_module_state(module) as state:
        outputs = run_in_place(module, call)
        changed, written = tuple(state.list_changed_names()), tuple(state.written_tensors())
        buffers = tuple(state.list_changed_names(of_buffers=True))
    retained = _list_kept_state(module, call, changed) if changed else ()
    return TrialRun(call, outputs, changed, buffers, written, retained)


@watch_calls("the model")
def run_in_place(module: nn.Module, call: CallArgs) -> Any:
    """Run a module on copies of the inputs; its state changes as in any run.

    Raises:
        DataError: if the module does not run on the inputs.
    """
    copies = call.clone_tensors()
    try:
        with torch.no_grad():
            return module(*copies.args, **copies.kwargs)
    except Exception as error:
        # User code may raise any exception type.
        exceeded = find_exceeded_limits(module, call)
        raise DataError(
            f"{type(module).__name__} does not run on the inputs of the first batch ({call}): "
            f"{type(error).__name__}: {error}{_explain_whole_dict(module, call)}"
            f"{_explain_split_sequence(call, error)}{f'; {exceeded}' if exceeded else ''}"
        ) from error


def _list_kept_state(
    module: nn.Module, call: CallArgs, changed: tuple[str, ...]
) -> tuple[str, ...]:
    """Return the changed names that outputs of later runs may depend on; see `TrialRun.kept`."""
    with preserve_module_state(module), torch.random.fork_rng(devices=[]):
        seed = torch.get_rng_state()
        first = run_in_place(module, call)
        filled = ModuleState(module)
        torch.set_rng_state(seed)
        try:
            second = run_in_place(module, call)
        except DataError:
            return changed
        again = filled.list_changed_names()
    return tuple(again) if _have_equal_tensors(first, second) else changed


def _have_equal_tensors(first: object, second: object) -> bool:
    sides = [
        [leaf for leaf in pytree.tree_leaves(side) if isinstance(leaf, torch.Tensor)]
        for side in (first, second)
    ]
    if len(sides[0]) != len(sides[1]):
        return False
    return all(
        mine.shape == theirs.shape and torch.allclose(mine, theirs, equal_nan=True)
        for mine, theirs in zip(*sides, strict=True)
    )


def _explain_whole_dict(module: nn.Module, call: CallArgs) -> str:
    """Return an explanation if a dict went to a single parameter, perhaps unintentionally."""
    if call.kwargs or len(call.args) != 1 or not isinstance(call.args[0], dict):
        return ""
    parameters = ", ".join(inspect.signature(module.forward).parameters)
    keys = ", ".join(map(str, call.args[0]))
    return (
        f". The batch was passed as one argument, as none of its keys ({keys}) is a parameter of "
        f"forward ({parameters})"
    )


def _explain_split_sequence(call: CallArgs, error: Exception) -> str:
    """Return an explanation if a tuple or list was passed as several arguments, and failed."""
    if call.kwargs or len(call.args) < 2 or not isinstance(error, TypeError):
        return ""
    return (
        ". A tuple or list of inputs is passed as positional arguments; to pass it as one "
        "argument, enclose it in a tuple: ((first, second),)"
    )


def find_exceeded_limits(module: nn.Module, call: CallArgs) -> str:
    """Return the limits of a language model that token ids exceed, vocabulary and context."""
    config = getattr(module, "config", None)
    ids = next(
        (leaf for leaf in call.flatten_leaves() if getattr(leaf, "dtype", None) is torch.int64),
        None,
    )
    if config is None or ids is None or ids.ndim != 2 or not ids.numel():
        return ""
    vocabulary, context = (
        getattr(config, name, None) for name in ("vocab_size", "max_position_embeddings")
    )
    messages = []
    if isinstance(vocabulary, int) and int(ids.max()) >= vocabulary:
        messages.append(f"the vocabulary has {vocabulary} words, got token id {int(ids.max())}")
    if isinstance(context, int) and ids.shape[1] > context:
        messages.append(f"the context has {context} tokens, got {ids.shape[1]}")
    return "; ".join(messages)


@contextmanager
def switch_to_inference(module: nn.Module) -> Iterator[None]:
    """Switch to evaluation mode; restore the flag of every submodule on exit."""
    flags = [(m, m.training) for m in module.modules()]
    # A graph of torch.export keeps the mode in which it was captured, and refuses the call.
    with suppress(NotImplementedError):
        module.eval()
    try:
        yield
    finally:
        for m, training in flags:
            m.training = training


def at_least_two(call: CallArgs) -> CallArgs:
    """Repeat a batch of one, as torch.export would specialize on size 1."""
    return resize_batch(call, _PROBE_BATCH_SIZE) if call.batch_size == 1 else call
