"""The object a user drives."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from neural_mp.amp import AutoMixedPrecisionOptions
from neural_mp.api.explain import write_log
from neural_mp.api.job_builder import (
    DEFAULT_PRECISIONS,
    DEFAULT_WORKSPACE,
    JobBuilder,
    check_option,
)
from neural_mp.api.optimized_model import OptimizedModel
from neural_mp.api.options import exit_policy_of, parse_criterion
from neural_mp.config import Settings, load_settings, settings_from, trust_of
from neural_mp.core import hardware as machine
from neural_mp.core.precision import Precision, parse_precisions
from neural_mp.errors import ConfigurationError, did_you_mean
from neural_mp.reporting import LiveListener, NotebookListener, is_notebook
from neural_mp.space import planned_ops
from neural_mp.strategies import DEFAULT
from neural_mp.tuning.criterion import AccuracyCriterion, ExitPolicy
from neural_mp.tuning.listener import Listener, RunLog
from neural_mp.tuning.sensitivity import SensitivityReport, measured_sensitivities
from neural_mp.tuning.tuner import tune
from neural_mp.util.user_calls import ReraiseUserErrors
from neural_mp.util.validators import validate_option, without_nul

logger = logging.getLogger(__name__)


class MixedPrecision:
    """Finds the fastest form of a model that still meets an accuracy target.

    Set what is needed, then call the object (or `fit()`). Everything can also come from a YAML
    file; what is set in Python wins.

    Args:
        conf: a YAML file, a dict with the same content, or settings read before.
        **options: sets the attributes of these names.

    Raises:
        ConfigurationError: there is no option of a name, or a value is not as it should be.

    Attributes:
        model: the framework's object, a path to a model, or `module:attribute` of your own.
        precisions: `"bf16"`, `"int8,bf16"`, a list of such words; FP32 is always allowed.
        amp: which ops may run in 16 bits: moves op types between the four lists.
        metric: a name, a function of all predictions and labels, an object with `update(preds,
            labels)`, `reset()` and `result()`, a metric of Keras, torchmetrics or scikit-learn; a
            list, of which the mean counts, or a dict, of which every one has to meet the target.
        eval_dataloader: batches of `(inputs, labels)` the metric is computed over.
        max_batches: how many of them; all by default. A loader without an end needs it.
        eval_func: model → accuracy, instead of `metric` and `eval_dataloader`.
        postprocess: applied to `(predictions, labels)` before the metric sees them.
        calib_dataloader: batches to calibrate INT8 with; `eval_dataloader` by default.
        approach: how INT8 ranges are found: `static` by calibration; `dynamic` on every run;
            `weight_only`, where activations stay as they are. The last two are for dense layers
            and need no calibration. None allows all three.
        sampling_size: samples of it that are used.
        inputs, outputs: names of the model's inputs and outputs, where they are not found by
            themselves; `inputs` may be example tensors, or for a Keras model or a tf.function
            shapes, with None for axes that are to be free.
        framework: the model's framework, where it is not found by itself.
        capture: `modules` converts the modules of a model whose graph cannot be captured as a
            whole one by one; what runs between them stays as it is.
        exclude: ops that stay in FP32: their names, names of layers or modules, which stand for
            all ops in them (`dense_1`, `encoder.layer.0`), or patterns (`layer[34]`).
        op_wise: name or pattern → what such ops may run in: precisions (`"fp32"`, `"int8,bf16"`),
            or a dict with `weight` and `activation` as in YAML.
        optype_wise: op type, or class of layers (`Dense`, `Linear`) → the same.
            `model_wise`: the same for all ops.
        accuracy_criterion: the tolerated loss; one percent, relative, by default. A number is a
            share of the baseline (0.005 is half a percent); a dict is read as in YAML:
            `{"absolute": 0.002}`.
        exit_policy: timeout, number of trials; a dict is read as in YAML.
        strategy: name of the search strategy.
        objective: `performance`, `footprint` or `modelsize`; or several with their weights.
        min_speedup: how many times as fast as FP32 a plan must be for sure to be the result, where
            speed is all that is wanted; 1.03 by default. A plan that gains less is not worth the
            accuracy it costs.
        workspace: folder the trials are kept in; `storage` an Optuna storage URL instead.
        resume: go on with the workspace's latest run of the same model.
        random_seed: for strategies that draw at random.
        early_stopping: whether an evaluation that is lost already is stopped.
        cache: whether the accuracy of FP32, the calibration and the times of ops are taken from
            earlier runs in the workspace where model, data, metric, machine and versions are the
            same, and kept for later ones.
        workers: processes that try the plans of one round side by side, or share an evaluation
            that takes long; an engine with its address, `"ray:10.0.0.1:6379"`; or a dict with
            `engine`, `count`, `threads` and what the engine takes, such as `address`.
        trust: modules that a file may name classes and functions of, such as `("sklearn",)`, beside
            those that lie in the working directory or in the file's folder; and ops of TensorFlow's
            that the file of a model may hold although they do more than compute, `"ReadFile"`.
        target: what to convert for: `this` machine; a level of processors, `avx2`, `avx512`,
            `vnni`, `amx` or `arm-dotprod`; or `portable`, which is right on all of them.
        hardware: the machine at hand; found by itself.
        listener: receives the events of the run. If standard error is a terminal, the default is
            a `neural_mp.reporting.LiveListener`, which shows progress and a summary; in a notebook
            a `NotebookListener`, which shows progress in the cell; else none.
    """

    def __init__(
        self, conf: str | Path | Mapping[str, Any] | Settings | None = None, **options: object
    ) -> None:
        settings = _settings_of(conf)
        self._settings = settings
        self._precisions = settings.precisions
        tuning = settings.tuning
        self.model: Any = settings.model.name
        self.amp: AutoMixedPrecisionOptions | None = None
        self.metric: Any = None
        self.eval_dataloader: Any = None
        self.max_batches: int | None = settings.evaluation.max_batches
        self.eval_func: Callable[[Any], float] | None = None
        self.postprocess: Callable[[Any], Any] | None = None
        self.calib_dataloader: Any = None
        self.approach: str | None = settings.approach
        self.sampling_size: int = settings.calibration.sampling_size
        self.inputs: Any = settings.model.inputs or None
        self.outputs: Any = settings.model.outputs or None
        self.framework: str | None = settings.model.framework
        self.capture: str = settings.model.capture
        self.exclude: str | Iterable[str] = ()
        self.op_wise: Mapping[str, Any] = {}
        self.optype_wise: Mapping[str, Any] = {}
        self.model_wise: Any = None
        self._criterion = tuning.criterion
        self._exit_policy = tuning.exit_policy
        self.strategy: str = tuning.strategy or DEFAULT
        self.objective: str | Mapping[str, float] = tuning.objective
        self.min_speedup: float = tuning.min_speedup
        self.workspace: str | Path = tuning.workspace or DEFAULT_WORKSPACE
        self.storage: str | None = tuning.storage
        self.resume: bool = tuning.resume
        self.random_seed: int = tuning.random_seed
        self.early_stopping: bool = tuning.early_stopping
        self.cache: bool = tuning.cache
        self.workers: int | str | Mapping[str, Any] = tuning.workers
        self.trust: str | Iterable[str] = settings.trust
        self.target: str = settings.target
        self.hardware: machine.Hardware | None = None
        self.listener: Listener | None = None
        self._complete = True
        for name, value in options.items():
            setattr(self, name, value)

    def __setattr__(self, name: str, value: object) -> None:
        if getattr(self, "_complete", False) and not hasattr(self, name):
            words = (*vars(self), "precisions", "accuracy_criterion", "exit_policy")
            known = [word for word in words if not word.startswith("_")]
            raise ConfigurationError(
                f"MixedPrecision has no option {name!r}{did_you_mean(name, known)}"
            )
        validate_option(name, without_nul, value)
        super().__setattr__(name, value)

    @property
    def precisions(self) -> tuple[Precision, ...]:
        """What may be used beside FP32."""
        return self._precisions or DEFAULT_PRECISIONS

    @precisions.setter
    def precisions(self, value: str | Precision | Iterable[str | Precision]) -> None:
        self._precisions = parse_precisions(value)

    @property
    def accuracy_criterion(self) -> AccuracyCriterion:
        """How much worse than FP32 the result may be."""
        return self._criterion

    @accuracy_criterion.setter
    def accuracy_criterion(self, value: AccuracyCriterion | float | Mapping[str, Any]) -> None:
        self._criterion = parse_criterion(value)

    @property
    def exit_policy(self) -> ExitPolicy:
        """When the search ends at the latest."""
        return self._exit_policy

    @exit_policy.setter
    def exit_policy(self, value: ExitPolicy | Mapping[str, Any]) -> None:
        self._exit_policy = exit_policy_of(value)

    def without_python(self) -> MixedPrecision:
        """The options as the file alone says, or as they are by default without one."""
        return MixedPrecision(self._settings, trust=self.trust)

    @ReraiseUserErrors()
    def sensitivity(self, most: int | None = None) -> SensitivityReport:
        """Measure which decisions cost accuracy, and what they gain, without any evaluation.

        Args:
            most: how many of them, those with most noise first, are measured at the outputs, which
                takes a conversion each; all by default.

        Returns:
            The decisions, those that do most harm first; under the plan with everything as low as
            it can be.

        Raises:
            NeuralMPError: as for `fit`.
        """
        log = RunLog(self._checked_listener())
        with log.loading():
            job, _ = self._preparation(log).job()
        return measured_sensitivities(job, log, most)

    def _checked_listener(self) -> Listener:
        check_option("listener", self.listener)  # it is told of the load, before all is checked
        return self.listener or _default_listener()

    def _preparation(self, log: RunLog) -> JobBuilder:
        settings = replace(self._settings, trust=trust_of(self.trust))
        return JobBuilder(self, settings, self._precisions, log)

    def __call__(self) -> OptimizedModel:
        """Tune and return the result; the same as `fit()`."""
        return self.fit()

    @ReraiseUserErrors()
    def fit(self) -> OptimizedModel:
        """Tune.

        Returns:
            A usable model, always: the best that met the target, or the FP32 one, marked so.

        Raises:
            NeuralMPError: something asked for does not exist or does not fit; the message names
                it. Errors of your own metric or evaluation function come through unchanged.
        """
        log = RunLog(self._checked_listener())
        with log.loading():
            job, log_folder = self._preparation(log).job()
        found = tune(job, log)
        plan = found.plan.plan
        report = replace(found.report, record=found.record)
        for line in report.converted:
            logger.info(line)
        if log_folder is not None:
            missing = write_log(log_folder, job.model, found.model, plan)
            report = replace(report, warnings=(*report.warnings, *missing))
        log.listener.result(report, found.met)
        planned = planned_ops(job.space, found.plan)
        return OptimizedModel(
            found.model, plan, report, found.met, found.trials, found.observations, planned
        )


def _settings_of(conf: object) -> Settings:
    """The settings of a file, of a mapping with the same content, or as they are."""
    if conf is None:
        return Settings()
    if isinstance(conf, Settings):
        return conf
    if isinstance(conf, Mapping):
        return settings_from(conf)
    if isinstance(conf, str | Path):
        return load_settings(conf)
    raise ConfigurationError(
        f"MixedPrecision takes the path of a YAML file, or a dict with the same content, got "
        f"{type(conf).__name__}; give a model by its keyword: MixedPrecision(model=…)"
    )


def _default_listener() -> Listener:
    if is_notebook():
        return NotebookListener()
    return LiveListener() if sys.stderr.isatty() else Listener()
