"""Tiny random instances of all text generators of transformers, converted layer by layer.

    python tests/zoo/all_decoders.py [--only NAME…] [--shard 1/2] [--limit-seconds 60] [--seed 0]
        [--results decoders.jsonl]

Each is converted to 4 bits with `capture="layers"`, writes tokens and is saved in a process of its
own; another process loads the result, which must write the same tokens. A further run with the same
file of results continues after the last row.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from zoo_cases.decoders import DECODER_STAGES, names
from zoo_cases.pool import Pool, serve

THIS = Path(__file__).resolve()


def main() -> None:
    options = _options()
    if options.pool:
        import transformers

        transformers.logging.set_verbosity_error()
        with tempfile.TemporaryDirectory() as folder:
            # Children of this process then import nothing.
            job = {"name": "llama", "seed": 0}
            for stage in DECODER_STAGES.values():
                stage(job, Path(folder))
        serve()
        return
    rows = [json.loads(line) for line in _lines(options.results)]
    done = {row["name"] for row in rows}
    number, count = map(int, options.shard.split("/"))
    every = names()
    # A run that ends early covers all families.
    random.Random(options.seed).shuffle(every)
    remaining = [name for name in every[number - 1 :: count] if name not in done]
    if options.only:
        remaining = [name for name in remaining if name in options.only]
    with options.results.open("a", encoding="utf-8") as file:
        for row in _run(remaining, options):
            rows.append(row)
            print(json.dumps(row), file=file, flush=True)
            print(f"{row['name']}: {verdict(row)}", flush=True)
    counts = Counter(verdict(row).partition(":")[0] for row in rows)
    built = len(rows) - counts["not built"]
    print(", ".join(f"{kind} {count}" for kind, count in sorted(counts.items())))
    print(f"{counts['equal']} of {built} built: {counts['equal'] / max(built, 1):.1%}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", help="model types")
    parser.add_argument("--shard", default="1/1", help="part of the types, as in 1/2")
    parser.add_argument("--limit-seconds", type=float, default=60.0, help="CPU seconds of each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=Path("decoders.jsonl"))
    parser.add_argument("--pool", help=argparse.SUPPRESS)
    return parser.parse_args()


def _lines(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8").splitlines() if file.exists() else []


def _run(remaining: list[str], options: argparse.Namespace) -> Any:
    """Yield a row for each model type."""
    if not remaining:
        return
    pool = Pool(THIS, "decoders", [])
    job = {"seed": options.seed, "limit_seconds": options.limit_seconds}
    for name in remaining:
        with tempfile.TemporaryDirectory() as folder:
            job |= {"name": name, "folder": folder}
            row = {"name": name, **pool.run({**job, "stage": "decoder"})}
            if row.get("converted"):
                row |= pool.run({**job, "stage": "decoder reload"})
        yield row
    pool.close()


def verdict(row: dict[str, Any]) -> str:
    """Return the kind of a row, with a reason if the row is not equal."""
    if "not_built" in row:
        return f"not built: {row['not_built'][-200:]}"
    for key in ("ended", "crashed"):
        if key in row:
            return f"{key}: {row[key].strip().splitlines()[-1][:200]}"
    return str(row.get("reload", "no reload"))


if __name__ == "__main__":
    main()
