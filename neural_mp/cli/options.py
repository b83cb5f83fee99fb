"""Arguments and options shared by several commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from neural_mp.util.validators import MOST


def _targets() -> list[str]:
    from neural_mp.core.hardware import TARGETS

    return list(TARGETS)


ModelArgument = Annotated[str, typer.Argument(help="Model file or folder, or module:attribute.")]
FrameworkOption = Annotated[
    str | None, typer.Option(help="Framework; default: detected from the model.")
]
TargetOption = Annotated[
    str | None,
    typer.Option(
        help="Target CPU: portable, avx2, avx512, vnni, amx, arm-dotprod; default: this one.",
        autocompletion=_targets,
    ),
]
ShapeOption = Annotated[
    list[str] | None,
    typer.Option(help="Shape of an input, e.g. 2,3,224,224 or int64:2,128; one option per input."),
]
SaveOption = Annotated[
    Path | None, typer.Option("--output", "-o", help="Folder to save the result to.")
]
DataOption = Annotated[
    Path | None,
    typer.Option(help="Inputs: .npy, .npz or tuning YAML; default: random inputs."),
]
TrustOption = Annotated[
    list[str] | None,
    typer.Option(
        help="Module, e.g. sklearn, or TensorFlow op, e.g. ReadFile, to allow; repeatable.",
    ),
]
SamplesOption = Annotated[int, typer.Option(min=1, max=MOST, help="Number of samples to run.")]
BatchSizeOption = Annotated[
    int | None,
    typer.Option(min=1, max=MOST, help="Samples per batch of an array."),
]
CsvOption = Annotated[bool, typer.Option("--csv", help="Print only CSV on stdout.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print only a JSON document on stdout.")]
QuietOption = Annotated[
    bool, typer.Option("--quiet", "-q", help="Suppress progress and warnings on stderr.")
]
VerboseOption = Annotated[
    int,
    typer.Option(
        "--verbose",
        "-v",
        count=True,
        show_default=False,
        help="Log more on stderr; repeat for debug output.",
    ),
]
