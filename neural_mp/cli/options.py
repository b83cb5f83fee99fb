"""Arguments and options shared by several commands."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from neural_mp.cli.output import Output
from neural_mp.cli.search_options import SearchOptions, flag_of
from neural_mp.config.options import OPTIONS
from neural_mp.io.trust import trusting
from neural_mp.util.validators import MOST

if TYPE_CHECKING:
    import numpy as np

    from neural_mp.adaptors.loaded_model import AnyModel


ModelArgument = Annotated[str, typer.Argument(help="Model file or folder, or module:attribute.")]
FrameworkOption = Annotated[
    str | None, typer.Option(help="Framework; default: detected from the model.")
]
TargetOption = flag_of("target")
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
    typer.Option(
        help="Module, e.g. sklearn, or op, e.g. ReadFile, to allow; repeatable.",
    ),
]
SamplesOption = Annotated[int, typer.Option(min=1, max=MOST, help="Number of samples to run.")]
BatchSizeOption = Annotated[
    int | None,
    typer.Option(min=1, max=MOST, help="Samples per batch of an array."),
]
CsvOption = Annotated[bool, typer.Option("--csv", help="Print only CSV on stdout.")]


class ModelOptions(ExitStack):
    """Options of a command that loads a model; a context manager in which trusted names are valid.

    Args:
        framework: framework of the model; None to detect.
        input_shape: shape of each example input.
        trust: trusted modules and ops.
    """

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
    def inputs(self) -> tuple[np.ndarray, ...] | None:
        """Random example inputs of the given shapes; None without shapes."""
        from neural_mp.api.input_data import random_inputs

        return random_inputs(self._shapes)

    def load(self, model: str, out: Output) -> AnyModel:
        """Load the model given by an argument.

        Raises:
            NeuralMPError: the model cannot be loaded.
        """
        inputs = self.inputs
        with out.working(f"Loading {model}"):
            from neural_mp.api.loading import load_source

            return load_source(model, self.framework, inputs)


#: Groups of options, in the order in which their contexts are entered.
_GROUPS = (Output, ModelOptions, SearchOptions)


def _option_parameters(group: type) -> Iterator[inspect.Parameter]:
    for parameter in inspect.signature(group, eval_str=True).parameters.values():
        if parameter.kind is not parameter.VAR_KEYWORD:
            yield parameter
            continue
        for name, option in OPTIONS.items():
            if option.flag:
                kind = parameter.KEYWORD_ONLY
                yield inspect.Parameter(name, kind, default=None, annotation=flag_of(name))


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Return a function for typer that has the options of a group for each parameter of its type.

    Args:
        function: function with keyword-only parameters of the types in `_GROUPS`.
    """
    parameters = inspect.signature(function, eval_str=True).parameters.values()
    names = {parameter.annotation: parameter.name for parameter in parameters}
    options = {group: list(_option_parameters(group)) for group in _GROUPS if group in names}

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
