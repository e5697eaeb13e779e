"""The table of steering verbs: what may be done to a run of a live job, and to a server of it.

Three things come from an entry: the command (`counterpoint/cli/steering.py`), the endpoint and its part of the OpenAPI document
(`counterpoint/serve/api/steering.py`), and the page's button (`counterpoint/serve/page/views/run_actions.js`). An entry names its
function as text, so that `counterpoint --help` lists the verbs and imports nothing that carries them out.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_type_hints


class Verb(NamedTuple):
    """Something that may be done to a run or a server."""

    name: str
    """Names the command, and stands in the endpoint's path."""
    summary: str
    """What it does, in one line without a capital and a period."""
    explanation: str
    """What will happen, in sentences: for whoever is about to do it."""
    function: str
    """`MODULE:NAME` of what does it. For a run: `function(job, run_id, asked, wait_seconds)`, which returns a `VerbOutcome`; the
    fields of the model `asked` are what the verb is asked with, and a verb without any lacks it, as one that is done at once
    lacks `wait_seconds`. For a server: `function(job, url)`."""
    label: str
    """The text of the page's button."""
    when: Literal["", "paused", "not paused", "drained", "not drained", "added"] = ""
    """The state of the run or server in which the page offers it; empty: in any. In another state it changes nothing."""
    asks_first: bool = True
    """Whether the page shows the explanation and asks, before it acts."""
    needs_reason: bool = False
    """Whether the page insists on a reason. Elsewhere one may be left out."""
    is_dangerous: bool = False
    """Whether what it ends is not begun again by a further verb."""
    is_urgent: bool = False
    """Whether it must not wait behind other changes: what pauses or ends a run."""
    is_command: bool = True
    """Whether it is a command of its own. `counterpoint stop` has a form of its own, for eviction and for submitted jobs, too."""

    def load(self) -> Callable[..., Any]:
        """Returns the function."""
        module, _, name = self.function.partition(":")
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
        return function

    def fields(self) -> Any:
        """Returns the model of what the function is asked with (a subclass of `Config`), None if it has no fields."""
        return get_type_hints(self.load()).get("asked")


def sentence_of(verb: Verb) -> str:
    """Returns the summary with a capital and a period."""
    return f"{verb.summary[:1].upper()}{verb.summary[1:]}."


RUN_VERBS = (
    Verb(
        "pause",
        "pause a run of a live job: nothing starts until it is resumed",
        "What is in flight finishes and is trained. Nothing starts until the run is resumed, over restarts, too; the job's "
        "servers and its trainer go on for other runs.",
        "counterpoint.job.admin.run_requests:pause_run",
        "Pause",
        when="not paused",
        is_urgent=True,
    ),
    Verb(
        "resume",
        "let a paused run go on",
        "Groups of the run start again. A run that is not paused just goes on.",
        "counterpoint.job.admin.run_requests:resume_run",
        "Resume",
        when="paused",
        asks_first=False,
    ),
    Verb(
        "change",
        "give keys of a run new values from its next step on, all of them or none",
        "Keys of the configuration get new values from the next step on, all or none. The run's journal has them, and its curves "
        "are marked.",
        "counterpoint.job.admin.change:change_run",
        "Change",
    ),
    Verb(
        "checkpoint",
        "make a run's newest step durable now, and keep that checkpoint",
        "The trainer makes the newest step durable at once, and keeps that checkpoint until somebody removes it. Training goes "
        "on meanwhile.",
        "counterpoint.job.admin.run_requests:checkpoint_now",
        "Checkpoint",
    ),
    Verb(
        "dump",
        "have a run's next step written in full, for replay",
        "The next step is written in full when it is complete, for `counterpoint replay`. This may take as long as a step takes.",
        "counterpoint.job.admin.run_requests:dump_next_step",
        "Dump",
    ),
    Verb(
        "profile",
        "sample what a run's event loop does, for a flame graph",
        "The event loop of the run's orchestrator is sampled a hundred times a second. The run goes on.",
        "counterpoint.job.admin.run_requests:profile_loop",
        "Profile",
    ),
    Verb(
        "stop",
        "end a run in order; it can be resumed",
        "The run finishes what is under way, writes a checkpoint and ends. Start the job again with --resume to continue it. "
        "The other runs go on; when the last run ends, so does the job.",
        "counterpoint.job.admin.stop:stop_run",
        "Stop",
        is_dangerous=True,
        is_urgent=True,
        is_command=False,
    ),
    Verb(
        "evict",
        "end a run for good, with a reason",
        "The run ends and stays away, also after --resume, until somebody removes its control/evicted.txt.",
        "counterpoint.job.admin.stop:evict_run",
        "Evict",
        needs_reason=True,
        is_dangerous=True,
        is_urgent=True,
        is_command=False,
    ),
)
"""What may be done to a run. Those that are commands stand in `counterpoint --help` in this order."""

SERVER_VERBS = (
    Verb(
        "drain",
        "give a server no new requests",
        "The server gets no new requests; those that it has finish.",
        "counterpoint.job.admin.servers:drain_server",
        "Drain",
        when="not drained",
        asks_first=False,
    ),
    Verb(
        "undrain",
        "give a drained server requests again",
        "The server gets requests again, after the proof of its weights.",
        "counterpoint.job.admin.servers:undrain_server",
        "Give requests",
        when="drained",
        asks_first=False,
    ),
    Verb(
        "add",
        "add a server to the pools of all runs of the job",
        "All runs of the job ask it for rollouts from now on. It must serve the same model and read the job's directory.",
        "counterpoint.job.admin.servers:add_server",
        "Add a server",
    ),
    Verb(
        "remove",
        "take an added server away again",
        "The server is taken away; its requests finish.",
        "counterpoint.job.admin.servers:remove_server",
        "Take away",
        when="added",
        asks_first=False,
    ),
)
"""The verbs for a server of a job: of `counterpoint servers VERB URL`, and of the endpoints below `/jobs/{job}/servers`."""
