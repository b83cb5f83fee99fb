"""The commands on an OpenVINO file, and trials in other processes on a model in memory."""

import cloudpickle
import numpy as np
import pytest
from command_cases import CommandCases

from neural_mp import ExitPolicy, MixedPrecision
from neural_mp.adaptors.openvino.adaptor import OpenVinoAdaptor
from neural_mp.adaptors.openvino.runtime import ov
from neural_mp.metrics import build_metric

pytestmark = pytest.mark.slow


class TestOpenVino(CommandCases):
    convolution = "Convolution"

    @pytest.fixture(scope="class")
    @classmethod
    def file(cls, _taken_in, tmp_path_factory):
        path = tmp_path_factory.mktemp("openvino") / "net.xml"
        ov.save_model(_taken_in["small"], path, compress_to_fp16=False)
        return path

    def test_the_whole_plan_holds(self, ask):
        assert ask("audit", "tuned")["holds"]


def test_a_pickled_model_is_the_same_model(net, digits):
    adaptor = OpenVinoAdaptor()
    model = adaptor.load(net, example=digits[1].images[:4])
    copied = cloudpickle.loads(cloudpickle.dumps(adaptor.to_picklable(model)))
    assert adaptor.fingerprint(copied) == adaptor.fingerprint(model)
    assert list(adaptor.graph(copied)) == list(adaptor.graph(model))
    images = digits[1].images[:20]
    np.testing.assert_array_equal(adaptor.predict(copied, images), adaptor.predict(model, images))


@pytest.mark.usefixtures("quick_runs")
def test_two_workers_find_what_one_finds(net, digits):
    outcomes = []
    for workers in (1, 2):
        converter = MixedPrecision()
        converter.model = net
        converter.precisions = "int8"
        converter.strategy = "random"
        converter.objective = "modelsize"
        converter.metric = build_metric("accuracy")
        converter.eval_dataloader = digits[1].loader()
        converter.exit_policy = ExitPolicy(max_trials=2)
        converter.workers = workers
        result = converter()
        outcomes.append([(trial.plan, trial.accuracy, trial.outcome) for trial in result.trials])
    assert outcomes[0] == outcomes[1]
