"""Conversion of one small model per layer class: tune, compare, audit, save, reload.

A case holds a model, calibration batches and the outputs that the framework itself computes for
each batch. `convert` returns the row of the generated table in `docs/layers/`.
"""

from __future__ import annotations

import textwrap
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import neural_mp
from neural_mp import MixedPrecision
from neural_mp.api.optimized_model import OptimizedModel
from neural_mp.core.precision import Precision

#: Least SQNR of an INT8 result beside the framework's own FP32 outputs, in dB.
MIN_INT8_SQNR_DB = 20.0
#: Least SQNR of a result without any INT8 op: conversion must not change what stays FP32.
MIN_FP32_SQNR_DB = 90.0
#: Least share of equal elements in integer, boolean and string outputs of an INT8 result.
MIN_EQUAL_RATIO = 0.9
#: Decibels of equal arrays.
EQUAL_SQNR_DB = 150.0


@dataclass(frozen=True)
class Built:
    """A model of a case with its data.

    Attributes:
        model: source that `MixedPrecision.model` takes.
        batches: calibration batches, inputs only.
        outputs: the framework's own FP32 outputs for each batch, as a flat list of arrays.
        options: further options of `MixedPrecision`.
    """

    model: Any
    batches: Sequence[Any]
    outputs: Sequence[Sequence[np.ndarray]]
    options: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Case:
    """One layer class, op or construct.

    Attributes:
        name: row of the table; unique within a framework.
        build: makes the model and its data.
        min_sqnr_db: minimum SQNR of an INT8 result, in dB.
        discontinuous: reason why rounding of an input may change outputs without bound (argmax,
            floor, comparison); then only shapes and dtypes of an INT8 result are compared.
        savable: whether `save` is expected to work; False needs a model that holds user code.
    """

    name: str
    build: Callable[[], Built]
    min_sqnr_db: float = MIN_INT8_SQNR_DB
    discontinuous: str = ""
    savable: bool = True


@dataclass(frozen=True)
class Row:
    """Result of one case.

    Attributes:
        name: of the case.
        ran: (op type, precision) → number of ops that ran so, by the runtime's own trace.
        sqnr_db: SQNR relative to the framework's FP32 outputs; `EQUAL_SQNR_DB` if equal, NaN if the
            outputs cannot be compared.
        note: remark behind the SQNR, or why there is none.
    """

    name: str
    ran: Mapping[tuple[str, Precision], int]
    sqnr_db: float
    note: str = ""

    def cells(self) -> str:
        """Row of the Markdown table."""
        columns: dict[bool, list[str]] = {True: [], False: []}
        for (op_type, ran), count in sorted(self.ran.items()):
            bits = f" ({ran})" if ran in (Precision.BF16, Precision.FP16) else ""
            times = f" ×{count}" if count > 1 else ""
            columns[ran is Precision.INT8].append(f"{op_type}{bits}{times}")
        quantized, floats = (", ".join(columns[is_int8]) or "–" for is_int8 in (True, False))
        shown = "equal" if self.sqnr_db >= EQUAL_SQNR_DB else f"{self.sqnr_db:.0f} dB"
        if np.isnan(self.sqnr_db):
            shown = self.note or "–"
        elif self.note:
            shown = f"{shown}, {self.note}"
        return f"| {self.name} | {quantized} | {floats} | {shown} |"


#: Framework, type and precision of the ops that were read back from a file in this process.
_RELOADED: set[tuple[str, str, Precision]] = set()


#: Op type and precision → number of ops that ran so.
Ran = Counter[tuple[str, Precision]]


def convert(case: Case, folder: Path, audit: Callable[[OptimizedModel], Ran] | None = None) -> Row:
    """Run one case through tune → compare → audit → save → reload; return its row.

    A case is read back if it has an op of a type and precision that none before had.

    Args:
        case: the case.
        folder: empty folder for workspace and saved model.
        audit: returns what ran in what; by default, by the runtime's own trace.

    Raises:
        AssertionError: a promise does not hold.
    """
    built = case.build()
    result = _tuned(built, folder)
    quantized = any(config.precision is Precision.INT8 for config in result.plan.values())
    sqnr_db = _compared(case, built, result, quantized)
    ran = (audit or _audited)(result)
    if case.savable and not _RELOADED.issuperset(kinds := {(result.framework, *op) for op in ran}):
        _reloaded(built, result, folder)
        _RELOADED.update(kinds)
    compared = not (quantized and case.discontinuous)
    return Row(case.name, ran, sqnr_db if compared else float("nan"))


def _tuned(built: Built, folder: Path) -> OptimizedModel:
    """Convert as much as possible: without a metric, and for size, so that time decides nothing."""
    converter = MixedPrecision(
        precisions="int8",
        objective="modelsize",
        workspace=folder / "workspace",
        cache=False,
        **(built.options or {}),
    )
    converter.model = built.model
    converter.calib_dataloader = [(batch, None) for batch in built.batches]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return converter()


def _compared(case: Case, built: Built, result: OptimizedModel, quantized: bool) -> float:
    """Return the least SQNR over batches and outputs, in dB."""
    least = EQUAL_SQNR_DB
    limit = case.min_sqnr_db if quantized else MIN_FP32_SQNR_DB
    for batch, expected in zip(built.batches, built.outputs, strict=True):
        outputs = flat(result.loaded(batch))
        assert len(outputs) == len(expected), f"{len(outputs)} outputs, expected {len(expected)}"
        for index, (ours, theirs) in enumerate(zip(outputs, expected, strict=True)):
            label = f"{case.name}, output {index}"
            assert ours.shape == theirs.shape, f"{label}: shape {ours.shape}, not {theirs.shape}"
            assert ours.dtype == theirs.dtype, f"{label}: dtype {ours.dtype}, not {theirs.dtype}"
            if quantized and case.discontinuous:
                continue
            if np.issubdtype(theirs.dtype, np.inexact):
                sqnr = signal_to_noise(theirs, ours)
                assert sqnr >= limit, f"{label}: {sqnr:.1f} dB, must be ≥ {limit:.0f} dB"
                least = min(least, sqnr)
            else:
                equal = float(np.mean(ours == theirs)) if theirs.size else 1.0
                required = MIN_EQUAL_RATIO if quantized else 1.0
                assert equal >= required, f"{label}: {equal:.0%} of elements equal"
    return least


def _audited(result: OptimizedModel) -> Ran:
    """Return what ran in what, by the trace; nothing for a model without ops."""
    if not result.planned and not result.plan:
        return Counter()
    audit = result.audit()
    assert audit.holds, f"the audit found {[(op.name, op.verdict) for op in audit.findings]}"
    return Counter((op.planned.type, op.ran_in) for op in audit.ops if op.ran_in is not None)


def _reloaded(built: Built, result: OptimizedModel, folder: Path) -> None:
    """Save and load; every output must be equal bit by bit.

    An FP32 result of PyTorch is the user's own module, which the saved graph equals but for the
    rounding of folded batch norms.
    """
    lowered = any(config.precision is not Precision.FP32 for config in result.plan.values())
    result.save(folder / "saved")
    loaded = neural_mp.load(folder / "saved")
    for batch in built.batches:
        for ours, theirs in zip(
            flat(loaded.loaded(batch)), flat(result.loaded(batch)), strict=True
        ):
            if np.issubdtype(theirs.dtype, np.floating) and not lowered:
                steps = 4 * np.finfo(theirs.dtype).eps
                largest = float(np.max(np.abs(theirs), initial=0, where=np.isfinite(theirs)))
                np.testing.assert_allclose(ours, theirs, rtol=steps, atol=steps * largest)
            else:
                np.testing.assert_array_equal(ours, theirs)


def signal_to_noise(reference: np.ndarray, actual: np.ndarray) -> float:
    """Return the SQNR in dB; NaN and Inf must stand at the same places in both."""
    finite = np.isfinite(reference)
    np.testing.assert_array_equal(np.isfinite(actual), finite)
    kind = np.complex128 if np.iscomplexobj(reference) else np.float64
    real, ours = reference[finite].astype(kind), actual[finite].astype(kind)
    noise, signal = float(np.linalg.norm(real - ours)), float(np.linalg.norm(real))
    if noise == 0.0:
        return EQUAL_SQNR_DB
    return min(20 * float(np.log10(signal / noise)) if signal else 0.0, EQUAL_SQNR_DB)


def flat(outputs: Any) -> list[np.ndarray]:
    """Return the arrays of nested outputs, dicts in the order of their keys."""
    if outputs is None:
        return []
    if isinstance(outputs, Mapping):
        return [array for key in sorted(outputs) for array in flat(outputs[key])]
    if isinstance(outputs, (list, tuple)):
        return [array for item in outputs for array in flat(item)]
    if hasattr(outputs, "detach"):
        outputs = outputs.detach()
        if str(outputs.dtype) == "torch.bfloat16":  # which numpy lacks
            outputs = outputs.float()
    return [np.asarray(outputs)]


def check_complete(
    cases: Iterable[Case], classes: Iterable[str], without: Mapping[str, str]
) -> None:
    """Check that every class of a framework has a case, or a reason for having none.

    Args:
        cases: all cases; a case covers the class that its name starts with, up to the first space.
        classes: names of all classes that the installed framework has.
        without: class → why it has no case.
    """
    covered = {case.name.split()[0] for case in cases} | set(without)
    missing = sorted(set(classes) - covered)
    assert not missing, f"no case for {', '.join(missing)}; add one to the zoo"


def check_page(framework: str, cases: Iterable[Case]) -> None:
    """Check that the generated table of a framework lists every case."""
    page = (LAYERS / f"{framework}.md").read_text(encoding="utf-8")
    listed = {line.split("|")[1].strip() for line in page.splitlines() if line.startswith("| ")}
    missing = [case.name for case in cases if case.name not in listed]
    assert not missing, (
        f"docs/layers/{framework}.md lacks {', '.join(missing)}; "
        f"run pytest tests/zoo -n 0 --layer-tables"
    )


#: Folder of the generated tables.
LAYERS = Path(__file__).parents[2] / "docs" / "layers"
_INTRODUCTION = """Precisions of the ops in one small model of each kind, from {source}. The models
are converted with `precisions="int8"` and without a metric, so that as many ops as possible run in
INT8. SQNR is measured against the framework's own FP32 outputs. {remark} Generated by
`pytest tests/zoo -n 0 --layer-tables`."""
_COLUMNS = """| layer | INT8 | not quantized | SQNR |
|---|---|---|---|
"""
_TRACE = "the runtime's own trace"
_REMARK = (
    "Ops that run in 16 bits in the original model are marked `bf16` or `fp16`; FP32 in a plan "
    "leaves these ops in 16 bits."
)
#: Framework → source of the precisions in its table, and the remark, if others.
_OTHERS = {
    "litert": (
        "the types of tensors in the saved file",
        "Models that TensorFlow converts for a fixed batch size only are marked; for models that "
        "TensorFlow cannot convert, its error takes the place of the SQNR.",
    )
}
TITLES = {
    "keras": "Keras",
    "litert": "Keras in LiteRT",
    "onnx": "ONNX",
    "openvino": "OpenVINO",
    "tensorflow": "TensorFlow",
    "torch": "PyTorch",
}


def write_page(framework: str, rows: Iterable[Row]) -> None:
    """Write the table of a framework."""
    LAYERS.mkdir(exist_ok=True)
    lines = [row.cells() for row in sorted(rows, key=lambda row: row.name)]
    source, remark = _OTHERS.get(framework, (_TRACE, _REMARK))
    introduction = _INTRODUCTION.format(source=source, remark=remark)
    text = textwrap.fill(introduction, 99, break_on_hyphens=False)
    page = f"# Layers of {TITLES[framework]}\n\n{text}\n\n{_COLUMNS}" + "\n".join(lines) + "\n"
    (LAYERS / f"{framework}.md").write_text(page, encoding="utf-8")
