"""The policy watcher: the newest stable broadcast, in the right order of events, and nobody else's."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest

from counterpoint.inference.base import InferenceError, ModelNotServed, Probe, WeightsNotSeen, WeightUpdate
from counterpoint.orchestrator.policy import POLL_SECONDS, ForeignBroadcastError, PolicyWatcher, check_base_model
from counterpoint.orchestrator.run_directory import ConfigurationError
from counterpoint.orchestrator.scheduling.events import PolicyUpdated, PolicyUpdateStarting
from counterpoint.run.config import RunConfig
from counterpoint.transport.files.arrivals import Arrivals
from counterpoint.transport.files.atomic import STABLE, publish_directory, remove_directory


class RecordingPool:
    """Remembers what was loaded, among the events reported. `refuse` is called before, and may raise."""

    def __init__(self, refuse: Callable[[WeightUpdate], None] = lambda update: None) -> None:
        self.history: list[object] = []
        self.loaded = asyncio.Event()
        self._refuse = refuse

    async def update(self, update: WeightUpdate, on_loaded: Callable[[], None] | None = None) -> None:
        await asyncio.sleep(0)
        self._refuse(update)
        self.history.append(update)
        self.loaded.set()


def publish(run_dir: Path, version: int, said: int | None = None) -> Path:
    directory = run_dir / "broadcast" / f"step_{version}"
    with publish_directory(directory) as partial:
        probe = {"version": version if said is None else said, "token_ids": [1, 2], "log_probabilities": [-1.0]}
        (partial / "probe.json").write_bytes(orjson.dumps(probe))
    return directory


def make_watcher(run_dir: Path, pool: RecordingPool, newest_step: int) -> PolicyWatcher:
    return PolicyWatcher(run_dir, pool, "one", pool.history.append, lambda version: True, lambda: newest_step)


async def test_the_order_of_events(tmp_path: Path) -> None:
    pool = RecordingPool()
    watcher = make_watcher(tmp_path, pool, 2)
    directory = publish(tmp_path, 0)
    await asyncio.wait_for(watcher.load_first(0), 60)
    starting, update, updated = pool.history
    assert (starting, updated) == (PolicyUpdateStarting(0), PolicyUpdated(0))
    assert isinstance(update, WeightUpdate)
    assert (update.version, update.directory, update.adapter) == (0, directory, "one")


async def test_the_scheduler_goes_on_once_the_weights_are_loaded_and_their_proof_ends_later(tmp_path: Path) -> None:
    class Early(RecordingPool):
        async def update(self, update: WeightUpdate, on_loaded: Callable[[], None] | None = None) -> None:
            assert on_loaded is not None
            on_loaded()
            self.history.append("proof")

    pool = Early()
    publish(tmp_path, 0)
    await asyncio.wait_for(make_watcher(tmp_path, pool, 2).load_first(0), 60)
    assert pool.history == [PolicyUpdateStarting(0), PolicyUpdated(0), "proof"]


async def test_a_proof_that_fails_later_ends_the_run_even_if_the_version_was_removed(tmp_path: Path) -> None:
    class Early(RecordingPool):
        async def update(self, update: WeightUpdate, on_loaded: Callable[[], None] | None = None) -> None:
            assert on_loaded is not None
            on_loaded()
            remove_directory(update.directory)
            raise InferenceError("no inference server took version 0")

    publish(tmp_path, 0)
    with pytest.raises(InferenceError, match="no inference server took"):
        await asyncio.wait_for(make_watcher(tmp_path, Early(), 2).load_first(0), 60)


@pytest.mark.slow
async def test_only_the_newest_is_loaded_and_only_when_stable(tmp_path: Path) -> None:
    pool = RecordingPool()
    watcher = make_watcher(tmp_path, pool, 9)
    for version in (0, 1, 3):
        publish(tmp_path, version)
    (tmp_path / "broadcast" / "step_4").mkdir()
    await asyncio.wait_for(watcher.load_first(0), 60)
    assert watcher.version == 3
    task = asyncio.create_task(watcher.run())
    pool.loaded.clear()
    publish(tmp_path, 5)
    await asyncio.wait_for(pool.loaded.wait(), 60)
    assert [event.version for event in pool.history if isinstance(event, WeightUpdate)] == [3, 5]
    task.cancel()


async def test_a_version_that_the_trainer_names_is_opened_though_its_directorys_list_is_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a client of NFS keeps a list for a minute. What is named and not there yet is looked for again."""
    monkeypatch.setattr("counterpoint.orchestrator.policy.published_steps", lambda directory: [0])
    pool, told = RecordingPool(), [1]
    watcher = PolicyWatcher(
        tmp_path, pool, "one", pool.history.append, lambda version: True, lambda: 9, lambda: told[-1]
    )
    publish(tmp_path, 1)
    await asyncio.wait_for(watcher.load_first(1), 60)
    task = asyncio.create_task(watcher.run())
    pool.loaded.clear()
    told += [2, 3]
    publish(tmp_path, 3)
    await asyncio.wait_for(pool.loaded.wait(), 60)
    assert [event.version for event in pool.history if isinstance(event, WeightUpdate)] == [1, 3]
    task.cancel()


async def test_a_version_is_looked_for_at_once_when_the_trainer_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the kernel reports no arrival: between two versions the directory is hardly looked at."""
    monkeypatch.setattr("counterpoint.orchestrator.policy.IDLE_SECONDS", 1000.0)
    monkeypatch.setattr(Arrivals, "_read", lambda self: os.read(self._descriptor, 65_536))
    pool, told = RecordingPool(), [1]
    watcher = PolicyWatcher(
        tmp_path, pool, "one", pool.history.append, lambda version: True, lambda: 9, lambda: told[-1]
    )
    publish(tmp_path, 1)
    await asyncio.wait_for(watcher.load_first(1), 60)
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(watcher.run())
        for version in (2, 3):
            pool.loaded.clear()
            publish(tmp_path, version)
            told.append(version)
            watcher.look()
            await asyncio.wait_for(pool.loaded.wait(), 60)
        task.cancel()
    assert watcher.version == 3


@pytest.mark.slow
async def test_a_version_that_nothing_is_generated_with_is_not_loaded_unless_it_is_the_first(tmp_path: Path) -> None:
    pool = RecordingPool()
    looks = asyncio.Event()

    def is_used(version: int) -> bool:
        looks.set()
        return version != 2

    watcher = PolicyWatcher(tmp_path, pool, "one", pool.history.append, is_used, lambda: 9)
    publish(tmp_path, 1)
    await asyncio.wait_for(watcher.load_first(1), 60)
    task = asyncio.create_task(watcher.run())
    publish(tmp_path, 2)
    await asyncio.wait_for(looks.wait(), 60)
    pool.loaded.clear()
    publish(tmp_path, 3)
    await asyncio.wait_for(pool.loaded.wait(), 60)
    assert [event.version for event in pool.history if isinstance(event, WeightUpdate)] == [1, 3]
    task.cancel()

    resumed = PolicyWatcher(tmp_path, pool, "one", pool.history.append, lambda version: False, lambda: 9)
    await asyncio.wait_for(resumed.load_first(3), 60)
    assert resumed.version == 3


async def test_a_version_that_is_withdrawn_while_it_loads_is_none(tmp_path: Path) -> None:
    """As a trainer does that begins again at its checkpoint."""

    def withdraw(update: WeightUpdate) -> None:
        if update.version == 2:
            remove_directory(update.directory)
            raise InferenceError("it has no STABLE marker")

    pool = RecordingPool(withdraw)
    watcher = make_watcher(tmp_path, pool, 9)
    for version in (1, 2):
        publish(tmp_path, version)
    await asyncio.wait_for(watcher.load_first(1), 60)
    assert watcher.version == 1


async def test_a_version_that_is_half_removed_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A removal takes the marker first, and the rest file by file: the watcher may look in between."""
    pool = RecordingPool()
    watcher = make_watcher(tmp_path, pool, 9)
    half_removed = publish(tmp_path, 2)
    read = Probe.read

    def removed_meanwhile(path: Path) -> Probe:
        if path.parent == half_removed:
            (half_removed / STABLE).unlink(missing_ok=True)
            path.unlink()
            publish(tmp_path, 3)
        return read(path)

    monkeypatch.setattr(Probe, "read", removed_meanwhile)
    await asyncio.wait_for(watcher.load_first(1), 60)
    assert watcher.version == 3


async def test_a_stable_version_without_a_probe_is_a_fault(tmp_path: Path) -> None:
    (publish(tmp_path, 2) / "probe.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"probe\.json"):
        await asyncio.wait_for(make_watcher(tmp_path, RecordingPool(), 9).load_first(1), 60)


@pytest.mark.slow
async def test_a_trainer_that_begins_again_before_what_is_served_is_caught_up_with(tmp_path: Path) -> None:
    """Its newer broadcasts are withdrawn and published again: what is served is not loaded a second time, nor an older one."""
    pool = RecordingPool()
    watcher = make_watcher(tmp_path, pool, 9)
    directories = [publish(tmp_path, version) for version in (4, 5)]
    await asyncio.wait_for(watcher.load_first(4), 60)
    task = asyncio.create_task(watcher.run())
    pool.loaded.clear()
    for directory in directories:
        remove_directory(directory)
    for version in (3, 4, 5):
        publish(tmp_path, version)
        await asyncio.sleep(2 * POLL_SECONDS)
    publish(tmp_path, 6)
    await asyncio.wait_for(pool.loaded.wait(), 60)
    assert [event.version for event in pool.history if isinstance(event, WeightUpdate)] == [5, 6]
    task.cancel()


async def test_weights_that_no_server_sees_are_a_wrong_configuration(tmp_path: Path) -> None:
    def refuse(update: WeightUpdate) -> None:
        raise WeightsNotSeen("no inference server took version 1: it does not see it")

    publish(tmp_path, 1)
    with pytest.raises(ConfigurationError, match="it does not see it"):
        await asyncio.wait_for(make_watcher(tmp_path, RecordingPool(refuse), 9).load_first(1), 60)


async def test_weights_that_no_server_takes_end_the_run(tmp_path: Path) -> None:
    def refuse(update: WeightUpdate) -> None:
        raise InferenceError("no inference server took version 1")

    publish(tmp_path, 1)
    with pytest.raises(InferenceError, match="no inference server took"):
        await asyncio.wait_for(make_watcher(tmp_path, RecordingPool(refuse), 9).load_first(1), 60)


async def test_a_version_that_no_batch_can_have_trained(tmp_path: Path) -> None:
    pool = RecordingPool()
    publish(tmp_path, 3)
    with pytest.raises(ForeignBroadcastError, match="up to step 2 only"):
        await asyncio.wait_for(make_watcher(tmp_path, pool, 2).load_first(0), 60)
    assert pool.history == []


@pytest.mark.slow
async def test_a_version_that_no_batch_can_have_trained_is_refused_though_nothing_uses_it(tmp_path: Path) -> None:
    pool = RecordingPool()
    publish(tmp_path, 1)
    watcher = PolicyWatcher(tmp_path, pool, "one", pool.history.append, lambda version: version < 9, lambda: 2)
    await asyncio.wait_for(watcher.load_first(1), 60)
    publish(tmp_path, 9)
    with pytest.raises(ForeignBroadcastError, match="up to step 2 only"):
        await asyncio.wait_for(watcher.run(), 60)


async def test_a_probe_of_another_version(tmp_path: Path) -> None:
    publish(tmp_path, 1, said=2)
    with pytest.raises(ForeignBroadcastError, match="is of version 2; expected 1"):
        await asyncio.wait_for(make_watcher(tmp_path, RecordingPool(), 2).load_first(1), 60)


@pytest.mark.parametrize("lora", [None, {"rank": 2}])
async def test_servers_of_another_model_end_a_run_that_trains_all_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, lora: dict[str, int] | None
) -> None:
    class Others:
        async def check_model(self, model: str) -> None:
            raise ModelNotServed(f"http://a has no model {model!r}; it has 'theirs'")

    values = {"environments": [{"name": "toy", "kind": "reverse-text"}], "training": {"lora": lora}}
    config = RunConfig(output_dir=tmp_path, model="/models/ours", served_model="ours", **values)
    said = "http://a has no model 'ours'; it has 'theirs'"
    if lora is None:
        with pytest.raises(ConfigurationError, match=f"{said}; .* set served_model"):
            await check_base_model(Others(), config)
    else:
        await check_base_model(Others(), config)
        assert said in caplog.text
