"""Options of a search that replace or complete a tuning file."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from neural_mp.core.workload import Workload
from neural_mp.errors import ConfigurationError
from neural_mp.io.yaml_reader import YamlError, load_yaml
from neural_mp.util.validators import MOST

if TYPE_CHECKING:
    from neural_mp.api.mixed_precision import MixedPrecision


EvaluationDataOption = Annotated[
    Path | None, typer.Option(help="Inputs with labels: .npz, .csv; or a text: .txt, .jsonl.")
]
LabelOption = Annotated[str | None, typer.Option(help="Array or column of the labels in --data.")]


#: Defaults for a language model that is evaluated on a text.
LANGUAGE_MODEL_DEFAULTS = {
    "capture": "layers",
    "precisions": "int4,int8",
    "objective": "footprint",
}
#: Default objective with a workload, whose times would not count for the footprint.
_WITH_WORKLOAD = {"performance": 0.5, "footprint": 0.5}


def workload_of(text: str) -> object:
    """Return the value of `--workload`, which `MixedPrecision` checks.

    Raises:
        ConfigurationError: the text is not YAML.
    """
    try:
        return load_yaml(text)
    except YamlError as error:
        raise ConfigurationError(
            f"--workload must be a mapping, e.g. '{{decode: 0.8, prefill: 0.2, prompt: 512}}', got "
            f"{text!r}: {error}"
        ) from error


class SearchOptions(ExitStack):
    """Options of `tune` that a tuning file can also set.

    Args:
        metric: name of the metric.
        data: file with evaluation data.
        label: array or column of the labels.
        batch_size: samples per batch of the data.
        tolerance: tolerated accuracy loss.
        precisions: precisions to search.
        max_bytes: limit of the bytes of all weights, instead of an accuracy target.
        max_bits: limit of the mean bits per weight, instead of an accuracy target.
        workload: shares of decode and prefill of a decoder, as in YAML.
        timeout: limit of the search in seconds.
        max_trials: maximum number of evaluated plans.
    """

    def __init__(
        self,
        metric: Annotated[
            str | None, typer.Option(help="Metric, e.g. accuracy or rmse, or module:attribute.")
        ] = None,
        data: EvaluationDataOption = None,
        label: LabelOption = None,
        batch_size: Annotated[
            int | None, typer.Option(min=1, max=MOST, help="Samples per batch of --data.")
        ] = None,
        tolerance: Annotated[
            str | None, typer.Option(help="Tolerated loss: 1%, or absolute:0.02; default: 1%.")
        ] = None,
        precisions: Annotated[
            str | None, typer.Option(help="Precisions to search, e.g. int8,bf16.")
        ] = None,
        max_bytes: Annotated[
            int | None, typer.Option(min=1, help="Most accurate model of at most these bytes.")
        ] = None,
        max_bits: Annotated[
            float | None, typer.Option(help="Most accurate model of at most these bits a weight.")
        ] = None,
        workload: Annotated[
            str | None,
            typer.Option(help="Tokens of a decoder: {decode: 0.8, prefill: 0.2, prompt: 512}."),
        ] = None,
        timeout: Annotated[
            float | None, typer.Option(help="Time limit of the search in seconds.")
        ] = None,
        max_trials: Annotated[
            int | None, typer.Option(help="Maximum number of evaluated plans.")
        ] = None,
    ) -> None:
        super().__init__()
        self.metric, self.data, self.label = metric, data, label
        self.batch_size, self.tolerance, self.precisions = batch_size, tolerance, precisions
        self.sizes: dict[str, float | None] = {"max_bytes": max_bytes, "max_bits": max_bits}
        self.workload = workload
        self.limits: dict[str, Any] = {"timeout": timeout, "max_trials": max_trials}

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
        if self.workload is not None:
            converter.workload = Workload.parse(workload_of(self.workload))
        if self.data is not None:
            converter.eval_dataloader = loader_of(
                self.data, self.label, self.batch_size, converter.model
            )
            if is_text(self.data):
                for name, value in LANGUAGE_MODEL_DEFAULTS.items():
                    converter.set_default(name, value)
                if converter.workload is not None:
                    converter.set_default("objective", _WITH_WORKLOAD)
        if self.metric is not None:
            converter.metric = self.metric
        if self.tolerance is not None:
            converter.accuracy_criterion = criterion_of(
                self.tolerance, converter.accuracy_criterion
            )
        if self.precisions is not None:
            converter.precisions = self.precisions
        for option, limit in self.sizes.items():
            if limit is not None:
                setattr(converter, option, limit)
        limits = {name: value for name, value in self.limits.items() if value is not None}
        converter.exit_policy = replace(converter.exit_policy, **limits)

    def require_evaluation(self, model: str) -> None:
        """Check that a model without a tuning file has data and a metric.

        Raises:
            ConfigurationError: one of them is missing.
        """
        has_limit = any(limit is not None for limit in self.sizes.values())
        if self.data is None or (self.metric is None and not has_limit):
            raise ConfigurationError(
                f"tuning the model {model!r} requires --data FILE and --metric NAME; or write a "
                f"tuning file with: neural-mp init {model}"
            )
