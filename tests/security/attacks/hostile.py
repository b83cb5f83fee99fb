"""What attacks by hostile files share: a file is made, and then read as a user would."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attacks.verdicts import Family, Finding, judged, judged_command

from neural_mp.errors import NeuralMPError

FAMILY = "hostile files"


@dataclass(frozen=True)
class Attack:
    """One hostile file.

    Attributes:
        name: what it does.
        play: (an empty folder, the canary) → what came of it.
    """

    name: str
    play: Callable[[Path, Path], Finding]


class Attacks(list[Attack]):
    """Collects attacks by decorators.

    Args:
        family: name of the family.
        seconds: own seconds within which each attack must end.
    """

    def __init__(self, family: str = FAMILY, seconds: float = 60) -> None:
        super().__init__()
        self._family, self._seconds = family, seconds

    def as_family(self) -> Family:
        """Return a family that makes all attacks in turn."""

        def findings(count: int, folder: Path, seed: int) -> Iterator[Finding]:
            for number in range(count):
                home = folder / str(number)
                home.mkdir()
                yield self[(seed + number) % len(self)].play(home, folder / f"ran_{number}")

        return Family(self._family, len(self), findings)

    def here(
        self, name: str, *values: Any, refused: bool | None = True
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Decorate what makes a file and reads it, (folder, canary, *values) → anything.

        Args:
            name: of the attack; with values, it is given for each of them and says it.
            values: what the attack is made with, one after the other; tuples by their first.
            refused: whether the file must be refused (True) or accepted (False); None for files
                that may be read as if they were harmless.
        """

        def add(call: Callable[..., Any]) -> Callable[..., Any]:
            for arguments in [(value,) for value in values] or [()]:
                labels = [g[0] if isinstance(g, tuple) else str(g) for g in arguments]
                title = " ".join([name, *labels])
                self.append(Attack(title, self._player(title, call, arguments, refused)))
            return call

        return add

    def command(
        self, name: str
    ) -> Callable[[Callable[..., Sequence[str]]], Callable[..., Sequence[str]]]:
        """Decorate what makes a file, (folder, canary) → the arguments of a command."""

        def add(arguments: Callable[..., Sequence[str]]) -> Callable[..., Sequence[str]]:
            def play(folder: Path, canary: Path) -> Finding:
                argv = arguments(folder, canary)
                return judged_command(self._family, name, argv, canary=canary, folder=folder)

            self.append(Attack(name, play))
            return arguments

        return add

    def _player(
        self,
        title: str,
        call: Callable[..., Any],
        arguments: tuple[Any, ...],
        refused: bool | None,
    ) -> Callable[[Path, Path], Finding]:
        def play(folder: Path, canary: Path) -> Finding:
            def read() -> None:
                try:
                    call(folder, canary, *arguments)
                except NeuralMPError as error:
                    if refused is False:
                        raise AssertionError(f"a good input was refused: {error}") from error
                    raise
                if refused:
                    raise AssertionError("it was not refused")

            return judged(self._family, title, read, canary=canary, seconds=self._seconds)

        return play


def command_here(*arguments: str) -> None:
    """Run `neural-mp` in this process, which has imported the framework of the file.

    Raises:
        NeuralMPError: the command failed, with the message that it printed.
        RuntimeError: the command printed a traceback.
    """
    from neural_mp.cli import app

    printed, argv = io.StringIO(), sys.argv
    sys.argv = ["neural-mp", *arguments]
    try:
        with redirect_stdout(printed), redirect_stderr(printed):
            app.main()
    except SystemExit as ended:
        if "Traceback (most recent call last)" in printed.getvalue():
            raise RuntimeError(printed.getvalue()[-2000:]) from ended
        if ended.code:
            raise NeuralMPError(printed.getvalue().strip()[-2000:]) from ended
    finally:
        sys.argv = argv
