import pytest
import torch
from contract_nets import EveryKind
from nets import train
from torch import nn
from torch.utils._pytree import register_pytree_node

from neural_mp import AutoMixedPrecisionOptions, MixedPrecision
from neural_mp.errors import ConfigurationError, HistoryError
from neural_mp.testing import AmpContract

pytestmark = pytest.mark.slow


@pytest.mark.usefixtures("quick_runs")
class TestAmp(AmpContract):
    average, softmax = "avg_pool2d", "softmax"
    example = (torch.zeros(2, 1, 8, 8),)

    @pytest.fixture(scope="class")
    @classmethod
    def net(cls):
        torch.manual_seed(0)
        return EveryKind().eval()


class Drowned(nn.Module):
    """Adding 4096 leaves BF16 steps of 32: nothing of the features comes through."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.head = nn.Linear(256, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.avg_pool2d(torch.relu(self.first(image)), 2)
        hidden = torch.relu(self.second(hidden)) + 4096.0 - 4096.0
        return self.head(hidden.flatten(1))


def test_tuning_returns_lossy_ops_to_fp32_and_no_product(digits, accuracy, bf16_machine):
    torch.manual_seed(0)
    net = Drowned()
    train(net, digits[0], epochs=8)
    converter = MixedPrecision()
    converter.model, converter.hardware, converter.precisions = net.eval(), bf16_machine, "bf16"
    converter.metric, converter.eval_dataloader = accuracy, digits[1].loader()
    result = converter()
    assert not result.trials[0].met
    assert result.met
    assert len(result.trials) <= 8
    fp32_ops = {op for op, config in result.plan.items() if config.precision == "fp32"}
    assert fp32_ops == {"add", "sub"}


class Layers(nn.Module):
    """Two dense layers over 8 features, for what lies between and behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)


class WidenedSoftmax(Layers):
    def forward(self, x):
        x = self.second(torch.softmax(self.first(x), -1))
        return self.second(torch.softmax(x, -1, dtype=torch.float32))


class LargeScalars(Layers):
    def forward(self, x):
        x = self.first(x)
        negative = x < 0
        x = self.second(x.masked_fill(negative, -1.0).clamp(-9, 9)).masked_fill(negative, -1e9)
        return x.masked_fill(negative, torch.finfo(torch.float32).min).clamp(-1e9, 1e9)


class StoredMask(Layers):
    def __init__(self) -> None:
        super().__init__()
        mask = torch.full((4, 8), torch.finfo(torch.float32).min).triu(1)
        mask[3] = mask[0, 1]  # a row that is masked altogether
        self.register_buffer("mask", mask)

    def forward(self, x):
        return torch.softmax(self.second(self.first(x)) + self.mask, -1)


class ComputedMask(Layers):
    def forward(self, x):
        mask = torch.where(x[:, :1] > 0, torch.finfo(torch.float32).min, 0.0)
        return torch.softmax(self.second(self.first(x)) + mask, -1)


class WideStatistics(Layers):
    """A batch norm that cannot be folded, whose variance FP16 has no number for."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.norm.running_var.fill_(1e5)

    def forward(self, x):
        return self.second(self.norm(self.first(x).relu() * 300))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize(
    "kind", [WidenedSoftmax, LargeScalars, StoredMask, ComputedMask, WideStatistics]
)
def test_what_16_bits_have_no_numbers_for_stays_right(kind, precision, all_machine):
    torch.manual_seed(0)
    net, data = kind().eval(), torch.randn(4, 8)
    converter = MixedPrecision()
    converter.model, converter.hardware, converter.precisions = net, all_machine, precision
    converter.inputs = (data,)
    result = converter()
    assert result.plan.counts()[precision] >= 2
    with torch.no_grad():
        torch.testing.assert_close(result(data), net(data), atol=0.02, rtol=0.02)


def test_trials_under_other_lists_are_not_taken_up_again(digits, accuracy, bf16_machine, net):
    def converter(**amp):
        tuner = MixedPrecision(amp=AutoMixedPrecisionOptions(**amp) if amp else None)
        tuner.model, tuner.hardware, tuner.precisions = net, bf16_machine, "bf16"
        tuner.metric, tuner.eval_dataloader = accuracy, digits[1].loader()
        return tuner

    converter()()
    again = converter()
    again.resume = True
    assert again().report.evaluations == 0
    changed = converter(inferlist_remove="add", denylist_add="add")
    changed.resume = True
    with pytest.raises(HistoryError, match="four lists of this run differ"):
        changed()


def test_a_log_that_cannot_be_written_ends_nothing_that_was_computed(tmp_path):
    class Pair:
        """A container without a name that torch.export's format could hold."""

        def __init__(self, values):
            self.values = list(values)

    register_pytree_node(Pair, lambda pair: (pair.values, None), lambda values, _: Pair(values))

    class Paired(Layers):
        def forward(self, x):
            return Pair([self.first(x), x])

    (tmp_path / "file").write_text("")
    converter = MixedPrecision(amp=AutoMixedPrecisionOptions(log_path=tmp_path / "file" / "log"))
    converter.model, converter.precisions = Paired().eval(), "int8"
    converter.inputs, converter.approach = (torch.randn(4, 8),), "dynamic"
    with pytest.raises(ConfigurationError, match="log_path .* cannot be written to"):
        converter()
    converter.amp.log_path = tmp_path / "log"
    result = converter()
    assert result.plan.counts()
    assert any("the graph after was not written" in w for w in result.report.warnings)
    assert (tmp_path / "log" / "before.txt").is_file()


def test_an_edit_is_meant_for_the_precision_that_has_the_type_there(all_machine):
    class Mean(Layers):
        def forward(self, x):
            return self.second(self.first(x)).mean(-1)

    converter = MixedPrecision(amp=AutoMixedPrecisionOptions(denylist_remove="mean"))
    converter.model, converter.hardware = Mean().eval(), all_machine
    converter.inputs, converter.precisions = (torch.randn(4, 8),), "bf16,fp16"
    assert converter().plan["mean"].precision == "bf16"  # INFER there, as before


def test_variables_for_tensorflow_do_not_stop_other_frameworks(monkeypatch, all_machine):
    monkeypatch.setenv("TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_DENYLIST_ADD", "Tanh")
    converter = MixedPrecision()
    converter.model, converter.hardware = nn.Sequential(nn.Linear(8, 8)).eval(), all_machine
    converter.inputs, converter.precisions = (torch.randn(4, 8),), "bf16"
    assert any(
        "names 'Tanh', which is not an op type of pytorch" in w for w in converter().report.warnings
    )
