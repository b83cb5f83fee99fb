"""What does not go together with the graph rewrite: Keras policies, and XLA."""

from __future__ import annotations

import warnings
from typing import Any

import keras
from tensorflow.python.framework import ops
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

from neural_mp.adaptors.tensorflow.training.graph_rewrite_state import rewrite_is_enabled
from neural_mp.errors import ConfigurationError


def check_step() -> None:
    """Make sure that a step of training is one that the rewrite reaches, where it is enabled.

    Optimizers call it where a step begins: in a graph, that is when it is traced.

    Raises:
        ConfigurationError: a mixed Keras policy was set after the rewrite was enabled.
    """
    if not rewrite_is_enabled():
        return
    refuse_mixed_policy()
    if GraphOrParentsInXlaContext(ops.get_default_graph()):
        warnings.warn(
            "the graph rewrite is enabled, and has no effect on this step: XLA compiles it. Use "
            "jit_compile=False in compile() or tf.function",
            stacklevel=2,
        )


def mixed_policy() -> str | None:
    """The global Keras policy in words, if layers compute in another type than they keep.

    None where layers made by it do all in one type. Of a `DTypePolicyMap`, every entry counts.
    """
    policy = keras.config.dtype_policy()
    if _is_mixed(policy):
        return repr(policy.name)
    if isinstance(policy, keras.dtype_policies.DTypePolicyMap):
        for path, entry in policy.items():
            if _is_mixed(entry):
                return f"a map with {entry.name!r} for {path!r}"
    return None


def refuse_mixed_policy() -> None:
    """Make sure that the global Keras policy leaves the graph rewrite its work.

    Raises:
        ConfigurationError: it is a mixed one.
    """
    policy = mixed_policy()
    if policy is not None:
        raise ConfigurationError(
            f"the Keras policy is {policy}, and the graph rewrite cannot be used with it: both put "
            f"ops into 16 bits. Take one of them: keras.config.set_dtype_policy('float32') for the "
            f"rewrite, disable_mixed_precision_graph_rewrite() for the policy"
        )


def _is_mixed(policy: Any) -> bool:
    return bool(policy.compute_dtype != policy.variable_dtype)
