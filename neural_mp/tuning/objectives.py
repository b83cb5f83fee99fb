"""What is better among plans that meet the target: faster, or smaller in memory or on disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from neural_mp.adaptors.base import Adaptor, Model
from neural_mp.profiling import interleaved_medians, peak_growth
from neural_mp.trial import Trial
from neural_mp.tuning.data import count_samples

OBJECTIVES = ("performance", "footprint", "modelsize")

#: Figures closer than this are the same: latencies are noisy.
_SAME = 1.05


@dataclass(frozen=True)
class Measurement:
    """Measures a candidate beside the FP32 model.

    Attributes:
        adaptor: runs the models.
        inputs: one batch.
        objective: what the run is after; the costlier figures are taken only for their own.
        warmup, iterations: runs not counted, and counted at most.
        time_limit: seconds after which no further run starts.
        threads: threads the framework may use meanwhile; None leaves that to it.
    """

    adaptor: Adaptor
    inputs: Any
    objective: str = "performance"
    warmup: int = 5
    iterations: int = 30
    time_limit: float = 5.0
    threads: int | None = None

    def __call__(self, baseline: Model, candidate: Model) -> tuple[dict[str, float], float]:
        """The objectives of a candidate (smaller is better), and its speed-up over FP32."""
        found = {"modelsize": float(self.adaptor.size(candidate))}
        latencies = self.latencies(baseline, candidate)
        speedup = latencies["baseline"] / latencies["candidate"]
        found["performance"] = latencies["candidate"]
        found["relative_latency"] = 1 / speedup
        if self.objective == "footprint":
            growth = peak_growth(lambda: self.adaptor.predict(candidate, self.inputs))
            found["footprint"] = found["modelsize"] + growth
        return found, speedup

    @property
    def batch_size(self) -> int:
        """Samples in the batch that is measured."""
        return count_samples(self.inputs)

    def latencies(self, baseline: Model, candidate: Model) -> dict[str, float]:
        """Median seconds a batch of both, measured in turn."""
        if candidate is baseline:
            runs = [lambda: self.adaptor.predict(baseline, self.inputs)]
        else:
            runs = [
                lambda: self.adaptor.predict(baseline, self.inputs),
                lambda: self.adaptor.predict(candidate, self.inputs),
            ]
        with self.adaptor.threads(self.threads):
            seconds = interleaved_medians(
                runs, warmup=self.warmup, iterations=self.iterations, time_limit=self.time_limit
            )
        return {"baseline": seconds[0], "candidate": seconds[-1]}


def best_trial(trials: Sequence[Trial], objective: str) -> Trial | None:
    """The best of those that met the target; None if none did.

    Among trials whose figures cannot be told apart, the one with the fewest bits in its plan,
    then the earliest.
    """
    met = [trial for trial in trials if trial.met]
    if not met:
        return None
    # Latency is compared as a share of FP32's, taken in turn with it: machines drift.
    key = "relative_latency" if objective == "performance" else objective
    best = min(trial.objectives.get(key, float("inf")) for trial in met)
    close = [t for t in met if t.objectives.get(key, float("inf")) <= best * _SAME]
    return min(close, key=lambda trial: (_bits(trial), trial.number))


def _bits(trial: Trial) -> int:
    return sum(config.precision.bits for config in trial.plan.values())
