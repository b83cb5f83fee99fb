"""Consoles write where they began to."""

import io
from contextlib import redirect_stderr

from neural_mp.reporting import error_console


def test_a_bar_moves_on_while_a_frameworks_own_words_are_caught(capsys):
    console = error_console()
    with redirect_stderr(io.StringIO()) as caught:
        console.print("still loading")
    assert caught.getvalue() == ""
    assert capsys.readouterr().err == "still loading\n"
