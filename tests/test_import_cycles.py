"""No module imports itself by way of others; imports inside of functions count."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components

PACKAGE = Path(__file__).parent.parent / "neural_mp"


def import_graph(package: Path) -> dict[str, set[str]]:
    """Module → the modules of the package that it imports, wherever in its source."""
    files = {_name(file, package): file for file in package.rglob("*.py")}
    return {
        name: {target for target in _imports(file, name, files) if target != name}
        for name, file in files.items()
    }


def cycles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Every set of modules that import one another, however indirectly."""
    names = sorted(graph)
    index = {name: position for position, name in enumerate(names)}
    edges = [(index[source], index[target]) for source in names for target in graph[source]]
    rows, columns = np.array(edges, int).reshape(-1, 2).T
    matrix = csr_array((np.ones(len(edges)), (rows, columns)), shape=(len(names), len(names)))
    _, labels = connected_components(matrix, directed=True, connection="strong")
    groups: dict[int, list[str]] = {}
    for name, label in zip(names, labels, strict=True):
        groups.setdefault(label, []).append(name)
    return [group for group in groups.values() if len(group) > 1]


def _name(file: Path, package: Path) -> str:
    parts = file.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(file: Path, name: str, modules: Mapping[str, Path]) -> Iterator[str]:
    package = name.split(".") if file.stem == "__init__" else name.split(".")[:-1]
    for node in _executed(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom):
            outer = package[: len(package) + 1 - node.level] if node.level else []
            base = ".".join([*outer, *filter(None, [node.module])])
            for alias in node.names:
                target = f"{base}.{alias.name}"
                if target in modules:
                    yield target
                elif base in modules:
                    yield base


def _executed(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes below, without those that only a type checker reads."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            for statement in child.orelse:
                yield statement
                yield from _executed(statement)
        else:
            yield child
            yield from _executed(child)


def test_no_modules_import_one_another():
    assert cycles(import_graph(PACKAGE)) == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import package.core.plan", True),
        ("from package.core import plan", True),
        ("from package.core.plan import Plan", True),
        ("from .plan import Plan", True),
        ("def late():\n    from package.core.plan import Plan", True),
        ("from package.core import named_there", True),
        ("import package.core", True),
        ("if TYPE_CHECKING:\n    from package.core.plan import Plan", False),
        ("if TYPE_CHECKING:\n    pass\nelse:\n    from package.core.plan import Plan", True),
        ("import numpy", False),
    ],
)
def test_a_cycle_is_seen(tmp_path, source, found):
    core = tmp_path / "package" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").write_text("from package.core.plan import Plan")
    (core / "plan.py").write_text("import package.core.space")
    (core / "space.py").write_text(source)
    modules = {name for cycle in cycles(import_graph(tmp_path / "package")) for name in cycle}
    assert ("package.core.space" in modules) is found
