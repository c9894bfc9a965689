"""A terminal in which somebody types while an answer is being written: neither gets into the other."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


class Terminal:
    """Where a chat reads lines and writes answers. What is typed during an answer stands in the next line."""

    def __init__(self) -> None:
        self._typed = ""

    def read_lines(self) -> Iterator[str]:
        """The lines that the user types, until Ctrl-D."""
        while True:
            try:
                yield self._read_line() if sys.stdin.isatty() else input()
            except EOFError:
                return

    def write(self, text: str) -> None:
        """Write at once."""
        print(text, end="", flush=True)

    @contextmanager
    def hold_typing(self) -> Iterator[None]:
        """Show nothing of what is typed meanwhile, and keep it for the next line. Ctrl-C works as ever."""
        try:
            import termios
        except ImportError:  # not POSIX
            yield
            return
        if not sys.stdin.isatty():
            yield
            return
        descriptor = sys.stdin.fileno()
        before = termios.tcgetattr(descriptor)
        quiet = termios.tcgetattr(descriptor)
        quiet[3] &= ~(termios.ECHO | termios.ICANON)
        quiet[6][termios.VMIN], quiet[6][termios.VTIME] = 0, 0  # a read returns what there is
        termios.tcsetattr(descriptor, termios.TCSADRAIN, quiet)
        try:
            yield
        finally:
            typed = b"".join(iter(lambda: os.read(descriptor, 4096), b""))
            termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
            text = " ".join(typed.decode("utf-8", "replace").splitlines())
            self._typed += "".join(character for character in text if character.isprintable())

    def _read_line(self) -> str:
        """Ask for a line, in which what was typed before stands already, to be gone on with or deleted."""
        typed, self._typed = self._typed, ""
        try:
            import readline
        except ImportError:  # then it can't be deleted
            return typed + input(f"> {typed}")
        readline.set_startup_hook(lambda: readline.insert_text(typed))
        try:
            return input("> ")
        finally:
            readline.set_startup_hook(None)
