"""Document 000, multi-run training: each of its examples, and each of its rules by the names that it uses."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from counterpoint.orchestrator.run_directory import check_control
from counterpoint.run.trained import LoraConfig, TrainedRun
from counterpoint.trainer.lora import MultiLoRALinear, apply_lora_to_model
from counterpoint.trainer.lora.multi_lora import adapter_spans, peft_state
from counterpoint.trainer.runs import HookError, MultiRunManager, get_multi_run_manager, setup_multi_run_manager
from counterpoint.trainer.runs import manager as manager_module
from tests.conformance.many_runs import write_run
from tests.trainer.forked_ranks import launch


@pytest.fixture(autouse=True)
def no_manager_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test is a process of its own to the singleton."""
    monkeypatch.setattr(manager_module, "_manager", None)


def managed(output_dir: Path, max_runs: int = 4) -> MultiRunManager:
    """The manager, set up and returned as the document does."""
    setup_multi_run_manager(output_dir=output_dir, max_runs=max_runs)
    return get_multi_run_manager()


def test_the_singleton_is_set_up_and_returned_anywhere(tmp_path: Path) -> None:
    multi_run_manager = managed(tmp_path / "outputs" / "my-experiment")
    assert get_multi_run_manager() is multi_run_manager
    assert multi_run_manager.max_runs == 4


def test_a_number_of_runs_that_is_none_is_refused(tmp_path: Path) -> None:
    for number in (0, -1, True, 1.5):
        with pytest.raises(ValueError, match="max_runs"):
            setup_multi_run_manager(output_dir=str(tmp_path), max_runs=number)  # type: ignore[arg-type]


def test_runs_are_discovered_by_their_directories_and_wait_once_all_slots_are_taken(tmp_path: Path) -> None:
    multi_run_manager = managed(tmp_path, 2)
    (tmp_path / "run_empty" / "control").mkdir(parents=True)
    write_run(tmp_path, "bad").write_text("steps = 'many'")
    for age, run_id in enumerate(("def456", "abc123", "ghi789")):
        write_run(tmp_path, run_id, age=9 - age)
    multi_run_manager.discover_runs()
    multi_run_manager.synchronize_state()
    assert multi_run_manager.registry.run_ids == {0: "def456", 1: "abc123"}
    assert multi_run_manager.registry.slot_of("abc123") == 1
    assert "steps" in (tmp_path / "run_bad" / "control" / "config_validation_error.txt").read_text()
    progress = multi_run_manager.registry.in_slot(0).progress
    assert (progress.step, progress.total_tokens, progress.total_samples) == (0, 0, 0)
    shutil.rmtree(tmp_path / "run_def456")
    multi_run_manager.discover_runs()
    assert multi_run_manager.registry.run_ids == {0: "ghi789", 1: "abc123"}


def test_every_hook_is_called_with_index_and_id_in_the_order_of_the_document(tmp_path: Path) -> None:
    multi_run_manager = managed(tmp_path, 1)
    called: list[tuple[str, int, str]] = []

    def discovered_callback(idx: int, run_id: str, config: TrainedRun) -> None:
        assert config.run_id == run_id
        called.append(("discovered", idx, run_id))

    def forgotten_callback(idx: int, run_id: str) -> None:
        called.append(("forgotten", idx, run_id))

    def creation_callback(idx: int, run_id: str) -> None:
        called.append(("creation", idx, run_id))

    def deletion_callback(idx: int, run_id: str) -> None:
        called.append(("deletion", idx, run_id))

    def config_validation_callback(config: TrainedRun) -> tuple[bool, str]:
        called.append(("validation", -1, config.run_id))
        return True, ""

    multi_run_manager.register_discovered_hook(discovered_callback)
    multi_run_manager.register_forgotten_hook(forgotten_callback)
    multi_run_manager.register_creation_hook(creation_callback)
    multi_run_manager.register_deletion_hook(deletion_callback)
    multi_run_manager.register_config_validation_hook(config_validation_callback)

    write_run(tmp_path, "abc123")
    multi_run_manager.discover_runs()
    multi_run_manager.synchronize_state()
    assert called == [("validation", -1, "abc123"), ("discovered", 0, "abc123"), ("creation", 0, "abc123")]

    called.clear()
    shutil.rmtree(tmp_path / "run_abc123")
    write_run(tmp_path, "def456")
    multi_run_manager.discover_runs()
    multi_run_manager.synchronize_state()
    assert called == [
        ("forgotten", 0, "abc123"),
        ("validation", -1, "def456"),
        ("discovered", 0, "def456"),
        ("deletion", 0, "abc123"),
        ("creation", 0, "def456"),
    ]

    called.clear()
    multi_run_manager.evict_run(idx=0, reason="Run exceeded memory limits")
    write_run(tmp_path, "ghi789")
    multi_run_manager.discover_runs()
    assert called == [("forgotten", 0, "def456"), ("validation", -1, "ghi789"), ("discovered", 0, "ghi789")]


def test_to_evict_from_an_index_without_a_run_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    multi_run_manager = managed(tmp_path)
    for slot in (1, 5, -1):
        with caplog.at_level(logging.WARNING):
            multi_run_manager.evict_run(idx=slot, reason="misbehaves")
        assert f"slot {slot}" in caplog.text
    assert caplog.text.count("misbehaves") == 3


def test_a_configuration_without_an_id_has_that_of_its_directory(tmp_path: Path) -> None:
    """The document's directories alone have the ids."""
    multi_run_manager = managed(tmp_path)
    path = write_run(tmp_path, "abc123")
    path.write_text("".join(line for line in path.read_text().splitlines(keepends=True) if "run_id" not in line))
    multi_run_manager.discover_runs()
    assert multi_run_manager.registry.run_ids == {0: "abc123"}
    assert multi_run_manager.registry.in_slot(0).config.run_id == "abc123"


@pytest.mark.parametrize("name", ["run_my run", "run_a+b", "run_é", "run_", f"run_{'a' * 65}", "run_.hidden"])
def test_a_directory_whose_name_is_no_runs_is_explained(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    multi_run_manager = managed(tmp_path)
    (tmp_path / name / "control").mkdir(parents=True)
    with caplog.at_level(logging.WARNING):
        multi_run_manager.discover_runs()
        assert not caplog.text, "without a configuration it is no run, whatever its name"
        (tmp_path / name / "control" / "orch.toml").write_text("")
        for _ in range(3):
            multi_run_manager.discover_runs()
    assert caplog.text.count(f"{name} is ignored") == 1
    assert "letters" in (tmp_path / name / "control" / "config_validation_error.txt").read_text()
    assert multi_run_manager.registry.run_ids == {}


@pytest.mark.parametrize("part", ["", "control", "control/orch.toml"])
def test_a_link_in_the_place_of_a_run_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture, part: str) -> None:
    """It may lead to another run's directory, to which nothing is written."""
    multi_run_manager = managed(tmp_path / "job")
    write_run(tmp_path, "elsewhere")
    link = tmp_path / "job" / "run_linked" / part
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(tmp_path / "run_elsewhere" / part)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            multi_run_manager.discover_runs()
    assert caplog.text.count("run_linked") == 1
    assert not [*tmp_path.rglob("config_validation_error.txt")]


def test_an_evicted_run_leaves_at_the_next_discovery_and_its_orchestrator_raises(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    multi_run_manager = managed(tmp_path)
    write_run(tmp_path, "abc123")
    multi_run_manager.discover_runs()
    with caplog.at_level(logging.WARNING):
        multi_run_manager.evict_run(idx=0, reason="Run exceeded memory limits")
    assert "Run exceeded memory limits" in caplog.text
    assert multi_run_manager.registry.run_ids == {0: "abc123"}, "not at once"
    assert (tmp_path / "run_abc123" / "control" / "evicted.txt").read_text() == "Run exceeded memory limits"
    with pytest.raises(RuntimeError, match="Run exceeded memory limits"):
        check_control(tmp_path / "run_abc123")
    multi_run_manager.discover_runs()
    assert multi_run_manager.registry.run_ids == {}
    write_run(tmp_path, "def456")
    multi_run_manager.discover_runs()
    assert multi_run_manager.registry.run_ids == {0: "def456"}, "the index is used again"


@pytest.mark.parametrize("reason", [ValueError("bad data"), None, "x" + "ü" * 20_000])
def test_any_reason_is_written_as_text(tmp_path: Path, reason: Any) -> None:
    multi_run_manager = managed(tmp_path)
    write_run(tmp_path, "abc123")
    multi_run_manager.discover_runs()
    multi_run_manager.evict_run(idx=0, reason=reason)
    written = (tmp_path / "run_abc123" / "control" / "evicted.txt").read_text()
    assert written
    assert str(reason).startswith(written)


def with_a_layer(manager: MultiRunManager, width: int = 8) -> tuple[torch.nn.Module, MultiLoRALinear]:
    """A model of one layer, which registers itself as in the document."""
    config, base_module, module_name = LoraConfig(rank=4), torch.nn.Linear(width, width, bias=False), "layers.0.q_proj"
    lora_module = MultiLoRALinear(
        base_layer=base_module,
        rank=config.rank,
        n_adapters=get_multi_run_manager().max_runs,
    )
    lora_module.register_with_runs(get_multi_run_manager(), module_name)
    return torch.nn.ModuleDict({"q_proj": lora_module}), lora_module


def test_layers_register_themselves_and_the_manager_has_the_parameters_of_each_run(tmp_path: Path) -> None:
    multi_run_manager = managed(tmp_path, 2)
    with_a_layer(multi_run_manager)
    for run_id in ("a", "b"):
        write_run(tmp_path, run_id, lora={"rank": 4})
    multi_run_manager.discover_runs()
    for idx in (0, 1):
        multi_run_manager.reset_run_parameters(idx)
    names = {idx: dict(multi_run_manager.get_named_parameters_for_run(idx)) for idx in (0, 1)}
    assert [(name, [*each.shape]) for name, each in names[0].items()] == [
        ("layers.0.q_proj.lora_A", [4, 8]),
        ("layers.0.q_proj.lora_B", [8, 4]),
    ]
    assert not {*names[0].values()} & {*names[1].values()}, "each run has its own"
    optimizer = torch.optim.SGD(names[0].values(), lr=1.0)
    for parameter in names[0].values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = {idx: multi_run_manager.get_state_dict_for_run(idx) for idx in (0, 1)}
    lora_B = "base_model.model.layers.0.q_proj.lora_B.weight"
    assert state[0][lora_B].eq(-1).all()
    assert state[1][lora_B].eq(0).all()
    multi_run_manager.reset_run_parameters(0)
    assert multi_run_manager.get_state_dict_for_run(0)[lora_B].eq(0).all()


def test_an_optimizer_that_was_made_before_a_reset_goes_on_with_the_runs_parameters(tmp_path: Path) -> None:
    multi_run_manager = managed(tmp_path, 1)
    with_a_layer(multi_run_manager)
    write_run(tmp_path, "a", lora={"rank": 2})
    multi_run_manager.discover_runs()
    multi_run_manager.reset_run_parameters(0)
    initial = {name: each.clone() for name, each in multi_run_manager.get_state_dict_for_run(0).items()}
    parameters = [parameter for _, parameter in multi_run_manager.get_named_parameters_for_run(0)]
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    for _ in range(2):
        multi_run_manager.reset_run_parameters(0)
        state = multi_run_manager.get_state_dict_for_run(0)
        assert all(each.equal(initial[name]) for name, each in state.items())
        assert all(parameter.grad is None for parameter in parameters)
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        assert all(each.equal(initial[name] - 1) for name, each in state.items())
    assert multi_run_manager.get_named_parameters_for_run(0)[0][1] is parameters[0]


def test_a_layer_refuses_a_rank_above_its_own(tmp_path: Path) -> None:
    multi_run_manager = managed(tmp_path)
    with_a_layer(multi_run_manager)
    write_run(tmp_path, "a", lora={"rank": 5})
    multi_run_manager.discover_runs()
    with pytest.raises(ValueError, match="ranks up to 4"):
        multi_run_manager.reset_run_parameters(0)


def test_apply_lora_to_model_registers_the_layers(tmp_path: Path) -> None:
    multi_run_manager = managed(tmp_path, 2)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2,
        )
    )  # fmt: skip
    lora = LoraConfig(rank=2, target_modules=["q_proj"])
    layers = apply_lora_to_model(model, multi_run_manager.max_runs, lora, manager=multi_run_manager)
    assert multi_run_manager.modules == layers
    assert [*multi_run_manager.modules] == ["model.layers.0.self_attn.q_proj"]
    assert isinstance(model.get_submodule("model.layers.0.self_attn.q_proj"), MultiLoRALinear)
    write_run(tmp_path, "abc123", lora=lora.model_dump())
    multi_run_manager.discover_runs()
    multi_run_manager.reset_run_parameters(0)
    optimizer = torch.optim.AdamW(parameter for _, parameter in multi_run_manager.get_named_parameters_for_run(0))
    assert len(optimizer.param_groups[0]["params"]) == 2


def outputs(model: torch.nn.Module, layer: MultiLoRALinear) -> torch.Tensor:
    """What the adapter in slot 0 adds to the layer's output for one token."""
    hidden = torch.arange(8, dtype=torch.float32)[None]
    with adapter_spans(model, [(0, 1)]), torch.no_grad():
        return layer(hidden) - layer.base(hidden)


def test_a_scaling_factor_that_a_discovered_hook_sets_takes_effect(tmp_path: Path) -> None:
    multi_run_manager = managed(tmp_path, 1)
    model, layer = with_a_layer(multi_run_manager)

    def discovered_callback(idx: int, run_id: str, config: TrainedRun) -> None:
        lora = config.training.lora
        assert lora is not None
        # Example: Set the scaling factor for the run
        multi_run_manager.scaling_factors[idx] = lora.alpha / lora.rank * (10.0 if run_id == "b" else 1.0)

    multi_run_manager.register_discovered_hook(discovered_callback)
    added: dict[str, Any] = {}
    for run_id in ("a", "b"):
        write_run(tmp_path, run_id, lora={"rank": 4, "alpha": 6.0})
        assert multi_run_manager.discover_runs()
        multi_run_manager.synchronize_state()
        assert not multi_run_manager.discover_runs(), "the configuration in the file has not changed"
        multi_run_manager.reset_run_parameters(0)
        for parameter in peft_state(multi_run_manager.modules, 0).values():
            parameter.fill_(1.0)
        added[run_id] = outputs(model, layer)
        assert multi_run_manager.scaling_factors[0] == {"a": 1.5, "b": 15.0}[run_id]
        shutil.rmtree(tmp_path / f"run_{run_id}")
    assert added["a"].eq(1.5 * 28 * 4).all()
    torch.testing.assert_close(added["b"], 10 * added["a"])


def test_a_scaling_factor_is_never_lost_silently(tmp_path: Path) -> None:
    multi_run_manager = managed(tmp_path)
    write_run(tmp_path, "a", lora={"rank": 4})
    write_run(tmp_path, "full", lora=None)
    with pytest.raises(KeyError):
        multi_run_manager.scaling_factors[0] = 2.0
    multi_run_manager.discover_runs()
    with pytest.raises(ValueError, match="positive"):
        multi_run_manager.scaling_factors[0] = float("nan")
    with pytest.raises(KeyError):
        multi_run_manager.scaling_factors[1] = 2.0
    multi_run_manager.synchronize_state()
    with pytest.raises(RuntimeError, match="after its adapter was made"):
        multi_run_manager.scaling_factors[0] = 2.0


def test_a_hook_of_another_signature_is_named(tmp_path: Path) -> None:
    def takes_one(idx: int) -> None:
        raise AssertionError

    multi_run_manager = managed(tmp_path)
    multi_run_manager.register_creation_hook(takes_one)  # type: ignore[arg-type]
    write_run(tmp_path, "a")
    multi_run_manager.discover_runs()
    with pytest.raises(HookError, match="takes_one"):
        multi_run_manager.synchronize_state()


@pytest.mark.slow
def test_all_ranks_have_the_same_runs_and_the_same_parameters(tmp_path: Path) -> None:
    launch(2, tmp_path, module="tests.conformance.many_runs")
    first, second = (json.loads((tmp_path / f"rank_{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    assert [entry[:3] for entry in first] == [
        ["creation", 0, "a"],
        ["creation", 1, "b"],
        ["state", 0, 20.0],
        ["state", 1, 1.0],
        ["deletion", 0, "a"],
        ["creation", 0, "c"],
        ["state", 0, 1.0],
        ["state", 1, 1.0],
    ]
