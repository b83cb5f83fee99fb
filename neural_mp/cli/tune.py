"""`neural-mp tune`."""

from __future__ import annotations

from typing import Annotated

import typer

from neural_mp.cli.errors import ExitCode, epilog
from neural_mp.cli.options import SaveOption, TrustOption
from neural_mp.cli.output import Output, emit_result
from neural_mp.cli.search_options import SearchOptions

EPILOG = epilog(
    "tune conf.yaml --output tuned",
    "tune net.onnx --data test.npz --metric accuracy --tolerance 1% -o tuned",
    "tune conf.yaml --json | jq .report.speedup",
)


def tune(
    source: Annotated[
        str, typer.Argument(help="Tuning YAML, or a model with --data and --metric.")
    ],
    output: SaveOption = None,
    fail_if_missed: Annotated[
        bool, typer.Option("--fail-if-missed", help="Save a result only if the target is met.")
    ] = False,
    trust: TrustOption = None,
    *,
    search: SearchOptions,
    out: Output,
) -> None:
    """Tune a model as configured in a YAML file, by options, or both."""
    from neural_mp.api.saved_model import check_output
    from neural_mp.api.tuning_source import converter_of, is_model
    from neural_mp.core.enums import AUTO_RUNTIME
    from neural_mp.reporting import LiveListener, error_console
    from neural_mp.tuning.listener import Listener

    if output is not None:
        check_output(output)  # fail before the search, not after
    converter = converter_of(source, trust or ())
    if is_model(source):
        search.require_evaluation(source)
    search.apply(converter)
    converter.set_default("runtime", AUTO_RUNTIME)
    out.kept = "finished trials are kept; continue with --resume"
    listener = Listener() if out.quiet else LiveListener(error_console(), summary=False)
    converter.listener = listener
    result = converter()
    missed = result.met is False
    emit_result(result, out, None if missed and fail_if_missed else output)
    if missed and fail_if_missed and output is not None:
        out.warn(f"the target is not met, so that nothing is saved to {output}")
    if missed:
        raise typer.Exit(
            ExitCode.NOT_FASTER if result.report.only_slower else ExitCode.TARGET_MISSED
        )
