"""Times of single ops on the page: with intervals, and clipped with a note instead of flattened."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import page_records

from neural_mp.core.graph import OpGraph
from neural_mp.core.op_timings import MAX_GAIN, OpTimings
from neural_mp.core.precision import Precision
from neural_mp.reporting.page import page_of
from neural_mp.reporting.page.page_model import LETTERS
from neural_mp.runs.record_schema import record_from_dict, record_to_dict
from neural_mp.runs.report import RunRecord

FP32, INT8 = Precision.FP32, Precision.INT8


def _measured(times: OpTimings) -> RunRecord:
    run = page_records.record(page_records.chain(12))
    return replace(run, measured=replace(run.measured, times=times))


def _times(seconds: dict[str, tuple[float, float]]) -> OpTimings:
    ops = {op: {FP32: fp32, INT8: int8} for op, (fp32, int8) in seconds.items()}
    spread = {op: {p: (0.9 * s, 1.25 * s) for p, s in by.items()} for op, by in ops.items()}
    return OpTimings(ops, spread=spread)


def _ordinary() -> dict[str, tuple[float, float]]:
    tunable = page_records.record(page_records.chain(12)).setup.tunable_ops
    return dict.fromkeys(tunable, (2e-3, 5e-4))


def _widths(page: str) -> list[float]:
    section = page.split("Time of single ops")[1].split("</section>")[0]
    return [float(width) for width in re.findall(r'<rect[^>]* width="([0-9.]+)"', section)]


def test_an_interval_stands_behind_every_time():
    page = page_of(_measured(_times(_ordinary())))
    assert "2 ms (1.8 ms to 2.5 ms)" in page
    assert "Bars are clipped" not in page


def test_an_outlier_is_clipped_with_a_note_and_leaves_the_other_bars_legible():
    seconds = _ordinary()
    first = next(iter(seconds))
    page = page_of(_measured(_times({**seconds, first: (2.0, 5e-4)})))
    assert "Bars are clipped at 16 ms: 1 op longer." in page
    assert "the bar is clipped" in page
    widths = _widths(page)
    assert sorted(widths)[len(widths) // 2] > 0.02 * max(widths)


def test_a_gain_that_no_kernel_can_have_is_marked_as_clipped():
    chosen = page_records.record(page_records.chain(12)).ending.plan
    op = next(op for op, config in chosen.items() if config.precision is INT8)
    page = page_of(_measured(_times({**_ordinary(), op: (2e-3, 2e-5)})))
    assert f"≥ {MAX_GAIN:.0f}×, clipped" in page
    assert "100.00×" not in page
    data = json.loads(re.search(r'<script[^>]*id="data"[^>]*>([^<]*)<', page)[1])
    assert data["most_gain"] == MAX_GAIN


def test_op_times_of_one_sample_say_so():
    run = page_records.record(page_records.chain(12))
    assert "ops were timed on" not in page_of(run)
    sampled = replace(run, ending=replace(run.ending, timed_samples=1))
    page = page_of(record_from_dict(record_to_dict(sampled)))
    assert "the batch of 64 takes long, ops were timed on 1 sample." in page


def test_details_have_the_shapes_of_an_op():
    """A free size is a question mark; the shapes survive storing the run."""
    graph = page_records.chain(3)
    sizes = {"op0": (None, 8, 16), "op1": (), "op2": None}
    shaped = OpGraph([replace(op, shape=sizes[op.name]) for op in graph], graph.inputs)
    run = page_records.record(shaped)
    page = page_of(record_from_dict(record_to_dict(run)))
    data = json.loads(re.search(r'<script[^>]*id="data"[^>]*>([^<]*)<', page)[1])
    shown = [data["why"][op[-1]] for op in data["ops"]]
    assert shown == ["→ ? × 8 × 16", "? × 8 × 16 → scalar", "scalar"]


def test_the_script_has_a_name_and_a_colour_for_every_precision():
    """A precision without a name is `undefined` in the reasons of an op."""
    page = page_of(page_records.record(page_records.chain(3)))
    for constant in ("NAMES", "CLASSES"):
        entries = re.search(rf"const {constant} = \{{([^}}]*)\}}", page)[1]
        for letter in LETTERS.values():
            assert re.search(rf'(^|, )"?{re.escape(letter)}"?: "\w+"', entries), (constant, letter)
