import pytest
from hostile_files import ATTACKS
from verdicts import Verdict


@pytest.mark.slow
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_a_hostile_file_is_refused_and_nothing_of_it_runs(attack, tmp_path):
    folder = tmp_path / "given"
    folder.mkdir()
    found = attack.play(folder, tmp_path / "ran")
    assert found.verdict.harmless, f"{found.verdict}: {found.words}"
    assert found.verdict is Verdict.RIGHT or found.words
