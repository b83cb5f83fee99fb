"""Folders of saved models, and checkpoints of other tools with `quantization_config`."""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeGuard

from neural_mp.adaptors.common.optional import require_part
from neural_mp.adaptors.common.signatures.boundary import Boundary
from neural_mp.adaptors.common.weights.checkpoint_formats import IntegerLayer
from neural_mp.adaptors.common.weights.grouped_weight import (
    CodedGroups,
    GroupedWeight,
    group_spec,
    middle_code,
    to_bfloat16,
)
from neural_mp.adaptors.contract import Adaptor
from neural_mp.adaptors.loaded_model import AnyModel, LoadedModel
from neural_mp.adaptors.registry import get_adaptor_named
from neural_mp.core import hardware as machine
from neural_mp.core.enums import Approach, Capture, Scheme
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import INTEGERS, OpConfig, make_weight_only
from neural_mp.errors import ConversionError, ModelLoadError, NeuralMPError
from neural_mp.io.readers import read_json
from neural_mp.io.staged_folder import STAGED, finish_replacement, own_files, replace_files
from neural_mp.runs.report import Report, count_ops
from neural_mp.space import Capability, EffectiveOp, list_effective_ops
from neural_mp.util.text import format_count
from neural_mp.util.validators import (
    InvalidValueError,
    boolean,
    file_path,
    mapping_of,
    non_negative_integer,
    optional,
    preview_value,
    record,
    string,
    validate_option,
    values_matching,
)

logger = logging.getLogger(__name__)

FORMAT_VERSION = 2
MANIFEST = "neural_mp.json"
PLAN_FILE = "plan.yaml"
RECORD_FILE = "run.json.gz"
PAGE_FILE = "report.html"
ONNX_SUFFIX = ".onnx"
#: Suffixes of single files that some framework writes.
FILE_SUFFIXES = (ONNX_SUFFIX, ".pb", ".pbtxt", ".xml")
#: Suffixes of model files, which folders must not have.
_MODEL_SUFFIXES = (
    *FILE_SUFFIXES,
    ".pt2",
    ".pt",
    ".pth",
    ".bin",
    ".ckpt",
    ".safetensors",
    ".gguf",
    ".keras",
    ".h5",
    ".tflite",
)
#: File names reserved in the folder of a saved model, for all frameworks.
RESERVED = (
    MANIFEST,
    PLAN_FILE,
    RECORD_FILE,
    PAGE_FILE,
    "details.json",
    "neural_mp_onnx.json",
    "model.pt2",
    "saved_model.pb",
    "saved_model.pbtxt",
    "variables",
    "model.onnx",
    "model.onnx.data",
)


@contextmanager
def name_target(target: Path) -> Iterator[None]:
    """Name the target in errors of the file system raised in this context.

    Raises:
        NeuralMPError: the target cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise NeuralMPError(f"{str(target)!r} cannot be written: {error}") from error


def is_saved_model(path: object) -> TypeGuard[str | Path]:
    """Whether a path is a folder that `OptimizedModel.save` wrote."""
    try:
        return isinstance(path, str | Path) and any(
            file.is_file() for file in (Path(path) / MANIFEST, Path(path) / STAGED / MANIFEST)
        )
    except OSError:  # e.g. a name that is too long, or a folder without read permission
        return False


def check_suffix(path: str | Path, adaptor: Adaptor[Any]) -> None:
    """Check that a new folder is not named like a model file.

    Raises:
        ConversionError: the path has the suffix of a model file, which the framework cannot write.
    """
    if isinstance(path, str | Path):
        files = [*(adaptor.single_file.suffixes if adaptor.single_file else ())]
        if adaptor.offers("export_onnx") and ONNX_SUFFIX not in files:
            files.append(ONNX_SUFFIX)
        _refuse_file_name(Path(path), f"a model of {adaptor.framework}", files)


def _refuse_file_name(path: Path, subject: str, files: Sequence[str]) -> None:
    """Raise an error for a new path with the suffix of a model file; `files`: suffixes to use."""
    suffix = path.suffix.lower()
    if suffix not in _MODEL_SUFFIXES or path.is_dir():
        return
    alternative = f"to a file that ends in {' or '.join(files)}, or " if files else ""
    raise ConversionError(
        f"{subject} cannot be saved as a {suffix} file; save {alternative}to a folder without this "
        f"suffix, e.g. {str(path.with_suffix(''))!r}"
    )


def check_output(path: Path) -> None:
    """Check that a result of any framework can be saved to a path, before there is a result.

    Raises:
        NeuralMPError: as for `check_destination`, or no framework writes files with the suffix.
    """
    if path.suffix.lower() in FILE_SUFFIXES and not path.is_dir():
        with name_target(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            check_writable(path.parent)
        return
    _refuse_file_name(path, "a result", FILE_SUFFIXES)
    check_destination(path)


def check_destination(path: str | Path) -> Path:
    """Return the destination folder of a model after checks; create its parent folders.

    The folder may contain an earlier result, which is replaced if nobody changed its files, and
    other files, which stay unless their names are reserved.

    Raises:
        NeuralMPError: the path is a file, is not writable, or contains an unrelated model.
    """
    if not isinstance(path, str | Path):
        raise NeuralMPError(f"a model must be saved to the path of a folder, got {path!r}")
    target = validate_option("the folder to save a model in", file_path, path)
    if target.exists() and not target.is_dir():
        raise NeuralMPError(f"{str(target)!r} is a file; choose a folder to save the model in")
    with name_target(target):
        own = own_files(target, MANIFEST, _read_digests)
    names = _read_digests(target) if is_saved_model(target) else RESERVED
    for name in names:
        if os.path.lexists(target / name) and Path(name) not in own:
            raise _foreign_file_error(target, name)
    with name_target(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        check_writable(target.parent)
        if target.exists():
            check_writable(target)
    return target


def check_writable(folder: Path) -> None:
    """Check that files can be created in a folder, which permissions alone do not show.

    Raises:
        OSError: the folder is not writable.
    """
    with tempfile.TemporaryDirectory(dir=folder):
        pass


def put_in_place(complete: Path, target: Path) -> None:
    """Move a saved model to its folder, replacing an earlier one; unrelated files stay.

    Raises:
        NeuralMPError: an unrelated file, or one that was changed, has the name of a file of the
            model.
        OSError: the destination is not writable.
    """
    foreign = replace_files(complete, target, MANIFEST, _read_digests)
    if foreign is not None:
        raise _foreign_file_error(target, foreign)


def finish_saving(folder: Path) -> None:
    """Finish a save into a folder that was interrupted while the model was moved there.

    Raises:
        ModelLoadError: the folder is not writable, or contains an unrelated file of the same name.
    """
    try:
        foreign = finish_replacement(folder, MANIFEST, _read_digests)
    except OSError as error:
        raise ModelLoadError(
            f"{str(folder)!r} was interrupted while a model was saved there, which cannot be "
            f"finished: {error}; make the folder writable, or save the model to another one"
        ) from error
    if foreign is not None:
        raise ModelLoadError(str(_foreign_file_error(folder, foreign)))


def _foreign_file_error(folder: Path, name: str) -> NeuralMPError:
    return NeuralMPError(
        f"{str(folder)!r} contains {name!r}, which no earlier result wrote or which was changed "
        f"since, and which is not overwritten; choose another folder"
    )


def _read_digests(folder: Path) -> Mapping[str, str]:
    """Return the digests of the files of the saved model in a folder; empty if damaged."""
    try:
        files = read_json(folder / MANIFEST, _FILES, ModelLoadError)["files"]
    except ModelLoadError as error:
        logger.debug("%s", error)
        return {}
    # Paths in a manipulated manifest must not leave the folder.
    return {name: digest for name, digest in files.items() if _is_path_in_folder(name)}


def _is_path_in_folder(name: str) -> bool:
    try:
        path = file_path(name)
    except InvalidValueError:
        return False
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts


#: Validator of the file names (all inside the folder) and digests of a saved model.
digests_of_files = mapping_of(
    string, values_matching("names of files in the folder", _is_path_in_folder)
)
_FILES = record({"files": mapping_of(string)})


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a saved model.

    Raises:
        ModelLoadError: the manifest is missing, damaged, or of a later version.
    """
    file = folder / MANIFEST
    if not file.is_file():
        raise ModelLoadError(
            f"{str(folder)!r} is not a saved model: {MANIFEST} is missing; give a folder written "
            f"by OptimizedModel.save"
        )
    return read_json(file, _validate_manifest, ModelLoadError)


def _validate_manifest(value: object) -> dict[str, Any]:
    version = value.get("neural_mp") if isinstance(value, Mapping) else None
    if version is not None and version != FORMAT_VERSION:
        raise InvalidValueError(
            f"the format must be {FORMAT_VERSION}, got {preview_value(version)}"
        )
    return {"ops": {}, "boundary": None, "label_key": None, **_MANIFEST(value)}


_MANIFEST = record(
    {
        "neural_mp": non_negative_integer,
        "framework": string,
        "met": optional(boolean),
        "report": Report.from_dict,
        "files": digests_of_files,
    },
    # Missing in files of earlier versions.
    {
        "ops": mapping_of(EffectiveOp.from_dict),
        "boundary": optional(Boundary.from_dict),
        "label_key": optional(string),
    },
)


_CONFIG = "config.json"


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder holds a model of `transformers` with a `quantization_config`."""
    file = folder / _CONFIG
    return file.is_file() and '"quantization_config"' in file.read_text("utf-8", errors="replace")


def load_checkpoint(
    folder: Path,
) -> tuple[AnyModel, PrecisionPlan, Report, Mapping[str, EffectiveOp]]:
    """Load a checkpoint of compressed-tensors (`pack-quantized`), GPTQ or AWQ.

    Returned are the model, its plan, its sizes and warnings, and op → effective configuration.

    The codes are those of the file; scales are rounded to bfloat16, in which kernels read them. A
    layer without a kernel computes with floats of the same values: groups of no kernel's size,
    groups of inputs in another order, or 8 bits in groups or with zero points.

    Raises:
        ModelLoadError: a file is missing or damaged, or the format is not supported.
    """
    started = time.perf_counter()
    adaptor = get_adaptor_named("pytorch")
    offered = require_part(adaptor.checkpoints, adaptor.framework, "checkpoints of other tools")
    module, layers = offered.read(folder)
    original = adaptor.load(module, capture=Capture.LAYERS)
    space = adaptor.space(original, machine.detect())
    configs, grouped, rest = {}, {}, []
    for name, layer in layers.items():
        config = _select_config(layer, space.capabilities.get(name, Capability()))
        if config is None:
            rest.append(name)
            continue
        configs[name] = config
        if layer.bits < 8:
            grouped[name] = _to_grouped_weight(layer)
    resolved = space.resolve(PrecisionPlan(configs))
    groups = require_part(adaptor.grouped_weights, adaptor.framework, "weights in groups")
    converted = original
    if configs:
        converted = adaptor.convert_graph(groups.with_weights(original, grouped), resolved, {})
    model = LoadedModel(adaptor, converted)
    notes = (
        [f"{format_count(len(rest), 'layer')} without a kernel: floats, {rest[0]}"] if rest else []
    )
    report = Report(
        baseline_size=adaptor.weight_bytes(original),
        size=model.size,
        seconds={"convert": time.perf_counter() - started},
        op_counts=count_ops(space.graph, resolved.effective),
        conversions=model.conversions,
        warnings=tuple(notes),
    )
    return model, resolved.plan, report, list_effective_ops(space, resolved)


def _select_config(layer: IntegerLayer, capability: Capability) -> OpConfig | None:
    """Return the configuration of a layer; None if no kernel reads its weight."""
    if layer.groups is not None:
        return None
    if layer.bits == 8:
        if layer.group_size is not None or not layer.is_symmetric:
            return None  # One scale per output would round the weight again.
        integers = (c for c in capability.configs if c.approach is Approach.WEIGHT_ONLY)
        return next((c for c in integers if c.precision is INTEGERS[8]), None)
    # A symmetric weight is also an asymmetric one, whose zero points are the middle code.
    schemes = [Scheme.SYMMETRIC] if layer.is_symmetric else []
    for scheme in (*schemes, Scheme.ASYMMETRIC):
        config = make_weight_only(group_spec(layer.bits, _group_size(layer), scheme=scheme))
        if capability.accepts_config(config):
            return config
    return None


def _group_size(layer: IntegerLayer) -> int:
    return int(layer.codes.shape[1] // layer.scales.shape[1])


def _to_grouped_weight(layer: IntegerLayer) -> GroupedWeight:
    scales = to_bfloat16(layer.scales)
    steps = middle_code(layer.bits) - layer.zero_points.astype("float32")
    offsets = to_bfloat16(steps * scales)
    return GroupedWeight(CodedGroups(layer.codes, scales, offsets), _group_size(layer), layer.bits)
