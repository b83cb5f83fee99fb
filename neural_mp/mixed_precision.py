"""The object a user drives."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from neural_mp import hardware as machine
from neural_mp.adaptors.base import Adaptor, Model
from neural_mp.adaptors.registry import adaptor_for
from neural_mp.common import Metric
from neural_mp.config import Settings, load_settings
from neural_mp.data import build_dataloader, build_transforms
from neural_mp.data.user_code import load_user_object
from neural_mp.errors import ConfigurationError, DataError, MetricError, did_you_mean
from neural_mp.hardware import Hardware
from neural_mp.metrics import build_metric
from neural_mp.optimized_model import OptimizedModel, is_saved_model
from neural_mp.precision import Precision, parse_precisions
from neural_mp.space import TuningSpace
from neural_mp.strategies import DEFAULT, strategy_named
from neural_mp.tuning.criterion import AccuracyCriterion, ExitPolicy
from neural_mp.tuning.data import Batches
from neural_mp.tuning.evaluator import Evaluator
from neural_mp.tuning.history import History, storage_url
from neural_mp.tuning.listener import Listener
from neural_mp.tuning.objectives import OBJECTIVES, Measurement
from neural_mp.tuning.tuner import Tuner, TuningJob

#: Where trials are kept unless the user says otherwise.
DEFAULT_WORKSPACE = "neural_mp_workspace"
#: What is tried unless the user says otherwise.
DEFAULT_PRECISIONS = (Precision.INT8, Precision.BF16)


class MixedPrecision:
    """Finds the fastest form of a model that still meets an accuracy target.

    Set what is needed, then call the object (or `fit()`). Everything can also come from a YAML
    file; what is set in Python wins.

    Args:
        conf: a YAML file, or settings read before.

    Attributes:
        model: the framework's object, a path to a model, or `module:attribute` of your own.
        precisions: `"bf16"`, `"int8,bf16"`, a list of such words; FP32 is always allowed.
        metric: an object with `update(preds, labels)`, `reset()` and `result()`, or a list of them.
        eval_dataloader: batches of `(inputs, labels)` the metric is computed over.
        eval_func: model → accuracy, instead of `metric` and `eval_dataloader`.
        calib_dataloader: batches to calibrate INT8 with; `eval_dataloader` by default.
        inputs, outputs: names of the model's inputs and outputs, where they are not found by
            themselves; `inputs` may be example tensors.
        framework: the model's framework, where it is not found by itself.
        accuracy_criterion: the tolerated loss; one percent, relative, by default.
        exit_policy: timeout, number of trials.
        strategy: name of the search strategy.
        objective: `performance`, `footprint` or `modelsize`.
        workspace: folder the trials are kept in; `storage` an Optuna storage URL instead.
        resume: go on with the latest run of the workspace.
        random_seed: for strategies that draw at random.
        hardware: the machine to convert for; this one by default.
        listener: told how the run goes on; see `neural_mp.reporting.LiveListener`.
    """

    def __init__(self, conf: str | Path | Settings | None = None) -> None:
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
        self.metric: Any = None
        self.eval_dataloader: Any = None
        self.eval_func: Callable[[Any], float] | None = None
        self.calib_dataloader: Any = None
        self.inputs: Any = settings.model.inputs or None
        self.outputs: Any = settings.model.outputs or None
        self.framework: str | None = settings.model.framework
        self.accuracy_criterion: AccuracyCriterion = tuning.criterion
        self.exit_policy: ExitPolicy = tuning.exit_policy
        self.strategy: str = tuning.strategy or DEFAULT
        self.objective: str = tuning.objective
        self.workspace: str | Path = tuning.workspace or DEFAULT_WORKSPACE
        self.storage: str | None = tuning.storage
        self.resume: bool = tuning.resume
        self.random_seed: int = tuning.random_seed
        self.hardware: Hardware | None = None
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
        started = time.perf_counter()
        self._check_options()
        strategy = strategy_named(self.strategy)
        hardware = self.hardware or machine.detect()
        warnings: list[str] = []
        precisions = self._usable_precisions(hardware, warnings)
        evaluation, calibration = self._data()
        evaluator_metrics = self._metrics(evaluation)
        adaptor, model = self._load(calibration)
        warnings.extend(getattr(model, "warnings", ()))
        precisions = _without_int8_if_no_data(precisions, calibration, warnings)
        space = self._space(adaptor, model, hardware, precisions, warnings)
        evaluator = Evaluator(
            adaptor, evaluation, evaluator_metrics, self.eval_func, self._postprocess()
        )
        listener = self.listener or Listener()
        evaluator.on_batch = listener.step
        job = TuningJob(
            adaptor=adaptor,
            model=model,
            space=space,
            precisions=precisions,
            strategy=strategy,
            evaluator=evaluator,
            calibration=calibration,
            open_history=lambda: self._history(adaptor, model, evaluation or calibration),
            measurement=self._measurement(adaptor, model, evaluation or calibration),
            sampling_size=self._settings.calibration.sampling_size,
            criterion=self.accuracy_criterion,
            exit_policy=self.exit_policy,
            objective=self.objective,
            seed=self.random_seed,
            warnings=tuple(warnings),
            seconds={"load": time.perf_counter() - started},
        )
        found = Tuner(job, listener).run()
        return OptimizedModel(
            adaptor,
            found.model,
            found.plan,
            found.report,
            found.met,
            found.trials,
            found.observations,
        )

    def _check_options(self) -> None:
        if self.model is None:
            raise ConfigurationError("no model was given; set converter.model")
        if self.objective not in OBJECTIVES:
            raise ConfigurationError(
                f"objective cannot be {self.objective!r}{did_you_mean(self.objective, OBJECTIVES)}"
            )
        for name, kind in (("accuracy_criterion", AccuracyCriterion), ("exit_policy", ExitPolicy)):
            if not isinstance(getattr(self, name), kind):
                raise ConfigurationError(
                    f"{name} must be a {kind.__name__}, got {getattr(self, name)!r}"
                )
        if self.eval_func is not None and not callable(self.eval_func):
            raise ConfigurationError(
                f"eval_func must be a function model → float, got {type(self.eval_func).__name__}"
            )

    def _usable_precisions(self, hardware: Hardware, warnings: list[str]) -> tuple[Precision, ...]:
        usable, found = machine.require_any(hardware, self.precisions, self._settings.device)
        if self._precisions is not None:
            warnings.extend(found)
        for precision in usable:
            support = hardware.support(precision, self._settings.device)
            if not support.native:
                warnings.append(
                    f"{precision} is emulated here, so it gains no speed: {support.reason}"
                )
        return usable

    def _data(self) -> tuple[Batches | None, Batches | None]:
        """Evaluation and calibration batches, from Python or YAML; the first serves as second."""
        settings = self._settings
        loader = self.eval_dataloader
        if loader is None and settings.evaluation.dataloader is not None:
            loader = build_dataloader(settings.evaluation.dataloader)
        evaluation = None if loader is None else Batches(loader, "eval_dataloader")
        loader = self.calib_dataloader
        if loader is None and settings.calibration.dataloader is not None:
            loader = build_dataloader(settings.calibration.dataloader)
        calibration = evaluation if loader is None else Batches(loader, "calib_dataloader")
        return evaluation, calibration

    def _metrics(self, evaluation: Batches | None) -> list[tuple[Metric, float]]:
        if self.metric is not None:
            given = self.metric if isinstance(self.metric, list | tuple) else [self.metric]
            metrics = [(_checked(metric), 1.0 / len(given)) for metric in given]
        else:
            metrics = [
                (build_metric(metric.name, metric.options), metric.weight)
                for metric in self._settings.evaluation.metrics
            ]
        if metrics and evaluation is None and self.eval_func is None:
            raise DataError(
                "a metric was given but no data to compute it over; set eval_dataloader "
                "(evaluation.accuracy.dataloader in YAML)"
            )
        return metrics

    def _postprocess(self) -> Callable[[Any], Any] | None:
        spec = self._settings.evaluation.postprocess
        return None if spec is None else build_transforms(spec)

    def _load(self, calibration: Batches | None) -> tuple[Adaptor, Model]:
        source = resolve_source(self.model)
        adaptor = adaptor_for(source, self.framework)
        example = calibration.first_inputs() if calibration is not None else None
        model = adaptor.load(source, inputs=self.inputs, outputs=self.outputs, example=example)
        return adaptor, model

    def _space(
        self,
        adaptor: Adaptor,
        model: Model,
        hardware: Hardware,
        precisions: tuple[Precision, ...],
        warnings: list[str],
    ) -> TuningSpace:
        space = adaptor.space(model, hardware).restricted_to(precisions)
        space = space.constrained(self._settings.constraints)
        found = space.precisions()
        for precision in precisions:
            if precision not in found and precision is not Precision.FP32:
                warnings.append(f"no op of this model may run in {precision}; it stays out")
        return space

    def _measurement(self, adaptor: Adaptor, model: Model, data: Batches | None) -> Measurement:
        performance = self._settings.evaluation.performance
        return Measurement(
            adaptor,
            data.first_inputs() if data is not None else None,
            self.objective,
            performance.warmup,
            performance.iteration,
        )

    def _history(self, adaptor: Adaptor, model: Model, data: Batches | None) -> History:
        fingerprint: Mapping[str, str] = {
            "model": adaptor.fingerprint(model),
            "data": data.fingerprint() if data is not None else "none",
            "criterion": str(self.accuracy_criterion),
        }
        url = storage_url(self.workspace, self.storage)
        higher = self.accuracy_criterion.higher_is_better
        return History(url, fingerprint, higher, self.resume)


def resolve_source(source: Any) -> Any:
    """A model as an adaptor takes it: `module:attribute` is imported and, if callable, called.

    Raises:
        ConfigurationError: the name cannot be imported.
    """
    if is_saved_model(source):
        raise ConfigurationError(
            f"{str(source)!r} holds a model that was already converted; give the original model, "
            f"or use neural_mp.load"
        )
    if isinstance(source, str) and ":" in source and not Path(source).exists():
        module, _, attribute = source.partition(":")
        if all(part.isidentifier() for part in (*module.split("."), *attribute.split("."))):
            found = load_user_object(source)
            is_factory = isinstance(found, type) or type(found).__name__ == "function"
            return found() if is_factory else found
    return source


def _checked(metric: Any) -> Metric:
    missing = [name for name in ("update", "reset", "result") if not hasattr(metric, name)]
    if missing:
        raise MetricError(
            f"the metric {type(metric).__name__} has no {missing[0]}(); a metric needs "
            f"update(preds, labels), reset() and result()"
        )
    checked: Metric = metric
    return checked


def _without_int8_if_no_data(
    precisions: tuple[Precision, ...], calibration: Batches | None, warnings: list[str]
) -> tuple[Precision, ...]:
    if Precision.INT8 not in precisions or calibration is not None:
        return precisions
    others = tuple(p for p in precisions if p is not Precision.INT8)
    if not [p for p in others if p is not Precision.FP32]:
        raise DataError(
            "int8 needs data to calibrate with; set calib_dataloader or eval_dataloader"
        )
    warnings.append("int8 needs data to calibrate with and none was given; going on without it")
    return others
