"""Global Keras policy with layers that stay in float32, and loss scaling in `compile`."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import keras

from neural_mp.adaptors.tensorflow.training.loss_scale_optimizer import LossScaleOptimizer
from neural_mp.core.precision import Precision
from neural_mp.errors import ConfigurationError, UnknownOperatorError, did_you_mean

FLOAT32 = "float32"
FLOAT16 = "float16"

#: Names to keep of `set_policy`, and those that have matched a layer so far.
_keep: tuple[str, ...] = ()
_matched: set[str] = set()
#: Policy that `set_policy` set for these names.
_policy: Any = None


def set_policy(name: str, keep: tuple[str, ...]) -> None:
    """Set the policy of future layers, except those whose path matches a name."""
    global _keep, _policy
    for pattern in keep:
        _compile_pattern(pattern)
    _policy = keras.DTypePolicy(name)
    if keep:
        # A Keras map, so that files of the model load without this package. A path must match
        # exactly one key, so all names form one expression.
        own = keras.DTypePolicy(FLOAT32)
        _policy = keras.dtype_policies.DTypePolicyMap(name, {_make_path_expression(keep): own})
    keras.config.set_dtype_policy(_policy)
    _keep = keep
    _matched.clear()
    watch_compile()
    if keep:
        watch_layers()


def kept_layers(model: keras.Model) -> tuple[str, ...]:
    """Return the paths of the layers that the names of `set_policy` keep in float32."""
    layers = tuple(iterate_model_layers(model))
    matching = _find_matching_layers(layers)
    inside = {id(inner) for layer in matching for inner in layer._flatten_layers()}
    float_layers = [layer for layer in layers if id(layer) in inside]
    for layer in float_layers:
        if layer.path is None:  # the map has no entry for the layer
            layer.dtype_policy = FLOAT32
    missing = [name for name in _list_active_names() if name not in _matched]
    if missing:
        names = {label for layer in layers for label in (layer.name, get_layer_path(layer))}
        raise ConfigurationError(
            f"set_policy(keep=…) names {missing[0]!r}, which matches no layer of model "
            f"{model.name!r}{did_you_mean(missing[0], names)}"
        )
    return tuple(map(get_layer_path, float_layers))


def iterate_model_layers(model: object) -> Iterator[Any]:
    """Yield all layers except input layers; raise `ConfigurationError` unless a Keras model."""
    if not isinstance(model, keras.Model):
        raise ConfigurationError(f"model must be a Keras model, got {model!r}")
    for layer in model._flatten_layers(include_self=False):
        if not isinstance(layer, keras.layers.InputLayer):
            yield layer


def get_layer_path(layer: keras.Layer) -> str:
    """Return the path of a layer, or its name before it is built."""
    return str(layer.path or layer.name)


def name_in(model: keras.Model, layer: keras.Layer) -> str:
    """Return the path of a layer in a model without the model's name, which Keras numbers."""
    return get_layer_path(layer).removeprefix(f"{model.name}/")


def computes_in_float16(model: keras.Model) -> bool:
    """Whether a layer of the model computes in float16."""
    return any(layer.compute_dtype == FLOAT16 for layer in iterate_model_layers(model))


def watch_layers() -> None:
    """Patch layer construction so that layers with kept names are created in float32.

    A policy map uses paths. A layer without variables, such as `Softmax`, has no path, and would
    run in 16 bits whatever the map contains.
    """
    plain = keras.layers.Layer.__init__
    if hasattr(plain, "keras_init"):
        return

    @functools.wraps(plain)
    def init_and_keep(self: keras.Layer, **kwargs: object) -> None:
        plain(self, **kwargs)
        names = _list_active_names() if kwargs.get("dtype") is None else ()
        if names and _compile_pattern(_make_path_expression(names)).fullmatch(self.name):
            self.dtype_policy = FLOAT32

    init_and_keep.keras_init = plain  # type: ignore[attr-defined]
    keras.layers.Layer.__init__ = init_and_keep


def watch_compile() -> None:
    """Patch `compile` to scale the loss if a layer computes in float16, and to check kept names.

    Keras itself scales the loss only if the policy of the model is named `mixed_float16`, not for
    policies of layers or from a map.
    """
    # Patched in the defining class: Keras does not compile a loaded model if the `compile` of its
    # class differs.
    model_class = next(kind for kind in keras.Model.__mro__ if "compile" in vars(kind))
    plain = model_class.compile
    if hasattr(plain, "keras_compile"):
        return
    signature = inspect.signature(plain)

    @functools.wraps(plain)
    def compile_with_loss_scale(self: keras.Model, *args: object, **kwargs: object) -> None:
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        if self.built:
            kept_layers(self)
        else:  # layers created on building are not known yet
            _find_matching_layers(tuple(iterate_model_layers(self)))
        arguments = bound.arguments
        if arguments.get("auto_scale_loss") and computes_in_float16(self):
            arguments["optimizer"] = wrap_in_loss_scaling(arguments["optimizer"])
        plain(*bound.args, **bound.kwargs)

    compile_with_loss_scale.keras_compile = plain  # type: ignore[attr-defined]
    model_class.compile = compile_with_loss_scale


def wrap_in_loss_scaling(optimizer: object) -> Any:
    """Return an optimizer that scales the loss, wrapping the given one if necessary."""
    instance = keras.optimizers.get(optimizer)
    if instance is None or isinstance(instance, keras.optimizers.LossScaleOptimizer):
        return instance
    return LossScaleOptimizer(instance)


def _list_active_names() -> tuple[str, ...]:
    """Return the names to keep; empty if Keras has set another global policy since."""
    return _keep if keras.config.dtype_policy() is _policy else ()


def _find_matching_layers(layers: Collection[Any]) -> list[Any]:
    selected: dict[int, Any] = {}
    for name in _list_active_names():
        expression = _compile_pattern(_make_path_expression([name]))
        matches = {
            id(layer): layer for layer in layers if expression.fullmatch(get_layer_path(layer))
        }
        selected.update(matches)
        if matches:
            _matched.add(name)
    return list(selected.values())


def _make_path_expression(names: Collection[str]) -> str:
    """Return the expression for paths in which a name matches the last, inner or outer parts."""
    return rf"(?:.*/)?(?:{'|'.join(names)})(?:/.*)?"


def _compile_pattern(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ConfigurationError(
            f"keep must contain names or regular expressions, got {pattern!r}: {error}"
        ) from None


def list_unit_layers(model: keras.Model) -> dict[str, list[Any]]:
    """Return the layers that can be put into 16 bits separately: name in the model → layers.

    A layer with nested layers counts as a whole, since its own code combines their results. Nested
    models are split. Layers with equal names, which are rare, are grouped.
    """
    units: dict[str, list[Any]] = {}
    for layer in _iterate_unit_layers(model):
        units.setdefault(name_in(model, layer), []).append(layer)
    return units


def _iterate_unit_layers(model: keras.Model) -> Iterator[Any]:
    for layer in model._flatten_layers(include_self=False, recursive=False):
        if isinstance(layer, keras.Model):
            yield from _iterate_unit_layers(layer)
        elif not isinstance(layer, keras.layers.InputLayer):
            yield layer


@contextmanager
def restore_layer_policies(model: keras.Model) -> Iterator[None]:
    """Restore the policies of all layers at the end of the context."""
    policies = [(layer, layer._dtype_policy) for layer in model._flatten_layers()]
    try:
        yield
    finally:
        for layer, policy in policies:
            layer._dtype_policy = policy


def put_policy(layers: Collection[Any], name: str) -> None:
    """Set the policy of layers, built or not, and of all layers nested in them."""
    policy = keras.DTypePolicy(name)
    for layer in layers:
        for inner in layer._flatten_layers():
            # The public setter would change a map of policies that other models share.
            inner._dtype_policy = policy


_POLICIES = {
    Precision.BF16: "mixed_bfloat16",
    Precision.FP16: "mixed_float16",
    Precision.FP32: FLOAT32,
}
#: Functions that Keras compiled for a model with the policies at that time.
_COMPILED = ("train_function", "test_function", "predict_function")


def _rename_automatic_layers(
    model: keras.Model, plan: Mapping[str, Precision], layers: Collection[str]
) -> dict[str, Precision]:
    """Return a plan whose automatic names are those of the model, matched by class and position.

    Keras numbers the layers that are not named by all layers that the process has created so far:
    `re_lu_2` is the first `ReLU` of a model after another one. Names of one class are matched only
    if the model lacks some of them and has as many layers of the class as the plan.
    """
    classes = {type(layer).__name__ for layer in model._flatten_layers()}
    stems = {_to_snake_case(name) for name in classes}
    own = _group_by_class(list_unit_layers(model), stems)
    renamed: dict[str, str] = {}
    for kind, names in _group_by_class(plan, stems).items():
        if len(own.get(kind, ())) == len(names) and not all(name in layers for name in names):
            renamed.update(zip(names, own[kind], strict=True))
    return {renamed.get(name, name): precision for name, precision in plan.items()}


def _group_by_class(names: Iterable[str], stems: Collection[str]) -> dict[str, list[str]]:
    """Return path without automatic numbers → the names, in order."""
    groups: dict[str, list[str]] = {}
    for name in names:
        numbered = ((part, re.sub(r"_\d+$", "", part)) for part in name.split("/"))
        parts = (stem if stem in stems else part for part, stem in numbered)
        groups.setdefault("/".join(parts), []).append(name)
    return groups


def _to_snake_case(class_name: str) -> str:
    """Return the name that Keras gives to the first layer of a class."""
    name = re.sub(r"(.)([A-Z][a-z]+)", r"\1_\2", re.sub(r"\W+", "", class_name))
    return re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower()


def apply_plan(model: keras.Model, plan: Mapping[str, Precision]) -> Any:
    """Set the dtype policies of layers, given by name or path."""
    layers: dict[str, list[Any]] = {}
    for layer in iterate_model_layers(model):
        for name in {name_in(model, layer), get_layer_path(layer), layer.name}:
            layers.setdefault(name, []).append(layer)
    plan = _rename_automatic_layers(model, plan, layers)
    for name in plan:
        if name not in layers:
            hint = did_you_mean(name, layers)
            if not all(layer.built for group in layers.values() for layer in group):
                hint = "; some of its layers are not built: call the model on a batch first"
            raise UnknownOperatorError(
                f"the plan names {name!r}, which is not a layer of model {model.name!r}{hint}"
            )
    # Outer layers first: their policy holds for nested layers that the plan does not name.
    for name in sorted(plan, key=lambda name: -len(layers[name][0]._flatten_layers())):
        put_policy(layers[name], _POLICIES[plan[name]])
    named = {id(layer) for name in plan for layer in layers[name]}
    if all(id(layer) in named for group in list_unit_layers(model).values() for layer in group):
        # A 16-bit model casts its inputs, also for layers that should be in float32.
        for holder in model._flatten_layers():
            if isinstance(holder, keras.Model):
                holder._dtype_policy = keras.DTypePolicy(FLOAT32)
    for name in _COMPILED:
        setattr(model, name, None)
    watch_compile()
    if getattr(model, "compiled", False) and computes_in_float16(model):
        model.optimizer = wrap_in_loss_scaling(model.optimizer)
    return model
