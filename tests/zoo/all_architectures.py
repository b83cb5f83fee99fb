"""Small random instances of all architectures of packages: converted, compared, reloaded.

    python tests/zoo/all_architectures.py [--sources transformers keras …] [--only NAME…]
        [--shard 1/2] [--limit-seconds 120] [--seed 0] [--full] [--packages FOLDER…]
        [--results results.jsonl] [--page docs/layers/architectures.md]

Every architecture runs in a process of its own, which is ended at the limit of CPU seconds; the
saved result is loaded in another process. Rows are appended to the file of results, and a further
run with the same file continues after the last row. `--full` chooses among the installed runtimes
and measures times; without, only numbers are compared. Packages that the installed environment
lacks, such as torchvision, timm and skl2onnx, may lie in folders of their own
(`pip install --no-deps --target FOLDER …`); what is missing is listed as not run.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import sys
import tempfile
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from zoo_cases.page import page_of, verdict
from zoo_cases.pool import Pool, serve
from zoo_cases.sources import SOURCES, build_warm_up, names_of

THIS = Path(__file__).resolve()
#: Pool whose children load saved results.
RELOADING = "reload"
#: Pool → modules imported ahead: children of a process that has run a session may wait forever.
_IMPORTED = {
    "onnx": ("neural_mp.api.job_builder", "neural_mp.adaptors.onnxrt.adaptor"),
    "sklearn": ("sklearn", "neural_mp.api.job_builder", "neural_mp.adaptors.onnxrt.adaptor"),
    "keras": ("keras", "neural_mp.api.job_builder", "neural_mp.adaptors.tensorflow.adaptor"),
}


def main() -> None:
    options = _options()
    sys.path[1:1] = options.packages
    if options.pool:
        _prepare(options.pool)
        serve()
        return
    rows = _rows_of(options.results)
    _run_all(rows, options)
    if options.page:
        options.page.write_text(page_of(rows), encoding="utf-8")
    counts = Counter(verdict(row) for row in rows)
    print(", ".join(f"{kind} {count}" for kind, count in sorted(counts.items())))


def _run_all(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """Append a row for each architecture without one, in memory and in the file."""
    with options.results.open("a", encoding="utf-8") as file:
        for source in options.sources:
            done = {row["name"] for row in rows if row["source"] == source}
            for row in _run_source(source, done, options):
                rows.append(row)
                print(json.dumps(row), file=file, flush=True)
                print(f"{source} {row['name']}: {_verdict(row)}", flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sources", nargs="*", choices=SOURCES, default=list(SOURCES))
    parser.add_argument("--only", nargs="*", help="names of architectures")
    parser.add_argument("--shard", default="1/1", help="part of the architectures, as in 1/2")
    parser.add_argument("--limit-seconds", type=float, default=120.0, help="CPU seconds of each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--full", action="store_true", help="choose the runtime, measure times")
    parser.add_argument("--packages", nargs="*", default=[], help="folders with more packages")
    parser.add_argument("--results", type=Path, default=Path("architectures.jsonl"))
    parser.add_argument("--page", type=Path, help="a file for the table, in Markdown")
    parser.add_argument("--pool", help=argparse.SUPPRESS)
    return parser.parse_args()


def _prepare(pool: str) -> None:
    """Import what most children need, or run it where a fork may follow a run."""
    if pool in ("transformers", RELOADING):
        with suppress(ImportError):  # timm, which transformers may import, imports torchvision
            from zoo_cases.vision_families import import_torchvision

            import_torchvision()
    if pool in _IMPORTED:
        for module in _IMPORTED[pool]:
            importlib.import_module(module)
        names_of(pool)  # the tests of onnx take seconds to make
        return
    if pool == RELOADING:
        import torch
        from zoo_cases.case import ZooCase

        layer = torch.nn.Linear(4, 4).eval()
        case = ZooCase(layer, [torch.ones(2, 4)], layer)
    else:
        case = build_warm_up(pool)
    from zoo_cases.stages import warm_up

    warm_up(case)


def _rows_of(file: Path) -> list[dict[str, Any]]:
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def _run_source(source: str, done: set[str], options: argparse.Namespace) -> Any:
    """Yield a row for each architecture of a source that has none."""
    number, count = map(int, options.shard.split("/"))
    try:
        every = names_of(source)
    except Exception as error:  # noqa: BLE001 - a package of another build fails in any way
        print(f"{source} is not run: {error}", flush=True)
        return
    # Names in the alphabet's order are those of families; a run that ends early covers all kinds.
    random.Random(options.seed).shuffle(every)
    names = [name for name in every[number - 1 :: count] if name not in done]
    if options.only:
        names = [name for name in names if name in options.only]
    if not names:
        return
    pools = [Pool(THIS, kind, options.packages) for kind in (source, RELOADING)]
    job = {"source": source, "seed": options.seed, "full": options.full}
    job["limit_seconds"] = options.limit_seconds
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            job |= {"name": name, "folder": folder}
            row = {"source": source, "name": name, **pools[0].run({**job, "stage": "convert"})}
            if "precisions" in row:
                row |= pools[1].run({**job, "stage": "reload"})
        yield row
    for pool in pools:
        pool.close()


def _verdict(row: dict[str, Any]) -> str:
    for kind in ("not_built", "ended", "refused", "crashed"):
        if kind in row:
            return f"{kind}: {_last_line(row[kind])}"
    shown = {key: _last_line(row[key]) for key in _SHOWN if row.get(key) not in ("", None)}
    return ", ".join(f"{key} {value}" for key, value in shown.items())


def _last_line(value: Any) -> str:
    return str(value).strip().splitlines()[-1][:300]


_SHOWN = ("precisions", "sqnr_db", "lowest", "unlike", "reload", "convert_seconds", "save_seconds")


if __name__ == "__main__":
    main()
