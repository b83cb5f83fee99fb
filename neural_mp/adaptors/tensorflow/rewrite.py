"""TensorFlow's own mixed precision pass, switched on and off while a program runs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import tensorflow as tf

from neural_mp.adaptors.tensorflow.amp_lists import PASSES, PREFIX, runtime_lists
from neural_mp.adaptors.tensorflow.registry import every_op_type
from neural_mp.amp import EDIT_OPTIONS, AmpSettings, check_known
from neural_mp.errors import ConfigurationError, UnsupportedPrecisionError
from neural_mp.precision import Precision


@dataclass(frozen=True)
class State:
    """What is set of the passes: their switches, and the variables that they read."""

    switches: Mapping[str, bool]
    variables: Mapping[str, str]


#: What was set before the pass was first switched on; None while it is off.
_before: State | None = None


def state() -> State:
    """What is set now."""
    found = dict(tf.config.optimizer.get_experimental_options())
    return State(
        {name: found.get(name, False) for name, _ in PASSES.values()},
        {key: value for key, value in os.environ.items() if key.startswith(PREFIX)},
    )


def is_on() -> bool:
    """Whether the pass was switched on here."""
    return _before is not None


def restore(wanted: State) -> None:
    """Set just this."""
    for key in [key for key in os.environ if key.startswith(PREFIX)]:
        del os.environ[key]
    os.environ.update(wanted.variables)
    tf.config.optimizer.set_experimental_options(dict(wanted.switches))


def enable(precision: Precision, amp: AmpSettings) -> None:
    """Switch the pass on, for all functions, in place of what may have been switched on before.

    Raises:
        UnsupportedPrecisionError: there is no pass for the precision, or none that works here.
        UnknownOperatorError: an edit names an op type that TensorFlow does not have.
        ConfigurationError: an edit does not fit TensorFlow's lists, or every op is to be forced
            into BF16, which its pass refuses; the folder for its log cannot be made.
    """
    global _before
    if precision not in PASSES:
        raise UnsupportedPrecisionError(
            f"TensorFlow has a pass for bf16 and one for fp16, none for {precision}"
        )
    if precision is Precision.FP16 and not tf.config.list_physical_devices("GPU"):
        raise UnsupportedPrecisionError(
            "TensorFlow's pass for fp16 looks at ops on a GPU only, and there is none; use bf16"
        )
    variables = _variables(precision, amp)
    if _before is None:
        _before = state()
    restore(State({name: p is precision for p, (name, _) in PASSES.items()}, variables))


def disable() -> None:
    """Set everything as it was before; without effect if the pass was not switched on here."""
    global _before
    if _before is not None:
        restore(_before)
    _before = None


def _variables(precision: Precision, amp: AmpSettings) -> dict[str, str]:
    """What the pass reads from the environment."""
    check_known(amp.edits, every_op_type())
    lists = runtime_lists(precision)
    if lists is None:
        raise UnsupportedPrecisionError(f"this TensorFlow has no working pass for {precision}")
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
        found[f"{PREFIX}LEVEL"] = "UNSAFE_FORCE_ALL"
    if amp.log_path is not None:
        found[f"{PREFIX}LOG_PATH"] = _made(amp.log_path)
    return {key: value for key, value in found.items() if value}


def _made(folder: str) -> str:
    path = Path(folder).expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"log_path {folder!r} cannot be made: {error}") from error
    return str(path)
