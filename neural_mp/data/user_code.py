"""The user's own classes and functions, named in YAML as `module:attribute`."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from neural_mp.errors import ConfigurationError, did_you_mean


def load_user_object(name: str) -> Any:
    """Import what `module:attribute` names, from the current directory or any installed package.

    Args:
        name: such as `my_package.data:Digits`.

    Raises:
        ConfigurationError: the name is malformed, the module cannot be imported, or it has no
            such attribute.
    """
    module_name, _, attribute = name.partition(":")
    if not (_is_dotted(module_name) and _is_dotted(attribute)):
        raise ConfigurationError(
            f"{name!r} does not name code of yours: write module:attribute, "
            f"such as my_package.data:Digits"
        )
    found: Any = _import_module(module_name, name)
    for part in attribute.split("."):
        if not hasattr(found, part):
            public = [word for word in dir(found) if not word.startswith("_")]
            where = getattr(found, "__file__", None) or module_name
            raise ConfigurationError(f"{where} has no {part!r}{did_you_mean(part, public)}")
        found = getattr(found, part)
    return found


def _is_dotted(text: str) -> bool:
    return all(part.isidentifier() for part in text.split("."))


def _import_module(module_name: str, name: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        # First and for good, as `python -m` does: the module may import its neighbours later.
        sys.path.insert(0, here)
    importlib.invalidate_caches()
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        if module_name == missing or module_name.startswith(missing + "."):
            raise ConfigurationError(
                f"there is no module {missing!r}, named by {name!r}"
                f"{did_you_mean(missing, _neighbours(missing, here))}"
            ) from error
        raise _import_failed(module_name, name, error) from error
    except Exception as error:
        raise _import_failed(module_name, name, error) from error


def _import_failed(module_name: str, name: str, error: Exception) -> ConfigurationError:
    return ConfigurationError(
        f"importing {module_name!r}, named by {name!r}, failed with "
        f"{type(error).__name__}: {error}; mend that module or name another"
    )


def _neighbours(missing: str, here: str) -> list[str]:
    """Modules that could have been meant: those of the same package or directory."""
    package, _, _ = missing.rpartition(".")
    paths = list(getattr(sys.modules.get(package), "__path__", ())) if package else [here]
    prefix = f"{package}." if package else ""
    return [module.name for module in pkgutil.iter_modules(paths, prefix)]
