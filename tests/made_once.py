"""Parts that are alike in all runs of a test session, and that libraries make again for each."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
import threading
import typing
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest


def make_once(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Make such parts once; `folder` is an empty one, for files."""
    _compile_statements_once(patch)
    _create_tables_once(patch, folder)
    _compare_ops_without_a_child(patch)
    if "typer.main" in sys.modules:
        # Typer reads the signatures of all commands again for every call.
        typer = sys.modules["typer.main"]
        patch.setattr(typer, "get_command", cache(typer.get_command))
    if "torch" in sys.modules:
        _read_programs_quickly(patch)
        _leave_out_memory_formats(patch)
        _find_composite_ops_once(patch)
    if "tensorflow" in sys.modules:
        _read_sources_once(patch)


def _compare_ops_without_a_child(patch: pytest.MonkeyPatch) -> None:
    """A child process that compares ops between integer ops takes most of its time to start."""
    from neural_mp.adaptors.common.kernels import runtime_probe

    run = runtime_probe._run_probe
    modules = [f"neural_mp.adaptors.{name}.kernel_check_probe" for name in ("onnxrt", "openvino")]

    def run_here(module: str, environment: dict[str, str], seconds: float, *arguments: str) -> Any:
        if module not in modules:
            return run(module, environment, seconds, *arguments)
        probe = importlib.import_module(module)
        cases = list(Path(arguments[0]).iterdir())
        deviations = {f"{case.name} {probe.find_deviation(case)}" for case in cases}
        return deviations, {case.name for case in cases}

    patch.setattr(runtime_probe, "_run_probe", run_here)


def _compile_statements_once(patch: pytest.MonkeyPatch) -> None:
    """SQLAlchemy compiles its statements again for every SQLite database; each run has one."""
    from sqlalchemy import Engine
    from sqlalchemy.dialects.sqlite.pysqlite import SQLiteDialect_pysqlite as Dialect

    compiled: dict[Any, Any] = {}
    init = Engine.__init__

    def engine(self: Any, pool: Any, dialect: Any, *arguments: Any, **options: Any) -> None:
        init(self, pool, dialect, *arguments, **options)
        if type(dialect) is Dialect:
            self._compiled_cache = compiled

    patch.setattr(Engine, "__init__", engine)
    # Dialects are part of the keys of compiled statements.
    patch.setattr(Dialect, "__eq__", lambda first, second: type(first) is type(second))
    patch.setattr(Dialect, "__hash__", lambda first: hash(type(first)))


def _create_tables_once(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """A new database of Optuna is a copy of the first one.

    Databases that threads open are not: of several at once, one has to create the tables.
    """
    from optuna.storages._rdb.storage import RDBStorage, _VersionManager

    # Optuna reads its migration scripts again for every storage that it opens.
    cached: list[Any] = []
    create = _VersionManager._create_alembic_script

    def scripts(manager: Any) -> Any:
        cached[:] = cached or [create(manager)]
        return cached[0]

    patch.setattr(_VersionManager, "_create_alembic_script", scripts)
    first, opened = folder / "first.db", RDBStorage.__init__

    def open_it(self: Any, url: str, *arguments: Any, **options: Any) -> None:
        file = Path(url.removeprefix("sqlite:///"))
        is_new = url.startswith("sqlite:///") and not os.path.lexists(file)
        if is_new and first.exists() and threading.current_thread() is threading.main_thread():
            with suppress(OSError):  # as there is no such folder, which Optuna is to find
                shutil.copyfile(first, file)
        opened(self, url, *arguments, **options)
        if is_new and file.is_file() and not first.exists():
            shutil.copyfile(file, first)

    patch.setattr(RDBStorage, "__init__", open_it)


def _read_programs_quickly(patch: pytest.MonkeyPatch) -> None:
    """For every dataclass in a saved program, torch evaluates its annotations again."""
    from torch._export.serde import serialize

    cached: dict[Any, Any] = {}

    def hints(cls: type, globalns: dict[str, Any] | None = None) -> Any:
        if cls not in cached:
            cached[cls] = typing.get_type_hints(cls, globalns)
        return cached[cls]

    names = SimpleNamespace(**{**vars(typing), "get_type_hints": hints})
    patch.setattr(serialize, "typing", names)


def _leave_out_memory_formats(patch: pytest.MonkeyPatch) -> None:
    """For every op of a graph, torch notes the memory format, which nothing of it reads.

    With sizes that are symbols, that takes a twentieth of the time of an export.
    """
    from torch.fx.experimental import proxy_tensor

    noted = proxy_tensor._extract_tensor_metadata
    patch.setattr(
        proxy_tensor, "_extract_tensor_metadata", partial(noted, include_contiguity=False)
    )


def _find_composite_ops_once(patch: pytest.MonkeyPatch) -> None:
    """For every decomposition, torch looks up each of its thousand composite ops by name."""
    from torch._export import utils

    patch.setattr(utils, "_materialize_cpp_cia_ops", cache(utils._materialize_cpp_cia_ops))


def _read_sources_once(patch: pytest.MonkeyPatch) -> None:
    """For every function that TensorFlow rewrites, it reads the file of its module again.

    To find that, it asks all modules; `inspect` notices changed files by itself.
    """
    from tensorflow.python.autograph.pyct import inspect_utils

    patch.setattr(inspect_utils, "_fix_linecache_record", lambda function: None)
