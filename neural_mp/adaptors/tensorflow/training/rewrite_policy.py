"""Keras policies and the graph rewrite: of the two, one may put ops into 16 bits."""

from __future__ import annotations

from typing import Any

import keras

from neural_mp.errors import ConfigurationError


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
