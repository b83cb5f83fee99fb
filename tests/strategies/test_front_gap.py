"""Corners of the Pareto front that lie far apart: what the search tries in between."""

from made_up import chain, int8_ops, run

LENGTH = 40


def _barely_missed(plan):
    """24 ops in INT8 miss the target by a ten-thousandth, 23 meet it."""
    return 0.0101 if len(int8_ops(plan)) > 23 else 0.01


def test_a_jump_over_most_of_the_model_is_bisected():
    """With equal noise, the front has two corners: all ops in INT8, or one."""
    noise = {f"op{i}": 1e-4 for i in range(LENGTH)}
    trials = run(chain(LENGTH), _barely_missed, noise, strategy="mincut")
    counts = [(len(int8_ops(trial.plan)), trial.met) for trial in trials]
    assert counts[:2] == [(LENGTH, False), (1, True)]
    assert len(counts) == 4
    assert max(count for count, met in counts if met) >= LENGTH / 2
