"""`neural_compressor.transformers`: models of `transformers` that are quantized on loading."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from neural_mp.api.saved_model import is_saved_model
from neural_mp.compat.inc.import_aliases import absent_names
from neural_mp.compat.inc.v3.algorithm_config import WeightOnlyConfig
from neural_mp.compat.inc.v3.autoround import AutoRoundConfig
from neural_mp.compat.inc.v3.flow import convert, load, prepare
from neural_mp.compat.inc.v3.torch_configs import AWQConfig, RTNConfig, TEQConfig
from neural_mp.compat.inc.v3.torch_configs import GPTQConfig as GPTQOfTorch
from neural_mp.errors import DataError

__all__ = ["AutoRoundConfig"]

#: Options of loading that name features of other devices.
_IGNORED = ("use_neural_speed", "use_cpu", "use_xpu", "for_inference", "_commit_hash")


class _LoadingConfig:
    """Options of weight-only quantization on loading.

    Args:
        bits: bits of a weight.
        group_size: inputs per scale; -1 for one scale per output.
        sym: whether zero points are fixed.
        tokenizer: tokenizer of calibration texts.
        dataset: calibration: a text file, a list of texts, or batches of token ids.
        n_samples: number of calibration windows.
        seq_len: tokens of a window.
        batch_size: windows per call.
        quant_lm_head: whether the output layer is quantized.
        **options: options without effect.
    """

    algorithm: ClassVar[type[WeightOnlyConfig]] = RTNConfig

    def __init__(
        self,
        bits: int = 4,
        group_size: int = 32,
        *,
        sym: bool = True,
        tokenizer: Any = None,
        dataset: Any = None,
        n_samples: int = 128,
        seq_len: int = 2048,
        batch_size: int = 8,
        quant_lm_head: bool = False,
        **options: Any,
    ) -> None:
        self.bits, self.group_size, self.sym = bits, group_size, sym
        self.tokenizer, self.dataset = tokenizer, dataset
        self.n_samples, self.seq_len, self.batch_size = n_samples, seq_len, batch_size
        self.quant_lm_head = quant_lm_head
        self.options = options

    def config(self) -> WeightOnlyConfig:
        """Return the configuration of the algorithm."""
        return self.algorithm(
            bits=self.bits,
            group_size=self.group_size,
            use_sym=self.sym,
            quant_lm_head=self.quant_lm_head,
        )

    def batches(self) -> Iterator[Any]:
        """Yield calibration batches of token ids.

        Raises:
            DataError: there are no calibration data, or no tokenizer for texts.
        """
        data = self.dataset
        is_file = isinstance(data, str | Path) and Path(data).is_file()
        if isinstance(data, str | Path) and not is_file:
            raise DataError(
                f"dataset must be a text file, a list of texts or batches of token ids, got "
                f"{str(data)!r}, which is no file; no data are downloaded"
            )
        if data is None:
            raise DataError(
                f"{type(self).__name__} requires calibration data; set dataset to a text file, a "
                f"list of texts or batches of token ids"
            )
        texts = [Path(data).read_text(encoding="utf-8")] if is_file else list(data)
        if not all(isinstance(text, str) for text in texts):
            yield from texts
            return
        if self.tokenizer is None:
            raise DataError("calibration texts require a tokenizer; set tokenizer")
        yield from self._windows("\n\n".join(texts))

    def _windows(self, text: str) -> Iterator[Any]:
        torch: Any = importlib.import_module("torch")
        ids = torch.tensor(self.tokenizer(text)["input_ids"])
        length = min(self.seq_len, len(ids))
        count = min(len(ids) // max(length, 1), self.n_samples)
        if not count:
            raise DataError("the calibration texts must contain at least one token, got none")
        yield from ids[: count * length].reshape(count, length).split(self.batch_size)


class RtnConfig(_LoadingConfig):
    """Weights rounded to nearest."""


class GPTQConfig(_LoadingConfig):
    """Weights whose rounding errors are compensated with calibration data."""

    algorithm: ClassVar[type[WeightOnlyConfig]] = GPTQOfTorch


class AwqConfig(_LoadingConfig):
    """Weights scaled by the magnitudes of their inputs; `zero_point` is the opposite of `sym`."""

    algorithm: ClassVar[type[WeightOnlyConfig]] = AWQConfig

    def __init__(self, *values: Any, zero_point: bool = True, **options: Any) -> None:
        super().__init__(*values, **{"sym": not zero_point, **options})


class TeqConfig(_LoadingConfig):
    """As AWQ: the scales of inputs are searched, not trained."""

    algorithm: ClassVar[type[WeightOnlyConfig]] = TEQConfig


class _Auto:
    """Loading of models by a class of `transformers` of the same name."""

    _kind: ClassVar[str] = "AutoModel"

    @classmethod
    def from_pretrained(
        cls, name: str | Path, *values: Any, quantization_config: Any = None, **options: Any
    ) -> Any:
        """Load a model, and quantize its layers.

        Args:
            name: folder of a model of `transformers`, or of a model saved by `save_pretrained`.
            *values: passed on to `transformers`.
            quantization_config: the options of quantization; None for the model as stored.
            **options: passed on to `transformers`.

        Raises:
            DataError: the options need calibration data.
        """
        if is_saved_model(name):
            return _make_savable(load(name))
        arguments = {key: value for key, value in options.items() if key not in _IGNORED}
        kind = getattr(importlib.import_module("transformers"), cls._kind)
        model = kind.from_pretrained(name, *values, **arguments).eval()
        if quantization_config is None:
            return model
        return _make_savable(_quantize_model(model, quantization_config))


class AutoModel(_Auto):
    """`transformers.AutoModel`."""


class AutoModelForCausalLM(_Auto):
    """`transformers.AutoModelForCausalLM`."""

    _kind = "AutoModelForCausalLM"


class AutoModelForSeq2SeqLM(_Auto):
    """`transformers.AutoModelForSeq2SeqLM`."""

    _kind = "AutoModelForSeq2SeqLM"


def _quantize_model(model: Any, options: Any) -> Any:
    if not isinstance(options, _LoadingConfig):
        return convert(prepare(model, options))
    config = options.config()
    prepared = prepare(model, config)
    if any(rounding != "rtn" for rounding in config.roundings):
        _run_batches(prepared, options.batches())
    return convert(prepared)


def _run_batches(model: Any, batches: Iterable[Any]) -> None:
    torch: Any = importlib.import_module("torch")
    with torch.no_grad():
        for batch in batches:
            if isinstance(batch, Mapping):
                model(**batch)
            else:
                model(batch)


def _make_savable(model: Any) -> Any:
    """Return the module, whose `save_pretrained` writes a folder that is loaded here."""

    def save_pretrained(save_directory: str | Path, **options: Any) -> None:
        model.save(save_directory)

    model.save_pretrained = save_pretrained
    return model


__getattr__ = absent_names(globals())
