"""The global policy of Keras, with layers that stay in float32, and what `compile` makes of it."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import keras

from neural_mp.adaptors.tensorflow.training.loss_scale_optimizer import LossScaleOptimizer
from neural_mp.errors import ConfigurationError, did_you_mean

FLOAT32 = "float32"
FLOAT16 = "float16"

#: The names that `set_policy` was told to keep, and those of them that fitted a layer since.
_keep: tuple[str, ...] = ()
_fitted: set[str] = set()
#: The policy that `set_policy` set for them.
_policy: Any = None


def set_policy(name: str, keep: tuple[str, ...]) -> None:
    """Make a policy count for layers to come, but for those whose path fits a name.

    Raises:
        ConfigurationError: a name is no regular expression.
    """
    global _keep, _policy
    for pattern in keep:
        _compiled(pattern)
    _policy = keras.DTypePolicy(name)
    if keep:
        # A map of Keras's own, so that files of the model load where this package is missing. It
        # takes one key that fits a path, and refuses two: so all names make one expression.
        own = keras.DTypePolicy(FLOAT32)
        _policy = keras.dtype_policies.DTypePolicyMap(name, {_path_expression(keep): own})
    keras.config.set_dtype_policy(_policy)
    _keep = keep
    _fitted.clear()
    watch_compile()
    if keep:
        watch_layers()


def kept_layers(model: keras.Model) -> tuple[str, ...]:
    """The paths of the layers that the names of `set_policy` keep in float32.

    Raises:
        ConfigurationError: it is no Keras model; a name fits none of its layers, nor those of a
            model asked before.
    """
    found = tuple(layers_of(model))
    fitting = _fitting(found)
    inside = {id(inner) for layer in fitting for inner in layer._flatten_layers()}
    kept = [layer for layer in found if id(layer) in inside]
    for layer in kept:
        if layer.path is None:  # it has no entry in the map
            layer.dtype_policy = FLOAT32
    missing = [name for name in _names_in_force() if name not in _fitted]
    if missing:
        known = {word for layer in found for word in (layer.name, path_of(layer))}
        raise ConfigurationError(
            f"set_policy(keep=…) names {missing[0]!r}, which fits no layer of model "
            f"{model.name!r}{did_you_mean(missing[0], known)}"
        )
    return tuple(map(path_of, kept))


def layers_of(model: object) -> Iterator[Any]:
    """All layers of a model, those within others included, but for itself and its inputs.

    Raises:
        ConfigurationError: it is no Keras model.
    """
    if not isinstance(model, keras.Model):
        raise ConfigurationError(f"expected a Keras model, got {model!r}")
    for layer in model._flatten_layers(include_self=False):
        if not isinstance(layer, keras.layers.InputLayer):
            yield layer


def path_of(layer: keras.Layer) -> str:
    """The path of a layer; its name, before it is built."""
    return str(layer.path or layer.name)


def name_in(model: keras.Model, layer: keras.Layer) -> str:
    """The path of a layer in a model, without the name of the model, which Keras numbers."""
    return path_of(layer).removeprefix(f"{model.name}/")


def computes_in_float16(model: keras.Model) -> bool:
    """Whether a layer of the model computes in float16."""
    return any(layer.compute_dtype == FLOAT16 for layer in layers_of(model))


def watch_layers() -> None:
    """Let a layer whose name is kept be made in float32.

    A map of policies goes by paths, and a layer that has nothing to build, such as `Softmax`, has
    none: Keras would run it in 16 bits, whatever the map says.
    """
    plain = keras.layers.Layer.__init__
    if hasattr(plain, "keras_init"):
        return

    @functools.wraps(plain)
    def init_and_keep(self: keras.Layer, **kwargs: object) -> None:
        plain(self, **kwargs)
        names = _names_in_force() if kwargs.get("dtype") is None else ()
        if names and _compiled(_path_expression(names)).fullmatch(self.name):
            self.dtype_policy = FLOAT32

    init_and_keep.keras_init = plain  # type: ignore[attr-defined]
    keras.layers.Layer.__init__ = init_and_keep


def watch_compile() -> None:
    """Let `compile` scale the loss wherever a layer computes in float16, and check kept names.

    Keras scales the loss only where the policy of the model itself is named `mixed_float16`: not
    where policies belong to layers, or come from a map.
    """
    # Where it is defined: Keras does not compile a model that it loads from a file if the `compile`
    # of the model's class is another.
    owner = next(kind for kind in keras.Model.__mro__ if "compile" in vars(kind))
    plain = owner.compile
    if hasattr(plain, "keras_compile"):
        return
    signature = inspect.signature(plain)

    @functools.wraps(plain)
    def compile_with_loss_scale(self: keras.Model, *args: object, **kwargs: object) -> None:
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        if self.built:
            kept_layers(self)
        else:  # what it makes when it is built is not known yet
            _fitting(tuple(layers_of(self)))
        given = bound.arguments
        if given.get("auto_scale_loss") and computes_in_float16(self):
            given["optimizer"] = scaled(given["optimizer"])
        plain(*bound.args, **bound.kwargs)

    compile_with_loss_scale.keras_compile = plain  # type: ignore[attr-defined]
    owner.compile = compile_with_loss_scale


def scaled(optimizer: object) -> Any:
    """An optimizer that scales the loss: the given one, if it does, else one around it."""
    made = keras.optimizers.get(optimizer)
    if made is None or isinstance(made, keras.optimizers.LossScaleOptimizer):
        return made
    return LossScaleOptimizer(made)


def _names_in_force() -> tuple[str, ...]:
    """The names to keep; none once the global policy is another, which Keras itself can set."""
    return _keep if keras.config.dtype_policy() is _policy else ()


def _fitting(layers: Collection[Any]) -> list[Any]:
    """The layers that the names of `set_policy` fit."""
    found: dict[int, Any] = {}
    for name in _names_in_force():
        expression = _compiled(_path_expression([name]))
        fits = {id(layer): layer for layer in layers if expression.fullmatch(path_of(layer))}
        found.update(fits)
        if fits:
            _fitted.add(name)
    return list(found.values())


def _path_expression(names: Collection[str]) -> str:
    """Fits the paths in which one of the names fits the last part, several, or what is around."""
    return rf"(?:.*/)?(?:{'|'.join(names)})(?:/.*)?"


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ConfigurationError(
            f"keep names {pattern!r}, which is neither a name nor a regular expression: {error}"
        ) from None


def unit_layers(model: keras.Model) -> dict[str, list[Any]]:
    """The layers that can be put into 16 bits by themselves: name in the model → layers.

    A layer with layers in it is one of them, as a whole: its own code adds up what those give.
    Models in a model are looked into. Layers of one name, which are rare, go together.
    """
    found: dict[str, list[Any]] = {}
    for layer in _units(model):
        found.setdefault(name_in(model, layer), []).append(layer)
    return found


def _units(model: keras.Model) -> Iterator[Any]:
    for layer in model._flatten_layers(include_self=False, recursive=False):
        if isinstance(layer, keras.Model):
            yield from _units(layer)
        elif not isinstance(layer, keras.layers.InputLayer):
            yield layer


@contextmanager
def policies_of(model: keras.Model) -> Iterator[Callable[[Collection[Any], str], None]]:
    """A function that sets the policy of layers, with those in them, until the context ends."""
    before = [(layer, layer._dtype_policy) for layer in model._flatten_layers()]
    try:
        yield put_policy
    finally:
        for layer, policy in before:
            layer._dtype_policy = policy


def put_policy(layers: Collection[Any], name: str) -> None:
    """Set the policy of layers that may be built already, and of all layers in them."""
    policy = keras.DTypePolicy(name)
    for layer in layers:
        for inner in layer._flatten_layers():
            # Not by the public setter: it writes into a map of policies that other models share.
            inner._dtype_policy = policy
