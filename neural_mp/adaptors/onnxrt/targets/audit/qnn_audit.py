"""Audit of a QDQ file by Qualcomm's NPU, emulated on the CPU by the QNN execution provider.

The audit compiles and runs the file in a process of its own. It reports what the NPU refuses, what
it takes but computes in float, and by how much its outputs differ from the simulation. Nothing
runs on ONNX Runtime's CPU provider instead.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort

from neural_mp.adaptors.common.signatures.signature import Array
from neural_mp.adaptors.onnxrt.canonicalize import infer_shapes
from neural_mp.adaptors.onnxrt.graph.sessions import MESSAGE_LIMIT, PLAIN, Runner
from neural_mp.adaptors.onnxrt.kernels.ops import is_dequantize
from neural_mp.adaptors.onnxrt.targets.audit.qnn_kernels import (
    CompiledGraph,
    KernelRow,
    read_graphs,
    recover_onnx_name,
)
from neural_mp.adaptors.onnxrt.targets.audit.qnn_worker import (
    ASSIGNED,
    COMPILE_ERROR,
    GRAPHS,
    INPUTS,
    MODEL,
    OPTIONS,
    OUTPUTS,
    PROVIDER,
    REPORT,
    RUN_ERROR,
    array_key,
)
from neural_mp.adaptors.onnxrt.targets.audit.structural_audit import Finding, Rule
from neural_mp.adaptors.onnxrt.targets.qdq_structure import QdqOp, Result, iterate_float_ops
from neural_mp.errors import ConversionError, MissingFrameworkError
from neural_mp.io.readers import read_json
from neural_mp.targets import TargetProfile
from neural_mp.util.noise import noise_and_signal, nsr_to_decibels
from neural_mp.util.optional_packages import install_command
from neural_mp.util.system.processes import make_python_command
from neural_mp.util.validators import list_of, mapping_of, record, string, tuple_of

#: Least agreement of emulated and simulated outputs: noise of a tenth of the amplitude.
MIN_SQNR_DB = 20.0
#: Seconds for the compilation and the runs of one file.
MAX_AUDIT_SECONDS = 900.0
_WORKER = "neural_mp.adaptors.onnxrt.targets.audit.qnn_worker"
_PACKAGE = "onnxruntime_qnn"
#: Characters of a message of the compiler that are shown.
_MAX_MESSAGE_CHARS = 400
_PAIRS = ("QuantizeLinear", "DequantizeLinear")
_REPORT = record(
    {
        ASSIGNED: mapping_of(list_of(tuple_of(string, string))),
        COMPILE_ERROR: string,
        RUN_ERROR: string,
    }
)

Samples = Sequence[Mapping[str, Array]]
Node = tuple[str, str]


@dataclass(frozen=True)
class TargetAudit:
    """The result of an audit by the compiler of a target.

    Attributes:
        findings: the violations.
        taken: name and type of the nodes that the target takes.
        refused: name and type of the nodes that it refuses, without QuantizeLinear and
            DequantizeLinear.
        kernels: its kernels by kind and types; empty if the file was not compiled.
        sqnr_db: lowest SQNR in dB of an output, compared with the simulation; None if not compared.
        outputs: the outputs of each sample by name; empty if the file did not run.
    """

    findings: tuple[Finding, ...]
    taken: tuple[Node, ...]
    refused: tuple[Node, ...]
    kernels: tuple[KernelRow, ...]
    sqnr_db: float | None
    outputs: tuple[Mapping[str, Array], ...]

    @property
    def holds(self) -> bool:
        """Whether the target computes the file as planned."""
        return not self.findings


@dataclass(frozen=True)
class Deviation:
    """An op whose result on the target differs from the simulation.

    Attributes:
        op: name of the op.
        op_type: its type.
        tensor: the compared result.
        sqnr_db: SQNR of the result in dB.
    """

    op: str
    op_type: str
    tensor: str
    sqnr_db: float


def audit_by_qnn(
    model: onnx.ModelProto,
    profile: TargetProfile,
    samples: Samples = (),
    simulated: Samples | None = None,
    integer_ops: Collection[str] | None = None,
    max_seconds: float = MAX_AUDIT_SECONDS,
) -> TargetAudit:
    """Compile and run a QDQ file on the emulated NPU, and return the findings.

    Args:
        model: the file.
        profile: the profile, with the options of the provider.
        samples: inputs by name; emulation takes seconds for each.
        simulated: the outputs of the simulation for each sample, by name.
        integer_ops: names of the ops that a plan has in integers; by default, those with Q/DQ on
            all sides.
        max_seconds: limit of the compilation and the runs in seconds.

    Raises:
        MissingFrameworkError: the package onnxruntime-qnn is not installed.
        ConversionError: there is no result within the limit.
    """
    ops = _list_float_ops(model, profile)
    job = _run_worker(
        model, profile.options, samples, max_seconds, frozenset(op.name for op in ops)
    )
    findings = [*_find_refusals(job), *_find_floats(job.graph, ops, profile, integer_ops)]
    sqnr_db = None
    if simulated is not None and job.outputs:
        sqnr_db, output = _find_lowest_sqnr(simulated, job.outputs)
        if sqnr_db < MIN_SQNR_DB:
            pairs = zip(simulated, job.outputs, strict=True)
            levels = [_find_lowest_sqnr([before], [after])[0] for before, after in pairs]
            worst = samples[levels.index(min(levels))]
            deviation = find_first_deviation(model, profile, worst, max_seconds=max_seconds)
            findings.append(_make_noise_finding(output, sqnr_db, deviation))
    return TargetAudit(
        findings=tuple(findings),
        taken=job.taken,
        refused=job.refused,
        kernels=job.graph.kernel_rows,
        sqnr_db=sqnr_db,
        outputs=job.outputs,
    )


def find_first_deviation(
    model: onnx.ModelProto,
    profile: TargetProfile,
    sample: Mapping[str, Array],
    min_sqnr_db: float = MIN_SQNR_DB,
    max_seconds: float = MAX_AUDIT_SECONDS,
) -> Deviation | None:
    """Return the first op, in the order of the file, whose result differs from the simulation.

    None if all results have at least `min_sqnr_db`. Results in integers are compared behind their
    DequantizeLinear, as outputs besides those of the file.

    Raises:
        MissingFrameworkError: the package onnxruntime-qnn is not installed.
        ConversionError: the target does not run the file, or there is no result within the limit.
    """
    watched = onnx.ModelProto()
    watched.CopyFrom(model)
    tensors = _watch_results(watched, profile)
    job = _run_worker(watched, profile.options, [sample], max_seconds, frozenset())
    if not job.outputs:
        reason = job.run_error or job.compile_error
        raise ConversionError(f"QNN must run the file, got: {reason[:_MAX_MESSAGE_CHARS]}")
    simulate = Runner(ir.from_proto(watched), None, level=PLAIN)
    reference = simulate(sample, list(tensors))
    for (tensor, op), expected in zip(tensors.items(), reference, strict=True):
        sqnr_db = _compute_sqnr_db([expected], [job.outputs[0][tensor]])
        if sqnr_db < min_sqnr_db:
            return Deviation(op.name, op.node.op_type, tensor, sqnr_db)
    return None


def check_installation() -> None:
    """Check that the QNN execution provider can be loaded.

    Raises:
        MissingFrameworkError: a package is missing or too old.
    """
    if sys.version_info < (3, 11):
        raise MissingFrameworkError(
            f"an audit by QNN requires Python 3.11 or later, got {sys.version_info.major}."
            f"{sys.version_info.minor}; run it in an environment of a later Python"
        )
    if importlib.util.find_spec(_PACKAGE) is None:
        raise MissingFrameworkError(
            f"an audit by QNN requires the package onnxruntime-qnn: {install_command('qnn')}"
        )
    if not hasattr(ort, "register_execution_provider_library"):
        raise MissingFrameworkError(
            f"an audit by QNN requires ONNX Runtime 1.24.2 or later, got {ort.__version__}: "
            f"{install_command('qnn')}"
        )


@dataclass(frozen=True)
class _Job:
    """The results of a worker."""

    taken: tuple[Node, ...]
    refused: tuple[Node, ...]
    compile_error: str
    run_error: str
    graph: CompiledGraph
    outputs: tuple[Mapping[str, Array], ...]


def _run_worker(
    model: onnx.ModelProto,
    options: Mapping[str, str],
    samples: Samples,
    max_seconds: float,
    ops: frozenset[str],
) -> _Job:
    check_installation()
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        _write_job(folder, model, options, samples)
        with (folder / "log").open("w+b") as log:
            try:
                subprocess.run(
                    make_python_command(_WORKER, str(folder)),
                    stdout=log,
                    stderr=log,
                    timeout=max_seconds,
                    check=False,
                    env={"OMP_NUM_THREADS": "1", **os.environ},
                )
            except subprocess.TimeoutExpired:
                raise ConversionError(
                    f"QNN must compile and run the file within {max_seconds:g} seconds, got no "
                    f"result; give fewer samples, or raise the limit"
                ) from None
            log.seek(0)
            text = log.read().decode(errors="replace")
        return _read_job(folder, model, text, ops)


def _write_job(
    folder: Path, model: onnx.ModelProto, options: Mapping[str, str], samples: Samples
) -> None:
    is_large = model.ByteSize() > MESSAGE_LIMIT
    onnx.save_model(model, str(folder / MODEL), save_as_external_data=is_large)
    (folder / OPTIONS).write_text(json.dumps(dict(options)))
    constants = {item.name for item in model.graph.initializer}
    names = [value.name for value in model.graph.input if value.name not in constants]
    arrays = {
        array_key(index, position): np.asarray(sample[name])
        for index, sample in enumerate(samples)
        for position, name in enumerate(names)
    }
    np.savez(folder / INPUTS, **arrays)  # type: ignore[arg-type]  # all keys are arrays


def _read_job(folder: Path, model: onnx.ModelProto, log: str, ops: frozenset[str]) -> _Job:
    if not (folder / REPORT).exists():
        last = log.strip()[-_MAX_MESSAGE_CHARS:]
        error = f"the compiler ended without a result: {last}"
        return _Job((), (), error, "", CompiledGraph((), frozenset()), ())
    report = read_json(folder / REPORT, _REPORT, ConversionError)
    names = {node.name for node in model.graph.node}
    nodes = {
        provider: [(recover_onnx_name(name, names), kind) for kind, name in assigned]
        for provider, assigned in report[ASSIGNED].items()
    }
    accepted = [node for node in nodes.pop(PROVIDER, []) if node[0] in names]
    refused = [node for rest in nodes.values() for node in rest if node[1] not in _PAIRS]
    return _Job(
        tuple(dict.fromkeys(accepted)),
        tuple(dict.fromkeys(refused)),
        report[COMPILE_ERROR],
        report[RUN_ERROR],
        read_graphs(folder / GRAPHS, ops),
        _read_outputs(folder / OUTPUTS, [value.name for value in model.graph.output]),
    )


def _read_outputs(path: Path, names: Sequence[str]) -> tuple[Mapping[str, Array], ...]:
    if not path.exists():
        return ()
    with np.load(path) as arrays:
        return tuple(
            {name: arrays[array_key(index, i)] for i, name in enumerate(names)}
            for index in range(len(arrays) // len(names))
        )


# Findings


def _find_refusals(job: _Job) -> Iterator[Finding]:
    for name, kind in job.refused:
        message = f"{kind} {name!r} must be replaced or in other types, as QNN refuses it"
        yield Finding(name, kind, Rule.REFUSED, message)
    error = job.run_error or ("" if job.refused else job.compile_error)
    if error:
        step = "run" if job.run_error else "compile"
        message = f"QNN must {step} the file, got: {error[:_MAX_MESSAGE_CHARS]}"
        yield Finding("", "", Rule.COMPILE, message)


def _find_floats(
    graph: CompiledGraph,
    ops: Sequence[QdqOp],
    profile: TargetProfile,
    integer_ops: Collection[str] | None,
) -> Iterator[Finding]:
    """Yield the ops in integers that the NPU computes in float."""
    for op in ops:
        planned = _is_ringed(op, profile) if integer_ops is None else op.name in integer_ops
        tensors = {str(result.value.name) for result in op.results if result.pairs}
        if planned and (op.name in graph.float_ops or tensors & graph.float_tensors):
            message = (
                f"{op.node.op_type} {op.name!r} must be computed in integers, got float kernels; "
                f"its types or its Q/DQ do not fit, or QNN has no integer kernel"
            )
            yield Finding(op.name, op.node.op_type, Rule.FLOAT_KERNEL, message)


def _make_noise_finding(output: str, sqnr_db: float, deviation: Deviation | None) -> Finding:
    cause = "no op alone differs that much"
    if deviation is not None:
        cause = (
            f"the first op that differs is {deviation.op_type} {deviation.op!r} with "
            f"{deviation.sqnr_db:.1f} dB"
        )
    return Finding(
        "" if deviation is None else deviation.op,
        "" if deviation is None else deviation.op_type,
        Rule.NOISE,
        f"output {output!r} must have an SQNR of at least {MIN_SQNR_DB:g} dB to the simulation, "
        f"got {sqnr_db:.1f} dB; {cause}",
    )


def _list_float_ops(model: onnx.ModelProto, profile: TargetProfile) -> list[QdqOp]:
    program = ir.from_proto(model)
    infer_shapes(program)
    return list(iterate_float_ops(program, profile))


def _is_ringed(op: QdqOp, profile: TargetProfile) -> bool:
    """Whether an op that the target computes in integers has Q/DQ on all sides."""
    kind = op.node.op_type
    if not profile.widths_of(kind) and kind not in profile.same_scale:
        return False
    operands = all(operand.pair is not None for operand in op.operands if operand is not op.bias)
    return bool(op.results) and operands and all(result.is_closed for result in op.results)


# Comparison


def _watch_results(model: onnx.ModelProto, profile: TargetProfile) -> dict[str, QdqOp]:
    """Add the results of ops to the outputs; return tensor → op, in the order of the file."""
    outputs = {value.name for value in model.graph.output}
    tensors: dict[str, QdqOp] = {}
    for op in _list_float_ops(model, profile):
        for value in filter(None, map(_find_float_form, op.results)):
            name = str(value.name)
            tensors.setdefault(name, op)
            if name not in outputs:
                outputs.add(name)
                kind = int(value.dtype or ir.DataType.FLOAT)
                model.graph.output.append(onnx.helper.make_tensor_value_info(name, kind, None))
    return tensors


def _find_float_form(result: Result) -> ir.Value | None:
    """Return the tensor that holds a result as floats, without a change to its op."""
    if not result.pairs:
        return result.value
    integers = result.pairs[0].node.outputs[0]
    readers = (use.node for use in integers.uses() if is_dequantize(use.node))
    return next((reader.outputs[0] for reader in readers), None)


def _find_lowest_sqnr(simulated: Samples, emulated: Samples) -> tuple[float, str]:
    """Return the lowest SQNR of an output over all samples, and the output."""
    return min(
        (
            _compute_sqnr_db([item[name] for item in simulated], [item[name] for item in emulated]),
            name,
        )
        for name in emulated[0]
    )


def _compute_sqnr_db(expected: Sequence[Array], actual: Sequence[Array]) -> float:
    """Return the SQNR of all arrays in dB; -inf if one side alone is not finite somewhere."""
    sums = [noise_and_signal(pair[0], pair[1]) for pair in zip(expected, actual, strict=True)]
    noise, signal = (sum(numbers) for numbers in zip(*sums, strict=True))
    if not signal:
        return -math.inf if noise else math.inf
    return nsr_to_decibels(noise / signal)
