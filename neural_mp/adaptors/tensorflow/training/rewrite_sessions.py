"""Sessions of TensorFlow 1 and the graph rewrite: which follow it, and which do not."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tensorflow.core.protobuf import config_pb2
from tensorflow.core.protobuf.rewriter_config_pb2 import RewriterConfig
from tensorflow.python.client.session import BaseSession
from tensorflow.python.eager import context
from tensorflow.python.training.experimental import mixed_precision_global_state as state

from neural_mp.adaptors.tensorflow.runtime_lists import PASSES
from neural_mp.core.precision import Precision


def sessions_without_rewrite() -> int:
    """How many sessions are open that no rewrite is on in, nor can be switched on any more.

    TensorFlow's own flag is never taken back: it also speaks of sessions that are closed. So where
    it is set, the sessions themselves are looked for.
    """
    if not state.non_mixed_precision_session_created():
        return 0
    return sum(
        issubclass(type(found), BaseSession) and _is_open(found) and _is_plain(found._config)
        for found in gc.get_objects()
    )


@contextmanager
def sessions_follow(precision: Precision) -> Iterator[None]:
    """For a while, let new sessions rewrite their graphs, unless their config forbids it.

    A session without a config does so by itself. For one with a config, TensorFlow has a switch of
    its own, but for FP16 alone. For BF16 there is none, nor any other place where the config of a
    session could be changed from outside; so the one constructor that all sessions share is
    wrapped meanwhile.
    """
    if precision is Precision.FP16:
        before = state.is_mixed_precision_graph_rewrite_enabled()
        state.set_mixed_precision_graph_rewrite_enabled(True)
        try:
            yield
        finally:
            state.set_mixed_precision_graph_rewrite_enabled(before)
        return
    original, follows = BaseSession.__init__, True

    def construct(self: Any, target: str = "", graph: Any = None, config: Any = None) -> None:
        given = context.context().config if config is None else config
        wanted = _following(given, precision) if follows else None
        if wanted is None:
            original(self, target, graph, config=config)
            return
        before = state.non_mixed_precision_session_created()
        original(self, target, graph, config=wanted)
        # TensorFlow looks at the switch of FP16 only, and counts this one among those without.
        state.set_non_mixed_precision_session_created(before)

    BaseSession.__init__ = construct
    try:
        yield
    finally:
        follows = False  # where somebody has wrapped the constructor since, this one stays within
        if BaseSession.__init__ is construct:
            BaseSession.__init__ = original


def _following(config: Any, precision: Precision) -> Any | None:
    """A copy of the config with the rewrite on; None where it is not to be, or TensorFlow errs."""
    if not isinstance(config, config_pb2.ConfigProto):
        return None
    rewrites = config.graph_options.rewrite_options
    option, _ = PASSES[precision]
    if getattr(rewrites, option) == RewriterConfig.OFF or rewrites.optimizers:
        return None
    wanted = config_pb2.ConfigProto()
    wanted.CopyFrom(config)
    setattr(wanted.graph_options.rewrite_options, option, RewriterConfig.ON)
    return wanted


def _is_open(session: Any) -> bool:
    return not getattr(session, "_closed", True) and getattr(session, "_config", None) is not None


def _is_plain(config: Any) -> bool:
    """Whether no rewrite is on; configs that list their passes never follow a switch."""
    rewrites = config.graph_options.rewrite_options
    on = any(getattr(rewrites, option) == RewriterConfig.ON for option, _ in PASSES.values())
    return not on and not rewrites.optimizers
