"""Look at what stays in FP32 and why, move op types between the lists, see what that does."""

from __future__ import annotations

import csv
import os
from pathlib import Path

os.environ.setdefault("FORCE_BF16", "1")

from net import Digits, trained
from rich.console import Console
from rich.table import Table

from neural_mp import AutoMixedPrecisionOptions, MixedPrecision, OptimizedModel, common
from neural_mp.metrics import build_metric

OUT = Path(__file__).parent / "out"
#: What every round does to the lists; the first leaves them as TensorFlow has them.
ROUNDS = {
    "TensorFlow's lists": {},
    "AvgPool and Softmax allowed": {
        "inferlist_remove": "AvgPool,Softmax",
        "allowlist_add": "AvgPool,Softmax",
    },
    "Pow taken off the deny list, too": {
        "inferlist_remove": "AvgPool,Softmax",
        "denylist_remove": "Pow",
        "allowlist_add": "AvgPool,Softmax,Pow",
    },
}


def converted(model, name: str, edits: dict[str, str]) -> tuple[OptimizedModel, dict[str, dict]]:
    """One round: the result, and what was decided of every op, from the log."""
    log = OUT / "log" / name.replace(" ", "_").replace(",", "").replace("'", "")
    converter = MixedPrecision(amp=AutoMixedPrecisionOptions(**edits, log_path=log))
    converter.model = model
    converter.precisions = "bf16"
    converter.metric = build_metric("topk", {"k": 1})
    converter.eval_dataloader = common.DataLoader(Digits("test"), batch_size=128)
    converter.workspace = OUT / "workspace"
    result = converter()
    with (log / "paint_bf16.tsv").open(encoding="utf-8") as file:
        paints = {row["op"]: row for row in csv.DictReader(file, delimiter="\t")}
    return result, paints


def main() -> None:
    console, model = Console(width=100), trained()
    summary = Table(title="Round by round", title_justify="left")
    for heading in ("lists", "accuracy", "BF16 ops", "casts", "changed"):
        summary.add_column(heading)
    previous: dict[str, dict] = {}
    for name, edits in ROUNDS.items():
        result, paints = converted(model, name, edits)
        console.rule(name, align="left")
        console.print(result.report.converted[0], highlight=False)
        for row in paints.values():
            if row["runs in"] == "fp32":
                console.print(f"  FP32: {row['type']} '{row['op']}': {row['reason']}", style="dim")
        changed = [
            row["type"]
            for op, row in paints.items()
            if previous and previous[op]["runs in"] != row["runs in"]
        ]
        low = sum(row["runs in"] == "bf16" for row in paints.values())
        summary.add_row(
            name,
            f"{result.report.accuracy:.4f} (FP32: {result.report.baseline_accuracy:.4f})",
            f"{low} of {len(paints)}",
            str(result.report.casts),
            ", ".join(sorted(changed)) or "–",
        )
        previous = paints
    console.print(summary)
    print(f"graphs and reasons are in {OUT / 'log'}")


if __name__ == "__main__":
    main()
