"""Results of the peer's environment."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.decoders.goals import Detail, Figure, Goal
from benchmarks.decoders.settings import Settings, Subject
from benchmarks.decoders.weights import HEADINGS
from benchmarks.measurement.children import child_command


def results(peer: Path, *arguments: str) -> Iterator[dict[str, Any]]:
    """Yield the results of the peer of planners and times."""
    yield from run_peer(child_command("peers.decoder_peer", *arguments, python=peer))


def run_peer(command: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the results that a peer prints; what it says in failing goes to the error stream."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print("\n".join(done.stderr.splitlines()[-5:]), file=sys.stderr, flush=True)
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            yield json.loads(line)


def peer_plans(subject: Subject) -> Iterator[Detail | Figure]:
    """Yield rows of NNCF's plans for the twin with outlier channels."""
    if subject.settings.peer is None:
        return
    with tempfile.TemporaryDirectory() as folder:
        subject.hostile.save_pretrained(folder)
        texts = {"train": subject.calibration, "tune": subject.tuning, "unseen": subject.unseen}
        tokens = str(Path(folder) / "tokens.npz")
        np.savez(
            tokens,
            allow_pickle=False,
            **{name: np.concatenate([ids for _, ids in part]) for name, part in texts.items()},
        )
        rows = list(results(subject.settings.peer, "plans", folder, tokens))
    for row in rows:
        changes = (f"{row[part] * 100:+.2f} %" for part in ("tuning", "unseen"))
        sizes = (f"{row[part]:.3f}" for part in ("bytes", "over 8 bits"))
        labels = (str(subject.seed), "outlier channels", row["words"])
        evaluations = str(row["evaluations"]) if row["smallest"] else ""
        yield Detail(HEADINGS, (*labels, *sizes, *changes, evaluations))
    smallest = [row for row in rows if row["smallest"]]
    if smallest:
        best = min(smallest, key=lambda row: row["over 8 bits"])
        yield Figure(Goal.FEW_LEVELS, f"{best['over 8 bits']:.3f}", is_peer=True)
        yield Figure(Goal.EVALUATIONS, str(best["evaluations"]), is_peer=True)
    uniform = [row["unseen"] for row in rows if row["uniform"]]
    if uniform:
        yield Figure(Goal.UNIFORM, f"{min(uniform) * 100:+.2f} %", is_peer=True)


def peer_speed(settings: Settings) -> Iterator[dict[str, Any]]:
    """Yield torchao's ratios by rows."""
    if settings.peer is not None:
        yield from results(settings.peer, "speed", str(settings.layers), str(settings.rounds))
