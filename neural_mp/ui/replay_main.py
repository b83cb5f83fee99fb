"""Process of one replay: `… RUN WORKSPACE [--trust=MODULE]`, the edited plan on standard input.

The first line of standard input is a JSON document with the plan and its edits. Standard output
carries fields of a `Replay` as JSON documents, one per line.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from math import inf
from pathlib import Path

from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import Precision
from neural_mp.errors import PlanError, one_line
from neural_mp.jobs.worker_main import end_with_parent
from neural_mp.tuning.listener import Listener, RunLog

logger = logging.getLogger(__name__)


class _Messages(Listener):
    """Listener that sends the phases of a replay to the parent process."""

    wants_hints = False

    def __init__(self) -> None:
        # Standard output goes to standard error; the parent reads messages from the original.
        self._stream = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)

    def phase(self, name: str, total: int | None = None) -> None:
        """Report the start of a phase."""
        self.send(message=name)

    def send(self, **fields: object) -> None:
        """Send fields of the state."""
        print(json.dumps(fields), file=self._stream, flush=True)


def parse_edits(edits: object) -> dict[str, Precision]:
    """Return op → precision from a JSON document.

    Raises:
        PlanError: the document is no mapping of ops to precisions.
    """
    if not isinstance(edits, Mapping):
        raise PlanError(f"edits must be a mapping op → precision, got {edits!r}")
    return {op: Precision.parse(name, "a precision", PlanError) for op, name in edits.items()}


def try_edited_plan(
    workspace: Path,
    name: str,
    plan: PrecisionPlan,
    edits: Mapping[str, Precision],
    listener: Listener,
    trust: tuple[str, ...] = (),
) -> tuple[int, float | None]:
    """Evaluate an edited plan as a further trial of a run, with the options stored with the run.

    Returns:
        The number of the trial, and the NSR of its outputs on calibration samples, if measured.

    Raises:
        NeuralMPError: model or data are missing or were changed, or the plan does not fit.
    """
    from neural_mp.api.job_builder import JobBuilder
    from neural_mp.api.mixed_precision import MixedPrecision
    from neural_mp.config import parse_settings, trust_of
    from neural_mp.io.measurement_cache import RunCache
    from neural_mp.tuning.further_trial import try_further_plan
    from neural_mp.tuning.measurement.probe import MeasuringProbe
    from neural_mp.ui.workspace import Workspace

    conf = Workspace(workspace).get_run(name).require_source().conf
    settings = replace(parse_settings(conf, f"the options of {name}"), trust=trust_of(trust))
    converter = MixedPrecision(settings)
    converter.workspace, converter.resume, converter.workers = workspace, True, 1
    log = RunLog(listener)
    with log.loading_phase():
        job, _ = JobBuilder(converter, settings, log, run=name).build_job()
    trial, model = try_further_plan(job, log, plan, edits)
    listener.phase("Measuring the noise at the outputs")
    probe = MeasuringProbe(job.in_space(model.space), model, RunCache(), inf)
    return trial.number, probe.output_noise(trial.plan)


def main(name: str, workspace: str, *trust: str) -> int:
    """Replay a plan, report the outcome to the parent process, and return the exit code."""
    messages, request = _Messages(), json.loads(sys.stdin.buffer.readline())
    end_with_parent()
    try:
        plan, edits = PrecisionPlan.from_dict(request["plan"]), parse_edits(request["edits"])
        trusted = tuple(word.removeprefix("--trust=") for word in trust)
        trial, nsr = try_edited_plan(Path(workspace), name, plan, edits, messages, trusted)
        messages.send(trial=trial, nsr=nsr)
    except Exception as error:
        # Errors of the user's code, too, are shown in the page.
        logger.debug("the replay failed", exc_info=True)
        messages.send(message=one_line(error))
        return 1
    return 0


if __name__ == "__main__":
    from neural_mp.adaptors.tensorflow.log_suppression import suppress_startup_logs

    suppress_startup_logs()
    code = main(*sys.argv[1:])
    # Exit without waiting for threads and exit handlers of frameworks.
    sys.stderr.flush()
    os._exit(code)
