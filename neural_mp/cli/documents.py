"""Parts that the JSON documents of several commands share; see docs/cli.md."""

from __future__ import annotations

from typing import Any

from neural_mp.core.trial import Trial

#: Version of the documents of `tune`, `convert` and `report`; raised if a key changes its meaning
#: or disappears.
SCHEMA = 1


def trial_document(trial: Trial) -> dict[str, Any]:
    """Return a trial: the fields of `Trial`, the speed-up and the number of ops per precision."""
    counts = {str(precision): count for precision, count in trial.plan.counts().items()}
    return {**trial.to_dict(), "speedup": trial.speedup, "counts": counts}
