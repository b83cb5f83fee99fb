"""Table of the noise of a plan's results before and after its weights recover accuracy."""

from __future__ import annotations

from collections.abc import Mapping

from rich.table import Table

from neural_mp.reporting import formatting
from neural_mp.runs.stage_noise import STAGE_WORDS, Stage, StageNoise
from neural_mp.tuning.measurement.sqnr import decibels

#: Ops in the table of a report.
_MOST = 12


def stage_noise_table(noise: StageNoise) -> Table:
    """Return the SQNR of the noisiest ops and of the outputs at each stage."""
    remaining = len(noise.ops) - _MOST
    more = f", {_MOST} noisiest of {len(noise.ops)} ops" if remaining > 0 else ""
    headings = [STAGE_WORDS[stage] for stage in noise.stages]
    table = formatting.table(f"SQNR of results against FP32{more}", "op", *headings, right=headings)
    for row in stage_rows(noise, _MOST):
        table.add_row(*row)
    return table


def stage_rows(noise: StageNoise, count: int) -> list[list[str]]:
    """Return the cells of the noisiest ops, and of the outputs at the end."""
    rows = [[op, *_stage_cells(by, noise.stages)] for op, by in noise.noisiest(count).items()]
    return [*rows, ["outputs", *_stage_cells(noise.outputs, noise.stages)]]


def _stage_cells(by_stage: Mapping[str, float], stages: tuple[Stage, ...]) -> list[str]:
    values = (by_stage.get(stage.value) for stage in stages)
    return ["–" if nsr is None else formatting.decibels(decibels(nsr)) for nsr in values]


def stage_words(noise: StageNoise, op: str) -> str:
    """Return the SQNR of an op at each stage as text; empty if the op was not measured."""
    if op not in noise.ops:
        return ""
    cells = zip(noise.stages, _stage_cells(noise.ops[op], noise.stages), strict=True)
    return ", ".join(f"{cell} {STAGE_WORDS[stage]}" for stage, cell in cells)
