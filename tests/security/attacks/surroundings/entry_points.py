"""Installed packages whose entry points are broken, of no use, or named like built-in parts."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from attacks.hostile import Attacks, command_here
from attacks.users_ways import tiny_onnx

from neural_mp.adaptors.registry import adaptor_for
from neural_mp.data.datasets import DATASETS
from neural_mp.data.transforms import TRANSFORMS
from neural_mp.errors import NeuralMPError
from neural_mp.metrics.base import METRICS
from neural_mp.strategies import create_strategy_named
from neural_mp.testing import digits
from neural_mp.tuning.executors import get_executor_named

ENTRY_POINTS = Attacks("entry points")
_NUMBERS = itertools.count()

#: Group → a built-in name.
_GROUPS = {
    "adaptors": "onnxrt",
    "strategies": "basic",
    "executors": "local",
    "metrics": "topk",
    "datasets": "numpy",
    "transforms": "normalize",
}
#: Plug-in → code of its module, in which the entry point names `Thing`.
_CODES = {
    "that raises": "raise RuntimeError('x')",
    "that exits": "import sys; sys.exit(0)",
    "that is no Python": "def (",
    "of null bytes": "Thing = '\\0'\n\0",
    "that recurses without end": "def f(): f()\nf()",
    "without its object": "Other = 1",
    "whose lookup raises": "def __getattr__(name): raise KeyError(name)",
    "that is a number": "Thing = 1",
    "that is None": "Thing = None",
    "that is its own module": "import sys; Thing = sys.modules[__name__]",
    "that misses a package": "import no_such_package_of_anybody",
    "that raises an error of a hostile text": "raise ValueError('\\x1b[31m' + 'x' * 10_000)",
    "that raises an error without a text": """
class Silent(Exception):
    def __str__(self): raise RuntimeError
raise Silent
""",
    "that is an object whose class lies": """
class Lying:
    @property
    def __class__(self): raise RuntimeError
    def __call__(self): raise RuntimeError
Thing = Lying()
""",
}
#: Object that is called → its code.
_OBJECTS = {
    "a function": "def Thing(*_, **__): return 7",
    "a class of no base": "class Thing: pass",
    "a class whose creation raises": """
class Thing:
    def __init__(self): raise RuntimeError('x')
""",
    "a class derived from all bases": """
from neural_mp.adaptors.contract import Adaptor
from neural_mp.strategies import Strategy
from neural_mp.tuning.executors import Executor
class Thing(Adaptor, Strategy, Executor): pass
""",
}
_FILES = {
    "bytes that are not UTF-8": b"[neural_mp.strategies]\n\xff\xfe = x:y\n",
    "a line without a name": b"[neural_mp.strategies]\n= x:y\n",
    "a line without a value": b"[neural_mp.strategies]\nx\n",
    "an object that is no name": b"[neural_mp.strategies]\nhostile = not a module!:1\n",
    "no group": b"hostile = x:y\n",
    "a heading that never ends": b"[neural_mp.strategies\nhostile = x:y\n",
    "null bytes": b"\0" * 1000,
    "100,000 names": b"[neural_mp.strategies]\n"
    + b"".join(b"n%d = x:y\n" % n for n in range(100_000)),
    "a name of control characters": b"[neural_mp.strategies]\n\x1b[31mx = x:y\n",
    "an empty file": b"",
}

_TUNING = """
model: {{name: net.onnx, framework: {adaptors}}}
mixed_precision: {{precisions: int8}}
evaluation:
  accuracy:
    metric: {{{metrics}: {{}}}}
    dataloader: {{batch_size: 50, dataset: {{{datasets}: {{path: data.npz}}}},
      transform: {{{transforms}: {{}}}}}}
tuning: {{objective: modelsize, accuracy_criterion: {{relative: 0.4}},
  strategy: {{name: {strategies}}}, workers: {executors}, exit_policy: {{max_trials: 1}}}}
"""
_RIGHT = {
    "adaptors": "onnxrt",
    "strategies": "basic",
    "executors": "1",
    "metrics": "topk",
    "datasets": "numpy",
    "transforms": "rescale",
}


@contextmanager
def _installed(
    folder: Path, file: bytes, code: str = "", module: str = "hostile"
) -> Iterator[None]:
    """Install a package of one module into a folder of `sys.path`."""
    package = folder / "packages" / "hostile-1.0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: hostile\nVersion: 1.0\n")
    (package / "entry_points.txt").write_bytes(file)
    (package.parent / f"{module}.py").write_text(code)
    sys.path.insert(0, str(package.parent))
    try:
        yield
    finally:
        sys.path.remove(str(package.parent))
        sys.modules.pop(module, None)


def _builds_built_in(group: str) -> None:
    """See that a built-in name stands for what the toolkit has under it."""
    name = _GROUPS[group]
    built = {
        "adaptors": lambda: type(adaptor_for(None, name)),
        "strategies": lambda: type(create_strategy_named(name)),
        "executors": lambda: get_executor_named(name),
        "metrics": lambda: METRICS.find_factory(name),
        "datasets": lambda: DATASETS.find_factory(name),
        "transforms": lambda: TRANSFORMS.find_factory(name),
    }[group]()
    assert built.__module__.startswith("neural_mp."), built


def _tune(folder: Path, group: str, name: str) -> None:
    """Tune by a file that names a plug-in."""
    (folder / "net.onnx").write_bytes(tiny_onnx().SerializeToString())
    images, labels = digits()[1].images[:100], digits()[1].labels[:100]
    np.savez(folder / "data.npz", inputs=images, labels=labels)
    (folder / "conf.yaml").write_text(_TUNING.format(**{**_RIGHT, group: name}))
    cwd = Path.cwd()
    os.chdir(folder)
    try:
        command_here("tune", "conf.yaml", "--output", "out")
    except RuntimeError as error:
        if "comes from your own code" not in str(error):
            raise
        raise NeuralMPError(str(error)) from error
    finally:
        os.chdir(cwd)


def _use(folder: Path, group: str, code: str) -> None:
    module = f"hostile_{next(_NUMBERS)}"
    file = f"[neural_mp.{group}]\nhostile = {module}:Thing\n".encode()
    with _installed(folder, file, code, module):
        _builds_built_in(group)
        _tune(folder, group, "hostile")


for _group in _GROUPS:

    def _broken(folder: Path, canary: Path, kind: str, group: str = _group) -> None:
        _use(folder, group, _CODES[kind])

    ENTRY_POINTS.here(f"{_group}: a module", *_CODES)(_broken)
    if _group in ("adaptors", "strategies", "executors"):

        def _useless(folder: Path, canary: Path, kind: str, group: str = _group) -> None:
            _use(folder, group, _OBJECTS[kind])

        ENTRY_POINTS.here(f"{_group}: the object is", *_OBJECTS)(_useless)


@ENTRY_POINTS.here("a plug-in named like the built-in of", *_GROUPS, refused=False)
def _has_a_built_in_name(folder: Path, canary: Path, group: str) -> None:
    module = f"hostile_{next(_NUMBERS)}"
    file = f"[neural_mp.{group}]\n{_GROUPS[group]} = {module}:Thing\n".encode()
    with _installed(folder, file, f"open({str(canary)!r}, 'w')\nclass Thing: pass", module):
        _builds_built_in(group)


# SQLAlchemy cannot look for its own plug-ins then.
_BARS_OTHERS = "bytes that are not UTF-8"


@ENTRY_POINTS.here("a file of entry points with", _BARS_OTHERS, refused=None)
@ENTRY_POINTS.here(
    "a file of entry points with", *sorted(_FILES.keys() - {_BARS_OTHERS}), refused=False
)
def _is_damaged(folder: Path, canary: Path, kind: str) -> None:
    with _installed(folder, _FILES[kind]):
        for group in _GROUPS:
            _builds_built_in(group)
        _tune(folder, "strategies", "basic")


FAMILY = ENTRY_POINTS.as_family()
