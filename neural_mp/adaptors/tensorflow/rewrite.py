"""TensorFlow's own mixed precision pass, switched on and off while a program runs."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass

import tensorflow as tf
from tensorflow.python.util import _pywrap_util_port

from neural_mp.adaptors.tensorflow.int8_accumulation import bf16_obstacle
from neural_mp.adaptors.tensorflow.kernel_registry import every_op_type
from neural_mp.adaptors.tensorflow.runtime_lists import PASSES, PREFIX, runtime_lists
from neural_mp.amp import (
    EDIT_OPTIONS,
    FORCE_ALL,
    INFER_AS_DENY,
    LEVEL,
    AmpSettings,
    check_known,
)
from neural_mp.core.environment import restore_users, set_own
from neural_mp.core.log_folder import prepared_folder
from neural_mp.core.precision import Precision
from neural_mp.errors import ConfigurationError, UnsupportedPrecisionError


@dataclass(frozen=True, eq=False)
class Request:
    """One wish for the pass: its precision, and the variables that it is to read."""

    precision: Precision
    variables: Mapping[str, str]


_lock = threading.RLock()
#: What was asked for and not withdrawn yet, in order; the last counts.
_requests: list[Request] = []
#: The switches of the passes as they were before the first; none while there is no request.
_switches: dict[str, bool] = {}


def request(precision: Precision, amp: AmpSettings) -> Request:
    """Switch the pass on, for all functions, until the request is withdrawn.

    Raises:
        UnsupportedPrecisionError: there is no pass for the precision, or none that works here.
        UnknownOperatorError: an edit names an op type that TensorFlow does not have.
        ConfigurationError: an edit does not fit TensorFlow's lists, or every op is to be forced
            into BF16, which its pass refuses; the folder for its log cannot be made.
    """
    if precision not in PASSES:
        raise UnsupportedPrecisionError(
            f"TensorFlow has a pass for bf16 and one for fp16, none for {precision}"
        )
    if precision is Precision.FP16 and not tf.config.list_physical_devices("GPU"):
        raise UnsupportedPrecisionError(
            "TensorFlow's pass for fp16 looks at ops on a GPU only, and there is none; use bf16"
        )
    failure = bf16_obstacle() if precision is Precision.BF16 else None
    if failure is not None:
        raise UnsupportedPrecisionError(failure)
    made = Request(precision, _variables(precision, amp))
    with _lock:
        _requests.append(made)
        _apply()
    return made


def withdraw(made: Request) -> None:
    """Take a request back, in whatever order; with the last, all is as it was before the first."""
    with _lock:
        if made in _requests:
            _requests.remove(made)
            _apply()


def _apply() -> None:
    names = [name for name, _ in PASSES.values()]
    if not _switches:
        found = dict(tf.config.optimizer.get_experimental_options())
        _switches.update({name: found.get(name, False) for name in names})
    if _requests:
        wanted = _requests[-1]
        set_own(PREFIX, wanted.variables)
        name, _ = PASSES[wanted.precision]
        tf.config.optimizer.set_experimental_options({other: other == name for other in names})
        return
    restore_users(PREFIX)
    tf.config.optimizer.set_experimental_options(dict(_switches))
    _switches.clear()


def _variables(precision: Precision, amp: AmpSettings) -> dict[str, str]:
    """What the pass reads from the environment."""
    check_known(amp.edits, every_op_type())
    lists = runtime_lists(precision)
    if lists is None:
        raise UnsupportedPrecisionError(_no_pass(precision))
    lists.edited(amp.edits)  # of a type on two lists, the pass itself would fail without a word
    found = {
        f"{PREFIX}{option.upper()}": ",".join(
            edit.op_type for edit in amp.edits if (edit.list, edit.adds) == which
        )
        for option, which in EDIT_OPTIONS.items()
    }
    if amp.force_all:
        if precision is Precision.BF16:
            raise ConfigurationError(
                f"{amp.origins['unsafe_force_all']} is set, which TensorFlow's pass for bf16 does "
                f"not take; put the op types on the allow list instead"
            )
        found[LEVEL] = FORCE_ALL
    elif amp.infer_as_deny:
        found[LEVEL] = INFER_AS_DENY
    folder = prepared_folder(amp.log_path)
    if folder is not None:
        found[f"{PREFIX}LOG_PATH"] = str(folder)
    return {key: value for key, value in found.items() if value}


def _no_pass(precision: Precision) -> str:
    """Why TensorFlow's pass does nothing here."""
    if precision is Precision.BF16 and not _pywrap_util_port.IsMklEnabled():
        return (
            "TensorFlow's pass for bf16 is a part of oneDNN, which is off here; set the "
            "environment variable TF_ENABLE_ONEDNN_OPTS=1 before TensorFlow is imported"
        )
    return f"this TensorFlow has no working pass for {precision}"
