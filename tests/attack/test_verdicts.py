import time

from verdicts import Verdict, counts, harmful, judged, judged_command

from neural_mp.errors import DataError, users_own


def _fails(error):
    raise error


def test_right_results_and_errors_of_ours_are_harmless(tmp_path):
    found = [
        judged("f", "right", lambda: 1),
        judged("f", "refused", lambda: _fails(DataError("no data"))),
        judged("f", "the user's own", lambda: _fails(users_own(KeyError("x")))),
    ]
    assert [f.verdict for f in found] == [Verdict.RIGHT, Verdict.REFUSED, Verdict.RIGHT]
    assert not harmful(found)
    assert counts(found)["f"] == {Verdict.RIGHT: 2, Verdict.REFUSED: 1}


def test_tracebacks_hangs_wrong_results_and_code_that_ran_are_found(tmp_path):
    canary = tmp_path / "ran"
    found = [
        judged("f", "traceback", lambda: _fails(KeyError("x"))),
        judged("f", "hang", lambda: time.sleep(5), seconds=0.1),
        judged("f", "wrong", lambda: _fails(AssertionError("1 is not 2"))),
        judged("f", "executed", canary.touch, canary=canary),
    ]
    ends = [Verdict.TRACEBACK, Verdict.HANG, Verdict.WRONG, Verdict.EXECUTED]
    assert [f.verdict for f in found] == ends == [f.verdict for f in harmful(found)]


def test_commands_are_judged_by_their_exit_code_and_by_what_they_print(tmp_path):
    assert judged_command("f", "hardware", ["hardware"]).verdict is Verdict.RIGHT
    refused = judged_command("f", "no model", ["inspect", "none.pt2"], folder=tmp_path)
    assert refused.verdict is Verdict.REFUSED
    assert "none.pt2" in refused.words
