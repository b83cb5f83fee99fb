"""The names of files in a saved model are names of files in its folder."""

import pytest

from neural_mp.api.saved_model import digests_of_files
from neural_mp.errors import NeuralMPError


@pytest.mark.parametrize("name", ["/etc/passwd", "../x", "a/../../x", "", "a\0b", "x" * 300])
def test_a_name_that_is_none_of_the_folder_is_refused(name):
    with pytest.raises(NeuralMPError):
        digests_of_files({name: "0"})


def test_names_within_the_folder_are_taken():
    assert digests_of_files({"variables/a": "0"}) == {"variables/a": "0"}
