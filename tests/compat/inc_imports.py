"""Count the example scripts of Intel Neural Compressor that find all that they import.

    python tests/compat/inc_imports.py --repository CLONE --tag v3.9

Every script that imports `neural_compressor` is read, not run: for each of its imports, the module
is imported and the name looked up. The table lists what is missing, and what is a placeholder that
raises on use.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Iterator

from neural_mp.compat.inc.import_aliases import THEIRS, Absent, register


def main(arguments: list[str]) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repository", required=True, help="git folder of the clone")
    parser.add_argument("--tag", default="v3.9")
    parser.add_argument("--folder", default="examples")
    options = parser.parse_args(arguments)
    register(THEIRS)
    missing: Counter[str] = Counter()
    placeholders: Counter[str] = Counter()
    complete = with_placeholders = scripts = 0
    for names in _imports(options.repository, options.tag, options.folder):
        scripts += 1
        absent = {name for name in names if _lookup(name) is None}
        raising = {name for name in names - absent if isinstance(_lookup(name), Absent)}
        missing.update(absent)
        placeholders.update(raising)
        complete += not absent
        with_placeholders += not absent and bool(raising)
    print(f"scripts: {scripts}")
    print(f"find all names: {complete}, of these with placeholders: {with_placeholders}")
    for title, counts in (("missing", missing), ("placeholders", placeholders)):
        print(f"{title}:")
        for name, count in counts.most_common():
            print(f"  {count:3d}  {name}")


def _imports(repository: str, tag: str, folder: str) -> Iterator[set[str]]:
    """Yield the imports of every script, as `module:name`."""
    listed = _git(repository, "ls-tree", "-r", "--name-only", tag, folder)
    for path in listed.splitlines():
        if not path.endswith(".py"):
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(_git(repository, "show", f"{tag}:{path}"))
        names = set(_names(tree))
        if names:
            yield names


def _names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == THEIRS:
            yield from (f"{node.module}:{name.name}" for name in node.names)
        elif isinstance(node, ast.Import):
            yield from (
                f"{name.name}:" for name in node.names if name.name.partition(".")[0] == THEIRS
            )


def _lookup(name: str) -> object:
    """Return the object of an import; None if there is none."""
    module, _, attribute = name.partition(":")
    try:
        imported = importlib.import_module(module)
        return getattr(imported, attribute) if attribute else imported
    except (ImportError, AttributeError):
        return None


def _git(repository: str, *command: str) -> str:
    done = subprocess.run(
        ["git", "-C", repository, *command], capture_output=True, text=True, check=True
    )
    return done.stdout


if __name__ == "__main__":
    main(sys.argv[1:])
