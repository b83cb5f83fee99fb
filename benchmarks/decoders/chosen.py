"""Forms that a search by time chooses for a number of rows, and their speed as a whole model."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from benchmarks.decoders.goals import Detail, Figure, Goal
from benchmarks.decoders.settings import Settings
from benchmarks.decoders.torch_stack import WIDTH, WORDS, cpu_seconds, ratio, stack
from neural_mp import AccuracyCriterion, MixedPrecision
from neural_mp.config import settings_from
from neural_mp.core.op_timings import describe_timed_form

HEADINGS = ("rows", "forms that the search chose", "over FP32", "over a model in BF16")
#: Rows per call: a step of decoding, steps of several sequences, prompts.
ROWS = (1, 8, 32, 128)
_TEXTS, _LENGTH = 8, 8
_TOLERANCE = 0.05
#: Factor of the logits of random weights: all words are about equally likely, so that no form is
#: too inaccurate and time alone decides.
_EVEN = 0.02
#: Time does not depend on how weights are rounded.
_OPTIONS = {"quantization": {"optype_wise": {"linear": {"weight": {"rounding": "rtn"}}}}}


class Decoder(nn.Module):
    """A table of words before the stack of layers."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.layers = stack(layers)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.layers(self.table(input_ids).flatten(0, 1))
        return (_EVEN * logits).unflatten(0, input_ids.shape)


def _tokens(texts: int, length: int) -> torch.Tensor:
    return torch.randint(WORDS, (texts, length), generator=torch.Generator().manual_seed(2))


def searched(net: nn.Module, rows: int, workspace: str) -> Any:
    """Return the fastest result for calls of this many rows, of all forms that have kernels."""
    ids = _tokens(_TEXTS, _LENGTH)
    converter = MixedPrecision(settings_from(_OPTIONS, "the benchmark"), workspace=workspace)
    converter.model, converter.capture = net, "layers"
    converter.precisions, converter.objective = "int4,int8,bf16", "performance"
    converter.workload = {"prefill": 1, "prompt": rows}
    converter.metric = "perplexity"
    converter.accuracy_criterion = AccuracyCriterion(_TOLERANCE)
    converter.eval_dataloader = [({"input_ids": ids}, ids)]
    return converter()


def chosen(settings: Settings) -> Iterator[Detail | Figure]:
    """Yield a row per number of rows, and the ratios over BF16."""
    net = Decoder(settings.layers).eval()
    half = Decoder(settings.layers).eval().bfloat16()
    ratios = []
    for rows in ROWS:
        with tempfile.TemporaryDirectory() as workspace, torch.no_grad():
            result = searched(net, rows, workspace)
            ids = _tokens(1, rows)
            calls = [lambda m=m, ids=ids: m(ids) for m in (net, half, result)]
            fp32, bf16, best = cpu_seconds(calls, settings.rounds)
        forms = {describe_timed_form(config) for config in result.plan.values()}
        ratios.append(f"{ratio(bf16, best):.2f}")
        label = "; ".join(sorted(form for form in forms if form))
        yield Detail(HEADINGS, (str(rows), label, f"{ratio(fp32, best):.2f}", ratios[-1]))
    yield Figure(Goal.CHOSEN, ", ".join(ratios))
