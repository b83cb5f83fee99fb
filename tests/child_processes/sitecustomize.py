"""Imported by every Python process that a test starts: less garbage collection, fewer imports.

Of the import of a framework, collections take a third, and half of these come at the end, where
nothing is left to be used: what is frozen is out of them. `onnx_ir` imports `sympy` for expressions
of sizes, which takes a third of the imports of a worker and which few models have.
"""

import atexit
import gc
import sys
from importlib.machinery import PathFinder
from importlib.util import LazyLoader

gc.set_threshold(400_000, 10, 100)
atexit.register(gc.freeze)


class _Later:
    """Loads modules when they are first used."""

    names = frozenset({"sympy", "onnx_ir._symbolic_shapes"})

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        spec = PathFinder.find_spec(name, path, target) if name in cls.names else None
        if spec is not None:
            spec.loader = LazyLoader(spec.loader)
        return spec


sys.meta_path.insert(0, _Later)
