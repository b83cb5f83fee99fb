"""Words that are choices: each a string, of which only a few are known."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from typing import TypeVar

from neural_mp.errors import ConfigurationError, NeuralMPError, did_you_mean

W = TypeVar("W", bound="Word")


class Word(str, Enum):
    """One of a few words; equal to its text, found under it in dicts, and printed as it."""

    __hash__ = str.__hash__

    def __str__(self) -> str:
        return str(self.value)

    @classmethod
    def read(
        cls: type[W],
        value: object,
        what: str,
        error: Callable[[str], NeuralMPError] = ConfigurationError,
    ) -> W:
        """The word that a text stands for.

        Args:
            value: the text, or the word itself.
            what: what the message calls it.
            error: makes the error that is raised.

        Raises:
            NeuralMPError: it is none of the words.
        """
        known = [word.value for word in cls]
        if not isinstance(value, str) or value not in known:
            raise error(f"{what} cannot be {value!r}{did_you_mean(str(value), known)}")
        return cls(value)


class StoredType(Word):
    """The type that the numbers of a quantized tensor are stored in."""

    INT8 = "int8"
    UINT8 = "uint8"


class Scheme(Word):
    """Whether zero is stored as 0, or as what suits the range."""

    SYMMETRIC = "symmetric"
    ASYMMETRIC = "asymmetric"


class Granularity(Word):
    """Whether every channel has a scale of its own."""

    PER_CHANNEL = "per_channel"
    PER_TENSOR = "per_tensor"


class Algorithm(Word):
    """What chooses the range of a tensor.

    The first four choose it from what calibration saw, best known first; with `dynamic` it is the
    range of the values at hand, found anew on every run.
    """

    MINMAX = "minmax"
    PERCENTILE = "percentile"
    KL = "kl"
    MSE = "mse"
    DYNAMIC = "dynamic"


class WeightRange(Word):
    """How much of int8 a weight uses: ±127, or ±63 (see `neural_mp.core.int8_accumulation`)."""

    FULL = "full_range"
    REDUCED = "reduced_range"


class Approach(Word):
    """The ways of INT8: ranges fixed by calibration, found on every run, or of weights only."""

    STATIC = "static"
    DYNAMIC = "dynamic"
    WEIGHT_ONLY = "weight_only"


class Capture(Word):
    """How the graph of a model may be found: of the whole model, or module by module."""

    WHOLE = "whole"
    MODULES = "modules"


class RuleSet(Word):
    """The rules by which the four lists decide: ours, or those of TensorFlow's own pass."""

    ADVANCED = "advanced"
    STOCK = "stock"


class Objective(Word):
    """What a run makes small: time, memory while it runs, or the size of weights."""

    PERFORMANCE = "performance"
    FOOTPRINT = "footprint"
    MODELSIZE = "modelsize"


class Dialect(Word):
    """Whose words a tuning file is written in: ours, or those of Intel Neural Compressor."""

    OWN = "own"
    INC = "inc"


def is_speed_alone(objectives: Iterable[Objective]) -> bool:
    """Whether nothing but time is to be made small."""
    return set(objectives) == {Objective.PERFORMANCE}
