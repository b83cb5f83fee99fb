"""The result of a tuning run, with saving and loading."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from neural_mp.adaptors.common.optional import SingleFile, missing_part_error, require_part
from neural_mp.adaptors.common.weights.checkpoint_formats import CheckpointFormat
from neural_mp.adaptors.contract import Adaptor
from neural_mp.adaptors.loaded_model import AnyModel, LoadedModel, TransferredModel
from neural_mp.adaptors.registry import adaptor_for
from neural_mp.api.portability import EVERYWHERE, describe_exact_targets, ensure_exact
from neural_mp.api.saved_model import (
    FORMAT_VERSION,
    MANIFEST,
    ONNX_SUFFIX,
    PAGE_FILE,
    PLAN_FILE,
    RECORD_FILE,
    check_destination,
    check_suffix,
    finish_saving,
    is_checkpoint,
    load_checkpoint,
    name_target,
    put_in_place,
    read_manifest,
)
from neural_mp.core.observations import Observations
from neural_mp.core.plan import PLAN_KEY, PrecisionPlan, load_plan_file
from neural_mp.core.trial import Trial, Trials
from neural_mp.errors import (
    DataError,
    ModelLoadError,
    NeuralMPError,
    PlanError,
    did_you_mean,
    make_pickling_error,
    visible,
)
from neural_mp.io.limits import trusting
from neural_mp.io.staged_folder import digest_of_file, scratch_folder
from neural_mp.profiling.audit import Audit, audit_model
from neural_mp.reporting.page import cell_of, report_cell
from neural_mp.reporting.tables import verdict_line
from neural_mp.runs.record_schema import read_record_file, write_record
from neural_mp.runs.report import Report, RunRecord
from neural_mp.space import EffectiveOp
from neural_mp.tuning.measurement.sensitivity import SensitivityReport, sensitivity_report
from neural_mp.util.labels import without_key
from neural_mp.util.validators import file_path, validate_option

logger = logging.getLogger(__name__)

#: Key of the CPUs in the metadata of a model file.
EXACT_ON_KEY = "neural_mp.exact_on"
#: Attributes of models of `transformers` that a result passes on.
_OF_PIPELINES = frozenset(
    {"can_generate", "config", "device", "forward", "generate", "generation_config"}
)


class OptimizedModel:
    """A usable model with its plan, history and report.

    Attributes:
        loaded: the model together with its adaptor.
        plan: op → configuration.
        met: whether the accuracy target was met; None without an accuracy check.
        trials: all trials, oldest first, with `to_dataframe`.
        report: results of the run.
        observations: calibration results.
        planned: op → effective configuration; empty for a model saved by an earlier version.
        label_key: key of the labels in batches that are dicts, as in the run; None if unset.
    """

    def __init__(
        self,
        loaded: AnyModel,
        plan: PrecisionPlan,
        report: Report,
        met: bool | None = None,
        trials: tuple[Trial, ...] = (),
        observations: Observations | None = None,
        planned: Mapping[str, EffectiveOp] = MappingProxyType({}),
        label_key: str | None = None,
    ) -> None:
        self.loaded = loaded
        accelerator = report.accelerator
        lowered = (op for op, effective in planned.items() if effective.precision.is_integer)
        followers = tuple(op for op in lowered if op not in plan)
        plan = replace(plan, int8_followers=followers or plan.int8_followers)
        self.plan = plan if accelerator is None else replace(plan, target=accelerator.name)
        self.report = report
        self.met = met
        self.trials = Trials(trials)
        self.observations = observations or Observations()
        self.planned = planned
        self.label_key = label_key

    @property
    def adaptor(self) -> Adaptor[Any]:
        """The adaptor of the model's framework."""
        return self.loaded.adaptor

    @property
    def held(self) -> Any:
        """The model in the adaptor's representation."""
        return self.loaded.held

    @property
    def framework(self) -> str:
        """Name of the model's framework."""
        return self.adaptor.framework

    @property
    def needs(self) -> tuple[str, ...]:
        """The packages that must be installed to load and run the model."""
        return self.adaptor.packages

    @property
    def record(self) -> RunRecord | None:
        """The record of the run that found the model; None without a run."""
        return self.report.record

    @property
    def exact_on(self) -> str:
        """The CPUs on which INT8 accumulation of the model is exact, as text."""
        return describe_exact_targets(self.loaded)

    @property
    def model(self) -> Any:
        """The framework's own object."""
        return self.loaded.native

    def __call__(self, *inputs: object, **named: object) -> Any:
        """Run one batch: inputs as separate arguments, or all in one object.

        Labels in a dict are left out: those under reserved names, and those under `label_key`.

        Returns:
            The outputs, as numpy arrays if the inputs are numpy arrays.

        Raises:
            DataError: the inputs do not fit the model.
        """
        if not named and not inputs:
            raise DataError("a call must hold the inputs of one batch, got none")
        if named or len(inputs) != 1:
            fed = without_key(self.label_key, named)
            return TransferredModel(self.loaded)(*inputs, **fed)
        return self.loaded(without_key(self.label_key, inputs[0]))

    def __getattr__(self, name: str) -> Any:
        """Return what a pipeline of `transformers` asks a model for, if the model has it."""
        native = self.model if name in _OF_PIPELINES else None
        if getattr(native, name, None) is None:
            of_report = f"; use result.report.{name}" if hasattr(Report, name) else ""
            attributes = [attribute for attribute in dir(self) if not attribute.startswith("_")]
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}"
                f"{of_report or did_you_mean(name, attributes)}"
            )
        return getattr(native, name)

    def __copy__(self) -> OptimizedModel:
        """Return a result of the same model: calls do not change the model."""
        return OptimizedModel(
            self.loaded,
            self.plan,
            self.report,
            self.met,
            self.trials,
            self.observations,
            self.planned,
            self.label_key,
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> OptimizedModel:
        """Return a result of the same model; copy `model` for an independent one."""
        return copy.copy(self)

    def __reduce__(self) -> Any:
        raise make_pickling_error("a result")

    def __repr__(self) -> str:
        missed = f"target not met: {self.report.source_name}"
        texts = {True: "target met", False: missed, None: "accuracy not checked"}
        return f"OptimizedModel({self.framework}, {self.plan!r}, {texts[self.met]})"

    def _repr_html_(self) -> str:
        """Return HTML for notebooks: verdict, figures and trials, or the figures alone."""
        if self.record is None:
            return report_cell(self.report, verdict_line(self.report, self.met))
        return cell_of(self.record)

    def audit(self) -> Audit:
        """Compare the executed precision of every op with the plan.

        The model runs once on its example inputs, and the runtime's trace of this run is read. See
        `audit().holds` and `audit().findings`.

        Raises:
            PlanError: the plan contains no op.
            ConversionError: the framework does not report the executed kernels.
        """
        planned = self.planned or {
            op: EffectiveOp("", config.precision, config.approach)
            for op, config in self.plan.items()
        }
        if not planned:
            raise PlanError("nothing to audit: the plan must have at least one op, got none")
        return audit_model(self.loaded, planned, complete=bool(self.planned))

    def compiled(self) -> Any:
        """Return the framework's own object, compiled if the compiler gains speed.

        The first call with each input shape compiles.

        Raises:
            ConversionError: the framework has no compiler.
        """
        return require_part(self.adaptor.compiler, self.framework, "compiler").compile(self.held)

    def export_onnx(self, path: str | Path) -> None:
        """Write the model to an ONNX file, with the plan in the file's metadata.

        Raises:
            ConversionError: the model has ops that ONNX lacks, or the framework has no ONNX export.
        """
        if not self.adaptor.offers("export_onnx"):
            raise missing_part_error(self.framework, "way to ONNX")
        target = validate_option("the ONNX file", file_path, path)
        with name_target(target):
            target.parent.mkdir(parents=True, exist_ok=True)
        self.adaptor.export_onnx(self.held, target, self._make_file_metadata())

    def save_pretrained(
        self, folder: str | Path, quant_method: str = CheckpointFormat.COMPRESSED_TENSORS
    ) -> None:
        """Write a checkpoint with `quantization_config`, for transformers, vLLM and other tools.

        Args:
            folder: the folder to write to.
            quant_method: `compressed-tensors` (its form `pack-quantized`) or `gptq`.

        Raises:
            ConfigurationError: the format does not exist.
            ConversionError: the format cannot hold the model.
        """
        form = CheckpointFormat.parse(quant_method, "quant_method")
        offered = require_part(
            self.adaptor.checkpoints, self.framework, "checkpoints of other tools"
        )
        target = validate_option("the folder", file_path, folder)
        with name_target(target):
            offered.export(self.held, target, form)

    def sensitivity(self) -> SensitivityReport:
        """Return the sensitivities measured by the run, highest degradation first.

        Output noise is included if the strategy measured it; `MixedPrecision.sensitivity` measures
        the output noise of all decisions.

        Raises:
            NeuralMPError: the model has no record of a run.
        """
        if self.record is None:
            raise NeuralMPError(
                "the model must have the record of a run, got none; measure the sensitivity with "
                "MixedPrecision(...).sensitivity()"
            )
        return sensitivity_report(self.record)

    def save_plan(self, path: str | Path) -> None:
        """Write the plan and the calibration results to a YAML file, to edit and replay."""
        self.plan.save(path, framework=self.framework, observations=self.observations)

    def save(self, path: str | Path) -> None:
        """Write the model, its plan, its report and the page of its run into the folder `path`.

        An earlier result there is replaced; other files in the folder stay.

        If the path ends in a single-file suffix of the framework (`.pb`, `.pbtxt`, `.onnx`,
        `.xml`), or in `.onnx` and the framework exports to ONNX, only the model is written, for use
        without this package; ONNX metadata include the plan. If INT8
        accumulation is not exact on every CPU, a logged warning lists the suitable CPUs. The file
        of a model from another framework is called by the names and in the types of its runtime,
        which a logged warning lists; the folder keeps the calls of the source.

        Raises:
            NeuralMPError: the folder contains another model, or is not writable, or the path ends
                in the suffix of a model file that the framework cannot write.
        """
        single = self.adaptor.single_file
        suffix = Path(path).suffix.lower() if isinstance(path, str | Path) else ""
        if single and suffix in single.suffixes:
            self._save_file(single, validate_option("the file to save a model in", file_path, path))
        elif suffix == ONNX_SUFFIX and self.adaptor.offers("export_onnx"):
            self.export_onnx(path)
        else:
            check_suffix(path, self.adaptor)
            self._save_folder(path)
        level = logging.INFO if self.exact_on == EVERYWHERE else logging.WARNING
        logger.log(level, "%s is exact on %s", visible(str(path)), self.exact_on)

    def _save_folder(self, path: str | Path) -> None:
        target = check_destination(path)
        # A folder that exists may be on another file system than its parent.
        parent = target if target.exists() else target.parent
        with name_target(target), scratch_folder(parent) as scratch:
            complete = scratch / "model"
            complete.mkdir()
            self._write_folder(complete)
            put_in_place(complete, target)

    def _save_file(self, single: SingleFile[Any], target: Path) -> None:
        with name_target(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            with scratch_folder(target.parent) as scratch:
                folder = scratch / "model"
                folder.mkdir()
                single.save_file(self.held, folder / target.name, self._make_file_metadata())
                for file in folder.iterdir():
                    file.replace(target.parent / file.name)
        if self.loaded.boundary is not None:
            calls = self.loaded.boundary.calls_of_file()
            logger.warning("%s takes and returns arrays: %s", target, calls)

    def _make_file_metadata(self) -> dict[str, str]:
        return {
            PLAN_KEY: self.plan.to_yaml(framework=self.framework),
            EXACT_ON_KEY: self.exact_on,
        }

    def _write_folder(self, folder: Path) -> None:
        self.adaptor.save(self.held, folder)
        single = self.adaptor.single_file
        if single is not None and single.add_metadata is not None:
            single.add_metadata(folder, {EXACT_ON_KEY: self.exact_on})
        self.save_plan(folder / PLAN_FILE)
        if self.record is not None:
            write_record(folder / RECORD_FILE, self.record)
            self.report.save_html(folder / PAGE_FILE)
        manifest = {
            "neural_mp": FORMAT_VERSION,
            "framework": self.framework,
            "met": self.met,
            "label_key": self.label_key,
            "exact_on": self.exact_on,
            "boundary": None if self.loaded.boundary is None else self.loaded.boundary.to_dict(),
            "report": self.report.to_dict(),
            "ops": {name: op.to_dict() for name, op in self.planned.items()},
            "files": {
                str(file.relative_to(folder)): digest_of_file(file)
                for file in sorted(folder.rglob("*"))
                if file.is_file()
            },
        }
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")


def load(path: str | Path, trust: Iterable[str] = ()) -> OptimizedModel:
    """Load a model written by `save` or `save_pretrained`; code in files is never executed.

    Checkpoints of other tools in the formats of `save_pretrained` are loaded, too.

    Args:
        path: the folder of the model.
        trust: ops that the model may call although files may not, e.g. `aten.segment_reduce`; a
            warning of the conversion lists them.

    Raises:
        ModelLoadError: the folder is missing, incomplete, damaged or of a later version; or the
            results would be wrong on this machine and cannot be corrected.
    """
    if not isinstance(path, str | Path):
        raise ModelLoadError(f"a saved model must be given by the path of its folder, got {path!r}")
    folder = validate_option("the folder of a saved model", file_path, path)
    if not (folder / MANIFEST).is_file() and is_checkpoint(folder):
        restored, plan, report, planned = load_checkpoint(folder)
        return OptimizedModel(restored, plan, report, planned=planned)
    finish_saving(folder)
    manifest = read_manifest(folder)
    adaptor = adaptor_for(folder, manifest["framework"])
    for name, expected in manifest["files"].items():
        file = folder / name
        if not file.is_file():
            raise ModelLoadError(f"the saved model {str(folder)!r} lacks its file {name!r}")
        if digest_of_file(file) != expected and name not in adaptor.replaceable_files:
            raise ModelLoadError(
                f"the file {name!r} of the saved model {str(folder)!r} was changed or damaged"
            )
    plan, observations = load_plan_file(folder / PLAN_FILE)
    recorded = RECORD_FILE in manifest["files"]
    record = read_record_file(folder / RECORD_FILE) if recorded else None
    report = replace(manifest["report"], record=record)
    with trusting(trust):
        model = adaptor.restore(folder)
    restored = LoadedModel(adaptor, model, boundary=manifest["boundary"])
    right, done = ensure_exact(restored, repr(str(folder)))
    return OptimizedModel(
        right,
        plan,
        replace(report, warnings=(*report.warnings, *done)),
        manifest["met"],
        () if record is None else record.trials,
        observations=observations,
        planned=manifest["ops"],
        label_key=manifest["label_key"],
    )
