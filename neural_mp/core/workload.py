"""Workload of a decoder: shares of decode and prefill, and times of layers at their row counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from neural_mp.core.enums import Approach
from neural_mp.core.precision import OpConfig
from neural_mp.errors import ConfigurationError
from neural_mp.util.validators import integer_between, non_negative_float, validate_option

#: Form of a layer (`form_of`) → rows per call → seconds.
FormTimes = Mapping[str, Mapping[int, float]]
#: Upper bound of a prompt, beyond the context of any model in use.
_LONGEST_PROMPT = 1 << 24
#: Default number of tokens of a prompt.
_PROMPT = 512
#: Rows per call while tokens are generated one by one.
_DECODE_ROWS = 1


@dataclass(frozen=True)
class Workload:
    """Shares of the tokens that a decoder generates one by one, and reads in prompts.

    Attributes:
        decode: share of generated tokens, one row per call.
        prefill: share of tokens in prompts, `prompt` rows per call.
        prompt: tokens per prompt.

    Raises:
        ConfigurationError: a value is out of range, or both shares are 0.
    """

    decode: float = 0.0
    prefill: float = 0.0
    prompt: int = _PROMPT

    def __post_init__(self) -> None:
        for name in ("decode", "prefill"):
            validate_option(f"workload.{name}", non_negative_float, getattr(self, name))
        validate_option("workload.prompt", integer_between(1, _LONGEST_PROMPT), self.prompt)
        if not self.decode + self.prefill > 0:
            raise ConfigurationError(
                "workload must have a share of decode or prefill above 0, got 0 for both; set e.g. "
                "{decode: 0.8, prefill: 0.2, prompt: 512}"
            )

    def __str__(self) -> str:
        return f"decode {self.decode:g}, prefill {self.prefill:g}, prompt {self.prompt}"

    @classmethod
    def parse(cls, value: object) -> Workload | None:
        """Return a workload from a workload, or a dict as in YAML; None if unset.

        Raises:
            ConfigurationError: the type is wrong, a key is unknown, or a value is out of range.
        """
        if value is None or isinstance(value, Workload):
            return value
        names = [field.name for field in fields(cls)]
        if not isinstance(value, Mapping) or not {*value} <= {*names}:
            raise ConfigurationError(
                f"workload must be a mapping of {', '.join(names)}, e.g. {{decode: 0.8, "
                f"prefill: 0.2, prompt: 512}}, got {value!r}"
            )
        return cls(**value)

    @property
    def rows(self) -> tuple[int, ...]:
        """Rows per call that layers are timed with, in ascending order; those with a share."""
        shares = ((_DECODE_ROWS, self.decode), (self.prompt, self.prefill))
        return tuple(sorted({rows for rows, share in shares if share}))

    def seconds(self, times: Mapping[int, float]) -> float:
        """Return the mean seconds per token from the seconds per call of each number of rows."""
        per_token = self.prefill * times[self.prompt] / self.prompt if self.prefill else 0.0
        one_by_one = self.decode * times[_DECODE_ROWS] if self.decode else 0.0
        return (one_by_one + per_token) / (self.decode + self.prefill)


def form_of(config: OpConfig) -> str | None:
    """Return the properties of a configuration that decide on the kernel; None if not timed.

    The rounding of a weight does not change its kernel. Static ranges are not timed, as their
    kernels depend on the neighbours of a layer.
    """
    if config.approach is Approach.STATIC:
        return None
    weight = config.weight
    isolated = replace(
        config, weight=None if weight is None else weight.uncorrected, corrections=()
    )
    parts = (isolated.precision, isolated.kernel, isolated.weight, isolated.activation)
    return ", ".join(str(part) for part in parts if part)
