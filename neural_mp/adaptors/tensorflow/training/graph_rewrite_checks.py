"""Checks of sessions and policies for the graph rewrite."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
from keras.src.backend.common import global_state
from tensorflow.core.protobuf import config_pb2
from tensorflow.core.protobuf.rewriter_config_pb2 import RewriterConfig
from tensorflow.python.client.session import BaseSession
from tensorflow.python.eager import context
from tensorflow.python.framework import ops
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext
from tensorflow.python.training.experimental import mixed_precision_global_state as state

from neural_mp.adaptors.tensorflow.amp_pass import PASSES
from neural_mp.adaptors.tensorflow.training.graph_rewrite_state import rewrite_is_enabled
from neural_mp.core.precision import Precision
from neural_mp.errors import ArgumentValueError


def check_step() -> None:
    """Check that an enabled rewrite reaches a training step.

    Called by optimizers at the start of a step; in a graph, on tracing.

    Raises:
        ConfigurationError: a mixed Keras policy was set after the rewrite was enabled.
    """
    if not rewrite_is_enabled():
        return
    refuse_mixed_policy()
    if GraphOrParentsInXlaContext(ops.get_default_graph()):
        warnings.warn(
            "the graph rewrite is enabled, but has no effect on this step, because XLA compiles "
            "the step; set jit_compile=False in compile() or tf.function",
            stacklevel=2,
        )


def _describe_mixed_policy(policy: keras.DTypePolicy) -> str | None:
    """Return a Keras policy as text if it is mixed: compute and variable types differ.

    None if all its layers use one type. In a `DTypePolicyMap`, every entry counts.
    """
    if _is_mixed(policy):
        return repr(policy.name)
    if isinstance(policy, keras.dtype_policies.DTypePolicyMap):
        for path, entry in policy.items():
            if _is_mixed(entry):
                return f"map with {entry.name!r} for {path!r}"
    return None


def refuse_mixed_policy() -> None:
    """Raise `ArgumentValueError` if the global Keras policy is mixed."""
    _refuse_mixed_policy(keras.config.dtype_policy())


def _refuse_mixed_policy(given: keras.DTypePolicy) -> None:
    policy = _describe_mixed_policy(given)
    if policy is not None:
        raise ArgumentValueError(
            f"the graph rewrite cannot be combined with the Keras policy {policy}: both convert "
            f"ops to 16 bits; for the rewrite, call keras.config.set_dtype_policy('float32'), for "
            f"the policy, disable_mixed_precision_graph_rewrite()"
        )


@contextmanager
def mixed_policies_refused() -> Iterator[None]:
    """Let every function that sets the global Keras policy refuse a mixed one in this context.

    Keras has three names for its setter and no hook, so the function below it is wrapped.
    """
    original = global_state.set_global_attribute

    def set_global_attribute(name: str, value: object) -> None:
        if name == "dtype_policy" and value is not None and rewrite_is_enabled():
            _refuse_mixed_policy(value)
        original(name, value)

    global_state.set_global_attribute = set_global_attribute
    try:
        yield
    finally:
        if global_state.set_global_attribute is set_global_attribute:
            global_state.set_global_attribute = original


def _is_mixed(policy: keras.DTypePolicy) -> bool:
    return bool(policy.compute_dtype != policy.variable_dtype)


def sessions_without_rewrite() -> int:
    """Return the number of open sessions in which a rewrite is off, and stays off.

    TensorFlow's own flag is never reset and also covers closed sessions, so if it is set, the
    sessions themselves are searched.
    """
    if not state.non_mixed_precision_session_created():
        return 0
    count = 0
    for session in _find_sessions():
        if getattr(session, "_closed", True) or getattr(session, "_config", None) is None:
            continue
        rewrites = session._config.graph_options.rewrite_options
        on = any(getattr(rewrites, option) == RewriterConfig.ON for option, _ in PASSES.values())
        # Configs that list their passes never follow a switch.
        count += not on and not rewrites.optimizers
    return count


def _find_sessions() -> list[BaseSession]:
    """Return all sessions of this process.

    Instances refer to their class. `gc.get_referrers` searches them without a Python step for each
    of the many objects of a process.
    """
    classes = [BaseSession]
    for base in classes:
        classes.extend(base.__subclasses__())
    return [session for session in gc.get_referrers(*classes) if type(session) in classes]


@contextmanager
def enable_for_sessions(precision: Precision) -> Iterator[None]:
    """Enable the rewrite for new sessions within the context, unless their config forbids it.

    Sessions without a config follow automatically. For sessions with a config, TensorFlow has a
    switch for FP16 only. BF16 has none, nor another way to change the config of a session from
    outside, so the constructor shared by all sessions is wrapped meanwhile.
    """
    if precision is Precision.FP16:
        previous = state.is_mixed_precision_graph_rewrite_enabled()
        state.set_mixed_precision_graph_rewrite_enabled(True)
        try:
            yield
        finally:
            state.set_mixed_precision_graph_rewrite_enabled(previous)
        return
    original, follows = BaseSession.__init__, True

    def construct_session(
        self: BaseSession, target: str = "", graph: ops.Graph | None = None, config: object = None
    ) -> None:
        effective = context.context().config if config is None else config
        rewritten = _config_with_rewrite(effective, precision) if follows else None
        if rewritten is None:
            original(self, target, graph, config=config)
            return
        previous = state.non_mixed_precision_session_created()
        original(self, target, graph, config=rewritten)
        # TensorFlow checks its FP16 switch only, and would count the session as one without.
        state.set_non_mixed_precision_session_created(previous)

    BaseSession.__init__ = construct_session
    try:
        yield
    finally:
        follows = False  # disables a wrapper that stays because the constructor was wrapped again
        if BaseSession.__init__ is construct_session:
            BaseSession.__init__ = original


def _config_with_rewrite(config: object, precision: Precision) -> Any | None:
    """Return a copy of the config with the rewrite on; None if forbidden or no config."""
    if not isinstance(config, config_pb2.ConfigProto):
        return None
    rewrites = config.graph_options.rewrite_options
    option, _ = PASSES[precision]
    if getattr(rewrites, option) == RewriterConfig.OFF or rewrites.optimizers:
        return None
    rewritten = config_pb2.ConfigProto()
    rewritten.CopyFrom(config)
    setattr(rewritten.graph_options.rewrite_options, option, RewriterConfig.ON)
    return rewritten
