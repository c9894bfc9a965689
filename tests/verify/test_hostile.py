"""`kvblocks verify` of servers that answer as no server should: it ends in time, in one line or with a finding."""

import copy
import json
import math
import threading
import time

import pytest
from verify.hostile_servers import (
    BROKEN,
    NEVER_DONE,
    TOO_LARGE,
    UNREADABLE,
    drips_its_body,
    good,
    good_answer,
    sends_broken_letters,
    serving,
    whole,
)

from kvblocks.cli import main
from kvblocks.verify.server import AnswerError, Checkup, CheckupOptions, Target, TargetError, TimeUpError
from kvblocks.verify.server.comparison import distance, show
from kvblocks.verify.server.exchange import MAX_ANSWER_BYTES
from kvblocks.verify.server.page import as_html, as_text
from kvblocks.verify.server.patient import Patient
from kvblocks.verify.server.target import _read

SECONDS = 60  # limit for what ends sooner, unless the machine is very busy
SOON = "0.03"  # minutes


def within_a_minute(function):
    """What a function returns or raises. Fails if it does neither: a test must not last as long as its server."""
    done = []

    def call():
        try:
            done.append((function(), None))
        except BaseException as error:  # noqa: BLE001  # raised below
            done.append((None, error))

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(SECONDS)
    assert done, "it goes on and on"
    (found, error) = done[0]
    if error is not None:
        raise error
    return found


@pytest.mark.parametrize("answer", [*NEVER_DONE, *TOO_LARGE, *UNREADABLE, *BROKEN])
def test_the_command_ends_in_one_line(answer, capsys, tmp_path):
    with serving(answer) as server, pytest.raises(SystemExit) as ended:
        within_a_minute(lambda: main(["verify", server.url, "--minutes", SOON, "--html", str(tmp_path / "page.html")]))
    out, err = capsys.readouterr()
    assert ended.value.code == 1 and out == ""
    assert err.startswith(f"kvblocks: {server.url}") and err.count("\n") == 1 and "\x1b" not in err
    assert ("expected" in err and "got" in err) or "which is over" in err


def test_letters_that_cant_be_written_are_replaced(capsys, tmp_path):
    """A model's name and a text with half a surrogate pair, and with an order to a terminal."""
    page = tmp_path / "page.html"
    with serving(sends_broken_letters) as server, pytest.raises(SystemExit) as ended:
        main(["verify", server.url, "--max-requests", "20", "--html", str(page)])
    out, err = capsys.readouterr()
    assert not ended.value.code and r"model \ud800\x1b[2J: " in out
    assert "\x1b" not in out + err + page.read_text(encoding="utf-8")


def test_one_that_never_answers_at_all_is_left_in_time():
    """Neither host nor port need answer: the connection is waited for no longer, either."""
    with serving(good) as server:
        server.server_close()
        with pytest.raises(TargetError):
            within_a_minute(lambda: Target(server.url, end_s=time.monotonic() + 1))
        with pytest.raises(TimeUpError, match="in the time given, which is over"):
            within_a_minute(lambda: Target(server.url, end_s=time.monotonic()))


def checked(server, answer, *, only, seconds=math.inf, **options):
    """A checkup of a server that becomes hostile when it has been learned to know."""
    with Target(server.url) as target:
        checkup = Checkup(Patient(target, **options), CheckupOptions(only=only, max_requests=500))
        server.answer = answer
        target.end_s = time.monotonic() + seconds
        within_a_minute(lambda: checkup.run_turns(1))
        return checkup


@pytest.mark.parametrize("answer", [*TOO_LARGE, *UNREADABLE])
def test_what_cant_be_read_is_a_finding(answer):
    with serving(good) as server:
        checkup = checked(server, answer, only="repeats")
    (finding,) = checkup.findings
    assert (finding.case, finding.num_seen, finding.num_tries) == ("repeats", 3, 3)
    assert finding.what == "an answer can't be read"
    assert "expected" in finding.got and len(finding.got) < 1000
    assert finding.what in as_text(checkup) and "\x1b" not in as_text(checkup)
    assert as_html(checkup).startswith("<!doctype html>")
    json.dumps(checkup.as_json())


@pytest.mark.parametrize("answer", NEVER_DONE)
@pytest.mark.parametrize("only", ["repeats", "foreign", "cancels", "timing"])
def test_time_ends_each_way_of_asking(answer, only):
    """One by one, several at once, and what is left early."""
    with serving(good) as server, Target(server.url) as target:
        patient = Patient(target, expects_salts=True, num_flush_prompts=1)
        server.answer, target.end_s = answer, time.monotonic() + 0.5
        with pytest.raises(TimeUpError, match="expected a complete case in the time given"):
            within_a_minute(lambda: Checkup(patient, CheckupOptions(only=only)).run())


def test_what_was_found_before_the_time_ended_is_kept():
    with serving(good) as server:
        num_answers = []

        def is_wrong_once(server, path, body, write):
            num_answers.append(path)
            if len(num_answers) > 3:
                server.pause(600)
            good(server, path, body | {"prompt": f"{len(num_answers)} {body['prompt']}"}, write)

        checkup = checked(server, is_wrong_once, only="repeats", seconds=3)
    (finding,) = checkup.findings
    assert (finding.num_seen, finding.num_tries) == (1, 1) and "FAULT (seen in 1 of 1 tries" in as_text(checkup)


def test_one_answer_has_a_time_of_its_own():
    with (
        serving(drips_its_body) as server,
        pytest.raises(TargetError, match=r"within 0.3 s, got none that is complete"),
    ):
        within_a_minute(lambda: Target(server.url, timeout_s=0.3))


def test_the_largest_answer_is_read():
    """What is between it and a larger one decides, not how it comes."""

    def padded(server, path, body, write):
        whole(json.dumps(good_answer(path, body)).encode().ljust(MAX_ANSWER_BYTES + server.more), write)

    with serving(padded) as server:
        server.more = 0
        with Target(server.url) as target:
            assert target.ask("one two three", 2).tokens == (" one", " two")
            server.more = 1
            with pytest.raises(AnswerError, match="of at most 16 MiB, got a larger one"):
                target.ask("one two three", 2)


def nested(depth):
    found = []
    for _ in range(depth):
        found = [found]
    return found


ODD = (
    None, True, -1, 1.5, 10**400, math.inf, -math.inf, math.nan, "", "\ud800\x1b[2J", "x", [], {}, [None], {"x": None},
    [[]], nested(700), {"x": nested(700)},
)  # fmt: skip


def places(value, path=()):
    """The paths of all values within a value."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, held in inner:
        yield from places(held, (*path, key))


def test_no_json_raises_another_error():
    """Each value of a good answer is replaced by odd ones. What is read all the same can be shown and compared."""
    body = {"prompt": "one two three four", "max_tokens": 3}
    chat = {
        "choices": [
            {
                "message": {"content": "a"},
                "logprobs": {
                    "content": [{"token": "a", "logprob": -1.0, "top_logprobs": [{"token": "b", "logprob": -2.0}]}]
                },
            }
        ],
        "usage": {"prompt_tokens": 4},
    }
    num_read = num_refused = 0
    for answer in (good_answer("/v1/completions", body), chat):
        right = _read(answer, 1.0)
        for path in list(places(answer))[1:]:
            for odd in ODD:
                changed = copy.deepcopy(answer)
                within = changed
                for key in path[:-1]:
                    within = within[key]
                within[path[-1]] = odd
                try:
                    reply = _read(changed, 1.0)
                except AnswerError:
                    num_refused += 1
                    continue
                num_read += 1
                show(reply)
                assert not math.isnan(distance(right, reply)) and not math.isnan(distance(reply, right))
                json.dumps([reply.num_prompt_tokens, reply.num_cached_tokens, reply.text])
    assert num_read > 30 and num_refused > 200
