"""Servers that answer as no server should, for as long as a test lets them."""

import gzip
import itertools
import json
import socket
import socketserver
import threading
from contextlib import contextmanager, suppress

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
DEEP = 50_000


class _Handler(socketserver.StreamRequestHandler):
    """Answers the requests of one connection, until the mode of its server ends that."""

    def handle(self):
        while (line := self.rfile.readline()) not in {b"", b"\r\n"}:
            path, length = line.split()[1].decode(), 0
            while (header := self.rfile.readline().lower()) != b"\r\n":
                if header.startswith(b"content-length:"):
                    length = int(header.partition(b":")[2])
            body = json.loads(self.rfile.read(length) or b"null")
            try:
                self.server.answer(self.server, path, body, self.wfile.write)
            except OSError:
                return  # the client has gone, or the test is over


class Hostile(socketserver.ThreadingTCPServer):
    """answer: how it answers. is_over: set when the test ends, which ends all answers that would last for ever."""

    daemon_threads = True

    def __init__(self, answer):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer, self.is_over, self.connections = answer, threading.Event(), []

    def get_request(self):
        connection, address = super().get_request()
        self.connections.append(connection)
        return connection, address

    def handle_error(self, *_):
        pass  # a connection that was cut

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"

    def pause(self, seconds):
        """Wait, and end the answer if the test is over."""
        if self.is_over.wait(seconds):
            raise ConnectionError


@contextmanager
def serving(answer):
    """A running server that answers so."""
    server = Hostile(answer)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.is_over.set()
        server.shutdown()
        thread.join(60)
        for connection in server.connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        server.server_close()


def whole(content, write, more=b""):
    """Send a complete answer."""
    write(HEAD + more + f"Content-Length: {len(content)}\r\n\r\n".encode() + content)


def good(server, path, body, write):
    """What a server answers whose words are its tokens, and whose answers depend on nothing but the prompt."""
    whole(json.dumps(good_answer(path, body)).encode(), write)


def good_answer(path, body):
    if path == "/v1/models":
        return {"data": [{"id": "m"}]}
    words = body["prompt"].split()
    tokens = [f" {word}" for word in words[: body["max_tokens"]]]
    values = [-1.0 - number for number in range(len(tokens))]
    logprobs = {"tokens": tokens, "token_logprobs": values, "top_logprobs": [{"x": -9.0, "y": v} for v in values]}
    usage = {"prompt_tokens": len(words), "prompt_tokens_details": {"cached_tokens": 0}}
    return {"choices": [{"text": "".join(tokens), "logprobs": logprobs}], "usage": usage}


def silent(server, path, body, write):
    server.pause(600)


def drips_its_body(server, path, body, write):
    write(HEAD + b"Content-Length: 1000000\r\n\r\n")
    for _ in itertools.count():
        write(b" ")
        server.pause(0.05)


def drips_its_head(server, path, body, write):
    for letter in itertools.cycle(HEAD):
        write(bytes([letter]))
        server.pause(0.05)


def drips_chunks(server, path, body, write):
    write(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
    for _ in itertools.count():
        write(b"1\r\n \r\n")
        server.pause(0.05)


def goes_on_saying_continue(server, path, body, write):
    for _ in itertools.count():
        write(b"HTTP/1.1 100 Continue\r\n\r\n" * 100)
        server.pause(0.001)


def sends_endless_headers(server, path, body, write):
    write(HEAD)
    for number in itertools.count():
        write(f"X-{number}: {'x' * 1000}\r\n".encode())
        server.pause(0.0)


def sends_endless_chunks(server, path, body, write):
    write(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
    for _ in itertools.count():
        write(b"10000\r\n" + b" " * 0x10000 + b"\r\n")
        server.pause(0.0)


def sends_an_endless_body(server, path, body, write):
    write(HEAD + b"Content-Length: 1000000000000\r\n\r\n")
    for _ in itertools.count():
        write(b" " * 0x10000)
        server.pause(0.0)


def sends_a_bomb(server, path, body, write):
    whole(gzip.compress(bytes(1 << 26)), write, b"Content-Encoding: gzip\r\n")


def sends_deep_lists(server, path, body, write):
    whole(b"[" * DEEP + b"]" * DEEP, write)


def sends_deep_objects(server, path, body, write):
    whole(b'{"choices":' * DEEP + b"1" + b"}" * DEEP, write)


def sends_a_long_number(server, path, body, write):
    whole(b'{"choices": ' + b"9" * 10_000 + b"}", write)


def sends_no_json(server, path, body, write):
    whole(b"\xff\xfe\x1b[2J{", write)


def sends_null(server, path, body, write):
    whole(b"null", write)


def sends_nulls(server, path, body, write):
    whole(b'{"data": null, "choices": null}', write)


def sends_broken_letters(server, path, body, write):
    whole(rb'{"data": [{"id": "\ud800\u001b[2J"}], "choices": [{"text": "\ud800\u001b[2J"}]}', write)


def breaks_off(server, path, body, write):
    write(HEAD + b"Content-Length: 10\r\n\r\n{")
    raise ConnectionError


def talks_nonsense(server, path, body, write):
    write(b"\x16\x03\x01\x00\xff" * 100)
    raise ConnectionError


NEVER_DONE = (silent, drips_its_body, drips_its_head, drips_chunks, goes_on_saying_continue)
TOO_LARGE = (sends_endless_chunks, sends_an_endless_body)
UNREADABLE = (sends_deep_lists, sends_deep_objects, sends_a_long_number, sends_no_json, sends_null, sends_nulls)
BROKEN = (sends_endless_headers, sends_a_bomb, breaks_off, talks_nonsense)
