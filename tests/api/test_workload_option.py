"""The option `workload`: a decoder is tuned for its own mix, and other models are refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from neural_mp import MixedPrecision
from neural_mp.cli.options import SearchOptions
from neural_mp.config import settings_from
from neural_mp.config.writer import settings_to_yaml
from neural_mp.core.op_timings import Workload
from neural_mp.errors import ConfigurationError
from neural_mp.io.yaml_reader import load_yaml
from neural_mp.tuning.measurement.objectives import with_tokens
from neural_mp.tuning.measurement.probe import MeasuringProbe

MIX = {"decode": 0.8, "prefill": 0.2, "prompt": 16}
WORDS = 64


class Decoder(nn.Module):
    """A table, a dense layer and a head, as the logits of the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, 256)
        self.hidden, self.head = nn.Linear(256, 256), nn.Linear(256, WORDS)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.hidden(self.table(input_ids))))


def _converter(tmp_path, **options) -> MixedPrecision:
    torch.manual_seed(0)
    ids = torch.randint(1, WORDS, (8, 12))
    return MixedPrecision(
        model=Decoder().eval(),
        precisions="int4,int8,bf16",
        metric="perplexity",
        accuracy_criterion={"relative": 0.4},
        eval_dataloader=[({"input_ids": ids}, ids)],
        workspace=tmp_path,
        # Times count, but not so much that kernels of a small CPU decide for FP32.
        objective={"performance": 0.02, "footprint": 0.98},
        **{"capture": "layers", "workload": MIX, **options},
    )


@pytest.mark.slow
@pytest.mark.usefixtures("quick_runs")
def test_a_decoder_is_tuned_by_the_times_of_its_forms(tmp_path, monkeypatch):
    timed = []
    measured = MeasuringProbe.form_times

    def watched(probe, workload):
        timed.append(measured(probe, workload))
        return timed[-1]

    monkeypatch.setattr(MeasuringProbe, "form_times", watched)
    result = _converter(tmp_path)()
    assert result.plan.counts().keys() & {"int4", "int8", "bf16"}
    assert {*timed[0]} == {"hidden", "head"}
    assert all({*rows} == {1, 16} for by in timed[0].values() for rows in by.values())
    _converter(tmp_path, max_batches=1, random_seed=1)()
    assert timed[1] == timed[0], "times of the same machine are read from the cache"


def test_a_model_in_one_graph_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="workload requires a decoder in PyTorch"):
        _converter(tmp_path, capture="whole")()


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"decode": 0, "prefill": 0}, "got 0 for both"),
        ({"decode": -1, "prefill": 1}, "workload.decode must be a finite number from 0"),
        ({"decode": 1, "prompt": 0}, "workload.prompt must be a whole number from 1"),
        ({"decoding": 1}, "workload must be a mapping of decode, prefill, prompt"),
        (0.8, "workload must be a mapping of decode, prefill, prompt"),
    ],
)
def test_a_bad_workload_is_one_clear_error_in_python_and_yaml(tmp_path, value, said):
    with pytest.raises(ConfigurationError, match=said):
        _converter(tmp_path, workload=value)()
    with pytest.raises(ConfigurationError, match=said):
        settings_from({"tuning": {"workload": value}}, "a file")


def test_a_workload_survives_a_yaml_file():
    settings = settings_from({"tuning": {"workload": MIX}}, "a file")
    restored = settings_from(load_yaml(settings_to_yaml(settings)), "the same file")
    assert restored.options.workload == MIX
    assert MixedPrecision(restored).workload == MIX


def test_the_command_takes_a_workload_as_in_yaml():
    converter = MixedPrecision()
    SearchOptions(workload="{decode: 0.8, prefill: 0.2, prompt: 16}").apply_to(converter)
    assert converter.workload == Workload(0.8, 0.2, 16)
    with pytest.raises(ConfigurationError, match="--workload must be a mapping"):
        SearchOptions(workload="{decode: ").apply_to(converter)


def test_inputs_of_one_token_and_of_a_prompt_are_those_of_the_first_sample():
    ids = torch.arange(6).reshape(2, 3)
    assert with_tokens({"input_ids": ids}, 1)["input_ids"].tolist() == [[0]]
    assert with_tokens({"input_ids": ids}, 5)["input_ids"].tolist() == [[0, 1, 2, 0, 1]]
    with pytest.raises(ConfigurationError, match="whose inputs are tokens"):
        with_tokens({"x": torch.zeros(3)}, 1)
