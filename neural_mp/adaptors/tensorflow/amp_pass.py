"""TensorFlow's own mixed precision pass: offline runs and a process-wide switch."""

from __future__ import annotations

import logging
import os
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import tensorflow as tf
from tensorflow.python.util import _pywrap_util_port

from neural_mp.adaptors.tensorflow.graph.runtime import every_op_type, run_offline_passes
from neural_mp.adaptors.tensorflow.graph.tensor_graph import GraphDef
from neural_mp.adaptors.tensorflow.int8_accumulation import find_bf16_obstacle
from neural_mp.amp import (
    EDIT_OPTIONS,
    FORCE_ALL,
    INFER_AS_DENY,
    LEVEL,
    AmpSettings,
    FourLists,
    check_known,
)
from neural_mp.core.precision import Precision
from neural_mp.errors import ConfigurationError, UnsupportedPrecisionError
from neural_mp.io.files import create_writable_folder
from neural_mp.util.system.environment import override_variables, restore_variables

logger = logging.getLogger(__name__)

#: Prefix of the environment variables that TensorFlow's pass reads.
PREFIX = "TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_"
#: Precision → its pass, and the settings the pass needs on a machine without a GPU.
PASSES: Mapping[Precision, tuple[str, Mapping[str, str]]] = {
    Precision.BF16: ("auto_mixed_precision_onednn_bfloat16", {}),
    Precision.FP16: ("auto_mixed_precision", {f"{PREFIX}SIMULATE_GPU": "true"}),
}


@cache
def read_runtime_lists(precision: Precision) -> FourLists | None:
    """Return the lists of the installed TensorFlow; None if its pass cannot report them."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            run_pass(_build_matmul_graph(), precision, ["x"], ["y"], {f"{PREFIX}LOG_PATH": folder})
        except (tf.errors.OpError, ValueError):
            logger.warning("TensorFlow's pass for %s fails", precision, exc_info=True)
        files = sorted(Path(folder).glob("paintbuckets*"))
        text = files[0].read_text(encoding="utf-8") if files else ""
    return _parse_lists(text) if text else None


def run_pass(
    graph: GraphDef,
    precision: Precision,
    inputs: Iterable[str],
    outputs: Iterable[str],
    variables: Mapping[str, str] | None = None,
) -> GraphDef:
    """Return a graph rewritten by TensorFlow's own mixed precision pass, for FP16 as on a GPU.

    The pass leaves the nodes of the outputs alone. `variables` are further settings, as environment
    variables.

    Raises:
        tf.errors.OpError: the pass refuses the graph.
    """
    name, settings = PASSES[precision]
    with _set_environment({**settings, **(variables or {})}):
        return run_offline_passes(graph, [name], inputs, outputs)


def _build_matmul_graph() -> GraphDef:
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, (None, 4), "x")
        tf.identity(tf.matmul(x, np.ones((4, 4), np.float32)), "y")
    return graph.as_graph_def()


def _parse_lists(text: str) -> FourLists:
    lists: dict[str, set[str]] = {}
    current: set[str] = set()
    for line in text.splitlines():
        if line.endswith(":"):
            current = lists.setdefault(line[:-1].lower().removesuffix("list").strip(), set())
        elif line.strip():
            current.add(line.strip())
    return FourLists(
        **{key: frozenset(lists.get(key, ())) for key in ("allow", "deny", "infer", "clear")}
    )


@contextmanager
def _set_environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables within the context, hiding the user's settings of the pass."""
    touched = {key for key in os.environ if key.startswith(PREFIX)} | set(values)
    previous = {key: os.environ.pop(key) for key in touched if key in os.environ}
    os.environ.update(values)
    try:
        yield
    finally:
        for key in values:
            os.environ.pop(key, None)
        os.environ.update(previous)


@dataclass(frozen=True, eq=False)
class _Request:
    """A request for the pass: its precision, and the environment variables it reads."""

    precision: Precision
    variables: Mapping[str, str]


_lock = threading.RLock()
#: Active requests in order; the last takes effect.
_requests: list[_Request] = []
#: Optimizer options of the passes before the first request; empty if there are no requests.
_switches: dict[str, bool] = {}


@contextmanager
def enable_pass(precision: Precision, amp: AmpSettings) -> Iterator[None]:
    """Enable the pass for all functions in this context; contexts may end in any order.

    The end of the last context restores the original options.

    Raises:
        UnsupportedPrecisionError: the precision has no pass, or none that works here.
        UnknownOperatorError: an edit names an op type that TensorFlow does not have.
        ConfigurationError: an edit does not fit TensorFlow's lists, every op is to be forced
            into BF16, which the pass refuses, or the log folder cannot be created.
    """
    if precision not in PASSES:
        raise UnsupportedPrecisionError(
            f"precision of TensorFlow's pass must be bf16 or fp16, got {precision}"
        )
    if precision is Precision.FP16 and not tf.config.list_physical_devices("GPU"):
        raise UnsupportedPrecisionError(
            "TensorFlow's pass for fp16 requires a GPU, but none is available; use bf16"
        )
    failure = find_bf16_obstacle() if precision is Precision.BF16 else None
    if failure is not None:
        raise UnsupportedPrecisionError(failure)
    request = _Request(precision, _make_environment_variables(precision, amp))
    with _lock:
        _requests.append(request)
        _apply_last_request()
    try:
        yield
    finally:
        with _lock:
            _requests.remove(request)
            _apply_last_request()


def _apply_last_request() -> None:
    names = [name for name, _ in PASSES.values()]
    if not _switches:
        options = dict(tf.config.optimizer.get_experimental_options())
        _switches.update({name: options.get(name, False) for name in names})
    if _requests:
        request = _requests[-1]
        override_variables(PREFIX, request.variables)
        name, _ = PASSES[request.precision]
        tf.config.optimizer.set_experimental_options({option: option == name for option in names})
        return
    restore_variables(PREFIX)
    tf.config.optimizer.set_experimental_options(dict(_switches))
    _switches.clear()


def _make_environment_variables(precision: Precision, amp: AmpSettings) -> dict[str, str]:
    check_known(amp.edits, every_op_type())
    lists = read_runtime_lists(precision)
    if lists is None:
        raise UnsupportedPrecisionError(_explain_missing_pass(precision))
    lists.edited(amp.edits)  # the pass itself fails silently on a type that is on two lists
    variables = {
        f"{PREFIX}{option.upper()}": ",".join(
            edit.op_type for edit in amp.edits if (edit.list, edit.adds) == which
        )
        for option, which in EDIT_OPTIONS.items()
    }
    if amp.force_all:
        if precision is Precision.BF16:
            raise ConfigurationError(
                f"{amp.origins['unsafe_force_all']} is set, but not supported by TensorFlow's pass "
                f"for bf16; add the op types to the allow list instead"
            )
        variables[LEVEL] = FORCE_ALL
    elif amp.infer_as_deny:
        variables[LEVEL] = INFER_AS_DENY
    folder = create_writable_folder(amp.log_path)
    if folder is not None:
        variables[f"{PREFIX}LOG_PATH"] = str(folder)
    return {key: value for key, value in variables.items() if value}


def _explain_missing_pass(precision: Precision) -> str:
    if precision is Precision.BF16 and not _pywrap_util_port.IsMklEnabled():
        return (
            "TensorFlow's pass for bf16 requires oneDNN, which is disabled; set the environment "
            "variable TF_ENABLE_ONEDNN_OPTS=1 before TensorFlow is imported"
        )
    return f"the installed TensorFlow has no working pass for {precision}"
