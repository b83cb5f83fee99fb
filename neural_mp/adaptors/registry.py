"""The registry of adaptors and the choice of an adaptor for a model."""

from __future__ import annotations

import importlib
import logging
import sys
from pathlib import Path
from typing import Any, TypeGuard

from neural_mp.adaptors.common.kernels.int8_accumulation import KernelAccumulation
from neural_mp.adaptors.common.optional import Training
from neural_mp.adaptors.contract import Adaptor
from neural_mp.adaptors.detect import FRAMEWORKS
from neural_mp.core.hardware import Hardware
from neural_mp.errors import MissingFrameworkError, UnknownFrameworkError, did_you_mean, one_line
from neural_mp.io.files import describe_working_directory
from neural_mp.util.optional_packages import install_command
from neural_mp.util.plug_ins import (
    create_plug_in,
    create_plug_ins,
    load_plug_ins,
    require_importable,
)
from neural_mp.util.system.memory import pause_garbage_collection
from neural_mp.util.text import with_article

logger = logging.getLogger(__name__)

#: Entry points of third-party adaptors.
ENTRY_POINT_GROUP = "neural_mp.adaptors"

AnyAdaptor = Adaptor[Any]
#: Framework of models of several graphs.
COMPOSITE = "parts"


def list_framework_names() -> list[str]:
    """Return the frameworks with an adaptor, whether or not they are installed."""
    return sorted({*FRAMEWORKS, *_third_party_adaptors()})


def probe_installed_accumulation(hardware: Hardware) -> dict[str, KernelAccumulation]:
    """Return installed framework → its INT8 accumulation.

    Built-in adaptors are not loaded; only TensorFlow is imported, by its table of ops.
    """
    accumulations = {}
    for name, entry in FRAMEWORKS.items():
        if entry.is_installed:
            module = importlib.import_module(f"{entry.home}.int8_accumulation")
            accumulations[name] = module.int8_accumulation(hardware)
    for name, adaptor in create_plug_ins(_third_party_adaptors()):
        accumulations[name] = adaptor.int8_accumulation(hardware)
    return accumulations


def is_composite(source: object) -> TypeGuard[dict[str, Any]]:
    """Whether a model is a dict of parts; weights by name are a subclass of `dict`."""
    return type(source) is dict


def adaptor_for(source: object, framework: str | None = None) -> AnyAdaptor:
    """Return the adaptor for a model object or path.

    Raises:
        UnknownFrameworkError: no adaptor has that name, or none accepts the model.
        MissingFrameworkError: the framework is not installed.
    """
    if is_composite(source) or framework == COMPOSITE:
        module = importlib.import_module("neural_mp.adaptors.composite.adaptor")
        parts = source.values() if is_composite(source) else ()
        composite: AnyAdaptor = module.CompositeAdaptor([adaptor_for(part) for part in parts])
        return composite
    # Third-party adaptors are looked up last: reading all entry points takes milliseconds.
    if framework is not None:
        if framework not in FRAMEWORKS and framework not in (names := list_framework_names()):
            what = f"framework {framework!r} has no adaptor"
            require_importable(ENTRY_POINT_GROUP, framework, Adaptor, UnknownFrameworkError, what)
            raise UnknownFrameworkError(f"{what}{did_you_mean(framework, names)}")
        return get_adaptor_named(framework)
    detected = _detect_adaptor(source)
    if detected is not None:
        return detected
    if isinstance(source, type):
        raise UnknownFrameworkError(
            f"the model must be an instance, got the class {_qualified_name(source)}; "
            f"create an instance"
        )
    if isinstance(source, str | Path) and not Path(source).exists():
        raise UnknownFrameworkError(
            f"the model {str(source)!r} does not exist in {describe_working_directory()}; give the "
            f"path of a model, or module:attribute"
        )
    if isinstance(source, str | Path) and Path(source).suffix in (".yaml", ".yml"):
        raise UnknownFrameworkError(
            f"{str(source)!r} is a tuning file, not a model; give its model.name, or pass the file "
            f"as MixedPrecision({str(source)!r})"
        )
    what = repr(source) if isinstance(source, str) else with_article(_qualified_name(type(source)))
    raise UnknownFrameworkError(
        f"{what} is not a model of a supported framework ({', '.join(list_framework_names())}); "
        "give a model object or its path, or name the framework"
    )


def _detect_adaptor(source: object) -> AnyAdaptor | None:
    for name, entry in FRAMEWORKS.items():
        if entry.rule.matches_source(source):
            return get_adaptor_named(name)
    others = create_plug_ins(_third_party_adaptors())
    return next((adaptor for name, adaptor in others if _accepts(name, adaptor, source)), None)


def _accepts(name: str, adaptor: AnyAdaptor, source: object) -> bool:
    try:
        return bool(adaptor.accepts(source))
    except Exception as error:  # of any type: the package runs its own code
        logger.warning("the plug-in %r cannot judge a model: %s", name, one_line(error))
        logger.debug("plug-in %r", name, exc_info=True)
        return False


def find_training_for(model: object) -> tuple[str, Training]:
    """Return the framework of a model to train, and the training part of its adaptor.

    Raises:
        UnknownFrameworkError: the model is a path, or of no framework with training support.
        MissingFrameworkError: the framework is not installed.
    """
    adaptor = None if isinstance(model, str | Path) else _detect_adaptor(model)
    if adaptor is None or adaptor.training is None:
        raise UnknownFrameworkError(
            f"model must be an object, got the class {model.__qualname__}; give an instance of it"
            if isinstance(model, type)
            else f"model must be a Keras model, a torch module, or of another framework whose "
            f"adaptor offers training, got {model!r}"
        )
    return adaptor.framework, adaptor.training


def list_training_parts() -> list[Training]:
    """Return the training parts of all adaptors whose frameworks are in use.

    If no built-in framework with training is imported yet, all installed ones are imported.
    """
    entries = {name: entry for name, entry in FRAMEWORKS.items() if entry.trains}
    used = [name for name, entry in entries.items() if entry.package in sys.modules]
    used = used or [name for name, entry in entries.items() if entry.is_installed]
    adaptors = [
        *map(get_adaptor_named, used),
        *(adaptor for _, adaptor in create_plug_ins(_third_party_adaptors())),
    ]
    return [adaptor.training for adaptor in adaptors if adaptor.training is not None]


def get_adaptor_named(name: str) -> AnyAdaptor:
    """Return the adaptor of a framework in `list_framework_names`.

    Raises:
        MissingFrameworkError: the framework is not installed.
    """
    ours = FRAMEWORKS.get(name)
    if ours is None:
        kind = _third_party_adaptors()[name]
        return create_plug_in(kind, UnknownFrameworkError, f"the adaptor of {name!r}")
    require_framework(name, f"models of {name}")
    with pause_garbage_collection():
        module = importlib.import_module(f"{ours.home}.adaptor")
    adaptor: AnyAdaptor = getattr(module, ours.adaptor)()
    return adaptor


def require_framework(name: str, what: str) -> None:
    """Raise unless a built-in framework is installed, which `what` (a plural) needs.

    Raises:
        MissingFrameworkError: the framework is not installed.
    """
    ours = FRAMEWORKS[name]
    if not ours.is_installed:
        raise MissingFrameworkError(
            f"{what} need the package {ours.package}, which is not installed; install it with: "
            f"{install_command(ours.extra)}"
        )


def _third_party_adaptors() -> dict[str, type[AnyAdaptor]]:
    return load_plug_ins(ENTRY_POINT_GROUP, FRAMEWORKS, Adaptor)


def _qualified_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
