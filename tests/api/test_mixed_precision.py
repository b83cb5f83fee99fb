"""The object a user drives, as the README shows it, on PyTorch models."""

import numpy as np
import pytest
import torch
from torch import nn

import neural_mp
from neural_mp import AccuracyCriterion, ExitPolicy, MixedPrecision, common
from neural_mp.errors import DataError
from neural_mp.testing import ApiContract

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_runs")]


def outputs(model, images):
    with torch.no_grad():
        return model(torch.from_numpy(images)).numpy()


class TestFace(ApiContract):
    framework = "pytorch"
    native = nn.Module
    convolution = "conv2d"
    image = "x"

    @pytest.fixture
    def model(self, net):
        return net

    @pytest.fixture
    def reference(self, net, digits):
        return outputs(net, digits[1].images)

    @pytest.fixture
    def hostile_net(self, hostile_net):
        return hostile_net


class TestFaceOfAFile:
    """Every use of a model that was given as a file."""

    framework, native, convolution = TestFace.framework, TestFace.native, TestFace.convolution
    image, reference = TestFace.image, TestFace.reference
    test_a_yaml_file = ApiContract.test_a_yaml_file
    test_dicts_with_labels_in_them = ApiContract.test_dicts_with_labels_in_them

    @pytest.fixture
    def model(self, exported, tmp_path):
        (tmp_path / "net.pt2").write_bytes(exported)
        return str(tmp_path / "net.pt2")

    def test_a_model_alone(self, monkeypatch, model, reference, digits):
        ApiContract.test_a_model_alone(self, monkeypatch, model, reference, digits, "bf16")


@pytest.fixture
def converter(net, digits, accuracy):
    tuner = MixedPrecision(precisions="int8")
    tuner.objective = "modelsize"  # latencies this short are the machine's mood
    tuner.model, tuner.metric, tuner.eval_dataloader = net, accuracy, digits[1].loader()
    return tuner


def test_bf16_beside_int8_without_hardware_is_left_out(net, plain_machine, digits, accuracy):
    converter = MixedPrecision()
    converter.objective = "modelsize"
    converter.hardware = plain_machine
    converter.precisions = "int8,bf16"
    converter.model = net
    converter.metric = accuracy
    converter.eval_dataloader = digits[1].loader()
    result = converter.fit()
    assert result.met
    assert any("bf16 is not supported" in warning for warning in result.report.warnings)
    assert "bf16" not in {config.precision for config in result.plan.values()}


@pytest.mark.parametrize("word", ["1", "0"])
def test_bf16_that_a_variable_asks_for_is_told_of_where_there_is_no_hardware(
    net, plain_machine, digits, accuracy, monkeypatch, word
):
    monkeypatch.setenv("ITEX_AUTO_MIXED_PRECISION", word)
    converter = MixedPrecision()
    converter.objective = "modelsize"
    converter.hardware = plain_machine
    converter.model = net
    converter.metric = accuracy
    converter.eval_dataloader = digits[1].loader()
    warnings = " ".join(converter.fit().report.warnings)
    assert ("bf16 is not supported" in warnings) == (word == "1")


def test_int8_alone_without_data_is_refused(net):
    converter = MixedPrecision()
    converter.precisions = "int8"
    converter.model = net
    with pytest.raises(DataError, match="int8 requires calibration data; set calib_dataloader"):
        converter()


def as_torch_loader(split):
    data = torch.utils.data.TensorDataset(
        torch.from_numpy(split.images), torch.from_numpy(split.labels)
    )
    return torch.utils.data.DataLoader(data, batch_size=100)


def as_generator_function(split):
    def batches():
        for start in range(0, len(split), 100):
            yield split.images[start : start + 100], split.labels[start : start + 100]

    return batches


LOADERS = {
    "our loader": lambda split: common.DataLoader(split, batch_size=100),
    "our loader over an iterable": lambda split: common.DataLoader(list(split_items(split)), 100),
    "a torch loader": as_torch_loader,
    "a generator function": as_generator_function,
    "a running generator": lambda split: as_generator_function(split)(),
    "a list": lambda split: list(as_generator_function(split)()),
}


def split_items(split):
    return (split[index] for index in range(len(split)))


@pytest.mark.parametrize("kind", LOADERS)
def test_any_kind_of_dataloader(converter, net, digits, kind):
    converter.eval_dataloader = LOADERS[kind](digits[1])
    result = converter()
    assert result.met
    expected = (outputs(net, digits[1].images).argmax(1) == digits[1].labels).mean()
    assert result.report.baseline_accuracy == pytest.approx(expected)


def test_an_evaluation_function_gets_the_native_model(net, digits):
    models = []

    def evaluate(model) -> float:
        models.append(model)
        return float((outputs(model, digits[1].images).argmax(1) == digits[1].labels).mean())

    converter = MixedPrecision()
    converter.precisions = "int8"
    converter.objective = "modelsize"  # latencies this short are the machine's mood
    converter.model = net
    converter.eval_func = evaluate
    converter.calib_dataloader = digits[0].loader()
    result = converter()
    assert result.met
    assert models[0] is net
    assert all(isinstance(model, nn.Module) for model in models)
    assert len(models) == result.report.evaluations


def test_the_hostile_net_is_tuned_to_keep_most_of_its_int8_ops(converter, hostile_net, digits):
    converter.strategy = "basic"
    converter.model = hostile_net
    converter.calib_dataloader = digits[0].loader()
    converter.accuracy_criterion = AccuracyCriterion(0.01, relative=True)
    result = converter()

    trials = result.trials
    assert [trial.met for trial in trials[:4]] == [False] * 4  # all-INT8, however calibrated
    assert all(set(trial.plan.counts()) == {"int8"} for trial in trials[:4])
    assert result.met
    assert result.report.accuracy >= 0.99 * result.report.baseline_accuracy
    # Convolutions 2 and 3, op names "2" and "4", share the hostile tensor and fell back together…
    together = [
        {op for op, config in trial.plan.items() if config.precision == "fp32"} for trial in trials
    ]
    assert {"2", "4"} in together
    # …and the one that only writes it came back.
    assert result.plan.counts()["int8"] >= 7


def test_the_space_sees_that_the_two_convolutions_belong_together(hostile_net, digits, all_machine):
    from neural_mp.adaptors.registry import adaptor_for

    adaptor = adaptor_for(hostile_net)
    model = adaptor.load(hostile_net, example=digits[1].images[:8])
    space = adaptor.space(model, all_machine)
    assert frozenset({"2", "4"}) in space.tied_ops
    observed = adaptor.observe(model, [digits[0].images[:100]], space)
    tensor = next(t for t in space.tensors if t.ops == {"2", "4"})
    assert observed.nsr[tensor.name] > 0.5
    # How noisy the others are depends on how training went, and that on the processor.
    remaining = [t.name for t in space.tensors if t is not tensor]
    assert all(observed.nsr[name] < observed.nsr[tensor.name] / 10 for name in remaining)


def test_a_target_no_plan_meets_returns_fp32_and_the_closest(converter, net, digits):
    converter.exit_policy = ExitPolicy(max_trials=3)

    class Never(AccuracyCriterion):
        def met(self, baseline, accuracy):
            return False

    converter.accuracy_criterion = Never()
    result = converter()
    assert result.met is False
    assert set(result.plan.counts()) == {"fp32"}
    assert result.model is net
    assert result.report.best_rejected in result.trials
    warning = next(w for w in result.report.warnings if "no plan met the target" in w)
    assert "Closest plan" in warning
    images = digits[1].images[:10]
    np.testing.assert_allclose(result(images), outputs(net, images), atol=1e-4)


def test_saving_and_loading(converter, digits, tmp_path):
    """In a process of its own: adaptors/pytorch/test_pytorch_storage.py."""
    result = converter()
    result.save(tmp_path / "tuned")
    images = digits[1].images[:37]
    loaded = neural_mp.load(tmp_path / "tuned")
    assert (loaded.met, loaded.report.accuracy) == (True, result.report.accuracy)
    assert loaded.plan == result.plan
    np.testing.assert_array_equal(loaded(images), result(images))


def test_no_data_of_the_user_is_saved(converter, digits, tmp_path):
    converter.eval_dataloader = digits[1].loader(500)
    result = converter()
    result.save(tmp_path / "tuned")
    restored = neural_mp.load(tmp_path / "tuned")
    (example,) = restored.held.example.args
    assert example.shape[0] == 2
    assert not example.any()


@pytest.mark.parametrize("objective", ["performance", "footprint", "modelsize"])
def test_every_objective_is_measured(converter, objective):
    converter.objective = objective
    result = converter()
    assert result.met
    assert result.trials[0].objectives[objective] > 0


def test_a_regression_metric_where_lower_is_better(digits):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1)).eval()

    class MeanSquaredError:
        def reset(self):
            self.errors = []

        def update(self, preds, labels):
            self.errors.append(np.square(preds[:, 0] - labels).mean())

        def result(self):
            return np.mean(self.errors)

    converter = MixedPrecision()
    converter.precisions = "int8"
    converter.objective = "modelsize"  # so small a model is no faster in INT8
    converter.model = model
    converter.metric = MeanSquaredError()
    converter.eval_dataloader = digits[1].loader()
    converter.accuracy_criterion = AccuracyCriterion(0.05, higher_is_better=False)
    result = converter()
    assert result.met
    assert result.report.accuracy <= result.report.baseline_accuracy * 1.05


class TwoImages(nn.Module):
    """Takes two images, and names the second."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 10), nn.Linear(64, 10)

    def forward(self, image, other):
        return self.first(image.flatten(1)) - self.second(other.flatten(1))


def test_the_result_is_called_as_the_model_is(digits, accuracy):
    torch.manual_seed(0)
    images = digits[1].images[:60]
    pairs = [
        ((images[i : i + 20], images[i : i + 20] / 2), digits[1].labels[i : i + 20])
        for i in (0, 20, 40)
    ]
    converter = MixedPrecision()
    converter.model = TwoImages().eval()
    converter.precisions = "int8"
    converter.metric, converter.eval_dataloader = accuracy, pairs
    converter.exit_policy = ExitPolicy(performance_only=True)
    result = converter()
    a, b = images[:5], images[5:10]
    expected = result((a, b))
    np.testing.assert_array_equal(result(a, b), expected)
    np.testing.assert_array_equal(result(image=a, other=b), expected)
    with pytest.raises(DataError, match="either by position or by name"):
        result(a, other=b)
