"""Models and files for accelerators: profile of a `target`, model as its adaptor sees it, audit."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from neural_mp.adaptors.loaded_model import AnyModel
from neural_mp.adaptors.registry import require_framework
from neural_mp.adaptors.transfer import load_transferred
from neural_mp.api.input_data import read_file_batches
from neural_mp.config import Options
from neural_mp.config.values import TARGET
from neural_mp.core import hardware as machine
from neural_mp.core.criterion import parse_objectives
from neural_mp.core.enums import AUTO_RUNTIME, SOURCE_RUNTIME, Objective
from neural_mp.core.precision import Precision
from neural_mp.errors import ConfigurationError, ConversionError, one_line
from neural_mp.targets import TargetProfile, load_profile
from neural_mp.util.validators import validate_option


def profile_of(target: str) -> TargetProfile | None:
    """Return the profile of an accelerator; None for a CPU.

    Raises:
        ConfigurationError: there is no such target, or its file is invalid.
    """
    if target in machine.TARGETS:
        return None
    return load_profile(validate_option("target", TARGET, target))


def check_ignored(options: Options) -> None:
    """Check that no option is set that a search for an accelerator cannot heed.

    Raises:
        ConfigurationError: a runtime or a provider is named, or another objective than latency.
    """
    if options.runtime not in (SOURCE_RUNTIME, AUTO_RUNTIME):
        raise ConfigurationError(
            f"runtime must be {SOURCE_RUNTIME!r} or {AUTO_RUNTIME!r} for an accelerator, got "
            f"{options.runtime!r}: the result is an ONNX file; remove the runtime"
        )
    if options.provider is not None:
        raise ConfigurationError(
            f"provider must be unset for an accelerator, got {options.provider!r}: the target "
            f"decides what runs the result; remove the provider"
        )
    if set(parse_objectives(options.objective)) != {Objective.PERFORMANCE}:
        raise ConfigurationError(
            f"objective must be latency for an accelerator, whose estimated cost is minimized, got "
            f"{options.objective!r}; remove the objective"
        )


def compute_target_fingerprint(profile: TargetProfile | None) -> dict[str, str]:
    """Return the digest of an accelerator's rules, for keys of runs and caches; empty for a CPU."""
    if profile is None:
        return {}
    text = json.dumps(profile.to_dict(), sort_keys=True)
    return {"target": hashlib.sha256(text.encode()).hexdigest()}


def choose_integer_precisions(
    profile: TargetProfile, explicit: tuple[Precision, ...] | None
) -> tuple[Precision, ...]:
    """Return the precisions of a search for an accelerator: by default, all that it offers.

    Raises:
        ConfigurationError: none of the user's precisions is an integer of the target.
    """
    widths = {dtype.bits for dtype in profile.activation.types}
    integers = tuple(p for p in (Precision.INT8, Precision.INT16) if p.bits in widths)
    if explicit is None:
        return integers
    chosen = tuple(precision for precision in integers if precision in explicit)
    if not chosen:
        raise ConfigurationError(
            f"precisions for {profile.title} must contain {' or '.join(map(str, integers))}, got "
            f"{', '.join(map(str, explicit))}"
        )
    return chosen


def model_for_target(source: AnyModel, profile: TargetProfile) -> AnyModel:
    """Return a model as the adaptor of a target reads its ONNX file, called as in its framework.

    Raises:
        ConfigurationError: the model cannot be written as ONNX.
        MissingFrameworkError: ONNX Runtime is not installed.
    """
    require_framework("onnxrt", "models for accelerators")
    from neural_mp.adaptors.onnxrt.targets.adaptor import TargetAdaptor

    try:
        return load_transferred(source, TargetAdaptor(profile))
    except ConversionError as error:
        raise ConfigurationError(
            f"target {profile.name!r} requires a model that can be written as ONNX, got one of "
            f"{source.adaptor.framework}: {one_line(error)}"
        ) from error


def seen_by_target(source: AnyModel, target: str) -> tuple[AnyModel, str]:
    """Return a model as planned for a target, and the CPU that it is planned or simulated on.

    Raises:
        ConfigurationError: as for `profile_of` and `model_for_target`.
    """
    profile = profile_of(target)
    if profile is None:
        return source, target
    return model_for_target(source, profile), machine.HOST_TARGET


@dataclass(frozen=True)
class TargetLoader:
    """A picklable loader of a model for an accelerator; see `model_for_target`."""

    load: Callable[[], AnyModel]
    target: str

    def __call__(self) -> AnyModel:
        """Return the model."""
        return model_for_target(self.load(), load_profile(self.target))


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
