"""How a user is told what of a model stays in FP32 whatever a plan says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


def stays_in_fp32(layers: Iterable[str], where: str, why: str) -> tuple[str, ...]:
    """One sentence for a user, such as `2 LSTM within the op 'a' stay in FP32: …`.

    Args:
        layers: the type of every layer that stays; none, and nothing is said.
        where: where they are, as it follows their names; may be empty.
        why: why they stay.
    """
    counts = Counter(layers)
    if not counts:
        return ()
    words = ", ".join(f"{count} {kind}" for kind, count in counts.most_common())
    verb = "stays" if counts.total() == 1 else "stay"
    return (" ".join(part for part in (words, where, f"{verb} in FP32: {why}") if part),)
