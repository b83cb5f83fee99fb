"""The object a user drives."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from neural_mp.adaptors.loaded_model import AnyModel
from neural_mp.amp import AmpSettings, AutoMixedPrecisionOptions
from neural_mp.api import configured
from neural_mp.api.amp_settings import edited_lists, forced, gather_amp, with_data_type
from neural_mp.api.deployment import hardware_for, not_native, without_kernels
from neural_mp.api.explain import write_log
from neural_mp.api.limits import constrained
from neural_mp.api.loading import (
    WeightedMetrics,
    gather_metrics,
    load_source,
    metric_words,
    resolve_source,
    without_int8_if_no_data,
)
from neural_mp.api.metric_direction import directed, metric_label
from neural_mp.api.optimized_model import OptimizedModel
from neural_mp.config import Settings, load_settings
from neural_mp.core import hardware as machine
from neural_mp.core.log_folder import prepared_folder
from neural_mp.core.precision import Precision, Precisions, parse_precisions
from neural_mp.core.words import Approach, Capture, is_speed_alone
from neural_mp.errors import ConfigurationError, did_you_mean
from neural_mp.reporting import LiveListener
from neural_mp.space import TuningSpace
from neural_mp.strategies import DEFAULT
from neural_mp.strategies.auto_mixed_precision import AutoMixedPrecision
from neural_mp.tuning.batches import Batches, Calibration
from neural_mp.tuning.criterion import AccuracyCriterion, ExitPolicy
from neural_mp.tuning.evaluator import Evaluator
from neural_mp.tuning.history import History, storage_url
from neural_mp.tuning.job import SearchSettings, TuningJob
from neural_mp.tuning.listener import Listener
from neural_mp.tuning.objectives import Measurement, parse_objectives
from neural_mp.tuning.run_log import RunLog
from neural_mp.tuning.tuner import tune

logger = logging.getLogger(__name__)

#: Where trials are kept unless the user says otherwise.
DEFAULT_WORKSPACE = "neural_mp_workspace"
#: What options of a simple type may be.
_OPTION_TYPES: Mapping[str, tuple[type, ...]] = {
    "accuracy_criterion": (AccuracyCriterion,),
    "exit_policy": (ExitPolicy,),
    "strategy": (str,),
    "framework": (str, type(None)),
    "random_seed": (int,),
    "sampling_size": (int,),
    "resume": (bool,),
    "early_stopping": (bool,),
    "workers": (int,),
    "hardware": (machine.Hardware, type(None)),
    "target": (str,),
    "listener": (Listener, type(None)),
}
#: What is tried unless the user says otherwise.
DEFAULT_PRECISIONS = Precisions((Precision.INT8, Precision.BF16))


class MixedPrecision:
    """Finds the fastest form of a model that still meets an accuracy target.

    Set what is needed, then call the object (or `fit()`). Everything can also come from a YAML
    file; what is set in Python wins.

    Args:
        conf: a YAML file, or settings read before.
        amp: sets the attribute of this name.

    Attributes:
        model: the framework's object, a path to a model, or `module:attribute` of your own.
        precisions: `"bf16"`, `"int8,bf16"`, a list of such words; FP32 is always allowed.
        amp: which ops may run in 16 bits: moves op types between the four lists.
        metric: an object with `update(preds, labels)`, `reset()` and `result()`, or a list of them.
        eval_dataloader: batches of `(inputs, labels)` the metric is computed over.
        eval_func: model → accuracy, instead of `metric` and `eval_dataloader`.
        postprocess: applied to `(predictions, labels)` before the metric sees them.
        calib_dataloader: batches to calibrate INT8 with; `eval_dataloader` by default.
        approach: the way of INT8: `static` with calibrated ranges; `dynamic` with ranges found on
            every run and `weight_only`, both for dense layers, need no calibration. None leaves
            it open.
        sampling_size: samples of it that are used.
        inputs, outputs: names of the model's inputs and outputs, where they are not found by
            themselves; `inputs` may be example tensors.
        framework: the model's framework, where it is not found by itself.
        capture: `modules` converts the modules of a model whose graph cannot be captured as a
            whole one by one; what runs between them stays as it is.
        accuracy_criterion: the tolerated loss; one percent, relative, by default.
        exit_policy: timeout, number of trials.
        strategy: name of the search strategy.
        objective: `performance`, `footprint` or `modelsize`; or several with their weights.
        workspace: folder the trials are kept in; `storage` an Optuna storage URL instead.
        resume: go on with the latest run of the workspace.
        random_seed: for strategies that draw at random.
        early_stopping: whether an evaluation that is lost already is stopped.
        workers: processes that try the plans of one round side by side.
        target: what to convert for: `this` machine; a level of processors, `avx2`, `avx512`,
            `vnni`, `amx` or `arm-dotprod`; or `portable`, which is right on all of them.
        hardware: the machine at hand; found by itself.
        listener: told how the run goes on. By default a `neural_mp.reporting.LiveListener` where
            standard error is a terminal, which shows progress and a summary, and none elsewhere.
    """

    def __init__(
        self,
        conf: str | Path | Settings | None = None,
        *,
        amp: AutoMixedPrecisionOptions | None = None,
    ) -> None:
        settings = Settings() if conf is None else conf
        if isinstance(settings, str | Path):
            settings = load_settings(settings)
        if not isinstance(settings, Settings):
            raise ConfigurationError(
                f"MixedPrecision takes the path of a YAML file, got {type(conf).__name__}"
            )
        self._settings = settings
        self._precisions = settings.precisions
        tuning = settings.tuning
        self.model: Any = settings.model.name
        self.amp: AutoMixedPrecisionOptions | None = amp
        self.metric: Any = None
        self.eval_dataloader: Any = None
        self.eval_func: Callable[[Any], float] | None = None
        self.postprocess: Callable[[Any], Any] | None = None
        self.calib_dataloader: Any = None
        self.approach: str | None = settings.approach
        self.sampling_size: int = settings.calibration.sampling_size
        self.inputs: Any = settings.model.inputs or None
        self.outputs: Any = settings.model.outputs or None
        self.framework: str | None = settings.model.framework
        self.capture: str = settings.model.capture
        self.accuracy_criterion: AccuracyCriterion = tuning.criterion
        self.exit_policy: ExitPolicy = tuning.exit_policy
        self.strategy: str = tuning.strategy or DEFAULT
        self.objective: str | Mapping[str, float] = tuning.objective
        self.workspace: str | Path = tuning.workspace or DEFAULT_WORKSPACE
        self.storage: str | None = tuning.storage
        self.resume: bool = tuning.resume
        self.random_seed: int = tuning.random_seed
        self.early_stopping: bool = tuning.early_stopping
        self.workers: int = tuning.workers
        self.target: str = settings.target
        self.hardware: machine.Hardware | None = None
        self.listener: Listener | None = None
        self._complete = True

    def __setattr__(self, name: str, value: Any) -> None:
        if getattr(self, "_complete", False) and not hasattr(self, name):
            known = [word for word in (*vars(self), "precisions") if not word.startswith("_")]
            raise ConfigurationError(
                f"MixedPrecision has no option {name!r}{did_you_mean(name, known)}"
            )
        super().__setattr__(name, value)

    @property
    def precisions(self) -> tuple[Precision, ...]:
        """What may be used beside FP32."""
        return self._precisions or DEFAULT_PRECISIONS

    @precisions.setter
    def precisions(self, value: str | Precision | Iterable[str | Precision]) -> None:
        self._precisions = parse_precisions(value)

    def __call__(self) -> OptimizedModel:
        """Tune and return the result; the same as `fit()`."""
        return self.fit()

    def fit(self) -> OptimizedModel:
        """Tune.

        Returns:
            A usable model, always: the best that met the target, or the FP32 one, marked so.

        Raises:
            NeuralMPError: something asked for does not exist or does not fit; the message names
                it. Errors of your own metric or evaluation function come through unchanged.
        """
        log = RunLog(self.listener or _default_listener())
        with log.phase("load"):
            job, log_folder = self._job(log)
        found = tune(job, log)
        report = found.report
        for line in report.converted:
            logger.info(line)
        if log_folder is not None:
            missing = write_log(log_folder, job.model, found.model, found.plan)
            report = replace(report, warnings=(*report.warnings, *missing))
        log.listener.result(report, found.met)
        return OptimizedModel(
            found.model, found.plan, report, found.met, found.trials, found.observations
        )

    def _job(self, log: RunLog) -> tuple[TuningJob, Path | None]:
        """All that the options come to, and the folder to log to, where there is to be one."""
        self._check_options()
        strategy = configured.strategy(self._settings, self.strategy)
        here = self.hardware or machine.detect()
        amp = gather_amp(self.amp, self._settings.amp)
        log_folder = prepared_folder(amp.log_path)
        precisions = self._usable_precisions(here.converting_for(self.target), amp, log)
        evaluation, calibration = self._data()
        metrics = gather_metrics(self.metric, self._settings, evaluation, self.eval_func)
        criterion = self._criterion(metrics)
        load = self._loading(calibration)
        loaded = load()
        hardware, told = hardware_for(self.target, here, loaded.adaptor)
        log.warnings += (*loaded.warnings, *told)
        if self.approach in (None, Approach.STATIC):
            precisions, told = without_int8_if_no_data(precisions, calibration)
            log.warnings += told
        space, precisions = self._space(loaded, hardware, precisions, amp, log)
        label = metric_label(metrics, self.eval_func)
        postprocess = self.postprocess or configured.postprocess(self._settings)
        evaluator = Evaluator(evaluation, metrics, self.eval_func, postprocess, label)
        evaluator.on_batch = log.listener.step
        job = TuningJob(
            model=loaded.in_space(space),
            load=load,
            strategy=strategy,
            evaluator=evaluator,
            calibration=None
            if calibration is None
            else Calibration(calibration, self.sampling_size),
            measurement=self._measurement(loaded, evaluation or calibration),
            open_history=lambda: self._history(
                loaded, evaluation, calibration, metrics, criterion, amp
            ),
            settings=SearchSettings(
                precisions=precisions,
                for_numbers=here.forced | not_native(here),
                criterion=criterion,
                exit_policy=self.exit_policy,
                seed=self.random_seed,
                workers=self.workers,
                early_stopping=self.early_stopping,
            ),
            amp=amp.words(),
        )
        return job, log_folder

    def _criterion(self, metrics: WeightedMetrics) -> AccuracyCriterion:
        """The criterion, with the direction of what measures the accuracy."""
        if self.exit_policy.performance_only:
            return self.accuracy_criterion
        named = self._settings.evaluation.metrics if self.metric is None else ()
        return directed(self.accuracy_criterion, metrics, self.eval_func, named)

    def _check_options(self) -> None:
        if self.model is None:
            raise ConfigurationError("no model was given; set converter.model")
        parse_objectives(self.objective)
        if (isinstance(self.workers, int) and self.workers < 1) or isinstance(self.workers, bool):
            raise ConfigurationError(f"workers must be at least 1, got {self.workers}")
        if self.approach is not None:
            Approach.read(self.approach, "approach")
        Capture.read(self.capture, "capture")
        for name, kinds in _OPTION_TYPES.items():
            if not isinstance(getattr(self, name), kinds):
                words = " or ".join(kind.__name__ for kind in kinds if kind is not type(None))
                raise ConfigurationError(f"{name} must be a {words}, got {getattr(self, name)!r}")
        names = self.outputs if isinstance(self.outputs, list | tuple) else [self.outputs]
        if self.outputs is not None and not all(isinstance(name, str) for name in names):
            raise ConfigurationError(f"outputs must be names, got {self.outputs!r}")
        if self.eval_func is not None and not callable(self.eval_func):
            raise ConfigurationError(
                f"eval_func must be a function model → float, got {type(self.eval_func).__name__}"
            )

    def _usable_precisions(
        self, hardware: machine.Hardware, amp: AmpSettings, log: RunLog
    ) -> tuple[Precision, ...]:
        if self._settings.device != "cpu":
            log.warn(f"device {self._settings.device!r} is not built yet; the CPU is used")
        wanted, told = with_data_type(self._precisions, DEFAULT_PRECISIONS, amp)
        usable, found = machine.require_any(hardware, wanted)
        log.warnings += (*told, *(found if self._precisions or amp.switched_on else ()))
        for precision in usable:
            support = hardware.support(precision)
            if not support.native:
                log.warn(f"{precision} is emulated here, for its numbers: {support.reason}")
        return usable

    def _data(self) -> tuple[Batches | None, Batches | None]:
        """Evaluation and calibration batches, from Python or YAML; the first serves as second."""
        settings = self._settings
        loader = self.eval_dataloader
        if loader is None:
            loader = configured.loader(settings, configured.ACCURACY)
        evaluation = None if loader is None else Batches(loader, "eval_dataloader")
        loader = self.calib_dataloader
        if loader is None:
            loader = configured.loader(settings, configured.CALIBRATION)
        calibration = evaluation if loader is None else Batches(loader, "calib_dataloader")
        return evaluation, calibration

    def _loading(self, calibration: Batches | None) -> Callable[[], AnyModel]:
        """Loads the model; can be sent to another process."""
        return partial(
            load_source,
            resolve_source(self.model),
            self.framework,
            self.inputs,
            outputs=self.outputs,
            example=calibration.first if calibration is not None else None,
            capture=Capture(self.capture),
        )

    def _space(
        self,
        model: AnyModel,
        hardware: machine.Hardware,
        precisions: tuple[Precision, ...],
        amp: AmpSettings,
        log: RunLog,
    ) -> tuple[TuningSpace, tuple[Precision, ...]]:
        """What every op may run in, and the precisions that are tried."""
        adaptor = model.adaptor
        lists, told = edited_lists(adaptor, amp, precisions)
        space = forced(adaptor.space(model.held, hardware, lists), amp).restricted_to(precisions)
        log.warnings += told
        emulated = without_kernels(space, hardware)
        if self._wants_speed_alone(amp) and Precision.INT8 in space.usable_precisions:
            precisions = tuple(p for p in precisions if p not in emulated or p in hardware.forced)
            space = space.restricted_to(precisions)
        else:
            log.warnings += tuple(
                f"{adaptor.framework} has no {precision} kernels here: {precision} is emulated, "
                f"for its numbers"
                for precision in emulated
            )
        space, told = constrained(space, self._settings)
        log.warnings += told
        if self.approach is not None:
            space = space.with_int8([Approach(self.approach)])
        for precision in precisions:
            if precision not in (*space.usable_precisions, Precision.FP32):
                log.warn(f"no op of this model may run in {precision}; it stays out")
        return space, precisions

    def _wants_speed_alone(self, amp: AmpSettings) -> bool:
        """Whether nobody asked for 16 bits, which may be wanted for their numbers or their size."""
        asked = self._precisions is not None or amp != AmpSettings()
        only_speed = is_speed_alone(parse_objectives(self.objective))
        return only_speed and not asked and self.strategy != AutoMixedPrecision.name

    def _measurement(self, model: AnyModel, data: Batches | None) -> Measurement:
        performance = self._settings.evaluation.performance
        loader = configured.loader(self._settings, configured.PERFORMANCE)
        if loader is not None:
            data = Batches(loader, "performance.dataloader").tried_on(model)
        return Measurement(
            data.first_inputs if data is not None else model.example_inputs(),
            parse_objectives(self.objective),
            performance.warmup,
            performance.iteration,
            threads=performance.cores_per_instance,
        )

    def _history(
        self,
        model: AnyModel,
        evaluation: Batches | None,
        calibration: Batches | None,
        metrics: WeightedMetrics,
        criterion: AccuracyCriterion,
        amp: AmpSettings,
    ) -> History:
        fingerprint: Mapping[str, str] = {
            "model": model.fingerprint(),
            "data": evaluation.fingerprint() if evaluation is not None else "none",
            "calibration": f"{self.sampling_size} samples of "
            + (
                "the same data"
                if calibration is None or calibration is evaluation
                else calibration.fingerprint()
            ),
            "metric": metric_words(metrics, self.eval_func),
            "criterion": str(criterion),
            "four lists": "; ".join(amp.list_words()) or "as they come",
        }
        url = storage_url(self.workspace, self.storage)
        return History(url, fingerprint, criterion.prefers_higher, self.resume)


def _default_listener() -> Listener:
    return LiveListener() if sys.stderr.isatty() else Listener()
