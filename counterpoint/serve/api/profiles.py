"""`/jobs/{job}/runs/{run}/profiles`: the profiles of a run's event loop, and the tree of one, as a flame graph draws it."""

from __future__ import annotations

from typing import Any

from counterpoint.job.reading.activity.profiles import ListedProfile, ProfiledFrame, list_profiles, read_profile
from counterpoint.serve.endpoint import Endpoint, NotFound, reads
from counterpoint.serve.jobs import Jobs
from counterpoint.transport.config import Config, Identifier
from counterpoint.transport.files.untrusted import UntrustedFileError
from counterpoint.transport.printable import printable


class ProfilesParameters(Config):
    """Which run."""

    job: Identifier
    """The job's id."""
    run: Identifier
    """The run's id."""


class ProfileParameters(ProfilesParameters):
    """Which profile."""

    profile: Identifier
    """The name of the profile."""


class Profiles(Config):
    """The profiles of a run."""

    profiles: list[ListedProfile]
    """The profiles, the newest first."""


class ProfileTree(Config):
    """The stacks of a profile as a tree."""

    name: str
    """The name of the profile."""
    seconds: float
    """The seconds of the loop's time that were sampled."""
    frames: list[ProfiledFrame]
    """A caller before what it called; the first is the whole. Empty if the file cannot be read."""
    unreadable: str
    """Why the file cannot be read; empty if it can."""


@reads("/jobs/{job}/runs/{run}/profiles", "Lists the profiles of a run's event loop.")
def profiles(jobs: Jobs, parameters: ProfilesParameters) -> Profiles:
    """Answers `GET /jobs/{job}/runs/{run}/profiles`."""
    return Profiles(profiles=list_profiles(jobs.get(parameters.job).run_directory(parameters.run)))


@reads(
    "/jobs/{job}/runs/{run}/profiles/{profile}",
    "Shows the stacks of a profile, merged into a tree.",
    fresh_seconds=10.0,
)
def profile(jobs: Jobs, parameters: ProfileParameters) -> ProfileTree:
    """Answers `GET /jobs/{job}/runs/{run}/profiles/{profile}`."""
    run_dir = jobs.get(parameters.job).run_directory(parameters.run)
    frames: list[ProfiledFrame] = []
    unreadable = ""
    try:
        frames = read_profile(run_dir, parameters.profile)
    except FileNotFoundError:
        raise NotFound(
            f"run {parameters.run} has no profile {parameters.profile}",
            where="profile",
            value=parameters.profile,
            advice="see the profiles of the run; those of the newest are kept",
        ) from None
    except (OSError, UntrustedFileError) as error:
        unreadable = printable(str(error)[:2000])
    return ProfileTree(
        name=parameters.profile,
        seconds=frames[0].seconds if frames else 0.0,
        frames=frames,
        unreadable=unreadable,
    )


ENDPOINTS: tuple[Endpoint[Any, Any], ...] = (profiles, profile)
