"""The command line, as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import neural_mp
from neural_mp import PrecisionPlan

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_runs")]

TESTS = Path(__file__).parent.parent


def test_tune_shows_the_result_and_saves_it(tune_run, digits, net):
    assert tune_run.code == 0
    assert "The accuracy target is met" in tune_run.out
    assert "conv2d" in tune_run.out
    assert "trial 1: met" in tune_run.err
    tuned = neural_mp.load(tune_run.folder / "tuned")
    images = digits[1].images
    with torch.no_grad():
        expected = net(torch.from_numpy(images)).argmax(1).numpy()
    assert (tuned(images).argmax(1) == expected).mean() > 0.98


def test_tune_takes_another_model_and_resumes(run, workplace):
    (workplace / "net.pt2").rename(workplace / "other.pt2")
    code, _, err = run("tune", "conf.yaml", "--model", "other.pt2", "-q")
    assert (code, err) == (0, "")
    code, out, err = run("tune", "conf.yaml", "--model", "other.pt2", "--resume")
    assert code == 0
    assert "0 evaluations" in out
    assert "trial 1" not in err


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("0", "workers must be a whole number from 1 to 2147483647, got 0"),
        ("rai", "no engine 'rai' for workers"),
        ("ray:", "workers: address must be the address of a Ray cluster"),
    ],
)
def test_tune_reads_workers_as_the_file_does(run, workplace, word, says):
    code, _, err = run("tune", "conf.yaml", "--workers", word)
    assert code == 2
    assert says in err


def test_tune_exits_with_1_if_the_target_was_not_met(run, workplace, hostile_net):
    program = torch.export.export(
        hostile_net, (torch.zeros(2, 1, 8, 8),), dynamic_shapes=({0: torch.export.Dim.AUTO},)
    )
    torch.export.save(program, workplace / "net.pt2")
    with (workplace / "conf.yaml").open("a") as file:
        file.write("tuning: {strategy: basic, exit_policy: {max_trials: 1}}\n")
    code, out, _ = run("tune", "conf.yaml", "--output", "tuned")
    assert code == 1
    assert "NOT met" in out
    assert "Closest plan" in out
    assert set(neural_mp.load(workplace / "tuned").plan.counts()) == {"fp32"}


def test_inspect_shows_every_op_and_why_it_cannot(run, workplace):
    code, out, _ = run("inspect", "net.pt2")
    assert code == 0
    assert "block1.conv1" in out
    assert "no integer kernel" in out


def test_inspect_for_programs(run, workplace):
    rows = {row["name"]: row for row in json.loads(run("inspect", "net.pt2", "--json")[1])}
    assert "int8" in rows["stem"]["precisions"]
    assert rows["block1.add"]["reasons"]["int8"]
    assert rows["block1.conv2"]["inputs"] == ["block1.act"]


def test_explain_says_why_for_both_16_bit_precisions(run, workplace):
    code, out, _ = run("explain", "net.pt2", "mean")
    assert code == 0
    rows = {
        line.split("│")[1].strip(): line
        for line in out.splitlines()
        if "INFER" in line or "DENY" in line
    }
    assert "INFER, allowed: downstream of conv2d" in rows["bf16"]
    assert "DENY, denied" in rows["fp16"]


def test_explain_says_why_of_int8_what_the_plan_or_the_kernels_say(run, workplace):
    def said(op, *options):
        out = run("explain", "net.pt2", op, "--precision", "int8", *options, "--json")[1]
        return json.loads(out)["precisions"]["int8"]

    assert said("stem")["decision"] == "int8"
    assert "reads 'x' quantized" in said("stem")["reason"]
    assert said("block1.act")["reason"] == "fused into the INT8 kernel of 'block1.conv1'"
    assert said("mean") == {"list": None, "decision": "fp32", "reason": "no integer kernel"}
    Path("plan.yaml").write_text("neural_mp_plan: 2\nops: {stem: fp32, block1.conv1: fp32}\n")
    assert (
        said("stem", "--plan", "plan.yaml")["reason"]
        == "supports INT8, but is set to fp32 by the plan"
    )
    assert "which is not in INT8" in said("block1.act", "--plan", "plan.yaml")["reason"]


def test_explain_under_a_plan_and_with_lists_of_the_environment(run, workplace, monkeypatch):
    Path("plan.yaml").write_text("neural_mp_plan: 2\nops: {stem: bf16, head: fp32, mean: fp32}\n")
    code, out, _ = run("explain", "net.pt2", "head", "--precision", "bf16", "--plan", "plan.yaml")
    assert code == 0
    assert "ALLOW, not in 16 bits: set by the plan" in out
    monkeypatch.setenv("NEURAL_MP_AUTO_MIXED_PRECISION_INFERLIST_REMOVE", "mean")
    _, out, _ = run("explain", "net.pt2", "mean", "--precision", "bf16")
    assert "mean is on no list" in out


def test_inspect_takes_code_of_the_users_own(run):
    code, out, _ = run("inspect", "nets:small_net", "--input-shape", "2,1,8,8")
    assert code == 0
    assert "head" in out


def computed(model, images) -> dict[str, torch.Tensor]:
    """Op → what it computes in a converted model, and by which kernel."""
    outputs = {}

    class Spy(torch.fx.Interpreter):
        def run_node(self, n):
            result = super().run_node(n)
            if "neural_mp_op" in n.meta:
                outputs[n.meta["neural_mp_op"]] = (str(n.target), result)
            return result

    with torch.no_grad():
        Spy(model.runnable).run(torch.from_numpy(images))
    return outputs


def test_a_plan_edited_by_hand_and_replayed_differs_in_just_that_op(run, tuned_workplace, digits):
    workplace = tuned_workplace
    plan_file = workplace / "tuned" / "plan.yaml"
    replayed = run("convert", "net.pt2", "--plan", str(plan_file), "--output", "same")
    assert replayed[0] == 0

    lines = plan_file.read_text().splitlines()
    start = lines.index("  block2.conv1:")
    assert lines[start + 1] == "    precision: int8"
    lines[start : start + 4] = ["  block2.conv1: fp32"]
    (workplace / "edited.yaml").write_text("\n".join(lines))
    assert run("convert", "net.pt2", "--plan", "edited.yaml", "--output", "edited")[0] == 0

    tuned, same, edited = (neural_mp.load(workplace / n) for n in ("tuned", "same", "edited"))
    images = digits[1].images[:32]
    np.testing.assert_array_equal(same(images), tuned(images))
    assert same.plan == tuned.plan
    assert {op for op in tuned.plan if tuned.plan[op] != edited.plan[op]} == {"block2.conv1"}

    kernels, kernels_edited = computed(tuned.model, images), computed(edited.model, images)
    assert kernels["block2.conv1"][0].startswith("onednn.q")
    assert kernels_edited["block2.conv1"][0] == "aten.conv2d.default"
    remaining = set(kernels) - {"block2.conv1"}
    assert {op: kernels[op][0] for op in remaining} == {
        op: kernels_edited[op][0] for op in remaining
    }
    # Everything before the edited op computes the very same numbers.
    for op in ("stem", "pool", "block1.conv1", "block1.conv2"):
        assert torch.equal(kernels[op][1], kernels_edited[op][1])


def test_a_plan_without_observations_says_what_is_missing(run, workplace, net):
    from neural_mp.core.precision import OpConfig, Precision

    PrecisionPlan({"stem": OpConfig(Precision.INT8)}).save(workplace / "bare.yaml")
    code, _, err = run("convert", "net.pt2", "--plan", "bare.yaml", "--output", "out")
    assert code == 2
    assert "requires observations, got none" in err
    assert not (workplace / "out").exists()


@pytest.mark.usefixtures("tuned_workplace")
def test_benchmark_compares_models_and_results(run):
    code, out, _ = run(
        "benchmark", "net.pt2", "tuned", "--batch-size", "16", "--iterations", "5", "--warmup", "1"
    )
    assert code == 0
    rows = [line for line in out.splitlines() if "×" in line]
    assert len(rows) == 2
    assert "1.00×" in rows[0]


def test_hardware_is_shown_as_a_table(run, monkeypatch):
    monkeypatch.setenv("FORCE_FP16", "1")
    code, out, _ = run("hardware")
    assert code == 0
    assert all(name in out for name in ("int8", "bf16", "fp16", "fp32", "natively"))
    document = json.loads(run("hardware", "--json")[1])
    assert document["cpu"]["fp16"]["available"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tune", "missing.yaml"], "missing.yaml"),
        (["inspect", "missing.pt2"], "missing.pt2"),
        (["explain", "nets:small_net", "hea", "--input-shape", "2,1,8,8"], "did you mean 'head'"),
        (
            [
                "explain",
                "nets:small_net",
                "head",
                "--precision",
                "fp32",
                "--input-shape",
                "2,1,8,8",
            ],
            "precisions must be int8, bf16 or fp16, got fp32",
        ),
        (["inspect", "nets:small_net", "--input-shape", "2,x"], "'2,x' is malformed"),
        (
            ["convert", "nets:small_net", "--plan", "missing.yaml", "--output", "out"],
            "missing.yaml",
        ),
        (["benchmark", "nowhere:net"], "nowhere"),
    ],
)
def test_an_error_is_one_line_without_a_traceback(run, arguments, message):
    code, out, err = run(*arguments)
    assert code == 2
    assert message in err
    assert "Traceback" not in out + err
    assert len(err.strip().splitlines()) == 1
