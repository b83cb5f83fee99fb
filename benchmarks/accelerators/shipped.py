"""Nets that packages ship, with the metrics of the public report on regressions of accelerators."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.accelerators.fidelity import Characters, MaskOverlap, Probability, Spearman
from benchmarks.nets.case import write_onnx
from benchmarks.real import encoder, magika, ocr, speech
from benchmarks.real.case import Batches, Case, Split
from benchmarks.real.peers import session_run
from benchmarks.real.texts import described

#: Tokens of a text, fixed as compilers require, and texts of a batch.
TOKENS, TEXTS_PER_BATCH = 32, 16
#: Texts for calibration and evaluation.
TEXTS = {"calibration": slice(0, 32), "test": slice(32, 128)}
#: Batches of the cases of `benchmarks.real` that are read, at most.
_MAX_BATCHES: dict[Split, int] = {"calibration": 8, "test": 12}


def text_batches(split: Split) -> Batches:
    """Return batches of padded tokens, each with the embeddings of FP32."""
    texts = [text for _, text in described()[TEXTS[split]]]
    run = session_run(encoder_file(_scratch()))
    batches = []
    for start in range(0, len(texts), TEXTS_PER_BATCH):
        inputs = encoder.tokens(texts[start : start + TEXTS_PER_BATCH], TOKENS)
        batches.append((inputs, run(inputs)))
    return Batches(batches, TEXTS_PER_BATCH)


@cache
def _scratch() -> Path:
    """Return the folder of the exported encoder, which all processes of this machine share."""
    folder = Path.home() / ".cache" / "neural-mp-benchmarks"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def encoder_file(scratch: Path) -> str:
    """Return the encoder as ONNX, with an additive mask of -3.4e38 and a fixed number of tokens."""
    import torch
    from torch import nn
    from transformers import AutoModel

    path = scratch / f"encoder-{TOKENS}.onnx"
    if path.exists():
        return str(path)

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert = AutoModel.from_pretrained(
                encoder.folder(), local_files_only=True, attn_implementation="eager"
            )

        def forward(self, input_ids: Any, attention_mask: Any) -> Any:
            attended = attention_mask.to(torch.float32)
            bias = (1.0 - attended[:, None, None, :]) * torch.finfo(torch.float32).min
            states = self.bert(input_ids, attention_mask=bias).last_hidden_state
            weights = attended.unsqueeze(-1)
            pooled = (states * weights).sum(1) / weights.sum(1).clamp(min=1e-9)
            return nn.functional.normalize(pooled, dim=1)

    texts = [text for _, text in described()[:2]]
    inputs = encoder.tokens(texts, TOKENS)
    return write_onnx(Encoder().eval(), inputs, path, {0: "texts"}, opset_version=21)


def _first_batches(case: Case, split: Split) -> Batches:
    batches = case.batches(split)
    return Batches(list(islice(batches, _MAX_BATCHES[split])), batches.batch_size)


def _beside_fp32(case: Case) -> Callable[[Split], Batches]:
    """Return the inputs of a case, with the outputs of FP32 as labels."""

    def batches(split: Split) -> Batches:
        own, run = _first_batches(case, split), session_run(case.source(_scratch()))
        return Batches([(inputs, run(inputs)) for inputs, _ in own], own.batch_size)

    return batches


def _with_truth(case: Case) -> Callable[[Split], Batches]:
    return lambda split: _first_batches(case, split)


def _case(case: Case, batches: Callable[[Split], Batches], metric: Callable[[], Any]) -> Case:
    return Case("onnxrt", case.source, batches, metric, ())


def _encoder_source(scratch: Path) -> str:
    return encoder_file(_scratch())


#: Name → net, in the order of the table.
SHIPPED: dict[str, Case] = {
    "MiniLM": Case("onnxrt", _encoder_source, text_batches, Spearman, ()),
    "OCR recognizer": _case(ocr.RECOGNITION, _with_truth(ocr.RECOGNITION), Characters),
    "OCR detector": _case(ocr.DETECTION, _beside_fp32(ocr.DETECTION), MaskOverlap),
    "OCR direction": _case(ocr.DIRECTION, _beside_fp32(ocr.DIRECTION), Probability),
    "silero-vad": _case(speech.SEQUENCE, _with_truth(speech.SEQUENCE), speech.SEQUENCE.metric),
    "magika": _case(magika.CASE, _with_truth(magika.CASE), magika.CASE.metric),
}
