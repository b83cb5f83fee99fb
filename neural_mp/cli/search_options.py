"""Options of a search that replace or complete a tuning file."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from neural_mp.config.options import OPTIONS, Options
from neural_mp.core.workload import Workload
from neural_mp.errors import ConfigurationError
from neural_mp.io.yaml_reader import YamlError, load_yaml
from neural_mp.tuning.size_limit import SIZE_LIMITS
from neural_mp.util.validators import MOST

if TYPE_CHECKING:
    from neural_mp.api.mixed_precision import MixedPrecision


EvaluationDataOption = Annotated[
    Path | None, typer.Option(help="Inputs with labels: .npz, .csv; or a text: .txt, .jsonl.")
]
LabelOption = Annotated[str | None, typer.Option(help="Array or column of the labels in --data.")]


def flag_of(name: str) -> Any:
    """Return the annotation of a command's parameter for an option of a run."""
    option, hint = OPTIONS[name], get_type_hints(Options)[name]
    kind = next((kind for kind in (bool, int, float) if hint in (kind, kind | None)), str)
    complete = (lambda: list(option.choices)) if option.choices else None
    return Annotated[kind | None, typer.Option(help=option.flag, autocompletion=complete)]


def workload_of(text: str) -> object:
    """Return the value of `--workload`.

    Raises:
        ConfigurationError: the text is not YAML.
    """
    try:
        return Workload.parse(load_yaml(text))
    except YamlError as error:
        raise ConfigurationError(
            f"--workload must be a mapping, e.g. '{{decode: 0.8, prefill: 0.2, prompt: 512}}', got "
            f"{text!r}: {error}"
        ) from error


class SearchOptions(ExitStack):
    """Options of `tune` that a tuning file can also set.

    Args:
        data: file with evaluation data.
        label: array or column of the labels.
        batch_size: samples per batch of the data.
        tolerance: tolerated accuracy loss.
        timeout: limit of the search in seconds.
        max_trials: maximum number of evaluated plans.
        **flags: the options whose declaration has a flag; None if not given.
    """

    def __init__(
        self,
        data: EvaluationDataOption = None,
        label: LabelOption = None,
        batch_size: Annotated[
            int | None, typer.Option(min=1, max=MOST, help="Samples per batch of --data.")
        ] = None,
        tolerance: Annotated[
            str | None, typer.Option(help="Tolerated loss: 1%, or absolute:0.02; default: 1%.")
        ] = None,
        timeout: Annotated[
            float | None, typer.Option(help="Time limit of the search in seconds.")
        ] = None,
        max_trials: Annotated[
            int | None, typer.Option(help="Maximum number of evaluated plans.")
        ] = None,
        **flags: Any,
    ) -> None:
        super().__init__()
        self.data, self.label, self.batch_size = data, label, batch_size
        self.tolerance = tolerance
        self.limits: dict[str, Any] = {"timeout": timeout, "max_trials": max_trials}
        self.flags = {name: value for name, value in flags.items() if value is not None}

    def __enter__(self) -> SearchOptions:
        return self

    def apply(self, converter: MixedPrecision) -> None:
        """Set the given options.

        Raises:
            NeuralMPError: an option is invalid, or the data cannot be read.
        """
        from neural_mp.api.tuning_source import criterion_of, is_text, loader_of

        if self.data is None and (self.label is not None or self.batch_size is not None):
            raise ConfigurationError(
                "--label and --batch-size require --data, got none; add --data"
            )
        for name, value in self.flags.items():
            setattr(converter, name, workload_of(value) if name == "workload" else value)
        if self.data is not None:
            converter.eval_dataloader = loader_of(
                self.data, self.label, self.batch_size, converter.model
            )
            for name, value in (
                _language_model_defaults(converter).items() if is_text(self.data) else ()
            ):
                converter.set_default(name, value)
        if self.tolerance is not None:
            converter.accuracy_criterion = criterion_of(
                self.tolerance, converter.accuracy_criterion
            )
        limits = {name: value for name, value in self.limits.items() if value is not None}
        converter.exit_policy = replace(converter.exit_policy, **limits)

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


def _language_model_defaults(converter: MixedPrecision) -> dict[str, Any]:
    # Times of a workload would not count for the footprint.
    mixed = {"performance": 0.5, "footprint": 0.5}
    objective = "footprint" if converter.workload is None else mixed
    return {"capture": "layers", "precisions": "int4,int8", "objective": objective}
