"""Audit of a QDQ file by the rules of a profile, and by the target's compiler where that runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
from onnx.checker import ValidationError
from onnx.external_data_helper import load_external_data_for_model

from neural_mp.adaptors.common.signatures.input_spec import make_synthetic_example
from neural_mp.adaptors.common.signatures.signature import Array, TensorSpec
from neural_mp.adaptors.onnxrt.files.loading import read_file, read_signature
from neural_mp.adaptors.onnxrt.graph.edit import get_constant_array
from neural_mp.adaptors.onnxrt.graph.sessions import Runner
from neural_mp.adaptors.onnxrt.kernels.ops import is_quantize
from neural_mp.adaptors.onnxrt.targets.audit.qnn_audit import TargetAudit, audit_by_qnn
from neural_mp.adaptors.onnxrt.targets.audit.structural_audit import Finding, check_structure
from neural_mp.adaptors.onnxrt.targets.model import PLAIN_QDQ
from neural_mp.core.plan import PLAN_KEY, PrecisionPlan
from neural_mp.errors import DataError, MissingFrameworkError, ModelLoadError, one_line
from neural_mp.targets import TargetProfile
from neural_mp.util.text import format_count

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
        verdict = "no finding" if self.holds else format_count(len(self.findings), "finding")
        evidence = _EVIDENCE[self.profile.is_measured]
        lines = [f"{verdict} for {self.profile.title}; its rules are {evidence}"]
        if self.compiled is None:
            return (*lines, self.not_compiled)
        lines.append(
            f"{format_count(len(self.compiled.taken), 'node')} taken, "
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
    model = _load_model(path)
    integer_ops = _list_integer_ops(model)
    structure = tuple(check_structure(model, profile, integer_ops))
    if profile.provider != _EMULATED:
        reason = f"no compiler of {profile.title} runs here: only the structure was audited"
        return FileAudit(profile, structure, None, reason)
    if samples is None:
        feeds = _draw_random_feeds(model, count)
    else:
        feeds = [_make_sample_feed(model, sample) for sample in islice(samples, count)]
    try:
        compiled = audit_by_qnn(model, profile, feeds, simulate_file(model, feeds), integer_ops)
    except MissingFrameworkError as error:
        return FileAudit(profile, structure, None, str(error))
    return FileAudit(profile, structure, compiled, "")


def simulate_file(
    model: onnx.ModelProto, feeds: Iterable[Mapping[str, Array]]
) -> list[dict[str, Array]]:
    """Return the outputs of a file for each sample, by name.

    Raises:
        ConversionError: ONNX Runtime rejects the file.
    """
    program = ir.from_proto(model)
    names = [str(value.name) for value in program.graph.outputs]
    run = Runner(program, None, entries=PLAIN_QDQ).make_fetcher(names)
    return [dict(zip(names, run(sample), strict=True)) for sample in feeds]


def _load_model(path: Path) -> onnx.ModelProto:
    file = read_file(path.resolve() if path.is_file() else path)
    try:
        load_external_data_for_model(file.proto, str(file.folder))
    except (OSError, ValidationError) as error:
        raise ModelLoadError(
            f"the weights beside {str(path)!r} must be readable: {one_line(error)}"
        ) from error
    return file.proto


def _list_integer_ops(model: onnx.ModelProto) -> frozenset[str] | None:
    """Return the ops that the plan in a file has in integers; None without a plan."""
    for entry in model.metadata_props:
        if entry.key == PLAN_KEY:
            plan = PrecisionPlan.from_yaml(entry.value, "the plan in the file")
            return frozenset(op for op, config in plan.items() if config.activation is not None)
    return None


def _draw_random_feeds(model: onnx.ModelProto, count: int) -> list[dict[str, Array]]:
    """Return samples: uniform in the range of a float input; ones for a mask, else zeros."""
    draw, ranges = np.random.default_rng(0), _collect_input_ranges(model)

    def fill_port(port: TensorSpec, shape: Sequence[int]) -> Array:
        if port.dtype is None or port.dtype.kind != "f":
            return np.full(shape, "mask" in port.name.lower(), port.dtype)
        return draw.uniform(*ranges.get(port.tensor, (-1.0, 1.0)), shape).astype(port.dtype)

    signature = read_signature(ir.from_proto(model))
    return [make_synthetic_example(signature, fill_port) for _ in range(count)]


def _collect_input_ranges(model: onnx.ModelProto) -> dict[str, tuple[float, float]]:
    """Return input → the range of its integers, for inputs that the file quantizes."""
    ranges = {}
    for value in ir.from_proto(model).graph.inputs:
        for use in value.uses():
            scale = get_constant_array(use.node.inputs[1]) if is_quantize(use.node) else None
            zero = get_constant_array(use.node.inputs[2]) if scale is not None else None
            if scale is not None and zero is not None and scale.size == 1:
                info = np.iinfo(zero.dtype)
                low, high = (float(scale) * (end - int(zero)) for end in (info.min, info.max))
                ranges[str(value.name)] = low, high
    return ranges


def _make_sample_feed(
    model: onnx.ModelProto, sample: Array | Mapping[str, Array]
) -> dict[str, Array]:
    signature = read_signature(ir.from_proto(model))
    names = signature.input_tensors
    arrays = sample if isinstance(sample, Mapping) else dict.fromkeys(names[:1], sample)
    missing = [name for name in names if name not in arrays]
    if missing:
        raise DataError(
            f"the data must hold an array for each input of the model, and lack "
            f"{', '.join(map(repr, missing))}; they hold {', '.join(map(repr, arrays))}"
        )
    return make_synthetic_example(
        signature, lambda port, shape: np.asarray(arrays[port.tensor], port.dtype).reshape(shape)
    )
