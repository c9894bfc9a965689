"""A terminal in which somebody may type while an answer is written. The two texts don't mix."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType

HOW_TO_END = "Ctrl-C ends an answer. An empty line or Ctrl-D ends the chat."


class Terminal:
    """Where a chat reads lines and writes answers. Text typed during an answer becomes part of the next line."""

    def __init__(self) -> None:
        self._typed = ""
        self._waiting = ExitStack()

    def read_lines(self) -> Iterator[str]:
        """Yield the lines that the user types, until Ctrl-D.

        Ctrl-C discards a line, since it may have been meant for an answer that ended just before. The second one in a
        row raises KeyboardInterrupt, and so does the first one if nobody is typing.
        """
        was_interrupted = False
        while True:
            try:
                line = self._read_line() if sys.stdin.isatty() else input()
            except EOFError:
                return
            except KeyboardInterrupt:
                if was_interrupted or not sys.stdin.isatty():
                    raise
                was_interrupted = True
                self.write("\n[Ctrl-D, or Ctrl-C once more, ends the chat]\n")
            else:
                was_interrupted = False
                yield line

    def write(self, text: str) -> None:
        """Write text at once. The first text of an answer replaces the sign that it is being waited for."""
        if text:
            self._waiting.close()
            print(text, end="", flush=True)

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Return a context for writing an answer.

        It shows that the answer is being waited for, and keeps text that is typed for the next line.
        """
        with self._hold_typing(), self._waiting:
            self._waiting.enter_context(_show_waiting())
            yield

    @contextmanager
    def _hold_typing(self) -> Iterator[None]:
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


@contextmanager
def _show_waiting() -> Iterator[None]:
    """Show on a terminal that something is waited for, and for how long. Nothing is left of it at the end."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal or console.is_dumb_terminal:
        yield
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False) as progress:
        progress.add_task("waiting for the first token", total=None)
        yield


@contextmanager
def deferred_interrupts() -> Iterator[Callable[[], None]]:
    """Let Ctrl-C wait for calls that it must not interrupt.

    Yields a function that raises KeyboardInterrupt if Ctrl-C has come. Does nothing outside the main thread, the only
    one that gets signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    has_come = False

    def note(number: int, frame: FrameType | None) -> None:
        del number, frame
        nonlocal has_come
        has_come = True

    def check() -> None:
        if has_come:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, note)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)
