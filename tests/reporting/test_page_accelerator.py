"""The page of a run for an accelerator: widths of multiplications, and ops that it refuses."""

from dataclasses import replace
from types import SimpleNamespace

from page_records import chain, record

from neural_mp.core.enums import Granularity, QuantDType, Scheme
from neural_mp.core.precision import OpConfig, Precision
from neural_mp.core.quant_spec import QuantSpec
from neural_mp.reporting.page import page_of
from neural_mp.reporting.page.page_model import precision_letters
from neural_mp.runs.report import AcceleratorFigures

FIGURES = AcceleratorFigures(
    "npu", "Our NPU", "documents", 0.31, {"fp32": 0.1, "w8a16": 0.3, "w8a8": 0.6}, {}
)


def run_for(figures):
    run = record(chain(12))
    report = replace(run.ending.report, accelerator=figures, latency=None, baseline_latency=None)
    return replace(run, ending=replace(run.ending, report=report))


def test_shares_of_widths_are_a_bar_from_narrow_to_float():
    page = page_of(run_for(FIGURES))
    assert "Multiplications by width, Our NPU" in page
    assert "60% of MACs in w8a8; 30% of MACs in w8a16; 10% of MACs in fp32" in page
    assert "0.31 of the estimated cost" in page
    assert "from documents, untested" in page
    assert "that the compiler does not take" not in page
    assert "Multiplications by width" not in page_of(record(chain(12)))


def test_refused_ops_are_named():
    run = record(chain(12))
    op = next(iter(run.setup.graph))
    kinds = [other.type for other in run.setup.graph]
    page = page_of(run_for(replace(FIGURES, refused={op.type: kinds.count(op.type)})))
    assert "that the compiler does not take" in page
    assert f"<li>{op.name} ({op.type})</li>" in page


def test_map_has_a_letter_for_weights_of_16_bits():
    """Ops in w8a16 and w16a16 have the same precision, and different costs."""
    graph = record(chain(12)).setup.graph
    first, second, *_ = (op.name for op in graph)
    activation = QuantSpec(QuantDType.UINT16, Scheme.ASYMMETRIC, Granularity.PER_TENSOR)
    narrow, wide = (
        OpConfig(
            Precision.INT16,
            QuantSpec(dtype, Scheme.SYMMETRIC, Granularity.PER_CHANNEL),
            activation,
        )
        for dtype in (QuantDType.INT8, QuantDType.INT16)
    )
    runs_in = {first: Precision.INT16, second: Precision.INT16}
    shown = precision_letters(SimpleNamespace(graph=graph), {first: narrow, second: wide}, runs_in)
    assert shown == "wW" + "." * (len(list(graph)) - 2)
