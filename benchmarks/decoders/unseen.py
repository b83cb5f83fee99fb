"""Plans that are accepted on a tuning text, on text that their run does not see."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

from benchmarks.decoders.goals import Detail
from benchmarks.decoders.settings import Subject, change, perplexity
from benchmarks.decoders.weights import tuned

HEADINGS = ("seed", "model", "tuning text", "bytes", "tuning", "unseen", "verdict")
TOLERANCE = 0.01
MISSED, HELD, REFUSED = "missed", "held", "not accepted"


def unseen_of(subject: Subject) -> Iterator[Detail]:
    """Yield a row per run: several texts per decoder, tolerance 1 %, 2 to 8 bits."""
    count = subject.settings.tuning_texts
    for name, net in subject.nets.items():
        base = perplexity(net, subject.unseen)
        with tempfile.TemporaryDirectory() as folder:
            for index in range(count):
                text = subject.tuning_part(index, count)
                result = tuned(
                    net, subject.calibration, text, folder, precisions="int2,int3,int4,int8"
                )
                original, converted = (perplexity(model, text) for model in (net, result))
                unseen = perplexity(result, subject.unseen)
                verdict = HELD if unseen <= base * (1 + TOLERANCE) else MISSED
                size = result.adaptor.weight_bytes(result.held)
                whole = sum(4 * p.numel() for p in net.parameters())
                yield Detail(
                    HEADINGS,
                    (
                        str(subject.seed),
                        name,
                        f"part {index + 1}",
                        f"{size / whole:.3f}",
                        change(converted, original),
                        change(unseen, base),
                        verdict if result.met else REFUSED,
                    ),
                )
