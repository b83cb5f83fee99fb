"""How many of Intel Neural Compressor's own example files can be used here.

    python tests/compat/inc_files.py TAG --repository FOLDER [--out table.md] [--json all.json]

Takes every tuning file among the examples of a version: a `.yaml` file under `examples/` whose top
level has a `model`. Each is loaded, and all that it names is made: datasets, transforms, metrics,
the strategy. Data are made up, tiny and of the form that each dataset reads; of each loader one
batch is read. A file is usable where all of that works.

The folder is a clone of the repository, from which the tag is taken, or the unpacked files of it.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import subprocess
import tarfile
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

from inc_data import MadeUp
from rich.console import Console
from rich.progress import track
from rich.table import Table

from neural_mp.api import config_objects
from neural_mp.config import Settings, load_settings
from neural_mp.config.source import read_text
from neural_mp.errors import NeuralMPError

LOADERS = (config_objects.CALIBRATION, config_objects.ACCURACY, config_objects.PERFORMANCE)
#: How often a reason counts as one of few words.
_REASONS = (
    (r"framework with an adaptor, found '(\w+)'", r"framework \1"),
    (r"unknown (dataset|transform|metric) '([^']+)'", r"no \1 \2"),
    (r"there is no strategy '([^']+)'", r"no strategy \1"),
    (r"(dataset|transform|metric) '([^']+)' has no option '([^']+)'", r"\1 \2: no option \3"),
)


@dataclass(frozen=True)
class Found:
    """What came of one file.

    Attributes:
        file: where it lies among the examples.
        framework: what it says.
        reasons: why it cannot be used; none where it can.
    """

    file: str
    framework: str
    reasons: tuple[str, ...]


def tuning_files(folder: Path) -> list[Path]:
    """The tuning files among the examples of the repository in a folder."""
    return [file for file in sorted(folder.glob("examples/**/*.yaml")) if _is_tuning(file)]


def _is_tuning(file: Path) -> bool:
    try:
        return isinstance(read_text(file.read_text(), str(file)).data.get("model"), Mapping)
    except NeuralMPError:  # other files of YAML: lists, several documents
        return False


def checked(file: Path, folder: Path, made_up: MadeUp) -> Found:
    """Load a file and make all that it names."""
    data = read_text(file.read_text(), str(file)).data
    framework = str(data["model"].get("framework"))
    reasons = tuple(dict.fromkeys(_reasons(file, made_up)))
    return Found(str(file.relative_to(folder)), framework, reasons)


def _reasons(file: Path, made_up: MadeUp) -> Iterator[str]:
    try:
        settings = with_made_up(load_settings(file), made_up)
    except NeuralMPError as error:
        yield str(error)
        return
    for step in _steps(settings):
        try:
            step()
        # Whatever is raised, the other files are still to be seen.
        except Exception as error:  # noqa: BLE001
            ours = isinstance(error, NeuralMPError)
            yield str(error) if ours else f"bare {type(error).__name__}: {error}"


def _steps(settings: Settings) -> Iterable[Callable[[], object]]:
    """All that a run makes of a file before there is a model; first, that all names are known."""
    names = config_objects.choose_name_vocabulary(settings)
    specs = (
        settings.calibration_dataloader,
        settings.evaluation.dataloader,
        settings.evaluation.performance.dataloader,
    )
    for spec in filter(None, specs):
        for name in spec["dataset"]:
            yield partial(names.datasets.find_factory, name)
        for name in spec.get("transform") or ():
            yield partial(names.transforms.find_factory, name)
    for section in LOADERS:
        yield partial(_first_batch, settings, section)
    yield partial(config_objects.build_postprocess, settings)
    for metric in settings.evaluation.metrics:
        evaluation = replace(settings.evaluation, metrics=(metric,))
        yield partial(config_objects.build_metrics, replace(settings, evaluation=evaluation))
    yield partial(config_objects.build_strategy, settings, settings.options.strategy)


def _first_batch(settings: Settings, section: Any) -> object:
    loader = config_objects.build_loader(settings, section)
    return None if loader is None else next(iter(loader))


def with_made_up(settings: Settings, made_up: MadeUp) -> Settings:
    """The settings, all paths in them replaced by those of made-up data."""
    evaluation = settings.evaluation
    performance = evaluation.performance
    changed = replace(
        evaluation,
        metrics=tuple(
            replace(item, options=made_up.options(item.name, item.options))
            for item in evaluation.metrics
        ),
        dataloader=_loader(evaluation.dataloader, made_up),
        postprocess=_all(evaluation.postprocess, made_up),
        performance=replace(performance, dataloader=_loader(performance.dataloader, made_up)),
    )
    calibrated = _loader(settings.calibration_dataloader, made_up)
    return replace(settings, evaluation=changed, calibration_dataloader=calibrated)


def _loader(spec: Mapping[str, Any] | None, made_up: MadeUp) -> Mapping[str, Any] | None:
    if spec is None:
        return None
    # Made-up data has few samples, and images of the files' sizes are large.
    small = {"batch_size": min(int(spec.get("batch_size", 1)), 2)}
    return {**spec, **small, "dataset": _all(spec["dataset"], made_up)}


def _all(named: Mapping[str, Any] | None, made_up: MadeUp) -> Mapping[str, Any] | None:
    if named is None:
        return None
    return {name: made_up.options(name, options) for name, options in named.items()}


def in_short(reason: str) -> str:
    """The kind of a reason, by which files are counted."""
    for pattern, kind in _REASONS:
        match = re.search(pattern, reason)
        if match:
            return match.expand(kind)
    # Without file and line, and without what differs from file to file.
    plain = re.sub(r"^.*?, line \d+: ", "", reason.splitlines()[0])
    return plain if len(plain) <= 110 else f"{plain[:109]}…"


def lines_of(outcomes: list[Found]) -> list[list[str]]:
    """Framework, files, usable, refused; a line for each, and one for all."""
    names = sorted({item.framework for item in outcomes})
    groups = [(name, [item for item in outcomes if item.framework == name]) for name in names]
    return [[name, *_counted(items)] for name, items in [*groups, ("all", outcomes)]]


def _counted(items: list[Found]) -> list[str]:
    usable = sum(not item.reasons for item in items)
    return [str(count) for count in (len(items), usable, len(items) - usable)]


def reasons_of(outcomes: list[Found]) -> list[list[str]]:
    """Reason, the files it holds back, and those of them that nothing else holds back."""
    kinds = [{in_short(reason) for reason in item.reasons} for item in outcomes]
    every = Counter(kind for reasons in kinds for kind in reasons)
    isolated = Counter(kind for reasons in kinds if len(reasons) == 1 for kind in reasons)
    return [[kind, str(count), str(isolated[kind])] for kind, count in every.most_common()]


def table(title: str, headings: list[str], lines: list[list[str]]) -> Table:
    """For a terminal."""
    result = Table(title=title)
    for index, heading in enumerate(headings):
        result.add_column(heading, justify="right" if index else "left")
    for cells in lines:
        result.add_row(*cells)
    return result


def markdown_table(headings: list[str], lines: list[list[str]]) -> str:
    """For a page."""
    rules = ["---", *["---:"] * (len(headings) - 1)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (headings, rules, *lines))


def unpacked(tag: str, repository: Path, scratch: Path) -> Path:
    """The folder with the examples of a version."""
    if not (repository / ".git").exists() and not (repository / "HEAD").is_file():
        return repository
    command = ["git", "-C", str(repository), "archive", tag, "examples"]
    archive = subprocess.run(command, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(scratch, filter="data")
    return scratch


def main() -> None:
    """Measure, and print tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tag", help="the version, such as v1.14")
    parser.add_argument("--repository", type=Path, required=True, help="a clone, or its files")
    parser.add_argument("--out", type=Path, help="a page with the tables")
    parser.add_argument("--json", type=Path, help="what came of every file")
    chosen = parser.parse_args()
    console = Console()
    with tempfile.TemporaryDirectory() as scratch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folders = [Path(scratch) / name for name in ("examples", "data")]
        for subfolder in folders:
            subfolder.mkdir()
        folder = unpacked(chosen.tag, chosen.repository.resolve(), folders[0])
        made_up, files = MadeUp(folders[1]), tuning_files(folder)
        outcomes = [checked(file, folder, made_up) for file in track(files, console=console)]
    counts = ["framework", "files", "usable", "refused"], lines_of(outcomes)
    why = ["why", "files", "nothing else"], reasons_of(outcomes)
    title = f"Example files of Intel Neural Compressor {chosen.tag}"
    console.print(table(title, *counts), table("Why files are refused", *why))
    if chosen.out:
        chosen.out.write_text(markdown_table(*counts) + "\n" + markdown_table(*why))
    if chosen.json:
        chosen.json.write_text(json.dumps([vars(item) for item in outcomes], indent=1))


if __name__ == "__main__":
    main()
