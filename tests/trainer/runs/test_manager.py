"""The manager over real directories: who gets which slot, every hook in its order, and what is said to those refused."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch

from counterpoint.run.trained import TrainedRun, TrainingConfig
from counterpoint.trainer.lora.multi_lora import MultiLoRALinear
from counterpoint.trainer.runs import control_files
from counterpoint.trainer.runs import manager as manager_module
from counterpoint.trainer.runs.manager import HookError, MultiRunManager, get_multi_run_manager, setup_multi_run_manager
from counterpoint.trainer.runs.record import RunStage
from counterpoint.transport.files.atomic import write_atomically
from tests.trainer.conftest import make_run_config


def write(output_dir: Path, run_id: str, age: float = 0.0, **training: Any) -> Path:
    """The run's `orch.toml`, by rename as an orchestrator writes it, `age` seconds old."""
    config = make_run_config(output_dir, Path("/model"), **{"lora": {"rank": 2}, **training})
    path = output_dir / f"run_{run_id}" / "control" / "orch.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    values = config.model_copy(update={"run_id": run_id}).model_dump(mode="json", exclude_none=True)
    write_atomically(path, tomli_w.dumps(values).encode())
    os.utime(path, (1e9 - age, 1e9 - age))
    return path


class Diary:
    """Registers two hooks of each kind and notes what is called."""

    def __init__(self, manager: MultiRunManager) -> None:
        self.entries: list[tuple[object, ...]] = []
        for number in (1, 2):
            manager.register_deletion_hook(partial(self._note, "deletion", number))
            manager.register_forgotten_hook(partial(self._note, "forgotten", number))
            manager.register_creation_hook(partial(self._note, "creation", number))
            manager.register_discovered_hook(partial(self._note, "discovered", number))

    def _note(self, kind: str, number: int, slot: int, run_id: str, config: TrainedRun | None = None) -> None:
        assert config is None or config.run_id == run_id
        self.entries.append((kind, number, slot, run_id))

    def take(self) -> list[tuple[object, ...]]:
        taken, self.entries = self.entries, []
        return taken


def twice(kind: str, slot: int, run_id: str) -> list[tuple[object, ...]]:
    return [(kind, 1, slot, run_id), (kind, 2, slot, run_id)]


def test_runs_come_and_go_and_every_hook_is_called_in_its_order(tmp_path: Path) -> None:
    manager = MultiRunManager(tmp_path, 2)
    diary = Diary(manager)
    assert not manager.discover_runs()
    for age, run_id in enumerate(("new", "middle", "old")):
        write(tmp_path, run_id, age)
    assert manager.discover_runs()
    assert manager.registry.run_ids == {0: "old", 1: "middle"}
    assert manager.registry.queue == ["new"]
    assert diary.take() == twice("discovered", 0, "old") + twice("discovered", 1, "middle")
    manager.synchronize_state()
    assert diary.take() == twice("creation", 0, "old") + twice("creation", 1, "middle")
    assert not manager.discover_runs()
    manager.synchronize_state()
    assert diary.take() == []

    write_atomically(tmp_path / "run_old" / "control" / "evicted.txt", b"by hand")
    assert manager.discover_runs()
    assert diary.take() == twice("forgotten", 0, "old") + twice("discovered", 0, "new")
    assert manager.registry.run_ids == {0: "new", 1: "middle"}
    assert manager.registry.refused["old"].startswith("by hand (")
    manager.synchronize_state()
    assert diary.take() == twice("deletion", 0, "old") + twice("creation", 0, "new")
    assert (manager.registry.slot_of("new"), manager.registry.slot_of("old")) == (0, None)

    for name in ("run_new", "run_middle"):
        (tmp_path / name).rename(tmp_path / f"deleted_{name}")
    assert manager.is_deleted(0)
    manager.discover_runs()
    manager.synchronize_state()
    assert diary.take() == [
        *twice("forgotten", 0, "new"), *twice("forgotten", 1, "middle"),
        *twice("deletion", 0, "new"), *twice("deletion", 1, "middle"),
    ]  # fmt: skip
    assert manager.registry.run_ids == {}
    assert [record.run_id for record in manager.registry] == ["old"], "nothing of the others is left"


def test_a_run_that_goes_and_comes_back_between_two_synchronizations_is_another(tmp_path: Path) -> None:
    manager = MultiRunManager(tmp_path, 1)
    diary = Diary(manager)
    write(tmp_path, "a")
    manager.discover_runs()
    manager.synchronize_state()
    manager.evict_run(0, "for a moment")
    manager.discover_runs()
    (tmp_path / "run_a" / "control" / "evicted.txt").unlink()
    manager.discover_runs()
    diary.take()
    manager.synchronize_state()
    assert diary.take() == twice("deletion", 0, "a") + twice("creation", 0, "a")


def test_only_what_the_trainer_uses_of_a_configuration_renews_a_run(tmp_path: Path) -> None:
    manager = MultiRunManager(tmp_path, 1)
    write(tmp_path, "a")
    manager.discover_runs()
    write(tmp_path, "a", age=-5)
    assert not manager.discover_runs()
    write(tmp_path, "a", learning_rate=0.5)
    assert manager.discover_runs()
    assert manager.registry.in_slot(0).config.training.learning_rate == 0.5
    write(tmp_path, "a", steps=99)
    assert manager.discover_runs()
    assert manager.registry.in_slot(0).config.steps == 99


def test_a_configuration_may_hold_what_the_trainer_reads_and_nothing_else(tmp_path: Path) -> None:
    path = write(tmp_path, "a")
    for text, read in (
        ("[training]\nlearning_rate = 0.5", TrainedRun(run_id="a", training=TrainingConfig(learning_rate=0.5))),
        ('steps = 2\n[training]\nlr_schedule = "linear"', 2.0),
        ('[training]\nlr_schedule = "linear"', "lr_schedule.*steps"),
        ("steps = 2", "(?s)output_dir.*environments"),
        ("", "(?s)output_dir.*environments"),
        ('model = "m"\n[training]', "(?s)output_dir.*environments"),
    ):
        path.write_text(text)
        if isinstance(read, str):
            with pytest.raises(control_files.InvalidConfig, match=read):
                control_files.read_config(tmp_path, "a")
        else:
            config = control_files.read_config(tmp_path, "a")
            assert read in (config, config and config.last_step)
            assert type(config) is TrainedRun


def test_an_evicted_run_that_is_let_in_again_at_once_begins_anew(tmp_path: Path) -> None:
    manager = MultiRunManager(tmp_path, 1)
    diary = Diary(manager)
    write(tmp_path, "a")
    manager.discover_runs()
    diary.take()
    manager.evict_run(0, "for a moment")
    assert (tmp_path / "run_a" / "control" / "evicted.txt").read_text() == "for a moment"
    (tmp_path / "run_a" / "control" / "evicted.txt").unlink()
    assert manager.discover_runs()
    assert diary.take() == twice("forgotten", 0, "a") + twice("discovered", 0, "a")


def test_an_invalid_configuration_is_explained_once_and_looked_at_again_when_it_changes(tmp_path: Path) -> None:
    manager = MultiRunManager(tmp_path, 1)
    asked: list[str] = []

    def rank_is_even(config: TrainedRun) -> tuple[bool, str]:
        asked.append(config.run_id)
        lora = config.training.lora
        return lora is not None and lora.rank % 2 == 0, "the rank is odd"

    manager.register_config_validation_hook(rank_is_even)
    path = write(tmp_path, "a", lora={"rank": 3})
    complaint = path.with_name("config_validation_error.txt")
    for _ in range(3):
        assert not manager.discover_runs()
    assert asked == ["a"]
    assert complaint.read_text() == "the rank is odd"
    assert manager.registry.refused == {"a": "the rank is odd"}
    write_atomically(path, b"steps = [broken")
    assert not manager.discover_runs()
    assert "orch.toml" in complaint.read_text()
    write(tmp_path, "b", lora={"rank": 2}, age=-9)
    path.write_bytes(path.read_bytes().replace(b"[broken", b"'b'"))
    manager.discover_runs()
    assert "steps" in complaint.read_text()
    assert manager.registry.run_ids == {0: "b"}
    write(tmp_path, "a", lora={"rank": 4})
    manager.discover_runs()
    assert (manager.registry.queue, manager.registry.refused) == (["a"], {})
    assert not complaint.exists(), "its orchestrator would end with it"


def test_a_verdict_of_a_former_life_goes_with_the_first_look(tmp_path: Path) -> None:
    path = write(tmp_path, "a")
    complaint = path.with_name("config_validation_error.txt")
    complaint.write_text("of a trainer that had less room")
    in_the_way = write(tmp_path, "b").with_name("config_validation_error.txt")
    in_the_way.mkdir()
    manager = MultiRunManager(tmp_path, 2)
    assert manager.discover_runs()
    assert manager.registry.run_ids == {0: "a", 1: "b"}
    assert not complaint.exists()
    complaint.write_text("by another hand")
    manager.discover_runs()
    assert complaint.exists(), "what was refused is not looked at again"


def test_a_validation_hook_that_raises_is_named_and_costs_its_run_alone(tmp_path: Path) -> None:
    def divides(config: TrainedRun) -> tuple[bool, str]:
        return 1 // (config.last_step - 1) > -1, ""

    manager = MultiRunManager(tmp_path, 2)
    manager.register_config_validation_hook(divides)
    write(tmp_path, "bad", steps=1)
    write(tmp_path, "good", steps=2)
    manager.discover_runs()
    assert manager.registry.run_ids == {0: "good"}
    assert "divides failed: ZeroDivisionError" in manager.registry.refused["bad"]


@pytest.mark.parametrize("answer", [None, False, (False, ""), (False, None), ("yes", "no", "maybe")])
def test_a_validation_hook_that_gives_no_reason_is_named_and_costs_its_run_alone(tmp_path: Path, answer: Any) -> None:
    def speechless(config: TrainedRun) -> Any:
        return answer if config.run_id == "bad" else (True, "")

    manager = MultiRunManager(tmp_path, 2)
    manager.register_config_validation_hook(speechless)
    write(tmp_path, "bad")
    write(tmp_path, "good")
    manager.discover_runs()
    assert manager.registry.run_ids == {0: "good"}
    assert "speechless" in manager.registry.refused["bad"]


def test_a_job_without_a_directory_has_no_runs_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager_module, "_manager", None)
    manager = setup_multi_run_manager(output_dir=tmp_path / "outputs" / "my-experiment", max_runs=1)
    assert manager.discover_runs() is False


@pytest.mark.parametrize("kind", ["discovered", "forgotten", "creation", "deletion"])
def test_a_hook_that_raises_is_named(tmp_path: Path, kind: str) -> None:
    def unlucky(*arguments: object) -> None:
        raise OSError("no luck")

    manager = MultiRunManager(tmp_path, 1)
    getattr(manager, f"register_{kind}_hook")(unlucky)
    write(tmp_path, "a")

    def live() -> None:
        manager.discover_runs()
        manager.synchronize_state()
        (tmp_path / "run_a").rename(tmp_path / "gone")
        manager.discover_runs()
        manager.synchronize_state()

    with pytest.raises(HookError, match=rf"the {kind} hook .*unlucky failed for run 'a' on rank 0.*no luck"):
        live()


def test_names_that_are_no_ids_and_links_that_lead_elsewhere_are_no_runs(tmp_path: Path) -> None:
    job = tmp_path / "job"
    write(tmp_path / "elsewhere", "a")
    write(job, "good")
    write(job, "bad name")
    (job / "run_linked").symlink_to(tmp_path / "elsewhere" / "run_a")
    (job / "run_file").write_text("")
    (job / "run_half" / "control").mkdir(parents=True)
    (job / "run_half" / "control" / "orch.toml").symlink_to(tmp_path / "elsewhere" / "run_a" / "control" / "orch.toml")
    manager = MultiRunManager(job, 9)
    manager.discover_runs()
    assert manager.registry.run_ids == {0: "good"}
    assert not (tmp_path / "elsewhere" / "run_a" / "control" / "config_validation_error.txt").exists()


def test_a_link_to_another_run_is_no_run_and_says_nothing_in_its_name(tmp_path: Path) -> None:
    control_of_good = write(tmp_path, "good").parent
    (tmp_path / "run_whole").symlink_to(tmp_path / "run_good")
    (tmp_path / "run_inner").mkdir()
    (tmp_path / "run_inner" / "control").symlink_to(control_of_good)
    manager = MultiRunManager(tmp_path, 9)
    manager.discover_runs()
    assert manager.registry.run_ids == {0: "good"}
    assert manager.registry.refused == {}
    assert [path.name for path in control_of_good.iterdir()] == ["orch.toml"]


def test_a_directory_that_cannot_be_read_or_written_costs_its_run_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("good", "mute", "shut"):
        write(tmp_path, name)
    (tmp_path / "run_loop").symlink_to(tmp_path / "run_loop")
    (tmp_path / "run_mute" / "control" / "config_validation_error.txt").mkdir()
    manager = MultiRunManager(tmp_path, 9)
    manager.register_config_validation_hook(lambda config: (config.run_id != "mute", "not today"))
    manager.discover_runs()
    assert manager.registry.run_ids == {0: "good", 1: "shut"}
    assert manager.registry.refused["mute"] == "not today"

    def forbidden(*arguments: object) -> None:
        raise PermissionError(13, "Permission denied", "evicted.txt")

    monkeypatch.setattr(control_files, "evict", forbidden)
    manager.evict_run(1, "broken")
    for _ in range(2):
        manager.discover_runs()
        assert manager.registry.run_ids == {0: "good"}
        assert manager.registry.refused["shut"].startswith("broken ([Errno 13]")


def as_bytes(content: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "make", "reason"),
    [
        ("orch.toml", as_bytes(b"a = " + b"[" * 100_000), "more than 32 deep"),
        ("orch.toml", as_bytes(b"a" + b".a" * 400_000 + b" = 1"), "a dotted key of more than 32 parts"),
        ("orch.toml", as_bytes(b" " * 2**20 + b"\n"), "at most 1048576 are read"),
        ("orch.toml", as_bytes(b"".join(b"key_%d = 1\n" % number for number in range(10_000))), "Extra inputs"),
        ("orch.toml", os.mkfifo, "is a FIFO; expected a regular file"),
        ("orch.toml", Path.mkdir, "is a directory; expected a regular file"),
        ("evicted.txt", os.mkfifo, "is a FIFO; expected a regular file"),
        ("evicted.txt", Path.mkdir, "is a directory; expected a regular file"),
        ("evicted.txt", as_bytes(b"a" * 10**6), "has 1000000 bytes; at most 16384 are read"),
    ],
)
def test_a_file_of_a_guest_that_is_not_what_it_should_be_costs_its_run_alone(
    tmp_path: Path, name: str, make: Callable[[Path], object], reason: str
) -> None:
    bad = write(tmp_path, "bad").with_name(name)
    bad.unlink(missing_ok=True)
    make(bad)
    write(tmp_path, "good")
    manager = MultiRunManager(tmp_path, 9)
    assert manager.discover_runs()
    assert manager.registry.run_ids == {0: "good"}
    assert reason in manager.registry.refused["bad"]
    assert len(manager.registry.refused["bad"]) < 5000
    complaint = bad.with_name("config_validation_error.txt")
    assert complaint.exists() == (name == "orch.toml")
    if complaint.exists():
        assert reason in complaint.read_text()


def test_a_directory_deleted_and_made_anew_at_once_is_of_another_run(tmp_path: Path) -> None:
    """Though many a file system gives the new one the inode of the old."""
    manager = MultiRunManager(tmp_path, 1)
    diary = Diary(manager)
    write(tmp_path, "a")
    manager.discover_runs()
    diary.take()
    shutil.rmtree(tmp_path / "run_a")
    write(tmp_path, "a")
    assert manager.is_deleted(0)
    assert manager.discover_runs()
    assert diary.take() == twice("forgotten", 0, "a") + twice("discovered", 0, "a")
    assert not manager.is_deleted(0)


@pytest.mark.parametrize("target", ["run_a", "elsewhere"])
def test_a_directory_that_a_link_takes_the_place_of_is_deleted(tmp_path: Path, target: str) -> None:
    """A link to itself, too, which cannot be followed."""
    manager = MultiRunManager(tmp_path, 1)
    write(tmp_path, "a")
    manager.discover_runs()
    (tmp_path / "run_a").rename(tmp_path / "elsewhere")
    (tmp_path / "run_a").symlink_to(target)
    assert manager.is_deleted(0)


def test_a_run_without_a_slot_is_deleted_with_its_directory_and_not_with_its_configuration(tmp_path: Path) -> None:
    manager = MultiRunManager(tmp_path, 1)
    deleted: list[str] = []
    manager.register_directory_deleted_hook(deleted.append)
    path = write(tmp_path, "a", age=1)
    write(tmp_path, "b")
    manager.discover_runs({"a"})
    manager.registry.advance(0, 0.0)
    manager.discover_runs({"b"})
    assert manager.registry.run_ids == {0: "b"}
    path.unlink()
    manager.discover_runs({"b"})
    assert deleted == []
    shutil.rmtree(tmp_path / "run_a")
    for _ in range(2):
        manager.discover_runs({"b"})
    assert deleted == ["a"]
    record = manager.registry.find("a")
    assert record is not None
    assert record.stage is RunStage.DELETED


def test_a_file_that_vanishes_between_two_looks_is_not_there_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = MultiRunManager(tmp_path, 2)
    path = write(tmp_path, "a")
    read = control_files.read_config

    def too_late(output_dir: Path, run_id: str) -> TrainedRun | None:
        path.unlink()
        return read(output_dir, run_id)

    monkeypatch.setattr(control_files, "read_config", too_late)
    assert not manager.discover_runs()
    assert not path.with_name("config_validation_error.txt").exists()
    monkeypatch.setattr(control_files, "read_config", read)
    write(tmp_path, "a")
    assert manager.discover_runs()


@pytest.mark.slow
def test_discovery_while_directories_appear_change_and_go(tmp_path: Path) -> None:
    """No look fails or takes a run for invalid, and the last one finds what there is in the end."""
    manager = MultiRunManager(tmp_path, 4)
    diary = Diary(manager)
    done = threading.Event()

    def churn(name: str) -> None:
        for round_ in range(40):
            write(tmp_path, name, learning_rate=0.1 + round_ / 100)
            if round_ % 4 == 3:
                (tmp_path / f"run_{name}").rename(tmp_path / f"gone_{name}_{round_}")
        write(tmp_path, name, learning_rate=0.9)

    threads = [threading.Thread(target=churn, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()

    def watch() -> None:
        for thread in threads:
            thread.join()
        done.set()

    watcher = threading.Thread(target=watch)
    watcher.start()
    while not done.is_set():
        if manager.discover_runs():
            manager.synchronize_state()
        assert manager.registry.refused == {}
    watcher.join()
    manager.discover_runs()
    manager.synchronize_state()
    assert sorted(manager.registry.run_ids.values()) == ["a", "b", "c"]
    assert {run.config.training.learning_rate for run in manager.registry.at()} == {0.9}
    kinds = [entry[0] for entry in diary.entries if entry[1] == 1]
    assert kinds.count("creation") - kinds.count("deletion") == 3


def test_an_adapter_goes_and_the_next_ones_owner_finds_nothing_of_it(tmp_path: Path) -> None:
    layers = {f"layers.{n}.q_proj": MultiLoRALinear(torch.nn.Linear(8, 8), rank=8, n_adapters=2) for n in range(2)}
    other = MultiLoRALinear(torch.nn.Linear(8, 8), rank=8, n_adapters=2)
    manager = MultiRunManager(tmp_path, 2, seed=3)
    for prefix, layer in layers.items():
        manager.register_module(prefix, layer)
    manager.register_module("layers.0.v_proj", other)
    write(tmp_path, "a", lora={"rank": 2, "alpha": 8, "target_modules": ["q_proj"]})
    manager.discover_runs()
    manager.reset_run_parameters(0)
    assert manager.scaling_factors == {0: 4.0}
    parameters = dict(manager.get_named_parameters_for_run(0))
    assert sorted(parameters) == [f"layers.{n}.q_proj.lora_{part}" for n in range(2) for part in "AB"]
    fresh = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.fill_(7.0)
    exported = manager.get_state_dict_for_run(0)
    assert sorted(exported) == [f"base_model.model.{name}.weight" for name in sorted(parameters)]
    assert all(bool((tensor == 7.0).all()) for tensor in exported.values())
    manager.release_run_parameters(0)
    assert manager.get_named_parameters_for_run(0) == []
    manager.reset_run_parameters(0)
    again = dict(manager.get_named_parameters_for_run(0))
    assert all(torch.equal(again[name], fresh[name]) for name in fresh)
    assert all(again[name] is not parameters[name] for name in fresh)


def test_there_is_one_manager_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager_module, "_manager", None)
    with pytest.raises(RuntimeError, match="call setup_multi_run_manager first"):
        get_multi_run_manager()
    manager = setup_multi_run_manager(tmp_path, 2)
    assert get_multi_run_manager() is manager
    with pytest.raises(RuntimeError, match="has its multi-run manager"):
        setup_multi_run_manager(tmp_path, 2)


def test_a_directory_whose_file_system_is_unmounted_is_not_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its run would end, and with the last run the trainer, as if all were done."""
    manager = MultiRunManager(tmp_path, 1)
    write(tmp_path, "a")
    manager.discover_runs()
    shutil.rmtree(tmp_path / "run_a")
    assert manager.is_deleted(0)
    monkeypatch.setattr(os, "fstat", lambda descriptor: os.stat("/proc"))
    with pytest.raises(OSError, match="not mounted any more"):
        manager.is_deleted(0)
