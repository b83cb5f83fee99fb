"""A script for Intel Neural Compressor, run in this process or in another."""

import runpy
import subprocess
import sys
import textwrap


def run(folder, script, *arguments):
    """Run a script as `python script.py …` does, and give back what it has defined."""
    path = folder / "main.py"
    path.write_text(textwrap.dedent(script))
    argv = sys.argv
    sys.argv = [str(path), *arguments]
    try:
        return runpy.run_path(str(path), run_name="__main__")
    finally:
        sys.argv = argv


def shown(folder, script, *arguments):
    """Run a script in a process of its own; return standard output and error."""
    path = folder / "main.py"
    path.write_text(textwrap.dedent(script))
    command = [sys.executable, str(path), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr
