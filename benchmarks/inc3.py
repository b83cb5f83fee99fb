"""The same scripts with Intel Neural Compressor 3.x and with neural-mp: figures side by side.

    python -m benchmarks.inc3 --peer PYTHON [--only TEXT] [--out table.md] [--steps 300]

PYTHON is the interpreter of an environment with `neural-compressor-pt` and the same versions of
PyTorch and `transformers`. Three models are trained here: two classifiers of digits and a decoder
of bytes. Every case runs in a process of its own with one thread: static INT8, weights in 4 bits,
and `autotune` through one set of configurations in its order. `search` is `autotune` of neural-mp
with `sampler="neural_mp"`. Columns: CPU seconds of the conversion or search, memory beyond that
before, bytes of the saved files, evaluations, and accuracy and perplexity on the evaluation data.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import nn

from benchmarks import ROOT
from benchmarks.decoders import source_decoder
from benchmarks.measurement.tables import markdown_table, sectioned_table, shown
from benchmarks.peers.inc3_networks import TOLERATED, network

_SCRIPT = ROOT / "benchmarks" / "peers" / "inc3_script.py"
_MODELS = ("mlp", "cnn", "decoder")
CASES = (
    "static mlp",
    "static cnn",
    "rtn decoder",
    "gptq decoder",
    "awq decoder",
    *(f"autotune {name}" for name in _MODELS),
    *(f"search {name}" for name in _MODELS),
)
_LONGEST = 1200


def main() -> None:
    """Run the cases and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--peer", type=Path, required=True, help="Python with the peer")
    parser.add_argument("--only", default="", help="part of the names of the cases")
    parser.add_argument("--steps", type=int, default=300, help="training steps of the decoder")
    parser.add_argument("--out", type=Path, help="Markdown file for the table")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        _write_models(folder, options.steps)
        lines = []
        for case in CASES:
            if options.only not in case:
                continue
            if not case.startswith("search"):
                lines.append(_line(case, "INC", [str(options.peer)], folder))
            ours = [sys.executable, "-m", "neural_mp.compat.inc"]
            lines.append(_line(case, "neural-mp", ours, folder))
    Console(width=140).print(sectioned_table("INC 3.x and neural-mp", _HEADINGS, lines))
    if options.out is not None:
        options.out.write_text(markdown_table(_HEADINGS, [cells for _, cells in lines]), "utf-8")


_HEADINGS = (
    "case",
    "tool",
    "target",
    "seconds",
    "memory, MB",
    "kB on disk",
    "evaluations",
    "accuracy",
    "in FP32",
    "perplexity",
)


def _line(case: str, tool: str, command: list[str], folder: Path) -> tuple[object, list[str]]:
    """Play a case; an error is shown by its last line."""
    done = subprocess.run(
        [*command, str(_SCRIPT), str(folder), case],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=_LONGEST,
        check=False,
    )
    if done.returncode:
        print(done.stderr[-3000:], file=sys.stderr)
        error = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return case, [case, tool, error[:60], *[""] * (len(_HEADINGS) - 3)]
    return case, _cells(case, tool, json.loads(done.stdout.strip().splitlines()[-1]))


def _cells(case: str, tool: str, figures: dict[str, Any]) -> list[str]:
    size = figures.get("bytes")
    return [
        case,
        tool,
        _target(case, figures),
        shown(figures["seconds"], ".1f"),
        shown(figures["memory"] / 1e6, ".0f"),
        shown(None if size is None else size / 1e3, ".0f"),
        shown(figures["evaluations"] or None, "d"),
        shown(figures.get("accuracy"), ".4f"),
        shown(figures["baseline"], ".4f"),
        shown(figures.get("perplexity") if "decoder" in case else None, ".3f"),
    ]


def _target(case: str, figures: dict[str, Any]) -> str:
    """Return whether the tolerated loss of a search is kept."""
    kind, _, name = case.partition(" ")
    if kind not in ("autotune", "search"):
        return ""
    if not figures["found"]:
        return "None returned"
    lost = figures["baseline"] - figures["accuracy"]
    return "met" if lost <= TOLERATED[name] * figures["baseline"] else "missed"


def _write_models(folder: Path, steps: int) -> None:
    """Train the models, and write weights and data for the script."""
    torch.set_num_threads(1)
    train, tune, unseen = source_decoder.texts()
    rows = [inputs["input_ids"] for inputs, _ in source_decoder.windows(tune, 64)]
    tested = [inputs["input_ids"] for inputs, _ in source_decoder.windows(unseen, 128)]
    decoder = source_decoder.trained(train, steps)
    decoder.save_pretrained(folder / "decoder")
    _write(folder, "decoder", decoder, rows, tested, tested)
    for name in _MODELS[:2]:
        _write_classifier(folder, name)


def _write_classifier(folder: Path, name: str) -> None:
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.data))
    images = torch.from_numpy(digits.data[order].astype(np.float32) / 16)
    if name == "cnn":
        images = images.reshape(-1, 8, 8)
    labels = torch.from_numpy(digits.target[order])
    torch.manual_seed(0)
    net = network(name)
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    for start in np.random.default_rng(1).integers(0, 900 - 64, 600):
        loss = nn.functional.cross_entropy(
            net(images[start : start + 64]), labels[start : start + 64]
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    data = list(images[:256].split(64))
    _write(folder, name, net, data, list(images[900:].split(64)), list(labels[900:].split(64)))


def _write(
    folder: Path,
    name: str,
    net: nn.Module,
    calibration: list[torch.Tensor],
    inputs: list[torch.Tensor],
    labels: list[torch.Tensor],
) -> None:
    content = {
        "state": net.state_dict(),
        "calibration": calibration,
        "inputs": inputs,
        "labels": labels,
    }
    torch.save(content, folder / f"{name}.pt")


if __name__ == "__main__":
    main()
