"""The options of a run: each is declared once, here.

Validation, tuning files, flags of the command line, rows of reports, the JSON Schema and the tables
of the documentation follow from the declaration of an option.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from neural_mp.adaptors.common.simulation import EPOCHS
from neural_mp.amp import AutoMixedPrecisionOptions
from neural_mp.config import values
from neural_mp.config.declaration import Option, Parsed, declare_option
from neural_mp.config.source import KeyPath, read_mapping
from neural_mp.core import hardware as machine
from neural_mp.core.criterion import (
    MIN_SPEEDUP,
    AccuracyCriterion,
    Effort,
    ExitPolicy,
    check_min_speedup,
    parse_objectives,
)
from neural_mp.core.enums import (
    FLOAT_CACHE,
    FLOAT_IO,
    INT8_CACHE,
    INT8_IO,
    SOURCE_RUNTIME,
    Approach,
    Capture,
    Dialect,
    Objective,
    Tracker,
)
from neural_mp.core.op_timings import Workload
from neural_mp.core.precision import Precision, Precisions, parse_precisions
from neural_mp.core.quant_spec import MAX_ROUNDING_STEPS, ROUNDING_STEPS
from neural_mp.errors import ConfigurationError, did_you_mean
from neural_mp.strategies import DEFAULT as DEFAULT_STRATEGY
from neural_mp.tuning.listener import Listener
from neural_mp.tuning.size_limit import SIZE_LIMITS
from neural_mp.util.text import with_article
from neural_mp.util.validators import (
    MAX_SEED,
    Validator,
    boolean,
    integer_between,
    keep_original_value,
    one_of,
    seed_number,
    string,
    validate_option,
    values_matching,
    without_nul,
)

#: Default folder of the run history.
DEFAULT_WORKSPACE = "neural_mp_workspace"
_TRACKERS = frozenset(tracker.value for tracker in Tracker)
#: Default precisions to search.
DEFAULT_PRECISIONS = Precisions((Precision.INT8, Precision.BF16))


def _validate_instance_of(kind: type) -> Validator[Any]:
    return values_matching(with_article(kind.__name__), lambda value: isinstance(value, kind))


def _are_names(value: Any) -> bool:
    names = value if isinstance(value, list | tuple) else [value]
    return all(isinstance(name, str) for name in names)


def _names_tracker(value: Any) -> bool:
    return value is None or (isinstance(value, str) and value.partition(":")[0] in _TRACKERS)


def _parse_criterion(value: object) -> AccuracyCriterion:
    if isinstance(value, AccuracyCriterion):
        return value
    if isinstance(value, Mapping):
        return parse_criterion_mapping(value, "MixedPrecision")
    if isinstance(value, int | float) and not isinstance(value, bool):
        AccuracyCriterion(value)  # raises if the value does not fit a float
        return AccuracyCriterion(float(value))
    if isinstance(value, str) and value.strip().endswith("%"):
        return parse_criterion_mapping({"relative": value}, "MixedPrecision")
    raise ConfigurationError(
        f"accuracy_criterion must be an AccuracyCriterion, a fraction of the baseline, e.g. 0.01 "
        f"or '1%', or a dict, e.g. {{'absolute': 0.002}}, got {value!r}"
    )


def _parse_exit_policy(value: object) -> ExitPolicy:
    if isinstance(value, ExitPolicy):
        return value
    if isinstance(value, Mapping):
        return _in_section("exit_policy", value, "MixedPrecision", lambda keys: ExitPolicy(**keys))
    raise ConfigurationError(
        f"exit_policy must be an ExitPolicy, or a dict, e.g. {{'timeout': 600}}, got {value!r}"
    )


def parse_criterion_mapping(section: Mapping[str, Any], origin: str) -> AccuracyCriterion:
    """Return the criterion of a mapping as in YAML; `origin` names the mapping in messages.

    Raises:
        ConfigurationError: a key or a value is invalid.
    """
    return _in_section(
        "accuracy_criterion",
        section,
        origin,
        lambda keys: values.build_section_criterion(keys, Dialect.OWN),
    )


def _in_section(
    name: str, section: Mapping[str, Any], origin: str, build: Callable[[dict[str, Any]], Any]
) -> Any:
    option = OPTIONS[name]
    source = read_mapping({"tuning": {name: section}}, origin)
    with source.locate_errors(option.path):
        return build(option.in_file(source.data["tuning"][name]))


class Options:
    """Options of a run; an option that is not set has its default.

    Args:
        **options: values of options.

    Raises:
        ConfigurationError: an option is unknown or its value is invalid.
    """

    model: Any = declare_option(
        None,
        'an object of the framework, a path, or `"module:attribute"` of '
        "[your own code](data_and_metrics.md#custom-components) (a function or class is called). "
        "The name in a tuning file is only a label if Python or `--model` sets the model",
        "model.name",
        in_file=values.TEXT,
        flag="Model to tune; overrides model: name in the YAML.",
        default_words="required",
    )
    framework: str | None = declare_option(
        None,
        "name of the adaptor: `pytorch`, `tensorflow`, `onnxrt`, `openvino` or `litert`",
        "model.framework",
        rule=string,
        in_file=values.parse_framework,
        default_words="detected",
    )
    inputs: Any = declare_option(
        None,
        "names of the model's inputs; in Python also example tensors, or for a Keras model or a "
        "`tf.function` shapes, with `None` for dynamic axes",
        "model.inputs",
        in_file=values.NAMES,
        default_words="detected",
    )
    outputs: Any = declare_option(
        None,
        "names of the model's outputs",
        "model.outputs",
        rule=values_matching("a name or names", _are_names),
        in_file=values.NAMES,
        default_words="detected",
    )
    metric: Any = declare_option(
        None,
        "a name, a function, a metric of your own or of another library, a list or a dict: see "
        "[Metrics](guide.md#metrics-and-eval_func)",
        flag="Metric, e.g. accuracy or rmse, or module:attribute.",
    )
    eval_dataloader: Any = declare_option(
        None, "batches of `(inputs, labels)` for measuring accuracy"
    )
    eval_func: Callable[[Any], float] | None = declare_option(
        None,
        "function model → float, instead of `metric` and `eval_dataloader`",
        rule=values_matching("a function model → float", callable),
    )
    postprocess: Callable[[Any], Any] | None = declare_option(
        None,
        "function of `(predictions, labels)` that runs before the metric",
        rule=values_matching("a function (predictions, labels) → (predictions, labels)", callable),
    )
    calib_dataloader: Any = declare_option(
        None, "batches for calibrating INT8 ranges", default_words="`eval_dataloader`"
    )
    strategy: str = declare_option(
        DEFAULT_STRATEGY,
        "name of the search [strategy](strategies.md); `strategy: basic` in a tuning file is a "
        "short form",
        "tuning.strategy.name",
        rule=string,
        in_file=values.TEXT,
        shown=True,
    )
    precisions: Parsed[tuple[Precision, ...], str | Precision | Iterable[str | Precision]] = (
        declare_option(
            DEFAULT_PRECISIONS,
            'allowed precisions besides FP32: `"bf16"`, `"int8,bf16"`, or a list of such strings. '
            "In a tuning file with a section `quantization`, the default is `int8`, and `any` "
            "leaves the option unset",
            "mixed_precision.precisions",
            in_file=values.precisions,
            parse=parse_precisions,
            flag="Precisions to search, e.g. int8,bf16.",
            shown=True,
        )
    )
    amp: AutoMixedPrecisionOptions | None = declare_option(
        None, "op types to move between [the four lists](amp.md) of ops that may run in 16 bits"
    )
    accuracy_criterion: Parsed[
        AccuracyCriterion, AccuracyCriterion | float | str | Mapping[str, Any]
    ] = declare_option(
        AccuracyCriterion(),
        "the tolerated loss of accuracy; see [accuracy criterion](guide.md#accuracy-criterion)",
        "tuning.accuracy_criterion",
        in_file=values.criterion_section(values.SHARE, values.parse_amount),
        in_inc_file=values.criterion_section(values.ANY_SHARE, values.ANY_SHARE),
        parse=_parse_criterion,
        shown=True,
        default_words="1 %, relative",
    )
    objective: str | Mapping[str, float] = declare_option(
        Objective.PERFORMANCE,
        'objective: `"latency"` (also `"performance"`), '
        '[`"throughput"`](deployment.md#latency-and-throughput) of concurrent calls, '
        '`"footprint"` (weights and memory of a run), `"modelsize"` (weights; a weight that '
        "another op reads in float stays in float, since it would be stored twice); or several "
        'with weights, `{"latency": 0.7, "modelsize": 0.3}`',
        "tuning.objective",
        rule=parse_objectives,
        in_file=values.OBJECTIVE,
        flag="latency, throughput, footprint or modelsize; default: from the YAML.",
        shown=True,
    )
    min_speedup: float = declare_option(
        MIN_SPEEDUP,
        "minimum [lower bound of the speed-up](strategies.md#speed-measurement) over FP32, if "
        "latency is the only objective; a plan below this bound does not justify its loss of "
        "accuracy",
        "tuning.min_speedup",
        rule=keep_original_value(check_min_speedup),
        shown=True,
    )
    max_bytes: int | None = declare_option(
        None,
        "[limit of the bytes](language_models.md#a-budget-instead-of-a-target) of all weights: "
        "the result is the most accurate model within it, without evaluation",
        "tuning.max_bytes",
        rule=SIZE_LIMITS["max_bytes"],
        flag="Most accurate model of at most these bytes.",
        shown=True,
    )
    max_bits: float | None = declare_option(
        None,
        "the same limit in mean bits per weight",
        "tuning.max_bits",
        rule=SIZE_LIMITS["max_bits"],
        flag="Most accurate model of at most these bits a weight.",
        shown=True,
    )
    workload: Workload | Mapping[str, Any] | None = declare_option(
        None,
        "[shares of decode and prefill](language_models.md#decode-and-prefill) of a decoder: "
        "`{decode: 0.8, prefill: 0.2, prompt: 512}`",
        "tuning.workload",
        rule=keep_original_value(Workload.from_value),
        flag="Tokens of a decoder: {decode: 0.8, prefill: 0.2, prompt: 512}.",
        shown=True,
    )
    exit_policy: Parsed[ExitPolicy, ExitPolicy | Mapping[str, Any]] = declare_option(
        ExitPolicy(),
        "limits of the search; see [exit policy](guide.md#exit-policy)",
        "tuning.exit_policy",
        in_file=values.exit_section(values.SECONDS, integer_between(1)),
        in_inc_file=values.exit_section(values.ANY_SECONDS, values.validate_raised_integer(1)),
        parse=_parse_exit_policy,
        shown=True,
        default_words="100 trials",
    )
    effort: str = declare_option(
        Effort.NORMAL,
        "seconds that a run may spend on a faster result: `quick`, `normal` or `thorough`; see "
        "[effort](guide.md#effort)",
        "tuning.effort",
        rule=lambda value: Effort.parse(value, "effort"),
        choices=tuple(effort.value for effort in Effort),
        flag="Time for a faster result: quick, normal or thorough; default: normal.",
        shown=True,
    )
    approach: str | None = declare_option(
        None,
        'how INT8 ranges are determined: `"static"`, `"dynamic"` or `"weight_only"`; see '
        "[INT8 approaches](pytorch.md#int8-approaches). The values of Intel Neural Compressor are "
        "accepted in a tuning file",
        "quantization.approach",
        rule=lambda value: Approach.parse(value, "approach"),
        in_file=values.parse_approach,
        shown=True,
        default_words="all three",
    )
    sampling_size: int = declare_option(
        100,
        "number of calibration samples; of several numbers in a tuning file, e.g. `100, 200`, the "
        "largest is used",
        "quantization.calibration.sampling_size",
        rule=integer_between(1),
        in_file=values.SIZES,
        shown=True,
    )
    calibration_seed: int | None = declare_option(
        None,
        "seed that draws the calibration samples from all of the data, as whole batches, instead "
        "of reading the first ones; for data that is sorted, e.g. by class",
        "quantization.calibration.seed",
        rule=seed_number,
        shown=True,
        default_words="the first samples",
    )
    max_batches: int | None = declare_option(
        None,
        "maximum number of evaluation batches; required for an infinite loader",
        "evaluation.accuracy.max_batches",
        rule=integer_between(1),
        shown=True,
        default_words="all",
    )
    label_key: str | None = declare_option(
        None,
        "key of the labels in batches that are dicts; the other keys are the inputs",
        "evaluation.accuracy.label_key",
        rule=string,
        in_file=values.TEXT,
        default_words="the reserved names, e.g. `labels`",
    )
    target: str = declare_option(
        machine.HOST_TARGET,
        "CPU to convert for: `this` machine, `portable`, `avx2`, `avx512`, `vnni`, `amx` or "
        "`arm-dotprod`; see [another machine](guide.md#another-machine). Or an accelerator: `qnn`, "
        "`tensorrt`, `vitisai`, `openvino-npu`, `qdq`, or the path of [a profile](targets.md)",
        "target",
        rule=string,
        in_file=values.TARGET,
        choices=values.TARGET_NAMES,
        flag="Target: a CPU, an accelerator (qnn …) or a profile; default: this CPU.",
        shown=True,
    )
    runtime: str = declare_option(
        SOURCE_RUNTIME,
        'runtime of the result: `"source"`, `"auto"`, a name such as `"openvino"`, or '
        "[`torch.compile`](pytorch.md#compilation); the default of `neural-mp tune` is `auto`; "
        "see [choice of the runtime](guide.md#choice-of-the-runtime)",
        "model.runtime",
        rule=values.RUNTIME,
        flag="Runtime of the result: auto, source or a name; default: auto.",
        shown=True,
    )
    provider: str | None = declare_option(
        None,
        "[execution provider](onnx.md#execution-providers) of ONNX Runtime, e.g. "
        "`CUDAExecutionProvider`",
        "model.provider",
        rule=string,
        flag="Execution provider of ONNX Runtime, e.g. CUDAExecutionProvider; default: CPU.",
        shown=True,
        default_words="`CPUExecutionProvider`",
    )
    io: str = declare_option(
        FLOAT_IO,
        'types of the inputs and outputs of the result: `"float"`, or '
        '[`"int8"`](litert.md#integer-inputs-and-outputs) for a `.tflite` file',
        "model.io",
        rule=one_of((FLOAT_IO, INT8_IO)),
        choices=(FLOAT_IO, INT8_IO),
        flag="Types of inputs and outputs: float, or int8 for a .tflite file; default: float.",
        shown=True,
    )
    capture: str = declare_option(
        Capture.WHOLE,
        '`"modules"` for a model [without one graph](pytorch.md#models-without-a-single-graph), '
        '`"layers"` for a [language model](language_models.md)',
        "model.capture",
        rule=lambda value: Capture.parse(value, "capture"),
        in_file=values.CAPTURE,
        shown=True,
    )
    kv_cache: str = declare_option(
        FLOAT_CACHE,
        'keys and values that a decoder keeps of earlier tokens: `"float"`, or '
        '[`"int8"`](language_models.md#key-value-cache) with a scale for each head and token',
        "model.kv_cache",
        rule=one_of((FLOAT_CACHE, INT8_CACHE)),
        choices=(FLOAT_CACHE, INT8_CACHE),
        flag="Key-value cache of a decoder: float or int8; default: float.",
        shown=True,
    )
    exclude: str | Iterable[str] = declare_option(
        (), 'ops that stay in FP32: names, patterns or layers, `["fc", "layer4.*"]`', shown=True
    )
    op_wise: Mapping[str, Any] = declare_option(
        {},
        "name or pattern → allowed precisions: "
        '`{"fc": "fp32"}`, `{"layer4.*": "int8,bf16"}`, or a dict as in '
        "[yaml.md](yaml.md#quantization)",
        shown=True,
    )
    optype_wise: Mapping[str, Any] = declare_option(
        {}, "the same for op types, or classes of layers (`Dense`, `Linear`)", shown=True
    )
    model_wise: Any = declare_option(
        None, 'the same for all ops: `{"activation": {"algorithm": "kl"}}`', shown=True
    )
    train_func: Callable[[Any], Any] | None = declare_option(
        None,
        "function that trains a model in place; called with the simulation of the most promising "
        "plan if [no plan meets the target](quantization_aware_training.md#training-in-a-search)",
    )
    train_dataloader: Any = declare_option(
        None,
        "batches `(inputs, targets)` of a training, instead of `train_func`; without, outputs are "
        "trained towards those of FP32 on the calibration batches, if "
        "`exit_policy.train_seconds` is set",
    )
    loss: Callable[[Any, Any], Any] | None = declare_option(
        None, "function of outputs and targets of `train_dataloader`"
    )
    epochs: int = declare_option(
        EPOCHS,
        "number of passes of a training over the batches",
        "quantization.train.epochs",
        in_file=integer_between(1),
    )
    random_seed: int = declare_option(
        0,
        "seed of strategies that draw random plans, and of learned rounding",
        "tuning.random_seed",
        rule=seed_number,
        in_inc_file=values.validate_raised_integer(0, MAX_SEED),
        shown=True,
    )
    rounding_steps: int = declare_option(
        ROUNDING_STEPS,
        "steps per decoder block of [learned rounding](language_models.md#corrections)",
        "tuning.rounding_steps",
        rule=integer_between(1, MAX_ROUNDING_STEPS),
        shown=True,
    )
    workspace: str | Path = declare_option(
        DEFAULT_WORKSPACE,
        "folder in which trials are stored; `workspace: ./run` in a tuning file is a short form",
        "tuning.workspace.path",
        in_file=values.TEXT,
    )
    storage: str | None = declare_option(
        None,
        "an Optuna storage URL, instead of a file in the workspace",
        "tuning.storage",
        in_file=values.TEXT,
    )
    early_stopping: bool = declare_option(
        True,
        "stop evaluations that [cannot meet the target](strategies.md#early-stopping)",
        "tuning.early_stopping",
        rule=boolean,
        shown=True,
    )
    cache: bool = declare_option(
        True,
        "reuse the [measurements of earlier runs](guide.md#measurement-cache) with the same model "
        "and data",
        "tuning.cache",
        rule=boolean,
        flag="Reuse measurements of earlier runs in the workspace.",
    )
    workers: int | str | Mapping[str, Any] = declare_option(
        1,
        "processes that [run trials in parallel](strategies.md#workers) or share a long "
        'evaluation; or [several machines](clusters.md): `"ray:10.0.0.1:6379"`, or a dict with '
        "`engine`, `address`, `count` and `threads`",
        "tuning.workers",
        in_file=values.WORKERS,
        flag="Workers: a number of processes, ray or ray:HOST:PORT; default: from the YAML.",
        shown=True,
    )
    resume: bool = declare_option(
        False,
        "continue the latest run of the same model in the workspace. In a tuning file, a path "
        "stands for that workspace and `true`",
        "tuning.workspace.resume",
        rule=boolean,
        in_file=values.RESUME,
        flag="Resume the latest run of the same model in the workspace.",
        shown=True,
    )
    trust: str | Iterable[str] = declare_option(
        (),
        'modules that a tuning file may reference, e.g. `("sklearn",)`, in addition to '
        "[your own](data_and_metrics.md#custom-components); and TensorFlow ops with side effects "
        'that a model file may contain, e.g. `"ReadFile"`',
    )
    hardware: machine.Hardware | None = declare_option(
        None,
        "description of the machine",
        rule=_validate_instance_of(machine.Hardware),
        default_words="this machine",
    )
    track: str | None = declare_option(
        None,
        "store the run in an [experiment tracker](report.md#experiment-trackers): `mlflow`, "
        "`wandb` or `tensorboard`, or with its address, project or folder, `mlflow:PLACE`",
        "tuning.track",
        rule=values_matching("mlflow, wandb or tensorboard, or TRACKER:PLACE", _names_tracker),
        flag="Experiment tracker: mlflow, wandb or tensorboard, or TRACKER:PLACE.",
    )
    listener: Listener | None = declare_option(
        None,
        "object that receives the events of a run. Default: a `LiveListener` (progress and a "
        "summary) if standard error is a terminal, a `NotebookListener` (progress in the cell) in "
        "a notebook, otherwise none",
        rule=_validate_instance_of(Listener),
        default_words="by environment",
    )

    def __init__(self, **options: object) -> None:
        for name, value in options.items():
            setattr(self, name, value)

    def __init_subclass__(cls) -> None:
        meanings = "".join(f"\n        {name}: {o.plain_help}." for name, o in OPTIONS.items())
        cls.__doc__ = f"{(cls.__doc__ or '').rstrip()}\n\n    Attributes:{meanings}\n    "

    def __setattr__(self, name: str, value: object) -> None:
        if name != "_settings" and not hasattr(type(self), name):
            raise ConfigurationError(
                f"MixedPrecision has no option {name!r}{did_you_mean(name, OPTIONS)}"
            )
        validate_option(name, without_nul, value)
        super().__setattr__(name, value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Options) and all(
            getattr(self, name) == getattr(other, name) for name in OPTIONS
        )

    def is_set(self, name: str) -> bool:
        """Whether an option is set, in Python or by a tuning file."""
        return name in vars(self)

    def check_options(self) -> None:
        """Check each option by its rule.

        Raises:
            ConfigurationError: a value is invalid.
        """
        for name, option in OPTIONS.items():
            option.check_value(getattr(self, name))


#: Name → declaration of each option.
OPTIONS: Mapping[str, Option] = {
    name: option for name, option in vars(Options).items() if isinstance(option, Option)
}


def list_rules_below(section: KeyPath, dialect: Dialect) -> dict[str, Validator[Any]]:
    """Return key → validator of the options directly below a section of a tuning file."""
    return {
        str(option.path[-1]): option.in_inc_file if dialect is Dialect.INC else option.in_file
        for option in OPTIONS.values()
        if option.path and option.path[:-1] == section
    }
