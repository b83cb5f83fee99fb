"""Audit of a QDQ file by the rules of a profile, and by the target's compiler where that runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError

from neural_mp.adaptors.common.signatures.signature import Array
from neural_mp.adaptors.onnxrt.targets.findings import Finding
from neural_mp.adaptors.onnxrt.targets.qnn_audit import TargetAudit, audit_by_qnn
from neural_mp.adaptors.onnxrt.targets.simulation import input_ranges, simulate
from neural_mp.adaptors.onnxrt.targets.structural_audit import check_structure
from neural_mp.core.plan import PLAN_KEY, PrecisionPlan
from neural_mp.errors import DataError, MissingFrameworkError, ModelLoadError, one_line
from neural_mp.targets import TargetProfile
from neural_mp.util.text import counted

#: Whether the rules were measured → the words for it.
_EVIDENCE = {True: "measured with its compiler", False: "from documents, untested"}
#: Execution provider whose compiler runs here.
_EMULATED = "QNNExecutionProvider"


@dataclass(frozen=True)
class FileAudit:
    """The audit of a file for an accelerator.

    Attributes:
        profile: the rules.
        structure: violations of rules that the file shows.
        compiled: the result of the target's compiler; None if it does not run here.
        not_compiled: why; empty if it ran.
    """

    profile: TargetProfile
    structure: tuple[Finding, ...]
    compiled: TargetAudit | None
    not_compiled: str

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All violations."""
        return (*self.structure, *(self.compiled.findings if self.compiled else ()))

    @property
    def holds(self) -> bool:
        """Whether the file breaks no rule."""
        return not self.findings

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines on the compiler's part, and on the evidence of the rules."""
        verdict = "no finding" if self.holds else counted(len(self.findings), "finding")
        evidence = _EVIDENCE[self.profile.is_measured]
        lines = [f"{verdict} for {self.profile.title}; its rules are {evidence}"]
        if self.compiled is None:
            return (*lines, self.not_compiled)
        lines.append(
            f"{counted(len(self.compiled.taken), 'node')} taken, "
            f"{len(self.compiled.refused)} refused, in emulation; no device was used"
        )
        if self.compiled.sqnr_db is not None:
            lines.append(f"SQNR of the emulation to the simulation: {self.compiled.sqnr_db:.1f} dB")
        return tuple(lines)


def audit_file(
    path: Path,
    profile: TargetProfile,
    samples: Iterable[Array | Mapping[str, Array]] | None,
    count: int,
) -> FileAudit:
    """Audit an ONNX file with Q/DQ ops for an accelerator.

    Args:
        path: the file.
        profile: the rules.
        samples: batches of one sample, by input or of the only input; None for random values within
            the range of each input.
        count: the number of samples to emulate.

    Raises:
        ModelLoadError: the file is no ONNX model.
        DataError: the samples lack an input.
        ConversionError: the compiler gave no result within its limit.
    """
    model = _load(path)
    integer_ops = _integer_ops(model)
    structure = tuple(check_structure(model, profile, integer_ops))
    if profile.provider != _EMULATED:
        reason = f"no compiler of {profile.title} runs here: only the structure was audited"
        return FileAudit(profile, structure, None, reason)
    if samples is None:
        feeds = _random_feeds(model, count)
    else:
        feeds = [_feed_of(model, sample) for sample in islice(samples, count)]
    try:
        compiled = audit_by_qnn(model, profile, feeds, simulate(model, feeds), integer_ops)
    except MissingFrameworkError as error:
        return FileAudit(profile, structure, None, str(error))
    return FileAudit(profile, structure, compiled, "")


def _load(path: Path) -> onnx.ModelProto:
    if not path.is_file():
        raise ModelLoadError(f"model file {str(path)!r} does not exist")
    try:
        return onnx.load(path)
    except (DecodeError, OSError) as error:
        raise ModelLoadError(f"{str(path)!r} is not an ONNX model: {one_line(error)}") from error


def _integer_ops(model: onnx.ModelProto) -> frozenset[str] | None:
    """Return the ops that the plan in a file has in integers; None without a plan."""
    for entry in model.metadata_props:
        if entry.key == PLAN_KEY:
            plan = PrecisionPlan.from_yaml(entry.value, "the plan in the file")
            return frozenset(op for op, config in plan.items() if config.activation is not None)
    return None


def _inputs_of(model: onnx.ModelProto) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
    """Return input → its shape, with 1 for a free size, and its dtype."""
    constants = {tensor.name for tensor in model.graph.initializer}
    inputs = {}
    for value in model.graph.input:
        if value.name not in constants:
            kind = value.type.tensor_type
            shape = tuple(max(1, size.dim_value) for size in kind.shape.dim)
            inputs[value.name] = shape, onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)
    return inputs


def _random_feeds(model: onnx.ModelProto, count: int) -> list[dict[str, Array]]:
    """Return samples: uniform in the range of a float input; ones for a mask, else zeros."""
    draw, ranges = np.random.default_rng(0), input_ranges(model)

    def sample() -> dict[str, Array]:
        feeds = {}
        for name, (shape, dtype) in _inputs_of(model).items():
            if dtype.kind == "f":
                feeds[name] = draw.uniform(*ranges.get(name, (-1.0, 1.0)), shape).astype(dtype)
            else:
                feeds[name] = np.full(shape, "mask" in name.lower(), dtype)
        return feeds

    return [sample() for _ in range(count)]


def _feed_of(model: onnx.ModelProto, sample: Array | Mapping[str, Array]) -> dict[str, Array]:
    inputs = _inputs_of(model)
    arrays = sample if isinstance(sample, Mapping) else dict.fromkeys(list(inputs)[:1], sample)
    missing = [name for name in inputs if name not in arrays]
    if missing:
        raise DataError(
            f"the data must hold an array for each input of the model, and lack "
            f"{', '.join(map(repr, missing))}; they hold {', '.join(map(repr, arrays))}"
        )
    return {
        name: np.asarray(arrays[name], dtype).reshape(shape)
        for name, (shape, dtype) in inputs.items()
    }
