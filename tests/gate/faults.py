"""Faults in the session gate and in who asks it, each of which `make test` must find: broken rules and promises.

`python tests/gate/faults.py [WORD ...]` makes each whose name has all the words, and says after how many seconds
which test found it.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from model.faults import Change, find_all

GATE, PAUSES, ROUNDS = "gate/gate.py", "gate/pause_lengths.py", "gate/rounds.py"
ENTRANCE = "engine/schedule/entrance.py"

TESTS = (
    *(f"tests/gate/test_{name}.py" for name in ("gate", "rounds")),
    "tests/engine/schedule/test_entrance.py",
)
"""The quick ones first."""

FAULTS: dict[str, list[Change]] = {
    # 1. Footprint.
    "a member's answer doesn't count": [
        (GATE, "if session.running else number)", "if session.running else min(number, asked.prompt_tokens))")
    ],
    "a member's next prompt doesn't count": [
        (
            GATE,
            "            self._set_footprint(found, max(prompt, found.footprint) if found.running else prompt)\n",
            "",
        )
    ],
    "of a session's requests the last one to end counts": [
        (GATE, "max(number, session.footprint) if session.running", "number if session.running")
    ],
    "of a member's requests the last one counts": [
        (GATE, "max(prompt, found.footprint) if found.running", "prompt if found.running")
    ],
    "of a waiting session's requests the first one counts": [
        (
            GATE,
            "max([each.prompt_tokens for each in session.waiting.values()])",
            "next(iter(session.waiting.values())).prompt_tokens",
        )
    ],
    "a request without a session doesn't count": [
        (GATE, "self._other_tokens += prompt", "pass"),
        (GATE, "self._other_tokens -= asked.prompt_tokens", "pass"),
    ],
    "a request without a session counts after its end": [(GATE, "self._other_tokens -= asked.prompt_tokens", "pass")],
    "a request without a session waits": [
        (
            GATE,
            "if session is None:\n            self._requests[request_id] = _Asked(None",
            "if session is None and not self._waiting:\n            self._requests[request_id] = _Asked(None",
        )
    ],
    "a member's next request waits behind others": [
        (
            GATE,
            "if found.is_member and not found.waiting and not (self._waiting and self._is_past_turn(found)):",
            "if found.is_member and not self._waiting:",
        )
    ],
    "salts are ignored": [
        (GATE, 'tenant = check_name("salt", salt)\n', 'tenant = check_name("salt", salt) and None\n')
    ],
    # 2. Room.
    "the room is filled to the last token": [
        (GATE, "return int(self.fill * self.num_tokens)", "return self.num_tokens")
    ],
    "a session's own footprint needs no room": [
        (GATE, "self._num_counted + session.footprint <= self._most_tokens", "self._num_counted <= self._most_tokens")
    ],
    "a session that is larger than the room never enters": [
        (GATE, "return not self._members or self._num_counted", "return self._num_counted")
    ],
    "the whole host tier is room": [(GATE, "HOST_SHARE: Final = 0.5", "HOST_SHARE: Final = 1.0")],
    # 3. Hold.
    "the hold is fixed": [
        (GATE, "hold_s = holds[session.reason] = self.hold_s(session.reason)", "hold_s = holds[session.reason] = 24.0")
    ],
    "all stop reasons share a hold": [
        (
            GATE,
            "found = self._lengths.get(reason)",
            "found = self._lengths.get(reason) or next(iter(self._lengths.values()), None)",
        )
    ],
    "nothing is learned of pauses": [
        (PAUSES, "        if seconds is not None:\n            self._add(seconds)", "        pass")
    ],
    "pauses that last aren't counted": [(PAUSES, "self._num + self.num_open, 0.0", "self._num, 0.0")],
    "no pauses are known at first": [(PAUSES, "_NUM_PRIOR = 10", "_NUM_PRIOR = 0")],
    "a hold costs nothing if the session comes back later": [
        (PAUSES, "num_longer * (hold_s + cost_s)", "num_longer * cost_s")
    ],
    "to compute a prompt again costs a token": [
        (GATE, "hold_s(self.num_tokens * self._seconds_per_token)", "hold_s(self._seconds_per_token)")
    ],
    "sessions that ended teach how long pauses are": [
        (GATE, "self._end_pause(found, None)", "self._end_pause(found, self._now)")
    ],
    "old pauses count for ever": [(PAUSES, "if self._num > _MOST_PAUSES:", "if False:")],
    "members leave although nobody waits": [
        (
            GATE,
            "        if self._waiting:\n            wake_at = self._expire(paused)",
            "        wake_at = self._expire(paused)",
        )
    ],
    "a hold goes on in the next request": [(GATE, "        self._end_pause(found, self._now)\n", "")],
    "nobody says when a hold is over": [(GATE, "return next_end", "return None")],
    # 4. Growth.
    "members that outgrow the room stay": [
        (GATE, "        if self._num_counted > self.num_tokens:\n            paused += self._shrink()\n", "")
    ],
    "members leave before they outgrow the room": [
        (
            GATE,
            "if self._num_counted > self.num_tokens:",
            "if self._num_counted > int(self.fill * self.num_tokens):",
        )
    ],
    "who has paused longest leaves last": [
        (
            GATE,
            "for session in [each for each in self._paused if each.is_member]:\n            if",
            "for session in [each for each in self._paused if each.is_member][::-1]:\n            if",
        )
    ],
    "all that pause leave": [
        (GATE, "            if self._num_counted <= self._most_tokens:\n                break\n", "")
    ],
    "what runs is made to leave": [
        (
            GATE,
            "for session in [each for each in self._paused if each.is_member]:\n            if",
            "for session in list(self._members):\n            if",
        )
    ],
    "nobody makes room for one that entered since all was idle": [
        (
            GATE,
            "if self._num_counted > self._most_tokens:  # it entered because all was idle",
            "if False:",
        )
    ],
    # 5. Order.
    "sessions that are cached don't come first": [
        (
            GATE,
            "return not session.had_turn and 2 * first.cached_tokens >= first.prompt_tokens",
            "return False",
        )
    ],
    "sessions of which a third is cached come first": [
        (GATE, "2 * first.cached_tokens >= first.prompt_tokens", "3 * first.cached_tokens >= first.prompt_tokens")
    ],
    "sessions of which half is cached don't come first": [
        (GATE, "2 * first.cached_tokens >= first.prompt_tokens", "2 * first.cached_tokens > first.prompt_tokens")
    ],
    "who came last is next": [
        (
            GATE,
            "others = [session for session in self._waiting if session.num_overtakes < self.max_overtakes]",
            "others = [session for session in self._waiting if session.num_overtakes < self.max_overtakes][::-1]",
        )
    ],
    "a session that asks again goes to the end": [
        (
            GATE,
            "self._waiting.setdefault(session)",
            "self._waiting.pop(session, None)\n        self._waiting[session] = None",
        )
    ],
    "one more overtake is allowed": [
        (GATE, "session.num_overtakes >= self.max_overtakes]", "session.num_overtakes > self.max_overtakes]"),
        (GATE, "session.num_overtakes < self.max_overtakes]", "session.num_overtakes <= self.max_overtakes]"),
    ],
    "overtakes aren't counted": [(GATE, "older.num_overtakes += 1", "older.num_overtakes += 0")],
    "overtakes of an earlier wait count": [(GATE, "        session.num_overtakes = 0\n", "")],
    "who was overtaken too often enters without room": [
        (
            GATE,
            "            if not self._has_room(session):\n",
            "            if session.num_overtakes < self.max_overtakes and not self._has_room(session):\n",
        )
    ],
    "who waits is not looked up again": [(GATE, "asked.cached_tokens = check_count(", "check_count(")],
    "a session comes back first after its turn": [(GATE, "return not session.had_turn and 2 *", "return 2 *")],
    # 6. Patience.
    "the patience is twice as long": [(GATE, "PATIENCE: Final = 0.25", "PATIENCE: Final = 0.5")],
    "the patience is for the whole prompt": [
        (
            GATE,
            "(first.prompt_tokens - first.cached_tokens) * self._seconds_per_token",
            "first.prompt_tokens * self._seconds_per_token",
        )
    ],
    "the patience begins anew with each call": [(GATE, "        elif self._idle_since is None:\n", "        else:\n")],
    "the patience doesn't end": [
        (GATE, "            self._idle_since = self._now\n        admitted", "            pass\n        admitted")
    ],
    "the patience goes on while something is busy": [
        (
            GATE,
            "        if busy or not self._waiting:\n            self._idle_since = None\n",
            "        if not self._waiting:\n            self._idle_since = None\n",
        )
    ],
    "nobody says when the patience ends": [
        (GATE, "wake_at = enters_at if wake_at is None else min(wake_at, enters_at)", "pass")
    ],
    # 7. Turn.
    "a member keeps its place after its turn": [
        (
            GATE,
            "session.entered_at + self.turn_s\n            if self._now >= over_at",
            "float('inf')\n            if self._now >= over_at",
        )
    ],
    "requests pass after their session's turn": [
        (GATE, "return self._now >= session.entered_at + self.turn_s", "return False")
    ],
    "a turn begins anew with each request": [
        (
            GATE,
            "            found.running.add(request_id)\n",
            "            found.running.add(request_id)\n            found.entered_at = self._now\n",
        )
    ],
    "a turn ends in the middle of a session's requests": [
        (
            GATE,
            "if found.is_member and not found.running and self._waiting and self._is_past_turn(found):",
            "if found.is_member and self._waiting and self._is_past_turn(found):",
        )
    ],
    "a session whose turn is over isn't in the line": [
        (
            GATE,
            '            self._leave(session, "turn")\n            self._queue(session)\n',
            '            self._leave(session, "turn")\n',
        )
    ],
    # No request is refused or forgotten, and a call that changes nothing may come again.
    "of a session's requests one enters": [
        (GATE, "admitted = list(session.waiting)\n", "admitted = list(session.waiting)[:1]\n")
    ],
    "a request enters twice": [(GATE, "        session.waiting.clear()\n", "")],
    "one session enters in a call": [
        (
            GATE,
            "            admitted += self._enter(session)\n",
            "            if admitted:\n                break\n            admitted += self._enter(session)\n",
        )
    ],
    "a cancelled request enters": [(GATE, "        del session.waiting[request_id]\n", "")],
    "a cancelled session stays in the line": [
        (
            GATE,
            "            del self._waiting[session]\n            self._forget(session)\n",
            "            self._forget(session)\n",
        )
    ],
    "a request that ended is still known": [
        (
            GATE,
            "        self._idle_since = None\n        del self._requests[request_id]\n",
            "        self._idle_since = None\n",
        )
    ],
    "a session that ends keeps its place": [(GATE, "            found.has_ended = True\n", "            pass\n")],
    "a session that begins again is forgotten at its next pause": [
        (GATE, "        found.has_ended = False\n        asked", "        asked")
    ],
    "sessions that stay away are known for ever": [
        (
            GATE,
            "            if session.paused_at is None or self._now - session.paused_at <= MOST_S:\n",
            "            if True:\n",
        )
    ],
    "a release counts as an overtake": [
        (
            GATE,
            "        if not self._waiting:\n            wake_at = None\n",
            "        for each in self._waiting:\n            each.num_overtakes += 1\n",
        )
    ],
    "the clock goes back": [(GATE, "self._now = max(self._now, float(time))", "self._now = float(time)")],
    "a prompt of no tokens is refused": [
        (GATE, 'check_count("prompt_tokens", prompt_tokens, 0)', 'check_count("prompt_tokens", prompt_tokens, 1)')
    ],
    # What is said of those that wait.
    "the tokens that are missing leave out the session's own": [
        (
            GATE,
            "else self._num_counted + session.footprint - self._most_tokens",
            "else self._num_counted - self._most_tokens",
        )
    ],
    "a session's place counts from its arrival": [
        (GATE, "for number, each in enumerate(self._order()) if", "for number, each in enumerate(self._waiting) if")
    ],
    # Rounds.
    "no round is due when the gate's time has come": [
        (ROUNDS, "is_late = self._wake_at is not None and now >= self._wake_at", "is_late = False")
    ],
    "no round is due when all becomes idle": [
        (ROUNDS, "self._has_changed or is_late or (num_busy > 0) != self._was_busy", "self._has_changed or is_late")
    ],
    "a round is always due": [
        (ROUNDS, "return self._has_changed or is_late or (num_busy > 0) != self._was_busy", "return True")
    ],
    "nobody is looked up": [(ROUNDS, "[:NUM_LOOKED_UP]:", "[:0]:")],
    "all that wait are looked up": [(ROUNDS, "[:NUM_LOOKED_UP]:", ":")],
    "what was just admitted isn't busy": [(ROUNDS, "num_busy + len(decision.admitted) > 0", "num_busy > 0")],
    "the last step alone says how long a token takes": [(ROUNDS, "_WEIGHT = 0.1", "_WEIGHT = 1.0")],
    "a new gate has other settings": [
        (ROUNDS, "old.num_tokens, fill=old.fill, max_overtakes=old.max_overtakes, turn_s=old.turn_s", "old.num_tokens")
    ],
    # The engine.
    "with room for all, some pass others": [
        (
            ENTRANCE,
            "        if len(passing) == len(self.held):\n",
            "        if False:\n",
        )
    ],
    "the gate isn't told that a request has ended": [
        (
            ENTRANCE,
            'gate.ended(prompt, prompt.num_tokens, request.pause_reason or "stop", float(self._manager.now))',
            "pass",
        )
    ],
    "the gate isn't told that a request was cancelled": [
        (ENTRANCE, "            gate.cancel(prompt)\n", "            pass\n")
    ],
    "the gate isn't told how long answers are": [
        (ENTRANCE, "        prompt.num_tokens = max(prompt.num_tokens, request.sequence.num_tokens)\n", "")
    ],
    "the gate knows no tenants": [
        (ENTRANCE, "sequence.session, sequence.salt, num_tokens", "sequence.session, None, num_tokens")
    ],
    "the gate isn't told what is cached": [
        (
            ENTRANCE,
            "return min(self._lookups.find(prompt.first).num_tokens, prompt.first.sequence.num_prompt_tokens)",
            "return 0",
        )
    ],
    "the gate sees each sample": [(ENTRANCE, "        if prompt.num_left:\n            return\n", "")],
    "nothing wakes an engine in which all wait": [
        (ENTRANCE, "return self.rounds.wake_at if self.rounds is not None and self.held else None", "return None")
    ],
    "the gate outlives an interruption": [(ENTRANCE, "            self.rounds.restart()\n", "")],
    "an interruption forgets who waits": [(ENTRANCE, "        return held\n", "        return []\n")],
}

if __name__ == "__main__":
    sys.exit(find_all(FAULTS, TESTS))
