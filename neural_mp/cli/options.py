"""Arguments and options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from neural_mp.util.validators import MOST


def _targets() -> list[str]:
    from neural_mp.core.hardware import TARGETS

    return list(TARGETS)


ModelArgument = Annotated[
    str, typer.Argument(help="A model file or folder, or module:attribute of your own.")
]
FrameworkOption = Annotated[str | None, typer.Option(help="Where it is not found by itself.")]
TargetOption = Annotated[
    str | None,
    typer.Option(
        help="this machine, portable, avx2, avx512, vnni, amx or arm-dotprod.",
        autocompletion=_targets,
    ),
]
ShapeOption = Annotated[
    list[str] | None,
    typer.Option(help="An input's shape, 2,3,224,224 or int64:2,128; once for every input."),
]
SaveOption = Annotated[
    Path | None, typer.Option("--output", "-o", help="Folder to save the result in.")
]
DataOption = Annotated[
    Path | None,
    typer.Option(help="A .npy or .npz file, or a tuning YAML; random inputs by default."),
]
TrustOption = Annotated[
    list[str] | None,
    typer.Option(
        help="A module, such as sklearn, that a tuning YAML may name code of, beside your own in "
        "the working directory or beside the file; or an op, such as ReadFile, that the file of a "
        "TensorFlow model may hold. Several times.",
    ),
]
SamplesOption = Annotated[int, typer.Option(min=1, max=MOST, help="Samples that are run.")]
BatchSizeOption = Annotated[
    int | None,
    typer.Option(min=1, max=MOST, help="Samples a batch of an array, where another is wanted."),
]
CsvOption = Annotated[
    bool, typer.Option("--csv", help="Print a line for every row as CSV, and nothing else.")
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON document, and nothing else, on stdout.")
]
QuietOption = Annotated[
    bool, typer.Option("--quiet", "-q", help="No progress and no warnings on stderr.")
]
VerboseOption = Annotated[
    int,
    typer.Option(
        "--verbose",
        "-v",
        count=True,
        show_default=False,
        help="Log more on stderr; twice for everything.",
    ),
]
