"""What the site needs beside the pages of this folder: files of the repository that they link to.

The pages are read in two places: in the repository, where `../conf/README.md` is a file beside
`docs/`, and on the site, where there is nothing beside it. So those files become pages of the site,
and links are rewritten to where they are there.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
#: Files beside `docs/` that are part of the site, by pattern.
SHOWN = ("*.md", "LICENSE", "benchmarks/README.md", "conf/*", "examples/**/*")
#: The repository's first page; on the site `index.md` is the first.
RENAMED = {"README.md": "readme.md"}

_LINK = re.compile(r"(?P<before>\]\()(?P<target>[^)\s#]+)(?P<after>[^)]*\))")
_FENCE = re.compile(r"(^```.*?^```$)", flags=re.DOTALL | re.MULTILINE)


def on_config(config: Any) -> Any:
    """List every example."""
    examples = [
        {_title(file): file.relative_to(ROOT).as_posix()}
        for file in sorted(ROOT.glob("examples/*/README.md"))
    ]
    for entry in config["nav"]:
        if entry.get("Examples"):
            entry["Examples"] = [entry["Examples"], *examples]
    return config


def on_files(files: Files, *, config: Any) -> Files:
    """Add the files of the repository that belong to the site."""
    for file in _shown():
        path = file.relative_to(ROOT).as_posix()
        files.append(File.generated(config, RENAMED.get(path, path), abs_src_path=str(file)))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Make links lead to where files are on the site; what is in a code block stays as it is."""
    here = _in_repository(page.file)
    folder = posixpath.dirname(page.file.src_uri)

    def rewritten(link: re.Match[str]) -> str:
        target = link["target"]
        if re.match(r"\w+:", target):
            return link[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(here), target))
        if (ROOT / path).is_dir():
            path = f"{path}/README.md"
        on_site = path.removeprefix("docs/") if path.startswith("docs/") else path
        on_site = RENAMED.get(on_site, on_site)
        return f"{link['before']}{posixpath.relpath(on_site, folder or '.')}{link['after']}"

    parts = _FENCE.split(markdown)
    return "".join(
        part if index % 2 else _LINK.sub(rewritten, part) for index, part in enumerate(parts)
    )


def _in_repository(file: File) -> str:
    """A page's path from the root of the repository."""
    return Path(file.abs_src_path).relative_to(ROOT).as_posix()


def _shown() -> Iterator[Path]:
    for pattern in SHOWN:
        for file in sorted(ROOT.glob(pattern)):
            left_by_runs = {"out", "__pycache__", "neural_mp_workspace"} & set(file.parts)
            if file.is_file() and not left_by_runs:
                yield file


def _title(file: Path) -> str:
    return file.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
