"""`autocast` by the four lists, for training or inference of torch models."""

from __future__ import annotations

import logging
import sys
import threading
from collections import Counter
from contextlib import ContextDecorator, ExitStack
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch

from neural_mp.adaptors.pytorch.compiler import uncompiled
from neural_mp.adaptors.pytorch.graph.casts import DTYPES
from neural_mp.adaptors.pytorch.graph.op_types import TYPES
from neural_mp.adaptors.pytorch.training.autocast_mode import (
    Counts,
    FourListsMode,
    Policy,
    Rule,
    table,
)
from neural_mp.adaptors.pytorch.training.function_types import all_op_types
from neural_mp.adaptors.pytorch.versions import AUTOCAST_DEVICES
from neural_mp.amp import (
    AutoMixedPrecisionOptions,
    FourLists,
    ListEdit,
    canonical_lists,
    known_edits,
    requested,
)
from neural_mp.core.precision import Precision
from neural_mp.errors import ConfigurationError
from neural_mp.io.files import writable_folder
from neural_mp.util.environment import users_environment

_Result = TypeVar("_Result")
logger = logging.getLogger(__name__)

#: A device absent in practice: `nn.LSTM` accepts inputs whose dtype differs from its weights only
#: if autocast is on for some device.
_NO_DEVICE = "ipu"

_lock = threading.Lock()
#: File → decisions counted since its first use.
_logs: dict[Path, Counts] = {}


class autocast(ContextDecorator):  # noqa: N801  # the word that torch users know
    """Context manager or decorator in which torch computes in 16 bits by the four lists.

    Behaves the same on every device. Weights and their gradients keep their dtype, usually FP32.
    Use it like `torch.autocast`, around the forward pass and the loss:

    >>> with autocast("bf16"):
    ...     loss = cross_entropy(model(inputs), labels)
    >>> loss.backward()

    Inputs of a torch function in float32, bfloat16 or float16 are cast by the function's list:

    - ALLOW: to 16 bits;
    - DENY: to float32; the result is marked dangerous;
    - INFER: to 16 bits if an input is 16-bit and none is dangerous, else to float32. The mark
      passes through functions of the INFER and the CLEAR list;
    - CLEAR: not at all; mixed dtypes are handled as for INFER. Later readers of the result are
      unknown, so unlike in a converted model, only the inputs decide;
    - no list: to float32.

    Tensors written to by `add_`, `x[0] = y` or `out=` keep their dtype. Functions with a float64 or
    complex input are left alone. A mask of the lowest float32 becomes the lowest 16-bit number, not
    minus infinity. An op without a 16-bit kernel on a device runs in float32, as does an op with a
    number beyond the 16-bit range. A function composed in Python is one op: all of
    `F.multi_head_attention_forward`, which `nn.MultiheadAttention` calls, has the type
    `scaled_dot_product_attention`. Casts of weights are cached until the outermost context ends, so
    run the optimizer step after the context. The innermost context applies; torch's own autocast is
    off inside. A context affects only the thread that entered it.

    While a context is open, code from `torch.compile` runs uncompiled in all threads. Functions of
    `torch.jit` are opaque. A block recomputed by `torch.utils.checkpoint` must be decorated:
    `checkpoint(autocast("bf16")(block), x)`.

    Args:
        precision: `bf16` or `fp16`; default: `amp.data_type`, else BF16. Precisions without kernels
            on this machine are allowed, but slow.
        amp: edits of the lists, by op types of torch's dispatcher, e.g. `softmax`, and the log
            folder. Missing options are read from the environment. `unsafe_force_all` moves all but
            the CLEAR list to the ALLOW list. `log_path` is a folder: its `autocast_bf16.tsv` lists
            op types, the list of each, the dtype of the result and the number of runs.

    Raises:
        UnknownPrecisionError: if there is no such precision.
        UnknownOperatorError: if an edit names an op type that torch does not have.
        ConfigurationError: if the precision is not 16-bit, an edit does not fit the lists, an
            option is invalid, or the folder is not writable.
    """

    @uncompiled
    def __init__(
        self,
        precision: str | Precision | None = None,
        amp: AutoMixedPrecisionOptions | None = None,
    ) -> None:
        chosen, settings = requested("autocast", precision, amp, users_environment())
        if not chosen.is_16_bit:
            raise ConfigurationError(
                f"precision of autocast must be bf16 or fp16, got {str(chosen)!r}"
            )
        self.precision = chosen
        self._given = (precision, amp)
        self.lists, rules = _edit_lists(chosen, settings.edits, settings.force_all)
        folder = writable_folder(settings.log_path)
        self._log = None if folder is None else folder.resolve() / f"autocast_{chosen}.tsv"
        with _lock:
            counts = None if self._log is None else _logs.setdefault(self._log, Counter())
        self._policy = Policy(DTYPES[chosen], self.lists, rules, counts)

    @uncompiled
    def __enter__(self) -> autocast:
        """Activate the lists."""
        if _thread.mode is None:
            with ExitStack() as undone:
                _torchs_own_off(undone)
                _thread.mode = undone.enter_context(FourListsMode())
                _thread.leave = undone.pop_all()
        _thread.mode.policies.append(self._policy)
        return self

    @uncompiled
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Restore the enclosing context, and write the log."""
        mode = _thread.mode
        assert mode is not None  # set by __enter__
        mode.policies.pop()
        if not mode.policies:
            _thread.mode = None
            _thread.leave.close()
        if self._log is not None and self._policy.counts:
            try:
                with _lock:
                    self._log.write_text(table(self._policy.counts), encoding="utf-8")
            except OSError as problem:
                logger.warning("cannot write the log of autocast to %s: %s", self._log, problem)

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        """Copy or pickle by the constructor arguments."""
        return type(self), self._given


class _Thread(threading.local):
    """Active mode of a thread."""

    mode: FourListsMode | None = None
    leave: ExitStack


_thread = _Thread()


def is_open() -> bool:
    """Whether an `autocast` is active in this thread."""
    return _thread.mode is not None


def _torchs_own_off(undone: ExitStack) -> None:
    """Disable torch's autocast and compiled code, which would bypass the lists."""
    for device in AUTOCAST_DEVICES:
        if torch.is_autocast_enabled(device):
            torch.set_autocast_enabled(device, False)
            undone.callback(torch.set_autocast_enabled, device, True)
    torch.set_autocast_enabled(_NO_DEVICE, True)
    undone.callback(torch.set_autocast_enabled, _NO_DEVICE, False)
    if "torch._dynamo" in sys.modules:  # Importing the compiler costs seconds.
        undone.enter_context(torch.compiler.set_stance("force_eager"))


@cache
def _edit_lists(
    precision: Precision, edits: tuple[ListEdit, ...], force_all: bool
) -> tuple[FourLists, dict[Any, Rule]]:
    """Return the edited lists of a precision, and an empty cache of rules."""
    accepted, warnings = known_edits(edits, "pytorch", all_op_types)
    for warning in warnings:
        logger.warning(warning)
    lists = canonical_lists(precision).translated(TYPES).edited(accepted)
    if force_all:
        lists = lists.allowing(all_op_types() - lists.clear)
    return lists, {}
