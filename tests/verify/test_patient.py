"""What `kvblocks verify` learns of a server before it begins: of its rounding, blocks, salts and adapters."""

import base64
import json
import random
import struct
import threading
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from kvblocks.verify.server import Target
from kvblocks.verify.server.cases import CASES
from kvblocks.verify.server.patient import Patient
from kvblocks.verify.server.prompts import Words, picture
from kvblocks.verify.server.target import Reply


class FakeTarget:
    """Answers with log probabilities that each prompt has for itself.

    warm: by how much a hit changes them. decoded: by how much it does that a token is generated behind another one.
    block: tokens of a block. keeps_salts: whether salts are kept apart, and known. tells_time: with which chance a
    prompt that another salt has cached is answered as fast as a hit, although it isn't called one.
    """

    model, adapters, can_reset, num_requests = "m", (), False, 0
    seconds_a_word = 0.01

    def __init__(self, warm=0.0, decoded=0.0, block=16, keeps_salts=True, tells_time=0.0):
        self.warm, self.decoded, self.block, self.keeps_salts = warm, decoded, block, keeps_salts
        self.has_completions = self.has_logprobs = True
        self.prompts, self.cached = {}, {}
        self.tells_time, self.random = tells_time, random.Random(1)

    def find_out(self):
        pass

    def knows_salts(self):
        return self.keeps_salts

    def ask(self, prompt, max_tokens=8, *, salt=None, model=None, image=None):
        assert model is None and image is None
        words = prompt.split()
        cached = self.cached.setdefault(salt if self.keeps_salts else None, set())
        ends = range(self.block, len(words), self.block)
        elsewhere = any(tuple(words[: ends[-1]]) in found for found in self.cached.values()) if ends else False
        num_cached = max((end for end in ends if tuple(words[:end]) in cached), default=0)
        cached |= {tuple(words[:end]) for end in ends}
        value = -float(self.prompts.setdefault(tuple(words[:20]), len(self.prompts))) - self.warm * bool(num_cached)
        tokens = tuple(f" w{len(words) + number}" for number in range(max_tokens))
        values = tuple(value - self.decoded * bool(number) for number in range(max_tokens))
        is_fast = num_cached or (elsewhere and self.random.random() < self.tells_time)
        seconds = (0.1 if is_fast else len(words) * self.seconds_a_word) + self.random.uniform(0, 0.1)
        return Reply("".join(tokens), tokens, values, (value - 9,) * max_tokens, len(words), num_cached, seconds)


def test_what_generating_rounds_otherwise_is_no_fault():
    patient = Patient(FakeTarget(warm=0.3, decoded=0.1))
    assert patient.tolerance.nats == pytest.approx(0.8)
    assert "changes answers by up to 0.1000 nats" in patient.notes[-1]
    assert not CASES["repeats"].find(patient, "1")


def test_what_a_hit_changes_is_a_fault_where_nothing_else_rounds():
    patient = Patient(FakeTarget(warm=0.6))
    assert (patient.tolerance.nats, patient.notes) == (0.002, [])
    assert CASES["repeats"].find(patient, "1").difference == pytest.approx(300)


def test_an_exact_server_needs_no_note():
    patient = Patient(FakeTarget())
    assert (patient.notes, patient.tolerance.nats, patient.coldness.by) == ([], 0.002, "salt")


@pytest.mark.parametrize(("block", "num_words"), [(16, 90), (128, 360), (1000, 1440), (5000, 90)])
def test_prompts_are_longer_than_blocks(block, num_words):
    patient = Patient(FakeTarget(block=block))
    assert patient.num_words == num_words
    assert any("hits nothing" in note for note in patient.notes) == (block == 5000)


def test_a_server_that_ignores_salts_is_not_blamed_unless_it_is_to_know_them():
    patient = Patient(FakeTarget(keeps_salts=False))
    assert patient.coldness.by == "never"
    assert not CASES["salts"].applies_to(patient)
    assert CASES["salts"].find(Patient(FakeTarget(keeps_salts=False), expects_salts=True), "1")


def test_a_second_server_gives_cold_answers():
    warm, cold = FakeTarget(warm=0.9, keeps_salts=False), FakeTarget(block=10_000)
    cold.prompts = warm.prompts
    patient = Patient(warm, cold_target=cold)
    assert patient.coldness.by == "server"
    assert CASES["repeats"].find(patient, "1")


def test_a_hit_of_another_salt_is_seen_in_its_time():
    target = FakeTarget(tells_time=1.0)
    patient = Patient(target)
    assert patient.coldness.by == "salt"
    assert CASES["salts"].find(patient, "1") is None  # it isn't told
    finding = CASES["timing"].find(patient, "1")
    assert finding.what == "prompts of 90 words that were asked with another salt only, and new ones, in 12 pairs"
    assert "p = 0.00024" in finding.got
    assert finding.got.endswith("96 % confidence; p = 0.00024)")


def test_times_that_differ_by_chance_are_no_finding():
    patient = Patient(FakeTarget())
    for seed in range(40):
        assert CASES["timing"].find(patient, str(seed)) is None
    assert "of the time that a hit saves (-" in patient.measured["timing"]


def test_a_hit_that_takes_as_long_as_a_new_prompt_tells_nothing():
    class Fast(FakeTarget):
        seconds_a_word = 0.00001

    patient = Patient(Fast(tells_time=1.0))
    assert CASES["timing"].find(patient, "1") is None
    assert "times show nothing" in patient.measured["timing"]


def test_longer_prompts_are_timed_where_short_ones_are_answered_too_fast():
    class Fast(FakeTarget):
        seconds_a_word = 0.001

    patient = Patient(Fast(tells_time=1.0))
    assert "prompts of 360 words" in CASES["timing"].find(patient, "1").what


def test_pictures_are_png_images_that_differ():
    first, again, other = (picture(Words(seed)) for seed in ("a", "a", "b"))
    assert first == again != other
    data = base64.b64decode(first.removeprefix("data:image/png;base64,"))
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    chunks, data = {}, data[8:]
    while data:
        length, kind = struct.unpack(">I4s", data[:8])
        chunks[kind], data = data[8 : 8 + length], data[8 + length :]
        assert struct.unpack(">I", data[:4]) == (zlib.crc32(kind + chunks[kind]),)
        data = data[4:]
    assert list(chunks) == [b"IHDR", b"IDAT", b"IEND"]
    assert struct.unpack(">II", chunks[b"IHDR"][:8]) == (128, 128)
    pixels = zlib.decompress(chunks[b"IDAT"])
    assert len(pixels) == 128 * (1 + 3 * 128)
    assert len({pixels[1 + 3 * 16 * tile : 4 + 3 * 16 * tile] for tile in range(8)}) == 8


class CannedAnswers(BaseHTTPRequestHandler):
    """What mlx-lm answers to a chat, beside a list of models like vLLM's."""

    def do_GET(self):
        names = [("base", None), ("one", "base"), ("another base", None)]
        self.answer(200, {"data": [{"id": name, "parent": parent} for name, parent in names]})

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        top = [{"token": "The", "logprob": -2.7}, {"token": "One", "logprob": -0.1}]
        choice = {"message": {"content": "One"}, "logprobs": {"content": [top[0] | {"top_logprobs": top}]}}
        if self.path == "/v1/chat/completions":
            self.answer(200, {"choices": [choice], "usage": {"prompt_tokens": 5}})
        else:
            self.answer(404, {})

    def answer(self, status, found):
        content = json.dumps(found).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


@pytest.fixture
def canned():
    server = ThreadingHTTPServer(("127.0.0.1", 0), CannedAnswers)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join(60)
    server.server_close()


def test_only_adapters_of_the_model_are_asked_and_a_greedy_token_is_the_most_likely_one(canned):
    with Target(canned) as target:
        assert (target.model, target.adapters) == ("base", ["one"])
        target.find_out()
        assert not target.has_completions
        reply = target.ask("one two three")
    assert (reply.tokens, reply.logprobs, reply.runners_up) == (("One",), (-0.1,), (-2.7,))
    with Target(canned, "another base") as target:
        assert target.adapters == []
