"""Arguments and options of commands, alone and in groups."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from neural_mp.cli.output import Output
from neural_mp.config.options import OPTIONS, Options
from neural_mp.core.op_timings import Workload
from neural_mp.errors import ConfigurationError
from neural_mp.io.limits import trusting
from neural_mp.io.yaml_reader import YamlError, load_yaml
from neural_mp.tuning.size_limit import SIZE_LIMITS
from neural_mp.util.validators import MOST

if TYPE_CHECKING:
    import numpy as np

    from neural_mp.adaptors.loaded_model import AnyModel
    from neural_mp.api.mixed_precision import MixedPrecision
    from neural_mp.tasks.tuning import TaskRun


def make_flag_annotation(name: str) -> Any:
    """Return the annotation of a command's parameter for an option of a run."""
    option, hint = OPTIONS[name], get_type_hints(Options)[name]
    kind = next((kind for kind in (bool, int, float) if hint in (kind, kind | None)), str)
    complete = (lambda: list(option.choices)) if option.choices else None
    return Annotated[kind | None, typer.Option(help=option.flag, autocompletion=complete)]


ModelArgument = Annotated[str, typer.Argument(help="Model file or folder, or module:attribute.")]
FrameworkOption = Annotated[
    str | None, typer.Option(help="Framework; default: detected from the model.")
]
TargetOption = make_flag_annotation("target")
ShapeOption = Annotated[
    list[str] | None,
    typer.Option(help="Shape of an input, e.g. 2,3,224,224 or int64:2,128; one option per input."),
]
SaveOption = Annotated[
    Path | None, typer.Option("--output", "-o", help="Folder to save the result to.")
]
DataOption = Annotated[
    Path | None,
    typer.Option(help="Inputs: .npy, .npz, .csv or tuning YAML; default: random inputs."),
]
TrustOption = Annotated[
    list[str] | None,
    typer.Option(help="Module, e.g. sklearn, or op, e.g. ReadFile, to allow; repeatable."),
]
SamplesOption = Annotated[int, typer.Option(min=1, max=MOST, help="Number of samples to run.")]
BatchSizeOption = Annotated[
    int | None, typer.Option(min=1, max=MOST, help="Samples per batch of an array.")
]
EvaluationDataOption = Annotated[
    Path | None, typer.Option(help="Inputs with labels: .npz, .csv; or a text: .txt, .jsonl.")
]
LabelOption = Annotated[str | None, typer.Option(help="Array or column of the labels in --data.")]
CsvOption = Annotated[bool, typer.Option("--csv", help="Print only CSV on stdout.")]


class ModelOptions(ExitStack):
    """Options of a command that loads a model; a context in which trusted names are valid."""

    def __init__(
        self,
        framework: FrameworkOption = None,
        input_shape: ShapeOption = None,
        trust: TrustOption = None,
    ) -> None:
        super().__init__()
        self.framework, self._shapes, self.trust = framework, input_shape or (), trust or ()

    def __enter__(self) -> ModelOptions:
        self.enter_context(trusting(self.trust))
        return self

    @property
    def random_inputs(self) -> tuple[np.ndarray, ...] | None:
        """Random example inputs of the given shapes; None without shapes."""
        from neural_mp.api.input_data import make_random_inputs

        return make_random_inputs(self._shapes)

    def load_model(self, model: str, out: Output) -> AnyModel:
        """Load the model given by an argument.

        Raises:
            NeuralMPError: the model cannot be loaded.
        """
        inputs = self.random_inputs
        with out.show_progress(f"Loading {model}"):
            from neural_mp.api.loading import load_source

            return load_source(model, self.framework, inputs)


def parse_workload_option(text: str) -> object:
    """Return the value of `--workload`.

    Raises:
        ConfigurationError: the text is not YAML.
    """
    try:
        return Workload.from_value(load_yaml(text))
    except YamlError as error:
        raise ConfigurationError(
            f"--workload must be a mapping, e.g. '{{decode: 0.8, prefill: 0.2, prompt: 512}}', got "
            f"{text!r}: {error}"
        ) from error


class SearchOptions(ExitStack):
    """Options of `tune` that a tuning file can also set.

    `flags` are the options whose declaration has a flag; None if not given.
    """

    def __init__(
        self,
        data: EvaluationDataOption = None,
        label: LabelOption = None,
        task: Annotated[
            str | None,
            typer.Option(help="Task of a Hugging Face folder, e.g. text-classification."),
        ] = None,
        batch_size: Annotated[
            int | None, typer.Option(min=1, max=MOST, help="Samples per batch of --data.")
        ] = None,
        tolerance: Annotated[
            str | None, typer.Option(help="Tolerated loss: 1%, or absolute:0.02; default: 1%.")
        ] = None,
        timeout: Annotated[
            float | None,
            typer.Option(help="Time limit of the search in seconds, also for calls that hang."),
        ] = None,
        max_trials: Annotated[
            int | None, typer.Option(help="Maximum number of evaluated plans.")
        ] = None,
        **flags: Any,
    ) -> None:
        super().__init__()
        self.data, self.label, self.batch_size = data, label, batch_size
        self.task = task
        self.tolerance = tolerance
        self.limits: dict[str, Any] = {"timeout": timeout, "max_trials": max_trials}
        self.flags = {name: value for name, value in flags.items() if value is not None}

    def __enter__(self) -> SearchOptions:
        return self

    def apply_to(self, converter: MixedPrecision) -> None:
        """Set the given options.

        Raises:
            NeuralMPError: an option is invalid, or the data cannot be read.
        """
        from neural_mp.api.tuning_source import (
            is_text,
            make_file_dataset,
            parse_criterion_option,
            set_text_defaults,
        )
        from neural_mp.data import OWN, build_dataloader

        if self.data is None and (self.label is not None or self.batch_size is not None):
            raise ConfigurationError(
                "--label and --batch-size require --data, got none; add --data"
            )
        for name, value in self.flags.items():
            setattr(converter, name, parse_workload_option(value) if name == "workload" else value)
        if self.data is not None and self.task is None:
            spec: dict[str, Any] = {
                "dataset": make_file_dataset(self.data, self.label, converter.model)
            }
            if self.batch_size is not None:
                spec["batch_size"] = self.batch_size
            converter.eval_dataloader = build_dataloader(spec, OWN)
            if is_text(self.data):
                set_text_defaults(converter)
        if self.tolerance is not None:
            converter.accuracy_criterion = parse_criterion_option(
                self.tolerance, converter.accuracy_criterion
            )
        limits = {name: value for name, value in self.limits.items() if value is not None}
        converter.exit_policy = replace(converter.exit_policy, **limits)

    def prepare_task(self, folder: str, trust: Iterable[str]) -> TaskRun:
        """Return the run for a model folder and the task.

        Raises:
            NeuralMPError: the data are missing, or folder or data do not fit the task.
        """
        from neural_mp.tasks.tuning import prepare_run

        if self.task is None or self.data is None or self.label is not None:
            raise ConfigurationError(
                f"--task requires --data FILE, whose columns name the labels, got "
                f"{'--label' if self.label is not None else 'no --data'}"
            )
        return prepare_run(folder, self.task, self.data, batch_size=self.batch_size, trust=trust)

    def require_evaluation(self, model: str) -> None:
        """Check that a model without a tuning file has data and a metric.

        Raises:
            ConfigurationError: one of them is missing.
        """
        if self.data is None or not {"metric", *SIZE_LIMITS} & set(self.flags):
            raise ConfigurationError(
                f"tuning the model {model!r} requires --data FILE and --metric NAME; or write a "
                f"tuning file with: neural-mp init {model}"
            )


#: Groups of options, in the order in which their contexts are entered.
_GROUPS = (Output, ModelOptions, SearchOptions)


def _expand_option_parameters(group: type) -> Iterator[inspect.Parameter]:
    for parameter in inspect.signature(group, eval_str=True).parameters.values():
        if parameter.kind is not parameter.VAR_KEYWORD:
            yield parameter
            continue
        for name, option in OPTIONS.items():
            if option.flag:
                kind = parameter.KEYWORD_ONLY
                yield inspect.Parameter(
                    name, kind, default=None, annotation=make_flag_annotation(name)
                )


def make_command(function: Callable[..., None]) -> Callable[..., None]:
    """Return a function for typer, with a group's options for each keyword of its type."""
    parameters = inspect.signature(function, eval_str=True).parameters.values()
    names = {parameter.annotation: parameter.name for parameter in parameters}
    options = {group: list(_expand_option_parameters(group)) for group in _GROUPS if group in names}

    def run_in_contexts(**values: Any) -> None:
        with ExitStack() as stack:
            for group, members in options.items():
                instance = group(**{option.name: values.pop(option.name) for option in members})
                values[names[group]] = stack.enter_context(instance)
            function(**values)

    shown: list[inspect.Parameter] = []
    for parameter in parameters:
        shown += options.get(parameter.annotation, [parameter])
    keywords = [parameter.replace(kind=parameter.KEYWORD_ONLY) for parameter in shown]
    run_in_contexts.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]
    run_in_contexts.__doc__ = function.__doc__
    run_in_contexts.__name__ = function.__name__
    return run_in_contexts
