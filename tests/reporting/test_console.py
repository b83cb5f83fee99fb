"""Consoles write where they began to, and what they write is only to be read."""

import io
from contextlib import redirect_stderr

import onnx
import pytest
from nets import small_net
from onnx_nets import as_onnx
from rich.progress import Progress
from rich.table import Table
from rich.text import Text
from typer.testing import CliRunner

from neural_mp.cli.app import app
from neural_mp.reporting import create_error_console, create_output_console, formatting
from neural_mp.reporting.console import SafeConsole, render_terminal_html

#: Sets the title of a window, turns red, is markup and an emoji of rich, and HTML.
HOSTILE = "\x1b]0;owned\x07\x1b[31m[bold]a[/bold] :smile: <script>"
SHOWN = "\\u001b]0;owned\\u0007\\u001b[31m[bold]a[/bold] :smile: <script>"


def test_a_bar_moves_on_while_a_frameworks_own_words_are_caught(capsys):
    console = create_error_console()
    with redirect_stderr(io.StringIO()) as caught:
        console.print("still loading")
    assert caught.getvalue() == ""
    assert capsys.readouterr().err == "still loading\n"


def _table(cell):
    table = Table("op", "type")
    table.add_row(cell, "Conv")
    return table


@pytest.mark.parametrize(
    "shown",
    [HOSTILE, Text(HOSTILE), _table(HOSTILE), _table(Text(HOSTILE))],
    ids=["words", "text", "table", "text in a table"],
)
def test_control_characters_and_markup_in_names_are_shown_and_do_nothing(shown, capsys):
    create_output_console().print(shown)
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert "\x07" not in printed
    assert "\\u001b]0;owned" in printed
    assert "[bold]a[/bold] :smi" in printed


def test_a_table_knows_how_wide_a_name_is_as_it_is_shown(capsys):
    create_output_console().print(_table(HOSTILE))
    assert SHOWN in capsys.readouterr().out
    create_output_console().print(_table(HOSTILE))
    assert len({len(line) for line in capsys.readouterr().out.splitlines()}) == 1


def test_the_title_of_a_narrow_table_is_one_line_in_a_pipe(capsys):
    title = "No plan that meets the target is faster; the result is the FP32 model"
    table = formatting.create_table(title, "op")
    table.add_row("conv")
    create_output_console().print(table)
    first, border, *_ = capsys.readouterr().out.splitlines()
    assert first == title
    assert len(border) < len(title)


def test_colours_and_bars_of_our_own_still_move_and_shine():
    screen = io.StringIO()
    console = SafeConsole(file=screen, force_terminal=True, color_system="standard", width=80)
    console.print("slower than FP32", style="red")
    with Progress(console=console) as bar:
        bar.add_task("Loading", total=2)
    assert "\x1b[31mslower than FP32\x1b[0m" in screen.getvalue()
    assert "\x1b[?25l" in screen.getvalue()
    assert "\\u001b" not in screen.getvalue()


def test_a_notebooks_cell_shows_names_and_runs_nothing():
    html = render_terminal_html(_table(HOSTILE))
    assert "<script>" not in html
    assert "&lt;script&gt;" in html
    assert "\x1b" not in html


@pytest.mark.slow
def test_the_names_of_a_models_ops_reach_no_terminal_as_commands():
    model = as_onnx(small_net())
    for number, node in enumerate(model.graph.node):
        node.name = f"{HOSTILE}{number}"
    onnx.save(model, "named.onnx")
    for arguments in (["inspect", "named.onnx", "--all"], ["explain", "named.onnx", "nix"]):
        result = CliRunner().invoke(app, arguments)
        output = result.output + str(result.exception or "")
        assert "owned" in output
        assert "\x1b" not in result.output
