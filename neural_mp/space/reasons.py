"""Why ops of a model cannot run in a precision, counted by reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from neural_mp.core.graph import Op
from neural_mp.core.precision import Precision
from neural_mp.space.space import TuningSpace
from neural_mp.util.validators import count, fields, mapping_of, text, word


@dataclass(frozen=True)
class Reason:
    """Why ops of a model cannot run in a precision.

    Attributes:
        precision: the precision.
        words: why.
        types: op type → how many of its ops that is true of.
    """

    precision: Precision
    words: str
    types: Mapping[str, int]

    @property
    def ops(self) -> int:
        """How many ops it is true of."""
        return sum(self.types.values())

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings and dicts."""
        return {
            "precision": self.precision.value,
            "reason": self.words,
            "ops": self.ops,
            "types": dict(self.types),
        }

    @classmethod
    def from_dict(cls, data: Any) -> Reason:
        """Read back what `to_dict` wrote.

        Raises:
            NeuralMPError: it was not written so.
        """
        said = _REASON(data)
        return cls(said["precision"], said["reason"], said["types"])


_REASON = fields({"precision": word(Precision), "reason": text, "types": mapping_of(count)})


def counted_reasons(
    space: TuningSpace, ops: Iterable[Op], precisions: Iterable[Precision] = tuple(Precision)
) -> tuple[Reason, ...]:
    """Why some ops cannot run in precisions, that of most ops first.

    Args:
        space: what every op may run in.
        ops: the ops.
        precisions: the precisions; all by default.
    """
    asked = list(precisions)
    found: dict[tuple[Precision, str], Counter[str]] = {}
    for op in ops:
        for precision in asked:
            words = space.capabilities[op.name].why_not(precision)
            if words is not None:
                found.setdefault((precision, words), Counter())[op.type] += 1
    reasons = (Reason(*key, dict(types.most_common())) for key, types in found.items())
    return tuple(sorted(reasons, key=lambda reason: -reason.ops))
