"""Construction of a tuning job from the options of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

from neural_mp.adaptors.common.signatures.input_spec import InputSpec
from neural_mp.adaptors.common.weights.autoround import LearnOptions
from neural_mp.adaptors.common.weights.corrected_weights import CorrectionOptions
from neural_mp.adaptors.detect import FRAMEWORKS
from neural_mp.adaptors.loaded_model import AnyModel
from neural_mp.adaptors.registry import get_adaptor_named, is_composite
from neural_mp.amp import AmpSettings
from neural_mp.api import config_objects
from neural_mp.api.constraints import apply_force_all, edit_lists, gather_amp, with_data_type
from neural_mp.api.input_data import record_part_calls
from neural_mp.api.loading import for_all_sizes, load_source, without_int8_if_no_data
from neural_mp.api.portability import find_target_hardware, warn_idle_precisions, without_kernels
from neural_mp.api.runtime_comparison import HintSearch
from neural_mp.api.runtimes import RuntimeOptions
from neural_mp.api.targets import (
    TargetLoader,
    check_ignored,
    choose_integer_precisions,
    compute_target_fingerprint,
    model_for_target,
    profile_of,
)
from neural_mp.api.user_metrics import (
    MetricSet,
    build_aggregation,
    format_metric_label,
    gather_metrics,
    qualify_metric_name,
    resolve_direction,
    warn_replaced_metric,
)
from neural_mp.config import Options, Settings, describe_settings, describe_source
from neural_mp.config.options import DEFAULT_PRECISIONS, DEFAULT_WORKSPACE
from neural_mp.core import hardware as machine
from neural_mp.core.criterion import (
    EFFORT_LIMITS,
    AccuracyCriterion,
    Effort,
    EffortLimits,
    is_throughput,
    parse_objectives,
)
from neural_mp.core.enums import (
    AUTO_RUNTIME,
    SOURCE_RUNTIME,
    Approach,
    Capture,
    Objective,
    is_latency_only,
)
from neural_mp.core.op_timings import Workload
from neural_mp.core.precision import CPU_PRECISIONS, Precision
from neural_mp.errors import ConfigurationError
from neural_mp.io.files import create_writable_folder
from neural_mp.io.measurement_cache import CACHE_FOLDER, NO_CACHE, WEIGHTS_FOLDER, FileCache
from neural_mp.runs.history import History, get_storage_url, read_compared_runtimes
from neural_mp.runs.registry import describe_machine_key, in_detail
from neural_mp.space import TuningSpace
from neural_mp.strategies.basic import AutoMixedPrecision
from neural_mp.strategies.widening import Widening
from neural_mp.targets.profile import TargetProfile
from neural_mp.tuning.evaluation.batches import Batches, FirstBatch
from neural_mp.tuning.evaluation.calibration_batches import Calibration, sample_words
from neural_mp.tuning.evaluation.evaluator import Evaluator
from neural_mp.tuning.executors import get_executor_named, read_workers
from neural_mp.tuning.job import RunDescription, SearchSettings, TuningJob
from neural_mp.tuning.listener import RunLog
from neural_mp.tuning.measurement.objectives import Contention, Measurement
from neural_mp.tuning.size_limit import SizeLimit


def make_model_name(model: object) -> str:
    """Return the display name of a model: the file name, or the class of the object."""
    if isinstance(model, str | Path):
        return Path(model).name
    if is_composite(model):
        return " + ".join(map(str, model))
    return type(model).__name__


def cache_of(options: Options, model: AnyModel, target: TargetProfile | None = None) -> FileCache:
    """Return the workspace's cache of measurements of a model on this machine, or for a target."""
    folder = _cache_folder(options)
    if folder is None:
        return NO_CACHE
    rules = compute_target_fingerprint(target)
    return FileCache(
        folder,
        {
            "model": model.fingerprint,
            **rules,
            **describe_provider(model),
            **describe_machine_key(model.adaptor.packages),
        },
    )


def describe_provider(model: AnyModel) -> dict[str, str]:
    """Return the execution provider, for keys of runs and caches; empty for the default."""
    provider = model.adaptor.provider
    return {"provider": provider} if provider else {}


def make_correction_options(options: Options) -> CorrectionOptions:
    """Return the options of corrections of weights; finished blocks are kept in the cache."""
    folder = _cache_folder(options)
    learning = LearnOptions(options.rounding_steps, int(options.random_seed))
    weights = None if folder is None else folder / WEIGHTS_FOLDER
    return CorrectionOptions(learning, weights, bool(options.resume))


def _cache_folder(options: Options) -> Path | None:
    workspace = options.workspace
    elsewhere = options.storage is not None and workspace == DEFAULT_WORKSPACE
    if not options.cache or elsewhere or not isinstance(workspace, str | Path):
        return None  # opening the history reports an invalid workspace
    return Path(workspace) / CACHE_FOLDER


def count_concurrent_streams(
    settings: Settings, objective: str | Mapping[str, float]
) -> int | None:
    """Return the number of concurrent callers; None if latency is measured."""
    if not is_throughput(objective):
        return None
    performance = settings.evaluation.performance
    return performance.streams or performance.cores_per_instance or machine.detect().cores


def make_effort_limits(options: Options) -> EffortLimits:
    """Return the limits of the effort; without a limit of the run if the effort is not set.

    A time limit replaces that of the effort `normal`.
    """
    effort = Effort(options.effort)
    has_timeout = effort is Effort.NORMAL and bool(options.exit_policy.timeout)
    limits = EFFORT_LIMITS[effort]
    if options.is_set("effort") and not has_timeout:
        return limits
    return replace(limits, multiple=math.inf, extra_seconds=math.inf)


def choose_measurement_data(
    settings: Settings,
    objective: str | Mapping[str, float],
    min_speedup: float,
    model: AnyModel,
    data: Batches | None,
    workload: Workload | None = None,
) -> Measurement:
    """Return the measurement on the data of the tuning file, or else on the first batch of `data`.

    Without data, the example inputs of the model are used.

    Raises:
        ConfigurationError: the layers of the model do not run alone, as those of a decoder do,
            which a workload requires.
    """
    performance = settings.evaluation.performance
    loader = config_objects.build_loader(settings, config_objects.PERFORMANCE)
    if loader is not None:
        data = Batches(loader, "performance.dataloader").tried_on(model)
    if workload is not None and not model.layer_shapes:
        raise ConfigurationError(
            "workload requires a decoder in PyTorch that is captured layer by layer, got another "
            "model; set capture to 'layers', or remove the workload"
        )
    return Measurement(
        data.first_inputs if data is not None else model.example_inputs(),
        parse_objectives(objective),
        performance.warmup,
        performance.iteration,
        threads=performance.cores_per_instance,
        min_speedup=float(min_speedup),
        streams=count_concurrent_streams(settings, objective),
        workload=workload,
    )


@dataclass(frozen=True)
class JobBuilder:
    """Builder of the tuning job for a user's options.

    Attributes:
        options: options set in Python.
        settings: contents of the tuning file.
        log: receives warnings.
        run: name of the run that the job continues, if not the latest.
    """

    options: Options
    settings: Settings
    log: RunLog
    run: str = ""

    @property
    def explicit_precisions(self) -> tuple[Precision, ...] | None:
        """Precisions set by the user, in Python or in the file; None if unset."""
        return self.options.precisions if self.options.is_set("precisions") else None

    @cached_property
    def target_profile(self) -> TargetProfile | None:
        """The profile of an accelerator; None for a CPU."""
        return profile_of(self.options.target)

    @property
    def runtime(self) -> str:
        """The runtime of the result; the source's for an accelerator or an execution provider."""
        is_fixed = self.options.provider is not None or self.target_profile is not None
        return SOURCE_RUNTIME if is_fixed else self.options.runtime

    def build_job(self) -> tuple[TuningJob, Path | None]:
        """Return the tuning job, and the folder for log files if one is set."""
        check_options(self.options)
        self.log.calls.timeout = self.options.exit_policy.timeout
        return self.log.calls.run_part(self._build_from_checked)

    def _build_from_checked(self) -> tuple[TuningJob, Path | None]:
        options, log = self.options, self.log
        target = self.target_profile
        if target is not None:
            check_ignored(options)
        cpu = options.target if target is None else machine.HOST_TARGET
        is_set = target is None or options.is_set("strategy")
        strategy_name = options.strategy if is_set else Widening.name
        strategy = config_objects.build_strategy(self.settings, strategy_name)
        host = options.hardware or machine.detect()
        amp = gather_amp(options.amp, self.settings.amp)
        log_folder = create_writable_folder(amp.log_path)
        evaluation, calibration = self._select_batches()
        metrics = gather_metrics(options.metric, self.settings, evaluation, options.eval_func)
        criterion = self._direct_accuracy_criterion(metrics)
        load, loaded = self._load_model(calibration, labelled=calibration is evaluation)
        if target is None:
            host = replace(host, stored=self._find_stored_precisions(loaded))
            precisions = self._choose_usable_precisions(host.for_target(cpu), amp)
        else:
            precisions = choose_integer_precisions(target, self.explicit_precisions)
        noted = (*loaded.warnings, *warn_replaced_metric(options.metric, options.eval_func))
        loaded = loaded.prepare_for_streams(
            count_concurrent_streams(self.settings, options.objective)
        )

        contention = Contention()  # of the choice of the runtime, too

        def build_measurement(model: AnyModel) -> Measurement:
            data, goals = evaluation or calibration, (options.objective, options.min_speedup)
            workload = Workload.from_value(options.workload)
            measurement = choose_measurement_data(self.settings, *goals, model, data, workload)
            if target is not None:
                measurement = replace(measurement, objectives={Objective.TARGET: 1.0})
            return replace(measurement, contention=contention, limits=make_effort_limits(options))

        evaluator = self._build_evaluator(evaluation, metrics)
        fingerprint = partial(
            self._run_fingerprint,
            {"model": loaded.fingerprint, **describe_provider(loaded)},
            evaluator,
            calibration,
            criterion,
            amp,
        )
        url = partial(get_storage_url, options.workspace, options.storage)
        runtime = RuntimeOptions(
            self.runtime,
            load,
            loaded,
            self.settings,
            options,
            precisions,
            host.for_target(cpu),
            amp,
            strategy,
        )
        sampled = self._build_calibration(calibration)
        if self.runtime != SOURCE_RUNTIME:
            self.log.listener.phase("Choosing the runtime", None)
        chosen = runtime.choose_runtime(
            sampled,
            lambda: build_measurement(loaded),
            lambda: (
                read_compared_runtimes(url(), fingerprint(), self.run) if options.resume else ()
            ),
        )
        hint = self._build_hint_search(loaded, build_measurement)
        load, loaded = chosen.load, chosen.model
        if target is not None:
            loaded = model_for_target(loaded, target)
            load = TargetLoader(load, options.target)
        hardware, notes = find_target_hardware(cpu, host, loaded.adaptor)
        notes = (*notes, *(() if calibration is None else calibration.assumption_notes))
        log.warnings += dict.fromkeys((*noted, *loaded.warnings, *chosen.warnings, *notes))
        if options.approach in (None, Approach.STATIC):
            precisions, notes = without_int8_if_no_data(precisions, calibration)
            log.warnings += notes
        space, precisions = self._build_tuning_space(runtime, loaded, hardware, precisions, amp)
        slow_here = {
            precision
            for precision in CPU_PRECISIONS
            if not (support := host.support(precision)).native and not support.weights_only
        }
        job = TuningJob(
            model=loaded.in_space(
                space,
                None if sampled is None else sampled.iterate_inputs,
                make_correction_options(options),
            ),
            load=load,
            strategy=strategy,
            evaluator=evaluator,
            calibration=sampled,
            measurement=build_measurement(loaded),
            open_history=lambda: History(
                url(),
                log.calls.run_part(fingerprint),
                criterion.prefers_higher,
                options.resume,
                self.run,
            ),
            settings=SearchSettings(
                precisions=precisions,
                for_numbers=host.forced | slow_here,
                criterion=criterion,
                exit_policy=options.exit_policy,
                seed=int(options.random_seed),
                workers=read_workers(options.workers),
                early_stopping=options.early_stopping,
                size_limit=SizeLimit(options.max_bytes, options.max_bits),
            ),
            amp=amp.describe_options(),
            cache=cache_of(options, loaded, target),
            description=RunDescription(
                make_model_name(options.model),
                describe_settings(options, self.settings),
                hardware,
                describe_source(options, self.settings),
            ),
            runtimes=chosen.figures,
            alternatives=chosen.alternatives,
            hint=hint if target is None else None,
            target=target,
        )
        return job, log_folder

    def _build_evaluator(self, evaluation: Batches | None, metrics: MetricSet) -> Evaluator:
        eval_func = self.options.eval_func
        label = format_metric_label(metrics, eval_func)
        postprocess = self.options.postprocess or config_objects.build_postprocess(self.settings)
        evaluator = Evaluator(evaluation, metrics, eval_func, postprocess, label)
        evaluator.on_batch, evaluator.warn = self.log.report_step, self.log.warn_once
        criterion = self.options.accuracy_criterion
        evaluator.aggregation = build_aggregation(metrics, criterion, eval_func)
        return evaluator

    def _direct_accuracy_criterion(self, metrics: MetricSet) -> AccuracyCriterion:
        if self.options.exit_policy.performance_only:
            return self.options.accuracy_criterion
        named = self.settings.evaluation.metrics if self.options.metric is None else ()
        return resolve_direction(
            self.options.accuracy_criterion, metrics, self.options.eval_func, named
        )

    def _find_stored_precisions(self, loaded: AnyModel) -> frozenset[Precision]:
        """Return the 16-bit precisions of weights of the framework, or of the chosen runtime."""
        runtime = self.runtime
        adaptor = get_adaptor_named(runtime) if runtime in FRAMEWORKS else loaded.adaptor
        return adaptor.stored_precisions

    def _choose_usable_precisions(
        self, hardware: machine.Hardware, amp: AmpSettings
    ) -> tuple[Precision, ...]:
        if self.settings.device != "cpu":
            self.log.add_warning(
                f"device must be 'cpu', got {self.settings.device!r}; the CPU is used"
            )
        requested, notes = with_data_type(self.explicit_precisions, DEFAULT_PRECISIONS, amp)
        usable, messages = machine.require_any(hardware, requested)
        self.log.warnings += (
            *notes,
            *(messages if self.explicit_precisions or amp.switched_on else ()),
        )
        for precision in usable:
            support = hardware.support(precision)
            if support.is_emulated:
                self.log.add_warning(f"{precision} is emulated on this machine: {support.reason}")
        return usable

    def _select_batches(self) -> tuple[Batches | None, Batches | None]:
        """Return evaluation and calibration batches; by default, the latter are the former."""
        if is_composite(self.options.model):
            return None, record_part_calls(self.options)
        evaluation, loader = None, self.options.eval_dataloader
        if loader is None:
            loader = config_objects.build_loader(self.settings, config_objects.ACCURACY)
        if loader is not None:
            limit, key = self.options.max_batches, self.options.label_key
            evaluation = Batches(loader, "eval_dataloader", limit, key)
        loader = self.options.calib_dataloader
        if loader is None:
            loader = config_objects.build_loader(self.settings, config_objects.CALIBRATION)
        if loader is None:
            return evaluation, evaluation
        return evaluation, Batches(loader, "calib_dataloader", label_key=self.options.label_key)

    def _build_calibration(self, calibration: Batches | None) -> Calibration | None:
        if calibration is None:
            return None
        size, seed = self.options.sampling_size, self.options.calibration_seed
        return Calibration(calibration, int(size), seed)

    def _load_model(
        self, calibration: Batches | None, labelled: bool
    ) -> tuple[Callable[[], AnyModel], AnyModel]:
        """Return a picklable loader of the model, and the model.

        The batches determine the model's inputs, and are split as the model accepts; `labelled`
        ones are known to be pairs, since accuracy is evaluated on them.
        """
        default = self.options.inputs

        def build_loader(
            first: FirstBatch | None, inputs: object = default
        ) -> Callable[[], AnyModel]:
            return partial(
                load_source,
                config_objects.build_model(self.settings, self.options.model),
                self.options.framework,
                inputs,
                outputs=self.options.outputs,
                example=first,
                capture=Capture(self.options.capture),
                kv_cache=self.options.kv_cache,
                trust=self.settings.trust,
                provider=self.options.provider,
            )

        def load_for_batch(first: FirstBatch) -> tuple[Callable[[], AnyModel], AnyModel]:
            load = build_loader(first)
            with config_objects.locate_model_errors(self.settings, self.options.model):
                loaded = load()
            if batches.is_ambiguous and hides_batch:
                with batches.blame_batch():
                    loaded(first.inputs)
            return load, loaded

        if calibration is None:
            load = build_loader(None)
            with config_objects.locate_model_errors(self.settings, self.options.model):
                return load, load()
        batches, spec = calibration, InputSpec.from_arguments(default, None, None)
        # With example inputs from the user, loading does not depend on the batch.
        hides_batch = not labelled and spec.example is not None
        bound = batches.choose_reading(load_for_batch, labelled)
        if spec.names or spec.shapes is not None:
            return bound
        return for_all_sizes(*bound, batches, partial(build_loader, batches.first_batch))

    def _build_tuning_space(
        self,
        runtime: RuntimeOptions,
        model: AnyModel,
        hardware: machine.Hardware,
        precisions: tuple[Precision, ...],
        amp: AmpSettings,
    ) -> tuple[TuningSpace, tuple[Precision, ...]]:
        adaptor = model.adaptor
        lists, notes = edit_lists(adaptor, amp, precisions)
        space = model.whole_space(hardware)
        if space.lists:
            space = replace(space, lists=lists)
        space = apply_force_all(space, amp).restricted_to(precisions)
        self.log.warnings += notes
        space, notes = runtime.apply_constraints(model, space)
        self.log.warnings += notes
        if self.options.approach is not None:
            space = space.with_int8([Approach(self.options.approach)])
        space = space.suited_to(parse_objectives(self.options.objective))
        space, removed = self._remove_slow_precisions(space, hardware, amp, adaptor.framework)
        precisions = tuple(precision for precision in precisions if precision not in removed)
        self.log.warnings += warn_idle_precisions(space, hardware, precisions)
        return space, precisions

    def _remove_slow_precisions(
        self, space: TuningSpace, hardware: machine.Hardware, amp: AmpSettings, framework: str
    ) -> tuple[TuningSpace, frozenset[Precision]]:
        """Return the space without 16-bit precisions that cannot gain speed, and those removed."""
        able = space.usable_precisions
        retained = hardware.forced if self._needs_16_bit_speedup() else frozenset(Precision)
        remaining = space.without_emulated(retained)
        removed = frozenset(able) - frozenset(remaining.usable_precisions)
        explicit = self.explicit_precisions is not None or amp != AmpSettings()
        for precision in filter(removed.__contains__, able if explicit else ()):
            self.log.add_warning(
                f"{framework} has no {precision} kernels here that reduce latency; continuing "
                f"without {precision}; set {machine.FORCE_VARIABLES[precision]}=1 to emulate it"
            )
        for precision in without_kernels(remaining, hardware):
            self.log.add_warning(
                f"{framework} has no {precision} kernels here: {precision} is emulated"
            )
        return remaining, removed

    def _needs_16_bit_speedup(self) -> bool:
        """Whether 16 bits must gain speed: for latency alone, unless only 16 bits are searched."""
        only_16_bit = (
            self.explicit_precisions is not None and Precision.INT8 not in self.explicit_precisions
        )
        painted = self.options.strategy == AutoMixedPrecision.name
        return is_latency_only(parse_objectives(self.options.objective)) and not (
            only_16_bit or painted
        )

    def _build_hint_search(
        self, source: AnyModel, measured: Callable[[AnyModel], Measurement]
    ) -> HintSearch | None:
        """Return the search for a faster runtime; None if not wanted."""
        options = self.options
        is_free = options.runtime == SOURCE_RUNTIME and not source.adaptor.provider
        if (
            not (is_free and self.log.listener.wants_hints)
            or read_workers(options.workers).uses_processes
        ):
            return None
        return HintSearch(source, measured(source), cache_of(options, source, self.target_profile))

    def _run_fingerprint(
        self,
        model: Mapping[str, str],
        evaluator: Evaluator,
        calibration: Batches | None,
        criterion: AccuracyCriterion,
        amp: AmpSettings,
    ) -> Mapping[str, str]:
        """Return the fingerprint of the run; `model` are the keys of the source."""
        options, evaluation = self.options, evaluator.batches
        runtime = self.runtime
        streams = count_concurrent_streams(self.settings, options.objective)
        workload = Workload.from_value(options.workload)
        return {
            **model,
            **({} if runtime == SOURCE_RUNTIME else {"runtime": runtime}),
            **compute_target_fingerprint(self.target_profile),
            **({} if streams is None else {"throughput": f"{streams} streams"}),
            **({} if workload is None else {"workload": str(workload)}),
            "data": evaluation.data_fingerprint() if evaluation is not None else "none",
            "calibration": f"{sample_words(options.sampling_size, options.calibration_seed)} "
            + "samples of "
            + (
                "the same data"
                if calibration is None or calibration is evaluation
                else calibration.data_fingerprint()
            ),
            "metric": qualify_metric_name(evaluator.metrics, evaluator.eval_func),
            "criterion": str(criterion),
            "four lists": "; ".join(amp.list_words()) or "as they come",
            **in_detail(
                metric=evaluator.eval_func or [metric for metric, _ in evaluator.metrics],
                postprocess=evaluator.postprocess,
            ),
        }


def check_options(options: Options) -> None:
    """Check all options that can be checked before the model is loaded.

    Raises:
        ConfigurationError: an option has the wrong type or is out of range.
    """
    if options.model is None:
        raise ConfigurationError("model must be set; set converter.model, or model.name in YAML")
    options.check_options()
    SizeLimit(options.max_bytes, options.max_bits)
    if options.provider is not None and options.runtime not in (SOURCE_RUNTIME, AUTO_RUNTIME):
        raise ConfigurationError(
            f"runtime must be {SOURCE_RUNTIME!r} or {AUTO_RUNTIME!r} with a provider, got "
            f"{options.runtime!r}: the provider runs the model in ONNX Runtime; remove one of both"
        )
    workers = read_workers(options.workers)
    if workers.uses_processes:
        get_executor_named(workers.engine).check(workers)
