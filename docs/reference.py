"""Tables of options and of profiles' keys, and the JSON Schema of tuning files, from declarations.

And notebooks, from pages of the task gallery. `python docs/reference.py` writes all of them; a test
compares.
"""

from __future__ import annotations

import inspect
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from enum import Enum
from pathlib import Path
from typing import Any

from neural_mp.config.declaration import Option
from neural_mp.config.options import OPTIONS
from neural_mp.config.schema import SCHEMAS
from neural_mp.core.enums import Dialect
from neural_mp.targets import profile
from neural_mp.util.validators import json_schema

DOCS = Path(__file__).parent
SCHEMA = DOCS / "tuning_file.schema.json"
#: Tasks whose page is also a notebook.
NOTEBOOKS = ("classification", "detection", "segmentation")
_NOTEBOOK_FOLDER = DOCS.parent / "examples" / "notebooks"
#: The end of every notebook.
_DISPLAY = """## Result in a notebook

The last line of a cell is displayed: of a result, the verdict, figures and the chart of trials."""
_HEADER = "| attribute | default | meaning |\n|---|---|---|\n"
_PROFILE_HEADER = "| key | default | meaning |\n|---|---|---|\n"
#: Key of a profile → the class of its value.
_PARTS = {
    "activation": profile.Activations,
    "weight": profile.Weights,
    "placement": profile.Placement,
    "shifts": profile.Shifts,
    "others": profile.Group,
    "cost": profile.Cost,
}


def pages() -> dict[Path, str]:
    """Return the files that the declarations determine, with their content."""
    guide, yaml, targets = (DOCS / name for name in ("guide.md", "yaml.md", "targets.md"))
    before, header, rest = guide.read_text(encoding="utf-8").partition(_HEADER)
    after = rest[rest.index("\n\n") :]
    rows = "\n".join(_row(option.name, option, python=True) for option in OPTIONS.values())
    return {
        guide: before + header + rows + after,
        yaml: _with_rows(yaml.read_text(encoding="utf-8")),
        targets: _with_profile_keys(targets.read_text(encoding="utf-8")),
        SCHEMA: json.dumps(tuning_file_schema(), indent=1, ensure_ascii=False) + "\n",
        **{
            _NOTEBOOK_FOLDER / f"{task}.ipynb": notebook_of(DOCS / "tasks" / f"{task}.md")
            for task in NOTEBOOKS
        },
    }


def notebook_of(page: Path) -> str:
    """Return the notebook of a page: blocks of Python and YAML are cells, text is their output."""
    text = page.read_text(encoding="utf-8")
    cells: list[dict[str, Any]] = []
    parts = re.split(r"^```(\w+)\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    languages, blocks = [*parts[1::3], ""], [*parts[2::3], ""]
    for prose, language, block in zip(parts[::3], languages, blocks, strict=True):
        if prose.strip():
            cells.append({"cell_type": "markdown", "source": _links_from_notebooks(prose, page)})
        if language == "text":
            cells[-1]["outputs"] = [_stream(block)]
        elif language == "yaml":
            name, _, content = block.removeprefix("# ").partition("\n")
            cells.append(_code_cell(f"%%writefile {name}\n{content}", f"Writing {name}\n"))
        elif language:
            cells.append(_code_cell(block))
    cells += [{"cell_type": "markdown", "source": _DISPLAY}, _code_cell("result")]
    book = {
        "cells": [_complete_cell(cell, index) for index, cell in enumerate(cells)],
        "metadata": {"language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(book, indent=1, ensure_ascii=False) + "\n"


def _code_cell(source: str, output: str = "") -> dict[str, Any]:
    outputs = [_stream(output)] if output else []
    return {"cell_type": "code", "source": source, "execution_count": None, "outputs": outputs}


def _stream(text: str) -> dict[str, Any]:
    return {"output_type": "stream", "name": "stdout", "text": text.splitlines(keepends=True)}


def _complete_cell(cell: Mapping[str, Any], index: int) -> dict[str, Any]:
    lines = cell["source"].strip().splitlines(keepends=True)
    return {**cell, "id": f"cell-{index}", "metadata": {}, "source": lines}


def _links_from_notebooks(prose: str, page: Path) -> str:
    def relink(link: re.Match[str]) -> str:
        target = os.path.normpath(page.parent / link[1])
        return f"]({Path(os.path.relpath(target, _NOTEBOOK_FOLDER)).as_posix()}"

    return re.sub(r"\]\((?!\w+:)([^)#\s]+)", relink, prose)


def tuning_file_schema() -> dict[str, Any]:
    """Return the JSON Schema of tuning files."""
    schema: dict[str, Any] = json.loads(json.dumps(json_schema(SCHEMAS[Dialect.OWN])))
    for option in OPTIONS.values():
        if option.path:
            _keywords_at(schema, option.path).update(_description(option))
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Tuning file of neural-mp",
        **_with_empty_keys(schema),
    }


def _with_empty_keys(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema in which every key may be null, which counts as missing."""
    for part in (schema, *schema.get("anyOf", ())):
        for key, value in part.get("properties", {}).items():
            inner = _with_empty_keys(value)
            is_strict = bool({"type", "enum", "anyOf"} & {*inner})
            part["properties"][key] = {"anyOf": [{"type": "null"}, inner]} if is_strict else inner
        if isinstance(part.get("additionalProperties"), dict):
            inner = _with_empty_keys(part["additionalProperties"])
            part["additionalProperties"] = {"anyOf": [{"type": "null"}, inner]}
    return schema


def _description(option: Option) -> dict[str, Any]:
    is_plain = isinstance(option.default, bool | int | float | str)
    default = {"default": option.default} if is_plain else {}
    return {"description": option.plain_help, **default}


def _keywords_at(schema: dict[str, Any], path: tuple[str | int, ...]) -> dict[str, Any]:
    for key in path:
        section = schema["anyOf"][1] if "anyOf" in schema else schema
        schema = section["properties"][key]
    return schema


def _with_profile_keys(page: str) -> str:
    """Return a page whose rows of a profile's keys are those of its dataclasses."""
    before, header, rest = page.partition(_PROFILE_HEADER)
    after = rest[rest.index("\n## ") :]
    return before + header + "".join(_profile_rows(profile.TargetProfile, "")) + after


def _profile_rows(part: type, prefix: str) -> Iterator[str]:
    meanings = dict(
        re.findall(r"^    (\w+): (.+(?:\n {8}.+)*)", inspect.getdoc(part) or "", flags=re.MULTILINE)
    )
    for item in fields(part):
        meaning = re.sub(r"\s+", " ", meanings[item.name]).rstrip(".")
        is_required = item.default is MISSING and item.default_factory is MISSING
        default = "required" if is_required else _profile_default(item.default)
        yield f"| `{prefix}{item.name}` | {default} | {meaning} |\n"
        if item.name in _PARTS:
            yield from _profile_rows(_PARTS[item.name], f"{prefix}{item.name}.")


def _profile_default(value: object) -> str:
    words = value if isinstance(value, tuple) else (value,)
    plain = all(isinstance(word, str | float) for word in words)
    return ", ".join(f"`{word}`" for word in words) if words and plain else "none"


def _with_rows(page: str) -> str:
    """Return a page whose rows of options are those of the declarations.

    A new option follows the option that is declared before in the same section.
    """
    previous: dict[Any, str] = {}
    for option in OPTIONS.values():
        if not option.path or "properties" in json_schema(option.in_file):
            continue  # the keys of a section have rows of their own
        key, section = ".".join(map(str, option.path)), option.path[:1]
        row = _row(key, option, python=False)
        pattern = re.compile(rf"^\| `{re.escape(key)}` \|.*$", re.MULTILINE)
        if pattern.search(page) is None:
            page = page.replace(previous[section], f"{previous[section]}\n{row}")
        else:
            page = pattern.sub(lambda _, row=row: row, page)
        previous[section] = row
    return page


def _row(name: str, option: Option, *, python: bool) -> str:
    meaning = option.help if not python else option.help.replace("(guide.md#", "(#")
    meaning = meaning if python else meaning.replace("(yaml.md#", "(#")
    return f"| `{name}` | {_default(option.default, option, python)} | {meaning} |"


def _default(value: object, option: Option, python: bool) -> str:
    if option.default_words and (python or option.name != "model"):  # a file may leave it out
        return option.default_words
    if value is None or (isinstance(value, tuple | Mapping) and not value):
        return "none"
    if isinstance(value, tuple):
        value = ",".join(map(str, value))
    plain = value.value if isinstance(value, Enum) else value
    return f"`{plain!r}`".replace("'", '"') if python else f"`{json.dumps(plain)}`".replace('"', "")


if __name__ == "__main__":
    _NOTEBOOK_FOLDER.mkdir(exist_ok=True)
    for file, text in pages().items():
        file.write_text(text, encoding="utf-8")
