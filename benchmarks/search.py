"""Every search strategy on the same small models: evaluations, seconds, accuracy, speed kept.

    python -m benchmarks.search [--frameworks pytorch,tensorflow,onnx] [--models easy,chain,…]
                                [--strategies basic,mincut] [--out results.md] [--check]
                                [--peer ENV/bin/python]

Nets for scikit-learn's digits, trained on the first run (a minute): one that all INT8 suits, and
six with hostile places, which `nets/search_nets.py` describes. The same weights run in every
framework. A result's speed is the median of runs taken in turn with FP32 and with all INT8, which
is what the strategies would give if accuracy did not count. With `--peer`, a Python that has
Intel Neural Compressor, its strategies on the same weights too. `--check` tunes nothing, and shows
what the hostile places do.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.measurement.children import ChildError, run_child
from benchmarks.measurement.search_data import BATCH, Digits
from benchmarks.measurement.search_run import Case, Row, int8_ops
from benchmarks.measurement.tables import make_table, markdown_table, sectioned_table, shown
from neural_mp.strategies import list_strategy_classes

FRAMEWORKS = ("pytorch", "tensorflow", "onnx")
MODELS = ("easy", "chain", "residual1", "residual2", "residual3", "spread", "transformer")
#: What ONNX Runtime lacks: gradients.
NEEDS_GRADIENTS = frozenset({"hawq_v2"})
#: Knows 16 bits only.
NEEDS_16_BITS = frozenset({"auto_mixed_precision"})
HEADINGS = (
    "framework",
    "model",
    "strategy",
    "evaluations",
    "trials",
    "seconds",
    "accuracy",
    "INT8 ops",
    "× of FP32",
    "of all INT8",
)


def strategies_for(framework: str, requested: list[str], precisions: str) -> list[str]:
    """Those asked for; if none were, all that apply."""
    if requested:
        return requested
    unfit = set(NEEDS_GRADIENTS) if framework == "onnx" else set()
    if "16" not in precisions:
        unfit |= NEEDS_16_BITS
    return [name for name in list_strategy_classes() if name not in unfit]


def peer_rows(case: Case, python: str, strategies: list[str], max_trials: int) -> list[Row]:
    """A row for each of its strategies; none for TensorFlow, whose releases it does not know."""
    if case.framework == "tensorflow":
        return []
    folder = _given(case)
    rows = []
    for strategy in strategies:
        row = Row(case.framework, case.model, f"INC {strategy}")
        rows.append(row)
        arguments = (case.framework, case.model, folder, strategy, max_trials)
        try:
            figures = run_child("peers.inc_search", *arguments, python=python, folder=folder)
        except ChildError as error:
            row.error = str(error).splitlines()[-1]
            continue
        for name, value in figures.items():
            setattr(row, name, value)
    return rows


def _given(case: Case) -> Path:
    """A folder with the model and the data, in forms that any release reads."""
    folder = case.workspace / f"peer-{case.framework}-{case.model}"
    folder.mkdir(exist_ok=True)
    splits = {split: Digits(split) for split in ("train", "test")}
    np.savez(
        folder / "data.npz",
        calibration=splits["train"].images[:BATCH],
        images=splits["test"].images,
        labels=splits["test"].labels,
    )
    if case.framework == "onnx":
        _old_onnx(Path(case.source), folder / "model.onnx")
    else:
        from benchmarks.nets.search_nets import save_weights

        save_weights(case.source, folder / "weights.npz")
    return folder


def _old_onnx(source: Path, target: Path) -> None:
    """The file with a version that old releases take, and without the shapes of what is computed.

    It turns the matrices of dense layers around, and stumbles over the shapes they had.
    """
    import onnx

    model = onnx.load(source)
    model.ir_version = min(model.ir_version, 9)
    del model.graph.value_info[:]
    onnx.save(model, target)


def cells(row: Row) -> list[str]:
    """A row as it is shown; of one that failed, the reason in place of accuracy."""
    accuracy = f"{shown(row.baseline, '.4f')} → {shown(row.accuracy, '.4f')}"
    if row.met is False:
        accuracy = f"{shown(row.baseline, '.4f')}, target not met"
    if row.error is not None:
        accuracy = row.error.splitlines()[0][:60]
    return [
        row.framework,
        row.model,
        row.strategy,
        shown(row.evaluations, "d"),
        shown(row.trials, "d"),
        shown(row.seconds, ".1f"),
        accuracy,
        "" if row.kept is None else f"{row.kept} of {row.able}",
        shown(row.speedup, ".2f"),
        shown(row.share, ".0%"),
    ]


def table_of(rows: Iterable[Row]) -> Table:
    lines = (((row.framework, row.model), cells(row)) for row in rows)
    return sectioned_table("Search strategies", HEADINGS, lines)


def markdown(rows: Iterable[Row]) -> str:
    return markdown_table(HEADINGS, map(cells, rows))


def write(rows: list[Row], target: Path) -> None:
    """As JSON where the file is named so, else as Markdown."""
    if target.suffix == ".json":
        text = json.dumps([row.to_dict() for row in rows], indent=1) + "\n"
    else:
        text = markdown(rows)
    target.write_text(text, encoding="utf-8")


def cases(options: argparse.Namespace, workspace: Path) -> Iterator[Case]:
    for framework in options.frameworks:
        for model in options.models:
            yield Case(framework, model, options.precisions, options.max_trials, workspace)


def check(selected: Iterable[Case], console: Console) -> None:
    """What the hostile places do: nothing in FP32, much in all INT8."""
    from benchmarks.nets.search_nets import deviation

    title = "Accuracy on 597 digits; what hostile places change in FP32 is relative"
    headings = ("framework", "model", "FP32", "changed by", "all INT8", "INT8 ops")
    table = make_table(title, *headings, words=2)
    for case in selected:
        changed, plain = deviation(case.model)
        lowest = case.accuracy_of_fastest()
        counted = str(int8_ops(case.fastest))
        table.add_row(
            case.framework, case.model, f"{plain:.4f}", f"{changed:.1e}", f"{lowest:.4f}", counted
        )
        console.print(f"{case.framework} {case.model}: {lowest:.4f}", style="dim")
    console.print(table)


def run(options: argparse.Namespace, workspace: Path, console: Console) -> list[Row]:
    """All runs; after each model, what is known so far is written."""
    rows: list[Row] = []
    with Progress(console=Console(stderr=True)) as progress:
        shown = progress.add_task("", total=len(options.frameworks) * len(options.models))
        for case in cases(options, workspace):
            for strategy in strategies_for(case.framework, options.strategies, options.precisions):
                label = f"{case.framework} {case.model} {strategy}"
                progress.update(shown, description=label)
                row = case.run(strategy)
                progress.console.print(label, "failed" if row.error else f"{row.seconds:.1f} s")
            case.time_all()
            rows += case.rows
            if options.peer:
                progress.update(shown, description=f"{case.framework} {case.model}, the peer")
                rows += peer_rows(case, options.peer, options.peer_strategies, options.max_trials)
            if options.out:
                write(rows, options.out)
            progress.advance(shown)
    console.print(table_of(rows))
    return rows


def some_of(choices: Iterable[str]) -> Callable[[str], list[str]]:
    """Reads words between commas, each of them one of these."""
    names = list(choices)

    def words(text: str) -> list[str]:
        tokens = text.split(",")
        for token in tokens:
            if token not in names:
                raise argparse.ArgumentTypeError(f"{token!r} is not one of {', '.join(names)}")
        return tokens

    return words


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--frameworks", type=some_of(FRAMEWORKS), default=list(FRAMEWORKS))
    parser.add_argument("--models", type=some_of(MODELS), default=list(MODELS))
    parser.add_argument(
        "--strategies",
        type=some_of(list_strategy_classes()),
        default=[],
        help="all that apply by default",
    )
    parser.add_argument("--precisions", default="int8")
    parser.add_argument("--max-trials", type=int, default=60)
    parser.add_argument("--out", type=Path, help="a file for the table: .md or .json")
    parser.add_argument("--check", action="store_true", help="only show what hostile places do")
    parser.add_argument("--peer", help="a Python with neural-compressor")
    parser.add_argument(
        "--peer-strategies",
        type=lambda text: text.split(","),
        default=["basic"],
        help="of that one",
    )
    options = parser.parse_args()
    # What torch's exporter says of packages that are not here, and of torch itself.
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
    console = Console() if sys.stdout.isatty() else Console(width=140)
    with tempfile.TemporaryDirectory() as workspace:
        if options.check:
            check(cases(options, Path(workspace)), console)
        else:
            run(options, Path(workspace), console)


if __name__ == "__main__":
    main()
