"""The four lists while a torch model is trained, or just run."""

from __future__ import annotations

import logging
import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import ContextDecorator, ExitStack
from functools import cache, wraps
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch

from neural_mp.adaptors.pytorch.casts import DTYPES
from neural_mp.adaptors.pytorch.op_types import TYPES
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

#: A device that nobody has: where any autocast is on, `nn.LSTM` takes inputs in another type than
#: its weights.
_NO_DEVICE = "ipu"

_lock = threading.Lock()
#: File → what was decided since it was first asked for.
_logs: dict[Path, Counts] = {}


def _uncompiled(function: Callable[..., _Result]) -> Callable[..., _Result]:
    """A function that `torch.compile` does not look into, and calls as it is."""
    disabled = torch._disable_dynamo(function)

    @wraps(function)
    def call(*args: object, **kwargs: object) -> _Result:
        # Without this, torch would import its compiler, which takes seconds.
        return (disabled if "torch._dynamo" in sys.modules else function)(*args, **kwargs)

    return call


class autocast(ContextDecorator):  # noqa: N801  # the word that torch users know
    """A context, or a decorator, in which torch computes in 16 bits by the four lists.

    It does the same on every device. The weights stay as they are, FP32 as a rule, and so do their
    gradients. It stands where `torch.autocast` stands, around the forward pass and the loss:

    >>> with autocast("bf16"):
    ...     loss = cross_entropy(model(inputs), labels)
    >>> loss.backward()

    A function of torch gets what it reads, as far as that is float32, bfloat16 or float16,

    - on the ALLOW list in 16 bits;
    - on the DENY list in float32, and its result is dangerous;
    - on the INFER list in 16 bits if a part of it comes in 16 bits, and none is dangerous; else in
      float32. What is dangerous stays so behind functions of the INFER and the CLEAR list;
    - on the CLEAR list as it comes; where types are mixed, as on the INFER list. Nobody knows yet
      what will read the result, so unlike in a converted model it follows its inputs alone;
    - on no list in float32.

    What is written into, by `add_`, `x[0] = y` or `out=`, keeps its type. Tensors in float64, and
    complex ones, are left alone with all that is computed from them. A mask of the lowest float32
    becomes the lowest number in 16 bits, not minus infinity. An op that has no kernel for 16 bits
    on a device runs in float32, and so does one with a number that they cannot hold. A function
    composed in Python is one op: all of `F.multi_head_attention_forward`, which
    `nn.MultiheadAttention` calls, is of the type `scaled_dot_product_attention`. Casts of weights
    are kept until the outermost context ends, so do the optimizer's step behind it. Of nested
    contexts the innermost counts, and torch's own autocast, if it is on, is off inside. It counts
    in the thread that entered it.

    What `torch.compile` has made runs uncompiled while a context is open, in all threads. Functions
    of `torch.jit` are not seen into. A block that `torch.utils.checkpoint` computes again must be
    decorated: `checkpoint(autocast("bf16")(block), x)`.

    Args:
        precision: `bf16` or `fp16`; by default what `amp.data_type` says, else BF16. It may be one
            that the machine has no kernels for: torch computes it, slowly.
        amp: edits of the lists, by op types of torch's dispatcher such as `softmax`, and where to
            write what was decided. What is not given is looked up in the environment, as
            everywhere. `unsafe_force_all` puts all but the CLEAR list on the ALLOW list.
            `log_path` is a folder: `autocast_bf16.tsv` in it has the op types, the list of each,
            the dtype of its result and how often it ran.

    Raises:
        UnknownPrecisionError: there is no such precision.
        UnknownOperatorError: an edit names an op type that torch does not have.
        ConfigurationError: the precision has not 16 bits, an edit does not fit the lists, an
            option cannot be understood, or the folder cannot be written to.
    """

    @_uncompiled
    def __init__(
        self,
        precision: str | Precision | None = None,
        amp: AutoMixedPrecisionOptions | None = None,
    ) -> None:
        chosen, settings = requested("autocast", precision, amp, users_environment())
        if not chosen.is_16_bit:
            raise ConfigurationError(
                f"autocast takes a 16-bit precision, bf16 or fp16, got {str(chosen)!r}"
            )
        self.precision = chosen
        self._given = (precision, amp)
        self.lists, rules = _edited(chosen, settings.edits, settings.force_all)
        folder = writable_folder(settings.log_path)
        self._log = None if folder is None else folder.resolve() / f"autocast_{chosen}.tsv"
        with _lock:
            counts = None if self._log is None else _logs.setdefault(self._log, Counter())
        self._policy = Policy(DTYPES[chosen], self.lists, rules, counts)

    @_uncompiled
    def __enter__(self) -> autocast:
        """Let the lists count."""
        if _thread.mode is None:
            with ExitStack() as undone:
                _torchs_own_off(undone)
                _thread.mode = undone.enter_context(FourListsMode())
                _thread.leave = undone.pop_all()
        _thread.mode.policies.append(self._policy)
        return self

    @_uncompiled
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Let what counted before count again."""
        mode = _thread.mode
        assert mode is not None  # it was entered
        mode.policies.pop()
        if not mode.policies:
            _thread.mode = None
            _thread.leave.close()
        if self._log is not None and self._policy.counts:
            try:
                with _lock:
                    self._log.write_text(table(self._policy.counts), encoding="utf-8")
            except OSError as problem:
                logger.warning("what was decided was not written to %s: %s", self._log, problem)

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        """A copy, also in another process, is made of what was given."""
        return type(self), self._given


class _Thread(threading.local):
    """What is on in a thread."""

    mode: FourListsMode | None = None
    leave: ExitStack


_thread = _Thread()


def is_open() -> bool:
    """Whether an `autocast` counts in this thread."""
    return _thread.mode is not None


def _torchs_own_off(undone: ExitStack) -> None:
    """Switch off what would stand between the lists and the kernels."""
    for device in AUTOCAST_DEVICES:
        if torch.is_autocast_enabled(device):
            torch.set_autocast_enabled(device, False)
            undone.callback(torch.set_autocast_enabled, device, True)
    torch.set_autocast_enabled(_NO_DEVICE, True)
    undone.callback(torch.set_autocast_enabled, _NO_DEVICE, False)
    if "torch._dynamo" in sys.modules:  # to import it takes seconds, and is no use here
        undone.enter_context(torch.compiler.set_stance("force_eager"))


@cache
def _edited(
    precision: Precision, edits: tuple[ListEdit, ...], force_all: bool
) -> tuple[FourLists, dict[Any, Rule]]:
    """The lists of a precision with edits, and what they came to say of functions so far."""
    kept, warnings = known_edits(edits, "pytorch", all_op_types)
    for warning in warnings:
        logger.warning(warning)
    lists = canonical_lists(precision).translated(TYPES).edited(kept)
    if force_all:
        lists = lists.allowing(all_op_types() - lists.clear)
    return lists, {}
