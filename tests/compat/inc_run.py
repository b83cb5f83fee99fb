"""Example scripts of Intel Neural Compressor, run to their end: outcome and printed lines.

    python tests/compat/inc_run.py --repository FOLDER [--only TEXT] [--out table.md] [--rows kept]

The folder is a clone of the repository. Each script is run unchanged, in its own folder and
process, by `python -m neural_mp.compat.inc`: tuning, then the benchmark in both modes. Its tuning
file gets the paths of the data, as a user would set them; data and models are made here, small and
of the form that the script reads. Columns: whether every call ended without an error, whether all
lines were printed that a user waits for, the number of INT8 ops of the result, and seconds.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

from inc_examples.case import Case, Step
from inc_examples.cases import CASES
from inc_examples.files import FILES
from rich.console import Console
from rich.progress import track
from rich.table import Table

from neural_mp.core.precision import Precision

_ROOT = Path(__file__).resolve().parents[2]
#: Longest duration of one call of a script.
MAX_CALL_SECONDS = 600


@dataclass
class Row:
    """Outcome of a script.

    Attributes:
        name: of the script.
        ended: whether every call ended with exit code 0.
        missing: expected lines that were not printed.
        int8: INT8 ops of the result; None if not known.
        seconds: of all calls.
        error: last line of the first call that failed.
    """

    name: str
    ended: bool = True
    missing: list[str] = field(default_factory=list)
    int8: int | None = None
    seconds: float = 0.0
    error: str = ""


def main() -> None:
    """Run the scripts and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repository", type=Path, required=True, help="a clone of the repository")
    parser.add_argument("--files", action="store_true", help="run tuning files in place of scripts")
    parser.add_argument("--only", default="", help="part of the names of the scripts to run")
    parser.add_argument("--out", type=Path, help="Markdown file for the table")
    parser.add_argument("--packages", type=Path, help="folder of further packages of the scripts")
    parser.add_argument("--rows", type=Path, help="file that keeps the rows; they are not repeated")
    parser.add_argument("--verbose", action="store_true", help="print the output of failed calls")
    options = parser.parse_args()
    rows = _kept(options.rows)
    done = {row.name for row in rows}
    listed = FILES if options.files else CASES
    cases = [case for case in listed if options.only in _label(case) and _label(case) not in done]
    with suppress(KeyboardInterrupt):  # rows so far are shown
        for case in track(cases, "Scripts", console=Console(stderr=True)):
            rows.append(_outcome(case, options))
            if options.rows is not None:
                with options.rows.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(rows[-1])) + "\n")
    _show(rows)
    if options.out is not None:
        options.out.write_text(_markdown(rows), encoding="utf-8")


def _kept(file: Path | None) -> list[Row]:
    """Return the rows of an earlier run."""
    if file is None or not file.exists():
        return []
    return [Row(**json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()]


def _label(case: Case) -> str:
    arguments = next(iter(case.steps.values())).arguments
    configs = [argument for argument in arguments if argument.endswith(".yaml")]
    return f"{case.name} {' '.join(configs)}".strip()


def _outcome(case: Case, options: argparse.Namespace) -> Row:
    row = Row(_label(case))
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "example" / "script"
        folder.mkdir(parents=True)
        _unpack(options.repository, f"{case.tag}:{case.folder}", folder)
        case.make(folder)
        _set_paths(folder, case)
        for step in case.steps.values():
            _call(case, step, folder, row, options)
            if not row.ended:
                break
        if case.result is not None and row.ended:
            row.int8 = _int8_ops(folder / case.result)
    return row


def _unpack(repository: Path, tree: str, folder: Path) -> None:
    """Write the files of a folder of the repository into another folder."""
    command = ["git", "-C", str(repository), "archive", tree]
    content = subprocess.run(command, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(content)) as packed:
        packed.extractall(folder, filter="data")


def _set_paths(folder: Path, case: Case) -> None:
    """Set the paths of the data in the tuning files, as a user does."""
    for file in folder.glob("*.yaml"):
        text = file.read_text()
        for key, path in case.paths.items():
            text = re.sub(rf"(?m)^(\s*{key}\s*:\s*)\S+.*$", rf"\g<1>{folder / path}", text)
        file.write_text(text)


def _call(case: Case, step: Step, folder: Path, row: Row, options: argparse.Namespace) -> None:
    more = [] if options.packages is None else [options.packages.resolve()]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, [_ROOT, *more])),
        "KERAS_HOME": str(folder / ".keras"),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "neural_mp.compat.inc", case.script, *step.arguments]
    started = time.monotonic()
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=MAX_CALL_SECONDS,
            check=False,
        )
        shown, code = done.stdout + done.stderr, done.returncode
    except subprocess.TimeoutExpired:
        shown, code = f"no end within {MAX_CALL_SECONDS} seconds", -1
    row.seconds += time.monotonic() - started
    row.missing += [line for line in step.lines if not re.search(line, shown)]
    if code != 0:
        row.ended, row.error = False, (shown.strip().splitlines() or ["no output"])[-1]
        if options.verbose:
            print(shown, file=sys.stderr)


def _int8_ops(path: Path) -> int | None:
    """Return the INT8 ops of a result: of its plan, or the integer kernels of a single file."""
    if not path.exists():
        return None
    if path.suffix == ".pb":
        import tensorflow as tf

        graph = tf.compat.v1.GraphDef.FromString(path.read_bytes())
        return sum("Quantized" in node.op for node in graph.node)
    if path.suffix == ".onnx":
        import onnx

        return _int8_nodes(onnx.load(path).graph.node)
    import neural_mp

    return neural_mp.load(path).plan.counts().get(Precision.INT8, 0)


def _int8_nodes(nodes: Iterable[Any]) -> int:
    """Return the number of integer kernels: integer ops, and ops on dequantized data."""
    nodes = list(nodes)
    floats = {name for node in nodes if node.op_type == "DequantizeLinear" for name in node.output}
    count = 0
    for node in nodes:
        is_quantizer = node.op_type in ("QuantizeLinear", "DequantizeLinear")
        is_integer = "QLinear" in node.op_type or "Integer" in node.op_type
        count += is_integer or (not is_quantizer and bool(node.input) and node.input[0] in floats)
    return count


def _cells(row: Row) -> tuple[str, ...]:
    printed = "yes" if row.ended and not row.missing else "no"
    return (
        row.name,
        "yes" if row.ended else "no",
        printed,
        "–" if row.int8 is None else str(row.int8),
        f"{row.seconds:.0f}",
        row.error[:120] or ", ".join(row.missing),
    )


_HEADINGS = ("script", "reached its end", "printed the lines", "INT8 ops", "seconds", "missing")


def _show(rows: list[Row]) -> None:
    table = Table(*_HEADINGS)
    for row in rows:
        table.add_row(*_cells(row))
    console = Console()
    console.print(table)
    complete = sum(row.ended and not row.missing for row in rows)
    ended = sum(row.ended for row in rows)
    console.print(f"{ended} of {len(rows)} reached their end, {complete} printed all lines")


def _markdown(rows: list[Row]) -> str:
    lines = [_HEADINGS, ("---",) * len(_HEADINGS), *map(_cells, rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    main()
