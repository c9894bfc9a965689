"""A process at a terminal of its own, for tests of what somebody sees who types."""

import os
import pty
import subprocess
import sys
import threading

from server.server_harness import ROOT, wait_for

# Makes the terminal the one from which the process gets Ctrl-C.
_AT_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execvp(sys.argv[1], sys.argv[1:])
"""


class Screen:
    """A process at a terminal of its own, and everything that it has shown."""

    def __init__(self, *command, env, cwd=ROOT):
        self.terminal, inner = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", _AT_TERMINAL, *command],
            stdin=inner,
            stdout=inner,
            stderr=inner,
            cwd=cwd,
            env=env,
            start_new_session=True,
        )
        os.close(inner)
        self.text = ""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    @classmethod
    def of_kvblocks(cls, *arguments, term="dumb"):
        """A `kvblocks` command at a terminal of a kind."""
        return cls(sys.executable, "-m", "kvblocks", *arguments, env={**os.environ, "TERM": term})

    def _read(self):
        while True:
            try:
                part = os.read(self.terminal, 1000)
            except OSError:  # nobody has the other side any more
                return
            if not part:
                return
            self.text += part.decode("utf-8", "replace")

    def type(self, text):
        """Type a text."""
        os.write(self.terminal, text.encode())

    def interrupt_until(self, condition):
        """Press Ctrl-C, and again after ten seconds: Python's readline loses one that comes just before it waits."""
        for _ in range(12):
            self.type("\x03")
            try:
                return wait_for(condition, 10)
            except AssertionError:
                continue
        raise AssertionError(f"Ctrl-C had no effect; the screen ends in {self.text[-500:]!r}")

    def wait_for(self, text, count=1):
        """Wait until the text was shown so many times."""
        wait_for(lambda: self.text.count(text) >= count, 120)

    def close(self):
        """End the process."""
        self.process.kill()
        self.process.wait(60)
        self._reader.join(60)
        os.close(self.terminal)
