"""A terminal in which somebody may type while an answer is written. The two texts don't mix."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


class Terminal:
    """Where a chat reads lines and writes answers. Text typed during an answer becomes part of the next line."""

    def __init__(self) -> None:
        self._typed = ""

    def read_lines(self) -> Iterator[str]:
        """Yield the lines that the user types, until Ctrl-D."""
        while True:
            try:
                yield self._read_line() if sys.stdin.isatty() else input()
            except EOFError:
                return

    def write(self, text: str) -> None:
        """Write text at once."""
        print(text, end="", flush=True)

    @contextmanager
    def hold_typing(self) -> Iterator[None]:
        """Hide what is typed meanwhile, and keep it for the next line. Ctrl-C works as usual."""
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
        quiet[6][termios.VMIN], quiet[6][termios.VTIME] = 0, 0  # a read returns what is there, without waiting
        termios.tcsetattr(descriptor, termios.TCSADRAIN, quiet)
        try:
            yield
        finally:
            typed = b"".join(iter(lambda: os.read(descriptor, 4096), b""))
            termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
            text = " ".join(typed.decode("utf-8", "replace").splitlines())
            self._typed += "".join(character for character in text if character.isprintable())

    def _read_line(self) -> str:
        """Ask for a line. It begins with what was typed before, which the user can continue or delete."""
        typed, self._typed = self._typed, ""
        try:
            import readline
        except ImportError:  # without readline, the user can't delete the text
            return typed + input(f"> {typed}")
        readline.set_startup_hook(lambda: readline.insert_text(typed))
        try:
            return input("> ")
        finally:
            readline.set_startup_hook(None)
