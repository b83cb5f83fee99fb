"""Which example scripts of Intel Neural Compressor would get on with this package: a static check.

    python tests/compat/inc_scripts.py --repository FOLDER [--uses Quantization] [--verbose]

Every import of theirs, every attribute of what is imported, and every keyword of a call is looked
up here; nothing of the scripts is run. A script passes if all is found, and nothing in it stands
for what is not here (pruning, distillation, training in INT8).
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from neural_mp.compat.inc.import_aliases import THEIRS, Absent, register

register(THEIRS)


class _Script(ast.NodeVisitor):
    """What a script takes from their package, and what of it is not here."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {}
        self.imports = 0
        self.problems: list[str] = []

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if alias.name.split(".")[0] == THEIRS:
                self.imports += 1
                module = self._module(alias.name)
                name = alias.asname or THEIRS
                self.names[name] = module if alias.asname else self._module(THEIRS)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if (node.module or "").split(".")[0] != THEIRS:
            return
        self.imports += 1
        module = self._module(node.module or "")
        for alias in node.names:
            if module is None or alias.name == "*":
                continue
            value = getattr(module, alias.name, None)
            if value is None:
                value = self._module(f"{node.module}.{alias.name}", quiet=True)
            if value is None:
                self.problems.append(f"{node.module} has no {alias.name}")
            else:
                self._note(alias.name, value)
                self.names[alias.asname or alias.name] = value

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        called = self._value(node.func)
        if called in (None, _ANYTHING) or isinstance(called, Absent):
            return
        try:
            parameters = inspect.signature(called).parameters.values()
        except (TypeError, ValueError):
            return
        if any(p.kind is p.VAR_KEYWORD for p in parameters):
            return
        accepted = {p.name for p in parameters}
        for keyword in node.keywords:
            if keyword.arg is not None and keyword.arg not in accepted:
                self.problems.append(f"{ast.unparse(node.func)} takes no {keyword.arg}")

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.generic_visit(node)
        holder = self._value(node.value)
        if holder in (None, _ANYTHING) or isinstance(holder, Absent):
            return
        if not hasattr(holder, node.attr):
            self.problems.append(f"{ast.unparse(node.value)} has no {node.attr}")

    def visit_Assign(self, node: ast.Assign) -> None:
        """What a call of a class gives has the attributes of the class."""
        self.generic_visit(node)
        kind = self._value(node.value.func) if isinstance(node.value, ast.Call) else None
        for target in node.targets:
            if isinstance(target, ast.Name) and inspect.isclass(kind):
                self.names[target.id] = _Instance(kind)

    def _value(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Name):
            return self.names.get(node.id)
        if isinstance(node, ast.Attribute):
            holder = self._value(node.value)
            return None if holder is None else getattr(holder, node.attr, None)
        return None

    def _module(self, name: str, quiet: bool = False) -> Any:
        try:
            return importlib.import_module(name)
        except ImportError:
            if not quiet:
                self.problems.append(f"there is no module {name}")
            return None

    def _note(self, name: str, value: Any) -> None:
        if isinstance(value, Absent):
            self.problems.append(f"{name} is not here")


class _Instance:
    """Stands for an object of a class: has what its class and its `__init__` give it."""

    def __init__(self, kind: type) -> None:
        self._kind = kind

    def __getattr__(self, name: str) -> Any:
        if hasattr(self._kind, name):
            attribute = inspect.getattr_static(self._kind, name)
            return getattr(self._kind, name) if callable(attribute) else _ANYTHING
        if hasattr(self._kind, "__getattr__"):
            return _ANYTHING
        for base in self._kind.__mro__:
            source = inspect.getsource(base.__init__) if "__init__" in vars(base) else ""
            if f"self.{name}:" in source or f"self.{name} =" in source:
                return _ANYTHING
            if name in getattr(base, "__annotations__", {}):
                return _ANYTHING
        raise AttributeError(name)


_ANYTHING = object()


def check(path: Path) -> tuple[int, list[str]]:
    """How many imports of theirs a script has, and what of them is not here."""
    script = _Script()
    try:
        tree = ast.parse(path.read_text(encoding="utf-8", errors="replace"))
    except SyntaxError as error:
        return 0, [f"it is no Python of today: {error.msg}"]
    # Names are bound by imports within functions, too, before they are used.
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            script.visit(node)
    for statement in tree.body:
        script.visit(statement)
    return script.imports, list(dict.fromkeys(script.problems))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repository", type=Path, required=True, help="a checkout of theirs")
    parser.add_argument("--uses", default="", help="only scripts that name this")
    parser.add_argument("--verbose", action="store_true", help="every script that does not pass")
    options = parser.parse_args()
    reasons: Counter[str] = Counter()
    passed = total = 0
    for path in sorted((options.repository / "examples").rglob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        if THEIRS not in text or options.uses not in text:
            continue
        imports, problems = check(path)
        if not imports:
            continue
        total += 1
        passed += not problems
        reasons.update(problems[:1])
        if problems and options.verbose:
            print(path.relative_to(options.repository), *problems, sep="\n    ")
    table = Table(title=f"{passed} of {total} scripts pass", title_justify="left")
    table.add_column("first problem of a script that does not")
    table.add_column("scripts", justify="right")
    for reason, count in reasons.most_common(40):
        table.add_row(reason, str(count))
    Console().print(table)


if __name__ == "__main__":
    main()
