"""Which adaptors there are, and which one a model needs."""

from __future__ import annotations

import importlib
import importlib.util
import logging
from importlib import metadata
from typing import Any

from neural_mp.adaptors.contract import Adaptor
from neural_mp.errors import MissingFrameworkError, UnknownFrameworkError, did_you_mean

logger = logging.getLogger(__name__)

#: Where third parties announce adaptors of their own.
ENTRY_POINT_GROUP = "neural_mp.adaptors"
#: Ours, so that a source tree works without being installed; modules import no framework.
_OWN = {
    "onnxrt": "neural_mp.adaptors.onnxrt:OnnxRuntimeAdaptor",
    "pytorch": "neural_mp.adaptors.pytorch:PyTorchAdaptor",
    "tensorflow": "neural_mp.adaptors.tensorflow:TensorFlowAdaptor",
}
#: The package that must be installed, and the extra that installs it.
_NEEDED = {
    "onnxrt": ("onnxruntime", "onnx"),
    "pytorch": ("torch", "torch"),
    "tensorflow": ("tensorflow", "tensorflow"),
}


def adaptor_classes() -> dict[str, type[Adaptor]]:
    """Framework name → adaptor class, third-party ones included; imports no framework."""
    found = {name: _load(path) for name, path in _OWN.items()}
    for entry in metadata.entry_points(group=ENTRY_POINT_GROUP):
        if entry.name not in found:
            try:
                found[entry.name] = _load(entry.value)
            except Exception:
                # A plug-in of somebody else's may break in any way; the others must go on.
                logger.warning("the adaptor %r cannot be loaded", entry.value, exc_info=True)
    return found


def installed_adaptors() -> list[Adaptor]:
    """An adaptor of every framework that is installed; imports none of them."""
    found = []
    for name, candidate in adaptor_classes().items():
        try:
            found.append(_instance(name, candidate))
        except MissingFrameworkError:
            logger.debug("%s is not installed", name)
    return found


def adaptor_for(source: Any, framework: str | None = None) -> Adaptor:
    """The adaptor for a model.

    Args:
        source: the model object or path.
        framework: its name, where the user says it.

    Raises:
        UnknownFrameworkError: no adaptor of that name, or none that takes the model.
        MissingFrameworkError: the framework is not installed.
    """
    classes = adaptor_classes()
    if framework is not None:
        if framework not in classes:
            raise UnknownFrameworkError(
                f"there is no adaptor for framework {framework!r}{did_you_mean(framework, classes)}"
            )
        return _instance(framework, classes[framework])
    for name, candidate in classes.items():
        if candidate.accepts(source):
            return _instance(name, candidate)
    if isinstance(source, type):
        raise UnknownFrameworkError(
            f"{_qualified_name(source)} is a class; give an instance of it as the model"
        )
    what = repr(source) if isinstance(source, str) else f"a {_qualified_name(type(source))}"
    raise UnknownFrameworkError(
        f"{what} is not a model of any framework known here ({', '.join(sorted(classes))}); "
        f"give a model object, a path to one, or name its framework"
    )


def _instance(name: str, candidate: type[Adaptor]) -> Adaptor:
    package, extra = _NEEDED.get(name, (None, name))
    if package is not None and importlib.util.find_spec(package) is None:
        raise MissingFrameworkError(
            f"models of {name} need the package {package}, which is not installed; "
            f"install it with: pip install 'neural-mp[{extra}]'"
        )
    return candidate()


def _load(path: str) -> type[Adaptor]:
    module, _, attribute = path.partition(":")
    loaded: type[Adaptor] = getattr(importlib.import_module(module), attribute)
    return loaded


def _qualified_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
