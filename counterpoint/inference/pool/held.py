"""The state of one name of weights at one server, as a pure state machine: wanted, loading, held, proven or refused.

Each pair of a server and a name has a `Held`. Events come in, instructions go out, and `holder` carries them out: there are no
I/O, no tasks and no clock here. A name always returns to service in one way: the server answers a health check, loads the
weights, and proves them.

Next in the reading order of `docs/architecture.md`: `orchestrator/step/finalize.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from counterpoint.inference.base import (
    HeldWeights,
    InferenceError,
    RequestRefused,
    Scores,
    WeightUpdate,
    WrongAnswer,
    WrongWeights,
)
from counterpoint.inference.clients.client import ServerIdentity
from counterpoint.inference.loads import Origin, Stated
from counterpoint.inference.pool.own_loads import OwnLoads

FAILURES_IN_A_ROW = 3
"""Requests that fail with no success between them before a server is asked for one token, and taken out if that fails, too.
Fewer may be a dropped keep-alive connection. More would go to a server that fails fast, since it is least loaded."""

RESTARTED = "it was restarted, and holds the weights it was started with"
"""The reason if another process answers than the proven one."""


class ProbeFailed(RequestRefused):
    """The server accepted the weights but does not compute with them, as its digest or log-probabilities show."""


# --- states ---


Stage = Literal["loading", "begun", "held"]


@dataclass(frozen=True, slots=True)
class Unknown:
    """The pool has not checked the server yet."""

    awaited: bool = True
    """Whether an update waits for the server, in each state. If not, it has not answered in time, or was not reached."""


@dataclass(frozen=True, slots=True)
class Out:
    """The server takes no requests: it failed, or refused the weights."""

    reason: str
    awaited: bool
    not_before: float
    """The time of the next possible load of the weights, on the monotonic clock."""
    refusal: RequestRefused | None = None
    """Why it would not take the weights, or took them and failed their proof."""
    mute: bool = False
    """Whether it left requests unanswered."""


@dataclass(frozen=True, slots=True)
class Loading:
    """The server loads weights, or proves them. None stands for those that it was started with."""

    attempt: int
    update: WeightUpdate | None
    identity: ServerIdentity
    awaited: bool
    served: bool
    """Whether it served until now, and counts towards the capacity: requests may then begin before the proof."""
    version: int | None
    """The version of new requests, or of the last ones."""
    stage: Stage = "loading"
    """`begun` once the server computes new requests with the weights, `held` once their digest is right."""
    mute: bool = False
    unproven: tuple[str | None, int] | None = None
    """The load to forget if its proof fails."""
    dtype: str | None = None


@dataclass(frozen=True, slots=True)
class Proven:
    """The server serves the weights. None stands for those that it was started with."""

    update: WeightUpdate | None
    instance: str
    awaited: bool = True


State = Unknown | Out | Loading | Proven


# --- instructions ---


class AskToken(NamedTuple):
    """Ask the server for one token, or for whatever shows that it fits, then call `answers` or `failed`."""

    attempt: int


class LoadVersion(NamedTuple):
    """Load these weights, then call `begun`, `loaded` or `failed`."""

    attempt: int
    update: WeightUpdate
    first: bool
    """Whether it is the first load at this process, which alone may take the weights over from another owner."""


class Prove(NamedTuple):
    """Ask for the probe of these weights, then call `probed` or `failed`."""

    attempt: int
    update: WeightUpdate


class Check(NamedTuple):
    """Check the server's health without waiting for the next interval."""


class EndRequests(NamedTuple):
    """Give up the requests at the server."""


class Serves(NamedTuple):
    """The server serves the weights, proven. None stands for those that it has."""

    update: WeightUpdate | None
    instance: str
    stated: Stated | None = None
    """Its report on those that it has."""


class GoneOut(NamedTuple):
    """The server is out of service for this name, or still is, for a newer reason. End its requests, and a load in progress."""

    reason: str
    since: float | None
    """The last time at which it was known to be well, in Unix seconds, or None for now."""
    former: State


class Doubt(NamedTuple):
    """Ask the server for one token after several failed requests, then call `token_asked`."""

    failure: InferenceError
    failures: int


class MissesDigests(NamedTuple):
    """The server computes in a precision without published digests. Instructed once."""

    dtype: str
    update: WeightUpdate


Instruction = AskToken | LoadVersion | Prove | Check | EndRequests | Serves | GoneOut | Doubt | MissesDigests


class Held:
    """One name of weights at one server. Each event is a method, which returns the instructions in order.

    `now` is on the monotonic clock. Events of an earlier `attempt` than the current one are ignored.
    """

    def __init__(self, url: str, name: str, *, follows: bool, interval: float) -> None:
        """`follows`: others load the weights, at any time. `interval` is that between two health checks, in seconds."""
        self.url = url
        self.state: State = Unknown()
        self.wanted: WeightUpdate | None = None
        """The weights that the server must hold to serve, or None for those that it was started with."""
        self.settled = False
        """Whether it is known if the server holds the wanted weights."""
        self.turn = 0
        """Counts the events that make an earlier health check worthless: new wishes, loads that begin or end, failures."""
        self.has_served = False
        self.vets = False
        """Whether the server has to show that it fits, each time before it comes into service."""
        self.in_flight = 0
        """Its requests at the server, which `Fleet` counts."""
        self.failures = 0
        """Requests failed since the last success."""
        self.setbacks = 0
        """Times it was taken out since the last success."""
        self.loads = OwnLoads(name, follows)
        self._name = name
        self._interval = interval
        self._attempts = 0
        self.doubt: Doubt | None = None
        """The request for one token in progress."""
        self._has_missed = False
        """Whether it has reported that nothing was published for the server's precision."""

    # --- questions ---

    @property
    def takes_requests(self) -> bool:
        """Whether requests may begin."""
        state = self.state
        return type(state) is Proven or (type(state) is Loading and state.stage != "loading")

    @property
    def counts(self) -> bool:
        """Whether the server counts towards the capacity: it serves, or did when it began to load."""
        state = self.state
        return type(state) is Proven or (type(state) is Loading and state.served)

    @property
    def is_proving(self) -> bool:
        """Whether answers have to wait, since their weights are not proven yet."""
        return type(self.state) is Loading

    @property
    def is_doubted(self) -> bool:
        """Whether enough requests have failed that the server has to show that it can answer."""
        return self.takes_requests and self.failures >= FAILURES_IN_A_ROW

    @property
    def serves_wanted(self) -> bool:
        """Whether the server serves the wanted weights, proven."""
        return isinstance(self.state, Proven) and self.state.update is self.wanted

    def has(self, update: WeightUpdate, *stages: Stage) -> bool:
        """Whether the server serves these weights, or loads them and is at one of the stages."""
        match self.state:
            case Proven(update=served):
                return served is update
            case Loading(update=served, stage=stage):
                return served is update and stage in stages
        return False

    @property
    def refusal(self) -> RequestRefused | None:
        """Why the server would not take the weights, if it is out for that."""
        return self.state.refusal if isinstance(self.state, Out) else None

    @property
    def version(self) -> int | None:
        """The version of new requests, or None for unknown weights or those that the server was started with."""
        match self.state:
            case Loading(version=version):
                return version
            case Proven(update=update) if update is not None:
                return update.version
        return None

    @property
    def status(self) -> tuple[str, str]:
        """The state and its reason, as `ServerStatus` has them."""
        match self.state:
            case Unknown():
                return "unknown", "not reached yet"
            case Out(reason=reason):
                return "out", reason
            case Loading(stage="loading"):
                return "loading", "loading weights"
        return "serving", ""

    def version_of(self, origin: Origin | None, asked: int) -> int:
        """Returns the version with which an accepted answer began, or `asked` if the pool did not load it."""
        found = None if origin is None else self.loads.versions.get((origin.name, origin.first))
        return asked if found is None else found

    def stranger(self, origin: Origin | None) -> str:
        """Returns why an answer is not accepted: other weights computed it than the proven ones. Empty if it is."""
        if origin is None or self.loads.accepts(origin):
            return ""
        if origin.instance != self.loads.instance:
            return RESTARTED
        return f"it answers with weights that this run did not load there: {origin.described}"

    # --- wishes and health ---

    def want(self, update: WeightUpdate) -> list[Instruction]:
        """The pool wants new weights served. Loads them at once, however often the server has failed before."""
        self.wanted, self.settled = update, not self.state.awaited
        self.turn += 1
        if isinstance(self.state, Out):
            self.state = replace(self.state, not_before=0.0)
        return [Check()]

    def checked(self, identity: ServerIdentity, turn: int, now: float) -> list[Instruction]:
        """The server has answered a health check that began at `turn`."""
        if isinstance(self.state, Loading):
            return []
        if turn != self.turn:
            return [Check()]
        found = self._compared(self.state, identity) if isinstance(self.state, Proven) else ""
        gone = self.unfit(found, now) if found else []
        waits = isinstance(self.state, Out) and now < self.state.not_before
        if self.serves_wanted or waits:
            self.settled = True
            return gone
        return [*gone, *self._begin(identity, now)]

    def _compared(self, state: Proven, identity: ServerIdentity) -> str:
        """Returns why a server goes out: another process answers, or it has got other weights. Empty if not."""
        if identity.instance != state.instance:
            return RESTARTED
        found = self.loads.load_at(identity, state.update)
        if self.loads.follows or identity.weights is None or found in self.loads.versions:
            return ""
        missing = found[1] is None
        what = "it has no such adapter any more" if missing else f"it has load {found[1]}, which is not the run's"
        return f"someone else changed the weights of {self._name!r}: {what}"

    def unanswered(
        self, reason: str, now: float, well_at: float | None, *, reached: bool, firm: bool, silence: str
    ) -> list[Instruction]:
        """A health check failed. The server answered last at `well_at`, in Unix seconds.

        `reached`: it answered. If not, no update waits for it. `firm`: it is enough for a server that serves. `silence` says
        how long it has not answered, if that is too long for a server that loads, else it is empty.
        """
        state = self.state
        if isinstance(state, Loading):
            return self._out(_undone(state, silence), now, well_at, awaited=False) if silence else []
        if not firm and self.serves_wanted:
            return []
        self.settled = True
        return self._out(reason, now, well_at, awaited=None if reached else False)

    # --- loads and proofs ---

    def _begin(self, identity: ServerIdentity, now: float) -> list[Instruction]:
        state = self.state
        self.turn += 1
        self._attempts += 1
        is_mute = isinstance(state, Out) and state.mute
        served = isinstance(state, Proven)
        self.state = loading = Loading(
            self._attempts, self.wanted, identity, state.awaited, served, self.version, mute=is_mute
        )
        return [AskToken(loading.attempt)] if is_mute or (self.vets and not served) else self._load(loading, now)

    def answers(self, attempt: int, now: float) -> list[Instruction]:
        """A server that had answered no requests has answered one, with any result, or a server fits that was vetted."""
        if (state := self._at(attempt)) is None:
            return []
        self.state = state = replace(state, mute=False)
        return self._load(state, now)

    def _at(self, attempt: int) -> Loading | None:
        state = self.state
        return state if isinstance(state, Loading) and state.attempt == attempt else None

    def _load(self, state: Loading, now: float) -> list[Instruction]:
        if state.update is not None:
            return [LoadVersion(state.attempt, state.update, self.loads.at(state.identity.instance))]
        if (others := self.loads.find(state.identity)) is None:
            return self._serve(state)
        what = f"{self.url} has other weights under the name {self._name!r} than at first"
        found = f"someone else changed them (it was load {others[0]}, and is load {others[1]})"
        return self.failed(state.attempt, RequestRefused(f"{what}: {found}"), now)

    def begun(self, attempt: int) -> list[Instruction]:
        """From now on the server computes new requests with the weights of this load."""
        if (state := self._at(attempt)) is not None and state.served:
            self._take_early(state, "begun")
        return []

    def _take_early(self, state: Loading, stage: Stage) -> None:
        assert state.update is not None
        self.failures = 0
        self.state = replace(state, stage=stage, version=state.update.version)

    def loaded(self, attempt: int, held: HeldWeights | None, now: float) -> list[Instruction]:
        """The server has loaded the weights, and holds these, or None if it cannot report them."""
        if (state := self._at(attempt)) is None:
            return []
        update, found = state.update, list[Instruction]()
        assert update is not None
        if held is not None:
            unproven = self.loads.add(update.adapter, held.load, update.version)
            self.state = state = replace(state, unproven=unproven, dtype=held.dtype)
            if (others := update.probe.mismatched_layers(held)) is not None:
                what = f"{self.url} accepted version {update.version} but computes with other weights: {others}"
                return self.failed(attempt, ProbeFailed(what), now)
            if update.probe.digests and held.dtype not in update.probe.digests and not self._has_missed:
                self._has_missed = True
                found.append(MissesDigests(held.dtype, update))
            if update.probe.compares(held) and state.served:
                # It served until now, and holds the published weights. New requests begin beside the probe, and wait for it.
                self._take_early(state, "held")
        return [*found, Prove(attempt, update)]

    def probed(self, attempt: int, scores: Scores, tolerance: float | None, now: float) -> list[Instruction]:
        """The server has answered the probe. `tolerance` is as of `Probe.mismatch`."""
        if (state := self._at(attempt)) is None:
            return []
        update = state.update
        assert update is not None
        took = f"{self.url} took version {update.version}"
        if scores.origin is not None and not self.loads.accepts(scores.origin):
            wrong = WrongWeights(f"{took}, and its probe is of others: {scores.origin.described}")
            return self.failed(attempt, wrong, now)
        mismatch = update.probe.mismatch(scores.log_probabilities, tolerance, state.dtype)
        if mismatch is not None:
            return self.failed(attempt, ProbeFailed(f"{took} and failed its probe: {mismatch}"), now)
        return self._serve(state)

    def _serve(self, state: Loading) -> list[Instruction]:
        self.state = Proven(state.update, state.identity.instance)
        self.turn += 1
        self.has_served = True
        if state.stage != "held":
            self.failures = 0
        stated = None if state.update else state.identity.stated(self.loads.load_at(state.identity, None)[0])
        return [Serves(state.update, state.identity.instance, stated), *self._end_of(state)]

    def _end_of(self, state: Loading) -> list[Instruction]:
        if state.update is self.wanted:
            self.settled = True
            return []
        return [Check()]

    def failed(self, attempt: int, error: InferenceError, now: float, *, late: bool = False) -> list[Instruction]:
        """The server did not load the weights, or has not proven them. `late`: not in time."""
        if (state := self._at(attempt)) is None:
            return []
        refusal = error if isinstance(error, RequestRefused) else None
        reason = _undone(state, str(error)) if late else str(error)
        return self._out(reason, now, refusal=refusal, awaited=False if late else None)

    def late(self, now: float) -> list[Instruction]:
        """Others serve the weights, and this server's time is over: nobody waits for it any more."""
        if self.settled:
            return []
        self.settled = True
        match self.state:
            case Loading() as state:
                self.state = replace(state, stage="loading", served=False, awaited=False)
            case Proven():
                return self._out("it has not begun to load what others serve", now, awaited=False)
            case state:
                self.state = replace(state, awaited=False)
        return [EndRequests()]

    # --- requests ---

    def request_answered(self) -> None:
        """A request was answered."""
        self.failures = self.setbacks = 0

    def request_failed(self, error: InferenceError, now: float) -> list[Instruction]:
        """A request failed."""
        if isinstance(error, WrongAnswer):
            return self.unfit(f"it gave a wrong answer: {error}", now)
        self.failures += 1
        if not self.is_doubted:
            return [Check()] if self.takes_requests else []
        if self.doubt is not None:
            return []
        self.doubt = Doubt(error, self.failures)
        return [self.doubt]

    def token_asked(self, error: InferenceError | None, now: float, well_at: float | None) -> list[Instruction]:
        """A doubted server was asked for one token, and gave it, or failed with `error`. `well_at` as before."""
        doubt, self.doubt = self.doubt, None
        assert doubt is not None
        if error is None:
            self.request_answered()
        elif self.is_doubted:
            # Healthy or not, it may return at its next check, no sooner.
            many = f"{doubt.failures} requests in a row failed (the last: {doubt.failure})"
            return self._out(f"{many}, and so did one for one token: {error}", now, well_at)
        return []

    # --- out of service ---

    def unfit(self, reason: str, now: float, since: float | None = None, *, mute: bool = False) -> list[Instruction]:
        """The server must not be used. `since` is when it was last known to be well, in Unix seconds, or None for now.

        `mute`: it answers no requests, and has to answer one before it serves again. No update waits for it.
        """
        return self._out(reason, now, since, awaited=False if mute else None, mute=mute)

    def _out(
        self,
        reason: str,
        now: float,
        since: float | None = None,
        *,
        refusal: RequestRefused | None = None,
        awaited: bool | None = None,
        mute: bool = False,
    ) -> list[Instruction]:
        """Stops requests, which are retried at other servers. `awaited`: None leaves it as it is."""
        former = self.state
        if isinstance(former, Out):
            not_before = former.not_before
        else:
            self.setbacks += 1
            not_before = now + self._interval * intervals_out(self.setbacks)
        mute = mute or (isinstance(former, Out | Loading) and former.mute)
        self.state = Out(reason, former.awaited if awaited is None else awaited, not_before, refusal, mute)
        self.turn += 1
        self.failures = 0
        further: list[Instruction] = []
        if isinstance(former, Loading):
            self.loads.forget(former.unproven)
            further = self._end_of(former)
        return [GoneOut(reason, since, former), *further]

    def close(self) -> None:
        """Ends the use of the weights. Answers that wait for a proof fail, since their weights are unproven."""
        if isinstance(self.state, Loading):
            self.loads.forget(self.state.unproven)
            self.state = Out("the pool was closed before the weights were proven", False, float("inf"))


def _undone(state: Loading, because: str) -> str:
    version = None if state.update is None else state.update.version
    return f"version {version} was to be loaded and proven, and {because}"


def intervals_out(setbacks: int) -> int:
    """Returns for how many health intervals a server that is out gets no weights: 0 at first, then 1, 3, 7, up to 31."""
    return int(2 ** min(max(setbacks - 1, 0), 5)) - 1
