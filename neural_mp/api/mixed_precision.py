"""`MixedPrecision`, the entry point for tuning."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from neural_mp.amp import AutoMixedPrecisionOptions
from neural_mp.api.explain import write_log
from neural_mp.api.job_builder import DEFAULT_PRECISIONS, JobBuilder, check_option
from neural_mp.api.optimized_model import OptimizedModel
from neural_mp.api.options import exit_policy_of, parse_criterion
from neural_mp.api.trained_plans import with_training
from neural_mp.api.workspace import DEFAULT_WORKSPACE
from neural_mp.config import Settings, load_settings, settings_from, trust_of
from neural_mp.core import hardware as machine
from neural_mp.core.criterion import AccuracyCriterion, ExitPolicy
from neural_mp.core.enums import SOURCE_RUNTIME, Capture, Objective
from neural_mp.core.precision import Precision, parse_precisions
from neural_mp.core.workload import Workload
from neural_mp.errors import ConfigurationError, did_you_mean
from neural_mp.reporting import LiveListener, NotebookListener, is_notebook
from neural_mp.space import planned_ops
from neural_mp.strategies import DEFAULT
from neural_mp.training.loop import EPOCHS
from neural_mp.tuning.listener import Listener, RunLog
from neural_mp.tuning.measurement.sensitivity import SensitivityReport, measured_sensitivities
from neural_mp.tuning.tuner import tune
from neural_mp.util.user_calls import ReraiseUserErrors
from neural_mp.util.validators import validate_option, without_nul

logger = logging.getLogger(__name__)


class MixedPrecision:
    """Search for the fastest version of a model that meets an accuracy target.

    Set the attributes, then call the object (or `fit()`). All options can also come from a YAML
    file; attributes set in Python override the file.

    Args:
        conf: a YAML file, a dict with the same content, or loaded `Settings`.
        **options: values of the attributes of these names.

    Raises:
        ConfigurationError: an option is unknown or its value is invalid.

    Attributes:
        model: the framework's object, a path to a model, or `module:attribute`.
        precisions: `"bf16"`, `"int8,bf16"`, or a list; FP32 is always allowed.
        amp: op types to move between the four lists, which determine the ops that may run in 16
            bits.
        metric: a name; a function of all predictions and labels; an object with `update(preds,
            labels)`, `reset()` and `result()`; a metric of Keras, torchmetrics or scikit-learn; a
            list, whose mean counts; or a dict, in which every metric has to meet the target.
        eval_dataloader: batches of `(inputs, labels)` for the metric.
        max_batches: number of evaluation batches; default: all. Required for infinite loaders.
        label_key: key of the labels in batches that are dicts; default: the reserved names of
            Hugging Face, e.g. `labels`.
        eval_func: model → accuracy, instead of `metric` and `eval_dataloader`.
        postprocess: applied to `(predictions, labels)` before the metric.
        calib_dataloader: batches for INT8 calibration; default: `eval_dataloader`.
        approach: source of INT8 activation ranges: `static` (calibration), `dynamic` (computed on
            every run) or `weight_only` (activations are not quantized). The last two are for dense
            layers and need no calibration. None allows all three.
        sampling_size: number of calibration samples.
        inputs, outputs: names of the model's inputs and outputs; default: detected. `inputs` may be
            example tensors, or for a Keras model or a tf.function shapes, with None for dynamic
            axes.
        framework: framework of the model; default: detected.
        runtime: `source` (default) runs the result in its own framework; `auto` compares the
            installed runtimes that compute the same outputs, and uses the fastest; or the name of a
            runtime, such as `openvino`, or `torch.compile` for a compiled PyTorch model. The result
            is called as before.
        capture: `modules` converts the modules of a model one by one if the graph cannot be
            captured as a whole; code between the modules stays unchanged. `layers` converts dense
            layers and embeddings one by one: a decoder of transformers keeps its class, `generate`
            and its key-value cache.
        exclude: ops that stay in FP32: names of ops, names of layers or modules (all ops inside:
            `dense_1`, `encoder.layer.0`), or patterns (`layer[34]`).
        op_wise: name or pattern → allowed configurations: precisions (`"fp32"`, `"int8,bf16"`), or
            a dict with `weight` and `activation` as in YAML.
        optype_wise: op type, or class of layers (`Dense`, `Linear`) → likewise. `model_wise`:
            likewise for all ops.
        accuracy_criterion: the tolerated loss; default: one percent, relative. A number is a
            fraction of the baseline (0.005 is half a percent); a dict is read as in YAML:
            `{"absolute": 0.002}`.
        exit_policy: timeout and number of trials; a dict is read as in YAML.
        strategy: name of the search strategy.
        objective: `latency` (also `performance`), `throughput` of concurrent calls, `footprint` or
            `modelsize`; or several with their weights.
        min_speedup: minimum speedup over FP32 (lower confidence bound) of a result if latency is
            the only objective; default: 1.03. A smaller gain does not justify the accuracy loss.
        max_bytes, max_bits: limit of the bytes of all weights, or of their mean bits; the result is
            the most accurate model within the limit, without evaluation.
        workload: shares of decode and prefill of a decoder in PyTorch with `capture="layers"`:
            `{"decode": 0.8, "prefill": 0.2, "prompt": 512}`; `performance` then counts the seconds
            of a mean token.
        train_func: function that trains a model in place; called with the most promising plan's
            simulation (`training.quantization_aware`) if no plan meets the target.
        train_dataloader, loss, epochs: instead of `train_func`, batches `(inputs, targets)`, the
            loss and the number of epochs of `training.fit`. With only `exit_policy.train_seconds`,
            outputs are trained towards those of FP32 on the calibration batches, without labels.
        workspace: folder of the run history; `storage`: an Optuna storage URL instead.
        resume: continue the workspace's latest run of the same model.
        random_seed: seed of randomized strategies and of learned rounding.
        rounding_steps: steps per decoder block of learned rounding (`autoround`).
        early_stopping: whether to stop an evaluation as soon as it will miss the target.
        cache: whether FP32 accuracy, calibration and op times are shared with other runs in the
            workspace that have the same model, data, metric, machine and versions.
        workers: processes that run the trials of a round in parallel, or share a long evaluation;
            an engine with its address, `"ray:10.0.0.1:6379"`; or a dict with `engine`, `count`,
            `threads` and engine options, e.g. `address`.
        trust: modules whose classes and functions a file may name, e.g. `("sklearn",)`, besides
            modules in the working directory or the file's folder; and TensorFlow ops with side
            effects that a model file may contain, e.g. `"ReadFile"`.
        target: CPU to convert for: `this` machine; a CPU level, `avx2`, `avx512`, `vnni`, `amx` or
            `arm-dotprod`; or `portable`: INT8 is exact on all of them.
        hardware: hardware of this machine; default: detected.
        listener: receives the events of the run. Default on a terminal (standard error): a
            `neural_mp.reporting.LiveListener`, which shows progress and a summary; in a notebook: a
            `NotebookListener`, which shows progress in the cell; else none.
    """

    def __init__(
        self, conf: str | Path | Mapping[str, Any] | Settings | None = None, **options: object
    ) -> None:
        self.configure(_settings_of(conf))
        for name, value in options.items():
            setattr(self, name, value)

    def configure(self, settings: Settings) -> None:
        """Set all options to those of validated settings."""
        self._complete = False
        self._settings = settings
        self._precisions = settings.precisions
        tuning = settings.tuning
        self.model: Any = settings.model.name
        self.amp: AutoMixedPrecisionOptions | None = None
        self.metric: Any = None
        self.eval_dataloader: Any = None
        self.max_batches: int | None = settings.evaluation.max_batches
        self.label_key: str | None = settings.evaluation.label_key
        self.eval_func: Callable[[Any], float] | None = None
        self.postprocess: Callable[[Any], Any] | None = None
        self.calib_dataloader: Any = None
        self.approach: str | None = settings.approach
        self.sampling_size: int = settings.calibration.sampling_size
        self.inputs: Any = settings.model.inputs or None
        self.outputs: Any = settings.model.outputs or None
        self.framework: str | None = settings.model.framework
        self.runtime: str = settings.model.runtime or SOURCE_RUNTIME
        self.capture: str = settings.model.capture or Capture.WHOLE
        self.exclude: str | Iterable[str] = ()
        self.op_wise: Mapping[str, Any] = {}
        self.optype_wise: Mapping[str, Any] = {}
        self.model_wise: Any = None
        self._criterion = tuning.criterion
        self._exit_policy = tuning.exit_policy
        self.strategy: str = tuning.strategy or DEFAULT
        self.objective: str | Mapping[str, float] = tuning.objective or Objective.PERFORMANCE
        self.min_speedup: float = tuning.min_speedup
        self.max_bytes: int | None = tuning.max_bytes
        self.max_bits: float | None = tuning.max_bits
        self.workload: Workload | Mapping[str, Any] | None = tuning.workload
        self.train_func: Callable[[Any], Any] | None = None
        self.train_dataloader: Any = None
        self.loss: Callable[[Any, Any], Any] | None = None
        trained = settings.train
        self.epochs: int = (trained.epochs if trained else None) or EPOCHS
        self.workspace: str | Path = tuning.workspace or DEFAULT_WORKSPACE
        self.storage: str | None = tuning.storage
        self.resume: bool = tuning.resume
        self.random_seed: int = tuning.random_seed
        self.rounding_steps: int = tuning.rounding_steps
        self.early_stopping: bool = tuning.early_stopping
        self.cache: bool = tuning.cache
        self.workers: int | str | Mapping[str, Any] = tuning.workers
        self.trust: str | Iterable[str] = settings.trust
        self.target: str = settings.target
        self.hardware: machine.Hardware | None = None
        self.listener: Listener | None = None
        self._complete = True

    def __setattr__(self, name: str, value: object) -> None:
        if getattr(self, "_complete", False) and not hasattr(self, name):
            names = (*vars(self), "precisions", "accuracy_criterion", "exit_policy")
            options = [option for option in names if not option.startswith("_")]
            raise ConfigurationError(
                f"MixedPrecision has no option {name!r}{did_you_mean(name, options)}"
            )
        validate_option(name, without_nul, value)
        super().__setattr__(name, value)

    @property
    def precisions(self) -> tuple[Precision, ...]:
        """Precisions to search besides FP32."""
        return self._precisions or DEFAULT_PRECISIONS

    @precisions.setter
    def precisions(self, value: str | Precision | Iterable[str | Precision]) -> None:
        self._precisions = parse_precisions(value)

    @property
    def accuracy_criterion(self) -> AccuracyCriterion:
        """Tolerated accuracy loss compared with FP32."""
        return self._criterion

    @accuracy_criterion.setter
    def accuracy_criterion(self, value: AccuracyCriterion | float | Mapping[str, Any]) -> None:
        self._criterion = parse_criterion(value)

    @property
    def exit_policy(self) -> ExitPolicy:
        """Limits that end the search."""
        return self._exit_policy

    @exit_policy.setter
    def exit_policy(self, value: ExitPolicy | Mapping[str, Any]) -> None:
        self._exit_policy = exit_policy_of(value)

    @property
    def runtime_of_file(self) -> str | None:
        """The runtime in the tuning file; None if unset."""
        return self._settings.model.runtime

    def set_default(self, name: str, value: object) -> None:
        """Set `capture`, `objective` or `precisions`, unless the tuning file sets the option."""
        settings = self._settings
        in_file = {
            "capture": settings.model.capture,
            "objective": settings.tuning.objective,
            "precisions": settings.precisions,
        }
        if in_file[name] is None:
            setattr(self, name, value)

    def without_python(self) -> MixedPrecision:
        """Return the options of the file alone, or the defaults without a file."""
        return MixedPrecision(self._settings, trust=self.trust)

    @ReraiseUserErrors()
    def sensitivity(self, most: int | None = None) -> SensitivityReport:
        """Measure the sensitivity and the gain of each decision, without evaluations.

        Args:
            most: number of decisions to measure at the outputs, noisiest first, at the cost of one
                conversion each; default: all.

        Returns:
            The decisions under the plan of lowest precisions, highest degradation first.

        Raises:
            NeuralMPError: as for `fit`.
        """
        log = RunLog(self._checked_listener())
        with log.loading():
            job, _ = self._preparation(log).job()
        return measured_sensitivities(job, log, most)

    def _checked_listener(self) -> Listener:
        check_option("listener", self.listener)  # used before the other options are checked
        return self.listener or _default_listener()

    def _preparation(self, log: RunLog) -> JobBuilder:
        settings = replace(self._settings, trust=trust_of(self.trust))
        return JobBuilder(self, settings, self._precisions, log)

    def __call__(self) -> OptimizedModel:
        """Tune and return the result; the same as `fit()`."""
        return self.fit()

    @ReraiseUserErrors()
    def fit(self) -> OptimizedModel:
        """Run the search.

        Returns:
            Always a usable model: the best that met the target, or the FP32 model, marked so.

        Raises:
            NeuralMPError: an option is invalid or does not fit the model. Exceptions of the user's
                metric or evaluation function are raised unchanged.
        """
        log = RunLog(self._checked_listener())
        with log.loading():
            builder = self._preparation(log)
            job, log_folder = builder.job()
            job = with_training(job, self, builder.settings)
        result = tune(job, log)
        plan = result.plan.plan
        report = replace(result.report, record=result.record)
        for line in report.converted:
            logger.info(line)
        if report.hint is not None:
            logger.info("%s", report.hint)
        if log_folder is not None:
            missing = write_log(log_folder, result.fp32, result.model, plan)
            report = replace(report, warnings=(*report.warnings, *missing))
        log.listener.result(report, result.met)
        planned = planned_ops(result.fp32.space, result.plan)
        searched = (result.met, result.trials, result.observations)
        return OptimizedModel(result.model, plan, report, *searched, planned, self.label_key)


def _settings_of(conf: object) -> Settings:
    """Return the settings of a file or a mapping; `Settings` are returned unchanged."""
    if conf is None:
        return Settings()
    if isinstance(conf, Settings):
        return conf
    if isinstance(conf, Mapping):
        return settings_from(conf)
    if isinstance(conf, str | Path):
        return load_settings(conf)
    raise ConfigurationError(
        f"conf must be the path of a YAML file, or a dict with the same content, got "
        f"{type(conf).__name__}; give a model by its keyword: MixedPrecision(model=…)"
    )


def _default_listener() -> Listener:
    if is_notebook():
        return NotebookListener()
    return LiveListener() if sys.stderr.isatty() else Listener()
