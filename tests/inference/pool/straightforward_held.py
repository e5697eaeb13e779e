"""The rules of `counterpoint/inference/pool/held.py` in the plainest way: separate facts about one name at one server, and what
each event changes of them.

It has no words for a person. It believes its events, but for those of an earlier attempt.
"""

from __future__ import annotations

from typing import Any

from counterpoint.inference.base import HeldWeights, RequestRefused, Scores, WeightUpdate, WrongAnswer
from counterpoint.inference.clients.client import ServerIdentity
from counterpoint.inference.loads import Origin

NOTHING = object()
"""Held by a server that is not known to hold anything."""


class StraightforwardHeld:
    """Does as `Held`, which it is compared with. Instructions are their names and what counts of them."""

    def __init__(self, name: str, *, follows: bool, interval: float) -> None:
        self.name, self.follows, self.interval = name, follows, interval
        self.state = "unknown"
        self.wanted: WeightUpdate | None = None
        self.held: Any = NOTHING
        """What it serves, proven."""
        self.loading: Any = NOTHING
        """What it loads or proves."""
        self.early: WeightUpdate | None = None
        """What requests begin with though it is not proven."""
        self.digest_is_right = False
        self.settled = self.silent = self.mute = self.counted = self.refused = self.asked = False
        self.not_before = 0.0
        self.setbacks = self.failures = self.attempt = self.turn = 0
        self.version: int | None = None
        self.instance = ""
        self.accepted: dict[Any, int | None] = {}
        self.accepted_of: str | None = None
        self.own = False
        self.found: Any = None
        self.unproven: Any = None
        self.identity = ServerIdentity("")
        self.warned = False

    # --- what it is compared by ---

    def takes_requests(self) -> bool:
        return self.state == "serving"

    def unproven_number(self) -> int | None:
        """The number of the newest load that was to be proven."""
        return None if self.unproven is None else int(self.unproven[1])

    def accepts(self, origin: Origin) -> bool:
        if origin.instance != self.accepted_of:
            return False
        return self.follows or all(
            (origin.name, each) in self.accepted for each in range(origin.first, origin.last + 1)
        )

    # --- events ---

    def want(self, update: WeightUpdate) -> list[Any]:
        self.wanted, self.settled, self.not_before = update, self.silent, 0.0
        self.turn += 1
        return ["check"]

    def checked(self, identity: ServerIdentity, turn: int, now: float) -> list[Any]:
        if self.loading is not NOTHING:
            return []
        if turn != self.turn:
            return ["check"]
        done: list[Any] = []
        if self.state == "serving" and self.is_other(identity):
            done = self.out(now)
        if self.held is not self.wanted and now >= self.not_before:
            return done + self.begin(identity, now)
        self.settled = True
        return done

    def is_other(self, identity: ServerIdentity) -> bool:
        if identity.instance != self.instance:
            return True
        if self.follows or identity.weights is None:
            return False
        return self.number_at(identity, self.held) not in self.accepted

    def number_at(self, identity: ServerIdentity, held: Any) -> Any:
        adapter = held.adapter if isinstance(held, WeightUpdate) else None
        if not isinstance(held, WeightUpdate) and self.name in identity.adapters:
            adapter = self.name
        return adapter, identity.weights if adapter is None else identity.adapters.get(adapter)

    def begin(self, identity: ServerIdentity, now: float) -> list[Any]:
        self.attempt += 1
        self.turn += 1
        self.loading, self.identity = self.wanted, identity
        self.early, self.digest_is_right, self.held, self.unproven = None, False, NOTHING, None
        self.refused = False
        self.state = "loading"
        return ["ask"] if self.mute else self.load(now)

    def answers(self, attempt: int, now: float) -> list[Any]:
        if self.loading is NOTHING or attempt != self.attempt:
            return []
        self.mute = False
        return self.load(now)

    def load(self, now: float) -> list[Any]:
        if self.loading is not None:
            if self.accepted_of != self.identity.instance:
                self.accepted, self.accepted_of, self.own = {}, self.identity.instance, False
            return [("load", self.loading, not self.own)]
        name, number = self.number_at(self.identity, None)
        found = (self.identity.instance if number else "", name, number or 0)
        if self.found is not None and self.found[1] == name and self.found != found and not self.follows:
            return self.fail(now, refused=True)
        self.found, self.accepted, self.accepted_of = found, {found[1:]: None}, self.identity.instance
        return self.serve()

    def begun(self, attempt: int) -> list[Any]:
        if self.loading is not NOTHING and attempt == self.attempt and self.counted:
            self.begin_early()
        return []

    def begin_early(self) -> None:
        self.early, self.state, self.version, self.failures = self.loading, "serving", self.loading.version, 0

    def loaded(self, attempt: int, held: HeldWeights | None, now: float) -> list[Any]:
        if self.loading is NOTHING or attempt != self.attempt:
            return []
        done: list[Any] = []
        if held is not None:
            if not self.own:
                self.accepted = {key: each for key, each in self.accepted.items() if key[0] == self.loading.adapter}
            self.own, self.unproven = True, (self.loading.adapter, held.load)
            self.accepted[self.unproven] = self.loading.version
            published = self.loading.probe.digests.get(held.dtype)
            if published is None and not self.warned:
                self.warned = True
                done = ["misses"]
            if published is not None:
                if published != held.layers:
                    return self.fail(now, refused=True)
                if self.counted:
                    self.begin_early()
                    self.digest_is_right = True
        return [*done, ("prove", self.loading)]

    def probed(self, attempt: int, scores: Scores, now: float, *, right: bool) -> list[Any]:
        """`right`: the log-probabilities are those of the probe."""
        if self.loading is NOTHING or attempt != self.attempt:
            return []
        if scores.origin is not None and not self.accepts(scores.origin):
            return self.fail(now, refused=False)
        return self.serve() if right else self.fail(now, refused=True)

    def serve(self) -> list[Any]:
        served, is_wanted = self.loading, self.loading is self.wanted
        if not self.digest_is_right:
            self.failures = 0
        self.held, self.loading, self.early = served, NOTHING, None
        self.state, self.counted, self.silent, self.instance = "serving", True, False, self.identity.instance
        self.version = None if served is None else served.version
        self.turn += 1
        self.settled = self.settled or is_wanted
        return [("serves", served)] + ([] if is_wanted else ["check"])

    def fail(self, now: float, *, refused: bool, late: bool = False) -> list[Any]:
        self.silent = self.silent or late
        return self.out(now, refused=refused)

    def failed(self, attempt: int, error: Exception, now: float, *, late: bool) -> list[Any]:
        if self.loading is NOTHING or attempt != self.attempt:
            return []
        return self.fail(now, refused=isinstance(error, RequestRefused), late=late)

    def late(self, now: float) -> list[Any]:
        if self.settled:
            return []
        if self.held is not NOTHING:
            self.settled = self.silent = True
            return self.out(now)
        self.settled = self.silent = True
        if self.loading is not NOTHING:
            self.state, self.counted, self.early, self.digest_is_right = "loading", False, None, False
        return ["end requests"]

    def unanswered(self, now: float, *, reached: bool, firm: bool, silence: bool) -> list[Any]:
        if self.loading is not NOTHING:
            if not silence:
                return []
            self.silent = True
            return self.out(now)
        if self.held is self.wanted and not firm:
            return []
        self.settled = True
        self.silent = self.silent or not reached
        return self.out(now)

    def request_failed(self, error: Exception, now: float) -> list[Any]:
        if isinstance(error, WrongAnswer):
            return self.out(now)
        self.failures += 1
        if self.state != "serving":
            return []
        if self.failures < 3:
            return ["check"]
        if self.asked:
            return []
        self.asked = True
        return ["doubt"]

    def request_answered(self) -> None:
        self.failures = self.setbacks = 0

    def token_asked(self, error: Exception | None, now: float) -> list[Any]:
        self.asked = False
        if error is None:
            self.request_answered()
        elif self.state == "serving" and self.failures >= 3:
            return self.out(now)
        return []

    def unfit(self, now: float, *, mute: bool) -> list[Any]:
        self.mute, self.silent = self.mute or mute, self.silent or mute
        return self.out(now)

    def out(self, now: float, *, refused: bool = False) -> list[Any]:
        done: list[Any] = [("gone out", self.state)]
        if self.state != "out":
            self.setbacks += 1
            self.not_before = now + self.interval * [0, 1, 3, 7, 15, 31][min(self.setbacks, 6) - 1]
        if self.loading is not NOTHING:
            self.accepted.pop(self.unproven, None)
            if self.loading is self.wanted:
                self.settled = True
            else:
                done.append("check")
        self.state, self.held, self.loading, self.early = "out", NOTHING, NOTHING, None
        self.counted, self.version, self.failures, self.refused = False, None, 0, refused
        self.turn += 1
        return done

    def close(self) -> None:
        if self.loading is not NOTHING:
            self.accepted.pop(self.unproven, None)
            self.state, self.loading, self.early = "out", NOTHING, None
            self.counted, self.version, self.silent = False, None, True
