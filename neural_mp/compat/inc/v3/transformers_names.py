"""`neural_compressor.transformers`, whose models are quantized on loading, and `.evaluation`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from neural_mp.api.saved_model import is_saved_model
from neural_mp.compat.inc.import_aliases import make_absent_getter
from neural_mp.compat.inc.v3.base_config import WeightOnlyConfig
from neural_mp.compat.inc.v3.flow import convert, load, prepare
from neural_mp.compat.inc.v3.torch_configs import AutoRoundConfig, AWQConfig, RTNConfig, TEQConfig
from neural_mp.compat.inc.v3.torch_configs import GPTQConfig as GPTQOfTorch
from neural_mp.errors import DataError
from neural_mp.metrics.language import evaluate_lm_tasks

if TYPE_CHECKING:
    from torch.nn import Module

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
        tokenizer: Callable[..., Any] | None = None,
        dataset: str | Path | Iterable[Any] | None = None,
        n_samples: int = 128,
        seq_len: int = 2048,
        batch_size: int = 8,
        quant_lm_head: bool = False,
        **options: object,
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
        if isinstance(data, str | Path) and not Path(data).is_file():
            raise DataError(
                f"dataset must be a text file, a list of texts or batches of token ids, got "
                f"{str(data)!r}, which is no file; no data are downloaded"
            )
        if data is None:
            raise DataError(
                f"{type(self).__name__} requires calibration data; set dataset to a text file, a "
                f"list of texts or batches of token ids"
            )
        if isinstance(data, str | Path):
            texts: list[Any] = [Path(data).read_text(encoding="utf-8")]
        else:
            texts = list(data)
        if not all(isinstance(text, str) for text in texts):
            yield from texts
            return
        if self.tokenizer is None:
            raise DataError("calibration texts require a tokenizer; set tokenizer")
        yield from self._windows(self.tokenizer("\n\n".join(texts))["input_ids"])

    def _windows(self, tokens: Sequence[int]) -> Iterator[Any]:
        ids = importlib.import_module("torch").tensor(tokens)
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
        cls,
        name: str | Path,
        *values: object,
        quantization_config: object = None,
        **options: object,
    ) -> Module:
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


def _quantize_model(model: Module, options: object) -> Module:
    if not isinstance(options, _LoadingConfig):
        return convert(prepare(model, options))
    config = options.config()
    prepared = prepare(model, config)
    if any(rounding != "rtn" for rounding in config.roundings):
        torch: Any = importlib.import_module("torch")
        with torch.no_grad():
            for batch in options.batches():
                if isinstance(batch, Mapping):
                    prepared(**batch)
                else:
                    prepared(batch)
    return convert(prepared)


def _make_savable(model: Module) -> Module:
    """Return the module, whose `save_pretrained` writes a folder that is loaded here."""

    def save_pretrained(save_directory: str | Path, **options: object) -> None:
        model.save(save_directory)

    model.save_pretrained = save_pretrained
    return model


class LMEvalParser:
    """Options of an evaluation.

    Args:
        model: kind of model in lm-eval.
        tasks: names of tasks, separated by commas.
        model_args: options of the model, as in lm-eval.
        user_model: the model to evaluate, instead of the one that `model_args` names.
        tokenizer: its tokenizer.
        **options: further options: `num_fewshot`, `batch_size`, `limit`.
    """

    def __init__(
        self,
        model: str = "hf",
        tasks: str = "lambada_openai",
        model_args: str = "",
        user_model: Module | None = None,
        tokenizer: Callable[..., Any] | None = None,
        **options: Any,
    ) -> None:
        self.model, self.tasks, self.model_args = model, tasks, model_args
        self.user_model, self.tokenizer = user_model, tokenizer
        self.num_fewshot = options.get("num_fewshot")
        self.batch_size = options.get("batch_size", 1)
        self.limit = options.get("limit")
        self.options = options


def evaluate(args: LMEvalParser) -> dict[str, Any]:
    """Return the results of lm-eval.

    Raises:
        MissingFrameworkError: lm-eval is not installed.
    """
    options = {name: getattr(args, name) for name in ("num_fewshot", "batch_size", "limit")}
    tasks = args.tasks.split(",")
    if args.user_model is None:
        return evaluate_lm_tasks(args.model, tasks, model_args=args.model_args, **options)
    return evaluate_lm_tasks(args.user_model, tasks, tokenizer=args.tokenizer, **options)


__getattr__ = make_absent_getter(globals())
