"""Which weights a server computes with, and whose they are: its own record of loads, and what an answer says of them.

A server counts the loads of each model that requests may name: 0 is what it was started with, and every change takes the next
number, by whatever way it comes. An answer names the first and the last load that may have computed it, by the process
(`Origin`). A pool knows the numbers of its own loads and refuses all others.

The weights of a name belong to the owner who loaded them, until the owner gives them up or another takes them over
(`LoadClaim`). Neither torch nor vllm is needed here: the fakes of tests keep the same record.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from counterpoint.inference.identity import is_proof

MAX_KEY = 128
"""Characters of an owner's key."""

MAX_OWNER = 300
"""Characters of what a person reads of an owner."""


class NotOwner(Exception):
    """The weights belong to another owner. The message names it, for a person."""


@dataclass(frozen=True, slots=True)
class LoadClaim:
    """Who loads weights."""

    key: str
    """Random, and the same for a run however often it is resumed. Who knows it is the owner: it is not shown."""
    owner: str
    """The owner, for a person: the run, its directory and its machine."""
    takes_over: bool = False
    """Whether weights of another owner may be replaced."""
    proof: str = ""
    """Proof (`identity`) of the process and the key, for a server that belongs to a job."""

    @classmethod
    def of_process(cls) -> LoadClaim:
        """Returns a claim of this process alone, which no later one can renew."""
        return cls(secrets.token_hex(16), f"process {os.getpid()} on {socket.gethostname()}")

    def encode(self) -> dict[str, Any]:
        """Returns it as values of JSON."""
        return {"key": self.key, "owner": self.owner, "takes_over": self.takes_over, "proof": self.proof}

    @classmethod
    def decode(cls, fields: Any) -> LoadClaim:
        """Reads what `encode` returned. Raises `ValueError` for anything else."""
        match fields:
            case {"key": str(key), "owner": str(owner), "takes_over": bool(takes_over), "proof": str(proof)} if (
                0 < len(key) <= MAX_KEY and len(owner) <= MAX_OWNER
            ):
                return cls(key, owner, takes_over, proof)
        raise ValueError(
            f"a claim is {{key: text of 1 to {MAX_KEY} characters, owner: text of at most {MAX_OWNER}, takes_over: boolean, "
            "proof: text}"
        )


@dataclass(frozen=True, slots=True)
class Origin:
    """The weights that computed an answer, as the server counted them."""

    instance: str
    """The process: a random id that no other process has."""
    name: str | None
    """The adapter's name; None for the full weights."""
    first: int
    """The number of the load with which the request began."""
    last: int
    """The number of the last load that may have computed part of the answer: above `first` if the weights changed on the way."""
    described: str
    """The last load, for a person."""

    def encode(self) -> list[Any]:
        """Returns it as values of msgpack or JSON."""
        return [self.instance, self.name, self.first, self.last, self.described]

    @classmethod
    def decode(cls, fields: Any) -> Origin:
        """Reads what `encode` returned. Raises `ValueError` for anything else."""
        try:
            return _origin(*fields) if type(fields) is list else _origin()
        except TypeError:  # a value without a hash
            return _origin()


@lru_cache(maxsize=16, typed=True)
def _origin(*fields: Any) -> Origin:
    """See `Origin.decode`. All answers between two loads say the same."""
    match fields:
        case [str(instance), str() | None as name, int(first), int(last), str(described)] if 0 <= first <= last:
            return Origin(instance, name, first, last, described)
    raise ValueError("it does not say which weights computed it; does the server run another version of Counterpoint?")


UNLABELLED = "default"
"""What vLLM calls the weights that it was started with."""


@dataclass(frozen=True, slots=True)
class Load:
    """One load of one name."""

    number: int
    version: int | None
    """The policy version that the loader gave; None for weights that came by another way."""
    owner: str
    """The owner, for a person; empty for weights without an owner."""

    @property
    def label(self) -> str:
        """What the engine is told to call the weights of it: vLLM's `/weight_info` says it, and its own of each token."""
        return f"{self.version}@{self.number}" if self.number else UNLABELLED

    @property
    def described(self) -> str:
        """The load, for a person."""
        if not self.number:
            return "the weights that it was started with"
        if self.version is None:
            return f"load {self.number}, which came by another way than through its owner"
        return f"load {self.number}: version {self.version}, by {self.owner}"


STARTED = Load(0, None, "")


@dataclass(frozen=True, slots=True)
class Stated:
    """What a server says that it holds of one name."""

    load: int
    version: int | None = None
    """The version of the weights, as `Load.version` has it."""
    owner: str = ""
    digest: str | None = None
    """A short form of the digest of the weights that it computes with, `digest_of`; None where it has computed none."""

    def __str__(self) -> str:
        """Returns it for a person."""
        if not self.load:
            return STARTED.described
        digest = f" (digest {self.digest})" if self.digest else ""
        return f"{Load(self.load, self.version, self.owner or 'an owner that is gone').described}{digest}"

    @classmethod
    def decode(cls, fields: Any) -> Stated | None:
        """Reads what `Loads.described` returned; None for anything else."""
        match fields:
            case {"load": int(load), "version": int() | None as version, "owner": str(owner)}:
                digest = fields.get("digest")
                return cls(load, version, owner[:MAX_OWNER], digest[:MAX_KEY] if isinstance(digest, str) else None)
        return None


def digest_of(dtype: str, layers: Mapping[str, str]) -> str:
    """Returns 16 hexadecimal digits that stand for the layers' digests of weights in one precision."""
    return hashlib.sha256(repr((dtype, sorted(layers.items()))).encode()).hexdigest()[:16]


def _number(label: str) -> int:
    """Returns the number of the load that a label names, or -1 for one that is not ours."""
    number = label.rpartition("@")[2]
    return int(number) if number.isdecimal() and len(number) < 10 else -1


class Loads:
    """The record of one server, by name of the adapter; None stands for the full weights."""

    def __init__(self, instance: str, secret: bytes | None = None, belongs_to: str = "") -> None:
        """`secret` is that of the job that the server belongs to, and `belongs_to` what a person reads of it."""
        self.instance = instance
        self._secret = secret
        self._belongs_to = belongs_to
        self._numbers: Counter[str | None] = Counter()
        """The highest number of each name, which is never used again."""
        self._newest: dict[str | None, Load] = {}
        """What requests that begin now are computed with."""
        self._begun: dict[str | None, Load] = {}
        """A load that the engine may have made already, but which is not known to be complete."""
        self._digests: dict[str | None, tuple[int, str]] = {}
        """The number and the digest of the last load of each name whose weights were read back."""
        self._owners: dict[str | None, LoadClaim] = {}
        self._replaced: dict[str | None, set[str]] = {}
        """Names the processes, by model, whose weights another one with the same key has replaced."""

    def check(self, name: str | None, claim: LoadClaim) -> None:
        """Raises `NotOwner` if the server belongs to another's job, or the weights to another and they are not taken over."""
        if self._secret is not None and not is_proof(claim.proof, self._secret, self.instance, claim.key):
            raise NotOwner(
                f"this server belongs to a job, whose identity is in {self._belongs_to}, and {claim.owner} does not prove it: "
                "use another server, or set identity_file in [orchestrator.inference] to that file"
            )
        owner = None if claim.takes_over else self._owners.get(name)
        if owner is not None and not secrets.compare_digest(owner.key.encode(), claim.key.encode()):
            what = "weights" if name is None else f"weights of its adapter {name!r}"
            raise NotOwner(
                f"the server's {what} belong to {owner.owner}, not to {claim.owner}. End that one first, or use another server; "
                "if it is gone and did not end in order, take them over: take_over = true in [orchestrator.inference], for one "
                "start"
            )

    def next(self, name: str | None, version: int, claim: LoadClaim) -> Load:
        """Returns the next load of a name, which is not in use yet. Raises as `check`."""
        self.check(name, claim)
        self._numbers[name] += 1
        return Load(self._numbers[name], version, claim.owner)

    def begin(self, name: str | None, load: Load) -> None:
        """Notes that answers which end from now on may be of this load."""
        self._begun[name] = load

    def complete(self, name: str | None, load: Load, claim: LoadClaim) -> None:
        """Notes that requests which begin from now on are computed with this load, and whose it is."""
        self._begun[name] = self._newest[name] = load
        former, self._owners[name] = self._owners.get(name), claim
        if former is not None and former.owner != claim.owner:
            self._replaced.setdefault(name, set()).add(former.owner)

    def read_back(self, name: str | None, number: int, digest: str) -> None:
        """Notes the digest of a load that is complete."""
        self._digests[name] = number, digest

    def in_turn_with(self, name: str | None, claim: LoadClaim) -> str:
        """Returns the process that has replaced this one's weights by the same key, and whose weights are now replaced in turn.

        Empty if there is none, as after a resume: the process before it does not come back.
        """
        owner = self._owners.get(name)
        if owner is None or owner.owner == claim.owner or claim.owner not in self._replaced.get(name, ()):
            return ""
        return owner.owner

    def cancel(self, name: str | None) -> None:
        """Notes that the load that had begun has changed nothing."""
        self._begun.pop(name, None)

    def changed(self, name: str | None) -> None:
        """Notes that the weights of a name were changed, or removed, by another way than a load."""
        self._numbers[name] += 1
        self._newest[name] = self._begun[name] = Load(self._numbers[name], None, "")

    def witness(self, labels: Iterable[str], first: Load) -> None:
        """Takes up how the engine itself calls the weights that computed an answer, which began with `first` of the full weights.

        This is a second record beside ours, kept by vLLM (0.32 and later) token by token. If they differ, somebody has changed
        the weights by another way than a load, and the answer's `origin` says so.
        """
        last = max(self.now(None), self._begun.get(None, STARTED), key=lambda load: load.number).number
        numbers = [0 if label == UNLABELLED else _number(label) for label in labels]
        if not all(first.number <= number <= last for number in numbers):
            self.changed(None)

    def release(self, name: str | None, claim: LoadClaim) -> None:
        """Gives a name up, so that anyone may load it. Raises as `check`."""
        self.check(name, claim)
        self._owners.pop(name, None)

    def now(self, name: str | None) -> Load:
        """Returns the load that requests which begin now are computed with."""
        return self._newest.get(name, STARTED)

    def origin(self, name: str | None, first: Load) -> Origin:
        """Returns what an answer says that ends now and began with `first`."""
        last = max(self.now(name), self._begun.get(name, STARTED), key=lambda load: load.number)
        return Origin(self.instance, name, first.number, last.number, last.described)

    def described(self, name: str | None) -> dict[str, Any]:
        """Returns the load of a name for `status`."""
        load, owner = self.now(name), self._owners.get(name)
        number, digest = self._digests.get(name, (0, None))
        return {
            "load": load.number,
            "version": load.version,
            "owner": "" if owner is None else owner.owner,
            "digest": digest if number == load.number else None,
        }
