"""What `tune` and `convert` do with their result: show it, save it, or write it as JSON."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neural_mp.api.commands.output import Output

if TYPE_CHECKING:
    from neural_mp.api.optimized_model import OptimizedModel
    from neural_mp.core.trial import Trial


def hand_over(result: OptimizedModel, output: Output, folder: Path | None) -> None:
    """Show a result, and save it where a folder is given.

    Raises:
        NeuralMPError: it cannot be saved there.
    """
    from neural_mp.reporting import result_tables

    output.show(result_tables(result.report, result.met))
    if folder is not None:
        _save(result, folder)
        output.line(f"saved to {folder}; right on {result.right_on}")
    if output.as_json:
        output.document(_document(result, folder))


def _save(result: OptimizedModel, folder: Path) -> None:
    logger = logging.getLogger("neural_mp.api.optimized_model")
    logger.disabled = True  # where the numbers are right is said by the command itself
    try:
        result.save(folder)
    finally:
        logger.disabled = False


def _document(result: OptimizedModel, folder: Path | None) -> dict[str, Any]:
    return {
        "met": result.met,
        "framework": result.framework,
        "right_on": result.right_on,
        "saved_to": folder,
        "report": result.report.to_dict(),
        "trials": [_trial(trial) for trial in result.trials],
        "plan": result.plan.to_dict(),
    }


def _trial(trial: Trial) -> dict[str, Any]:
    return {
        "outcome": trial.outcome.value,
        "accuracy": trial.accuracy,
        "loss": trial.loss,
        "speedup": trial.speedup,
        "seconds": trial.seconds,
        "error": trial.error,
        "counts": {str(precision): count for precision, count in trial.plan.counts().items()},
    }
