"""Tuning files with one thing changed, read into settings: no framework is imported."""

from __future__ import annotations

import contextlib
import random
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from attacks.mutants import broken, lines_broken, mutants
from attacks.verdicts import REPOSITORY

from neural_mp.api import config_objects
from neural_mp.config import load_settings, settings_from
from neural_mp.errors import DataError

#: The last shares of attacks, on the text of a file and on its bytes; the rest are on its values.
_OF_LINES, _OF_BYTES = 0.15, 0.1
_YAML = re.compile(r"```yaml\n(.*?)```", re.DOTALL)


def prepare(folder: Path) -> None:
    """Gather tuning files: ours, those of examples, those of the documentation."""
    files = [*sorted((REPOSITORY / "conf").glob("*.yaml"))]
    files += sorted((REPOSITORY / "examples").rglob("*.yaml"))
    texts = [file.read_text(encoding="utf-8") for file in files]
    for page in sorted((REPOSITORY / "docs").rglob("*.md")):
        texts += _YAML.findall(page.read_text(encoding="utf-8"))
    mappings = [text for text in texts if isinstance(_or_none(text), dict)]
    for number, text in enumerate(dict.fromkeys(mappings)):
        (folder / f"{number:03}.yaml").write_text(text, encoding="utf-8")


def _or_none(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return None


def attacks(
    folder: Path, scratch: Path, seed: int, count: int
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Name and call of each attack."""
    files = sorted(folder.glob("*.yaml"))
    texts = [file.read_text(encoding="utf-8") for file in files]
    drawn = random.Random(f"settings {seed}")
    values, lines = round(count * (1 - _OF_LINES - _OF_BYTES)), round(count * _OF_LINES)
    # The more keys a file has, the more of the attacks are on it.
    sizes = [len(text) for text in texts]
    trees = [
        mutants(yaml.safe_load(text), f"{seed} {file.name}", count)
        for file, text in zip(files, texts, strict=True)
    ]
    path = scratch / "conf.yaml"
    for number in range(count):
        index = drawn.choices(range(len(texts)), sizes)[0]
        if number < values:
            case, tree = next(trees[index])
            as_dict = number % 4 == 0
            yield f"{files[index].name} {case}", _of_tree(path, tree, as_dict)
        elif number < values + lines:
            case, text = lines_broken(texts[index], drawn)
            yield f"{files[index].name} {case}", _of_bytes(path, text.encode("utf-8", "replace"))
        else:
            case, data = broken(texts[index].encode(), drawn)
            yield f"{files[index].name} {case}", _of_bytes(path, data)


def _of_tree(path: Path, tree: Any, as_dict: bool) -> Callable[[], object]:
    def call() -> None:
        if as_dict:
            _taken(settings_from(tree))
            return
        path.write_text(yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")
        _taken(load_settings(path))

    return call


def _of_bytes(path: Path, data: bytes) -> Callable[[], object]:
    def call() -> None:
        path.write_bytes(data)
        _taken(load_settings(path))

    return call


def _taken(settings: Any) -> None:
    """Make what can be made of the settings without a model.

    Most files name data that are not here, which must hide nothing else.
    """
    calls: list[Callable[[], object]] = [
        lambda: config_objects.build_metrics(settings),
        lambda: config_objects.build_postprocess(settings),
        *(partial(config_objects.build_loader, settings, section) for section in _SECTIONS),
    ]
    if settings.options.is_set("strategy"):
        calls.append(lambda: config_objects.build_strategy(settings, settings.options.strategy))
    for call in calls:
        with contextlib.suppress(DataError):
            call()


_SECTIONS = (config_objects.ACCURACY, config_objects.PERFORMANCE, config_objects.CALIBRATION)
