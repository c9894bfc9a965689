"""A chat at a terminal: text typed while an answer comes is not in the answer, but in the next line."""

import re
import time

import pytest

pytest.importorskip("pty", reason="terminals are POSIX'")

from cli.screen import Screen
from server.server_harness import Gate, running_server, tiny_loaded, wait_for


def test_what_is_typed_during_an_answer_is_for_the_next_line(tiny_folder):
    with running_server(tiny_loaded(tiny_folder), cache={"deterministic": True}) as server:
        gate = Gate(server.engine)
        screen = Screen.of_kvblocks("chat", "--url", server.url, "--max-tokens", "6")
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


@pytest.mark.usefixtures("hears_ctrl_c")
def test_ctrl_c_ends_an_answer_and_the_chat_goes_on(tiny_folder):
    import termios

    def echoes():
        return bool(termios.tcgetattr(screen.terminal)[3] & termios.ECHO)

    with running_server(tiny_loaded(tiny_folder)) as server:
        gate = Gate(server.engine)
        screen = Screen.of_kvblocks("chat", "--url", server.url, "--max-tokens", "6", term="xterm")
        try:
            screen.wait_for("> ")
            gate.shut()
            screen.type("hello\n")
            gate.wait_for_step()
            screen.wait_for("waiting for the first token")
            assert not echoes()
            screen.type("\x03")
            screen.wait_for("[the answer was ended]")
            wait_for(lambda: server.service.metrics.counts()["cancelled"] == 1)  # before the model could end it
            gate.open()
            screen.wait_for("> ", 2)
            server.wait_until_idle()
            screen.type("hello again\n")
            screen.wait_for("from the cache")
            screen.type("a line that I don't mean")
            screen.wait_for("a line that I don't mean")
            screen.interrupt_until(lambda: "[Ctrl-D, or Ctrl-C once more, ends the chat]" in screen.text)
            screen.interrupt_until(lambda: screen.process.poll() is not None)
            assert screen.process.returncode == 130
            assert echoes()
            assert server.service.metrics.counts()["finished"] == 1
        finally:
            gate.open()
            screen.close()
        server.wait_until_idle()


def test_nothing_of_the_sign_that_an_answer_is_waited_for_is_left(tiny_folder):
    with running_server(tiny_loaded(tiny_folder), cache={"deterministic": True}) as server:
        gate = Gate(server.engine)
        screen = Screen.of_kvblocks("chat", "--url", server.url, "--max-tokens", "6", term="xterm")
        try:
            screen.wait_for("> ")
            gate.shut()
            screen.type("hello\n")
            screen.wait_for("waiting for the first token")
            wait_for(lambda: re.search("0:00:0[1-9]", screen.text), 60)
            gate.open()
            screen.wait_for("from the cache")
            shown, _, _ = screen.text.partition("[first token")
            _, _, after = shown.rpartition("waiting for the first token")
            assert "\x1b[2K" in after  # the line of the sign is erased
            assert "\x1b[?25h" in after  # and the cursor is shown again
        finally:
            gate.open()
            screen.close()
        server.wait_until_idle()
