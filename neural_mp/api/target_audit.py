"""Audit of ONNX files for accelerators."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from neural_mp.adaptors.registry import require_framework
from neural_mp.api.input_data import read_file_batches
from neural_mp.targets import load_profile

if TYPE_CHECKING:
    from neural_mp.adaptors.onnxrt.targets.audit.file_audit import FileAudit

#: Samples that are emulated, by default: seconds each.
SAMPLES = 4


def audit_file(
    path: str | Path, target: str, data: str | Path | None = None, samples: int = SAMPLES
) -> FileAudit:
    """Audit an ONNX file with Q/DQ ops for an accelerator.

    Args:
        path: the file.
        target: the name or path of a profile.
        data: a file with inputs, as for `neural-mp compare`; by default, random values within the
            range of each input.
        samples: the number of samples to emulate.

    Raises:
        ConfigurationError: the target is no accelerator, or its profile is invalid.
        ModelLoadError: the file is no ONNX model.
        DataError: the data lack an input.
        ConversionError: the compiler gave no result within its limit.
    """
    require_framework("onnxrt", "audits of files for accelerators")
    from neural_mp.adaptors.onnxrt.targets.audit import file_audit

    inputs = None if data is None else (batch for batch, _ in read_file_batches(data, 1, samples))
    return file_audit.audit_file(Path(path), load_profile(target), inputs, samples)
