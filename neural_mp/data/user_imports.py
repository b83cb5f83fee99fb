"""Imports of user-defined classes and functions named as `module:attribute`.

Names in a command or script are imported as they are. Names in a file must be defined in a
module in the working directory or next to the file, or in an explicitly trusted module.
Otherwise a tuning file could call any installed function.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import pkgutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from neural_mp.errors import ConfigurationError, did_you_mean, message_of
from neural_mp.io.files import find_working_directory
from neural_mp.io.limits import is_trusted, trusting


@dataclass(frozen=True)
class NamedInFile:
    """Marks names as coming from a file.

    Attributes:
        folder: folder of the file; None if the content was passed directly.
    """

    folder: Path | None = None


_names: ContextVar[NamedInFile | None] = ContextVar("names", default=None)


@contextmanager
def named_in_file(folder: Path | None, trust: Iterable[str]) -> Iterator[None]:
    """Treat names imported inside as names in a file.

    Args:
        folder: see `NamedInFile`.
        trust: modules whose classes and functions the file may name, including submodules.
    """
    token = _names.set(NamedInFile(folder))
    try:
        with trusting(trust):
            yield
    finally:
        _names.reset(token)


def load_user_object(name: str) -> Any:
    """Import `module:attribute`.

    Modules in the working directory take precedence over installed modules; modules in the folder
    of the naming file are found too.

    Args:
        name: e.g. `my_package.data:Digits`.

    Raises:
        ConfigurationError: the name is malformed, the module cannot be imported or lacks the
            attribute, or a file names an object that is neither the user's nor trusted.
    """
    module_name, _, attribute = name.partition(":")
    if not (_is_dotted(module_name) and _is_dotted(attribute)):
        raise ConfigurationError(
            f"a name of your own code must be module:attribute, e.g. my_package.data:Digits, got "
            f"{name!r}"
        )
    rules = _names.get()
    folders = list_user_folders(None if rules is None else rules.folder)
    target: Any = _import_module(module_name, name, folders, rules)
    for part in attribute.split("."):
        if rules is not None:
            _check_lookup(target, part, name, folders, rules)
        if not hasattr(target, part):
            public = [member for member in dir(target) if not member.startswith("_")]
            where = getattr(target, "__file__", None) or module_name
            raise ConfigurationError(f"{where} has no {part!r}{did_you_mean(part, public)}")
        target = getattr(target, part)
    if rules is not None and not _is_users_object(target, folders):
        origin = (
            target.__name__ if isinstance(target, ModuleType) else _find_defining_module(target)
        )
        raise _foreign_module_error(name, f"it is defined in {origin!r}", rules)
    return target


def list_user_folders(folder: Path | None) -> tuple[Path, ...]:
    """Return the folders of user modules: the working directory, and the folder of the file."""
    folders = (find_working_directory(), None if folder is None else folder.resolve())
    return tuple(dict.fromkeys(path for path in folders if path is not None))


def _is_dotted(text: str) -> bool:
    return all(part.isidentifier() for part in text.split("."))


def _import_module(
    module_name: str, name: str, folders: tuple[Path, ...], rules: NamedInFile | None
) -> ModuleType:
    top = module_name.partition(".")[0]
    importlib.invalidate_caches()
    own = _find_user_module(top, folders)
    if own is not None:
        _check_replaces_nothing(top, name, own)
    elif rules is not None:
        _check_installed_module(module_name, name, folders, rules)
    try:
        if own is not None:
            _load_user_module(top, own)
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        if module_name == missing or module_name.startswith(missing + "."):
            raise _missing_module_error(missing, name, folders) from error
        raise _import_failed(module_name, name, error) from error
    except Exception as error:
        raise _import_failed(module_name, name, error) from error


def _find_user_module(
    top: str, folders: tuple[Path, ...]
) -> tuple[Path, importlib.machinery.ModuleSpec] | None:
    for folder in folders:
        spec = importlib.machinery.PathFinder.find_spec(top, [str(folder)])
        # A folder without __init__.py is a package only if no other module has its name.
        if spec is not None and (
            spec.origin is not None or _origin_outside_folder(top, folder) is None
        ):
            return folder, spec
    return None


def _origin_outside_folder(top: str, folder: Path) -> str | None:
    if _is_pythons(top):
        return "Python's standard library"
    paths = [path for path in sys.path if path and Path(path).resolve() != folder]
    spec = importlib.machinery.PathFinder.find_spec(top, paths)
    return None if spec is None else spec.origin


def _is_pythons(top: str) -> bool:
    return top in sys.stdlib_module_names or top in sys.builtin_module_names


def _check_replaces_nothing(
    top: str, name: str, own: tuple[Path, importlib.machinery.ModuleSpec]
) -> None:
    location = own[1].origin or str(own[0] / top)
    if _is_pythons(top):
        raise ConfigurationError(
            f"{name!r} names {location}, which has the name of a module of the standard library; "
            f"rename the module"
        )
    loaded = sys.modules.get(top)
    if loaded is None:
        return
    if own[0] not in _list_containing_folders(loaded):
        file = getattr(loaded, "__file__", None)
        raise ConfigurationError(
            f"{name!r} names {location}, but another module {top!r} is in use, "
            f"{file or 'which has no file'}; rename yours"
        )


def _load_user_module(top: str, own: tuple[Path, importlib.machinery.ModuleSpec]) -> None:
    """Load a user module, in place of an installed module of the same name."""
    folder, spec = own
    if str(folder) not in sys.path:
        # Appended, so that it hides no module; kept, since neighbours may be imported later.
        sys.path.append(str(folder))
    if top in sys.modules or spec.origin is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules[top] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(top, None)
        raise
    if _origin_outside_folder(top, folder) is not None:
        import cloudpickle

        # Another process would import the installed module by name.
        cloudpickle.register_pickle_by_value(module)


def _check_installed_module(
    module_name: str, name: str, folders: tuple[Path, ...], rules: NamedInFile
) -> None:
    """Check that a file may name an installed module, before its import."""
    top = module_name.partition(".")[0]
    if _is_pythons(top):
        raise _foreign_module_error(name, f"{top!r} is a module of the standard library", rules)
    if is_trusted(module_name):
        return
    spec = sys.modules.get(top) or importlib.machinery.PathFinder.find_spec(top)
    if spec is None:
        raise _missing_module_error(top, name, folders)
    where = getattr(spec, "origin", None) or getattr(spec, "__file__", None) or "no file"
    raise _foreign_module_error(name, f"{top!r} is defined in {where}", rules)


def _missing_module_error(missing: str, name: str, folders: tuple[Path, ...]) -> ConfigurationError:
    return ConfigurationError(
        f"there is no module {missing!r}, named by {name!r}"
        f"{did_you_mean(missing, _list_neighbour_modules(missing, folders))}"
    )


def _import_failed(module_name: str, name: str, error: Exception) -> ConfigurationError:
    return ConfigurationError(
        f"importing {module_name!r}, named by {name!r}, failed with "
        f"{type(error).__name__}: {message_of(error)}; correct that module or name another"
    )


def _foreign_module_error(name: str, why: str, rules: NamedInFile) -> ConfigurationError:
    location = "" if rules.folder is None else f" or in {str(rules.folder.resolve())!r}"
    return ConfigurationError(
        f"{name!r} is not your own code: {why}. A file may name classes and functions that are "
        f"defined in modules in the working directory{location}, and in modules that you trust by "
        f"--trust MODULE or trust=('MODULE',)"
    )


def _list_neighbour_modules(missing: str, folders: tuple[Path, ...]) -> list[str]:
    package, _, _ = missing.rpartition(".")
    roots = [str(folder) for folder in folders]
    paths = list(getattr(sys.modules.get(package), "__path__", ())) if package else roots
    prefix = f"{package}." if package else ""
    return [module.name for module in pkgutil.iter_modules(paths, prefix)]


def _check_lookup(
    target: object, part: str, name: str, folders: tuple[Path, ...], rules: NamedInFile
) -> None:
    """Check that an attribute is looked up only in user modules and classes."""
    users = isinstance(target, ModuleType | type) and _is_users_object(target, folders)
    if part.startswith("__") or not users:
        what = target.__name__ if isinstance(target, ModuleType | type) else type(target).__name__
        raise _foreign_module_error(name, f"{part!r} is looked up in {what!r}", rules)


def _is_users_object(target: object, folders: tuple[Path, ...]) -> bool:
    """Whether a class, function or object was created in a module that a file may name."""
    if isinstance(target, ModuleType):
        return _is_users_module(target.__name__, folders)
    home = _find_defining_module(target)
    if home is not None and _is_users_module(home, folders):
        return True
    if (
        isinstance(target, type)
        or hasattr(target, "__qualname__")
        or getattr(target, "__self__", None) is not None  # a bound method
    ):
        return False
    # An instance of a library class, e.g. a partial or a model: the user's, unless a module
    # that is not the user's also holds it.
    return not any(
        target is value
        for name, module in list(sys.modules.items())
        if isinstance(module, ModuleType) and not _is_users_module(name, folders)
        # Bypasses lazy modules, which load when an attribute is read.
        for value in list(object.__getattribute__(module, "__dict__").values())
    )


def _find_defining_module(target: object) -> str | None:
    home = getattr(target, "__module__", None)
    return home if isinstance(home, str) else None


def _is_users_module(module_name: str, folders: tuple[Path, ...]) -> bool:
    top = module_name.partition(".")[0]
    if _is_pythons(top) or top == "__main__":
        return False
    if is_trusted(module_name):
        return True
    loaded = sys.modules.get(top)
    return loaded is not None and any(
        folder in folders for folder in _list_containing_folders(loaded)
    )


def _list_containing_folders(module: ModuleType) -> list[Path]:
    paths = getattr(module, "__path__", None)
    if paths is not None:
        return [Path(path).parent.resolve() for path in paths]
    file = getattr(module, "__file__", None)
    return [] if file is None else [Path(file).parent.resolve()]
