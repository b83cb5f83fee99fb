"""Imported by every Python process that a test starts: less garbage collection, fewer imports.

Of the import of a framework, collections take a third, and half of these come at the end, where
nothing is left to be used: what is frozen is out of them. `onnx_ir` imports `sympy` for expressions
of sizes, which takes a third of the imports of a worker and which few models have. Keras imports
scikit-learn for wrappers, and that imports the statistics of SciPy.

In a process that a test starts, models have nominal times, as in the tests themselves.
"""

import atexit
import gc
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import LazyLoader, _LazyModule
from types import ModuleType

import bare_platform
from nominal_times import REPLACED

if os.environ.get(bare_platform.VARIABLE):
    bare_platform.hide()
gc.set_threshold(400_000, 10, 100)
atexit.register(gc.freeze)

#: What `inspect` asks all modules for, when it looks for the one that a function is from.
_KNOWN_BEFORE = frozenset({"__class__", "__file__", "__loader__", "__name__", "__spec__"})


class _Module(_LazyModule):
    """Module that is loaded when something that only its code defines is used."""

    def __getattribute__(self, name):
        kind = ModuleType if name in _KNOWN_BEFORE else _LazyModule
        return kind.__getattribute__(self, name)


class _Loader(LazyLoader):
    def exec_module(self, module):
        super().exec_module(module)
        module.__class__ = _Module


class _Existing:
    """Loader of a module that exists already."""

    @staticmethod
    def create_module(spec):
        return sys.modules[spec.name]

    @staticmethod
    def exec_module(module):
        pass


class _Later:
    """Loads modules when they are first used.

    An import of `sympy.logic` loads `sympy` for its path, and with it `sympy.logic`: without
    `_Existing`, Python would load that a second time, without its parts.
    """

    names = frozenset({"sympy", "onnx_ir._symbolic_shapes", "scipy.stats"})

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.rpartition(".")[0] in cls.names and name in sys.modules:
            return ModuleSpec(name, _Existing, is_package=hasattr(sys.modules[name], "__path__"))
        spec = PathFinder.find_spec(name, path, target) if name in cls.names else None
        if spec is not None:
            spec.loader = _Loader(spec.loader)
        return spec


sys.meta_path.insert(0, _Later)


class _Nominally:
    """Loader of a module that measures, or limits seconds: no test is about how fast that is."""

    def __init__(self, loader):
        self._loader = loader

    def __getattr__(self, name):
        return getattr(self._loader, name)

    def exec_module(self, module):
        self._loader.exec_module(module)
        for name, make_replacement in REPLACED[module.__name__].items():
            setattr(module, name, make_replacement(getattr(module, name)))


class _Measured:
    """Finds these modules."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        spec = PathFinder.find_spec(name, path, target) if name in REPLACED else None
        if spec is not None:
            spec.loader = _Nominally(spec.loader)
        return spec


if "PYTEST_CURRENT_TEST" in os.environ:  # no process that runs tests
    sys.meta_path.insert(0, _Measured)
