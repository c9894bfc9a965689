"""A chat at a terminal: text typed while an answer comes is not in the answer, but in the next line."""

import os
import re
import subprocess
import sys
import threading
import time

import pytest
from engine.server.server_harness import ROOT, Gate, running_server, tiny_loaded, wait_for

pty = pytest.importorskip("pty", reason="terminals are POSIX'")


class Screen:
    """A process at a terminal of its own, and everything that it has shown."""

    def __init__(self, *arguments):
        self.terminal, inner = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvblocks", *arguments],
            stdin=inner,
            stdout=inner,
            stderr=inner,
            cwd=ROOT,
            env={**os.environ, "TERM": "dumb"},
            start_new_session=True,
        )
        os.close(inner)
        self.text = ""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

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
        os.write(self.terminal, text.encode())

    def wait_for(self, text, count=1):
        wait_for(lambda: self.text.count(text) >= count, 60)

    def close(self):
        self.process.kill()
        self.process.wait(60)
        self._reader.join(60)
        os.close(self.terminal)


def test_what_is_typed_during_an_answer_is_for_the_next_line(tiny_folder):
    with running_server(tiny_loaded(tiny_folder), cache={"deterministic": True}) as server:
        gate = Gate(server.engine)
        screen = Screen("chat", "--url", server.url, "--max-tokens", "6")
        try:
            screen.wait_for("> ")
            gate.shut()
            screen.type("hello\n")
            gate.wait_for_step()
            screen.type("typed-too-early\x7f\nand \x1b[Amore")
            time.sleep(0.3)  # time in which it would be echoed
            assert "typed" not in screen.text
            gate.open()
            screen.wait_for("from the cache")
            screen.wait_for("> ", 2)
            screen.wait_for("typed-too-early and [Amore")
            answer, _, after = screen.text.partition("[first token")
            assert "typed" not in answer
            assert re.search(r"\]\r?\n> typed-too-early and \[Amore$", after), repr(after)
            screen.type(" now\n")
            screen.wait_for("from the cache", 2)
            assert server.service.metrics.counts()["finished"] == 2
            screen.wait_for("> ", 3)
            screen.type("\x04")
            assert screen.process.wait(60) == 0
        finally:
            gate.open()
            screen.close()
        server.wait_until_idle()


def test_ctrl_c_ends_an_answer_and_the_terminal_echoes_again(tiny_folder):
    with running_server(tiny_loaded(tiny_folder)) as server:
        gate = Gate(server.engine)
        screen = Screen("chat", "--url", server.url, "--max-tokens", "6")
        try:
            screen.wait_for("> ")
            gate.shut()
            screen.type("hello\n")
            gate.wait_for_step()
            import termios

            assert not termios.tcgetattr(screen.terminal)[3] & termios.ECHO
            screen.process.send_signal(2)
            assert screen.process.wait(60) == 130
            assert termios.tcgetattr(screen.terminal)[3] & termios.ECHO
        finally:
            gate.open()
            screen.close()
        server.wait_until_idle()
