"""The road of a plan, which is the same for every framework."""

import pytest

from neural_mp import MixedPrecision
from neural_mp.adaptors.loaded_model import LoadedModel
from neural_mp.core import quantization_flow
from neural_mp.space import resolution
from neural_mp.strategies.base import Strategy


def test_the_runs_of_an_op_are_those_after_the_warm_up():
    class Timed:
        def time_ops(self, model, inputs, runs):
            self.runs = [float(number) for number in range(runs)]
            return {"conv": self.runs, "folded": [0.0]}

    timed = Timed()
    times = LoadedModel(timed, None).profile_ops(None)
    assert times["folded"] == (0.0,)
    assert 0 < len(times["conv"]) < len(timed.runs)
    assert times["conv"] == tuple(timed.runs[-len(times["conv"]) :])


class Once(Strategy):
    """Tries everything as low as it can, and that again in other words."""

    name = "once"

    def search(self, problem):
        low = problem.space.fastest_plan()
        yield [low]
        yield [problem.space.resolve(low).plan]


def test_one_trial_resolves_its_plan_once_and_follows_it_through_the_graph_once(
    monkeypatch, net, digits, accuracy
):
    followed, checked = [], []
    follow, check = resolution.propagate_quantization, resolution.Resolver._expand_plan

    def following(graph, chosen, internal=frozenset()):
        followed.append(dict(chosen))
        return follow(graph, chosen, internal)

    def checking(resolver, plan):
        checked.append(plan)
        return check(resolver, plan)

    monkeypatch.setattr(resolution, "propagate_quantization", following)
    monkeypatch.setattr(quantization_flow, "propagate_quantization", None)
    monkeypatch.setattr(resolution.Resolver, "_expand_plan", checking)
    monkeypatch.setattr("neural_mp.api.config_objects.create_strategy_named", lambda name: Once())
    converter = MixedPrecision()
    converter.model, converter.precisions, converter.metric = net, "int8", accuracy
    converter.objective = "modelsize"
    converter.calib_dataloader = digits[0].loader()
    converter.eval_dataloader = digits[1].loader()
    result = converter()
    assert len(result.trials) == 1
    # The empty plan is FP32, whose memory is told for the report.
    assert len([plan for plan in checked if plan]) == 1
    assert len([chosen for chosen in followed if chosen]) == 1
    assert result.met
    assert accuracy.evaluations == 2


def test_a_plan_that_lowers_nothing_is_never_written(monkeypatch, net, digits, plain_machine):
    from neural_mp.adaptors.pytorch.adaptor import PyTorchAdaptor

    adaptor = PyTorchAdaptor()
    images = digits[1].images[:8]
    model = adaptor.load(net, example=images)
    space = adaptor.space(model, plain_machine)
    observed = adaptor.observe(model, [images], space)
    monkeypatch.setattr(PyTorchAdaptor, "convert_graph", lambda *_: pytest.fail("written"))
    assert adaptor.convert(model, space.resolve(space.fp32_plan()), observed, space) is model
    assert adaptor.native(model) is net
