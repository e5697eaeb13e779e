"""`counterpoint sft` against TRL's `SFTTrainer`, and its resume, its refusals and its result as a run's beginning."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import tomli_w
import torch
from pydantic import ValidationError
from safetensors.torch import load_file

from counterpoint.trainer.runs import manager
from counterpoint.trainer.sft import train
from counterpoint.trainer.sft.batches import SftBatches
from counterpoint.trainer.sft.config import SftConfig
from counterpoint.trainer.sft.train import newest_weights
from counterpoint.transport.files.atomic import published_steps
from counterpoint.transport.process.launch import descendants
from tests.support.polling import DEADLINE_SECONDS, wait_until
from tests.support.ports import free_port
from tests.support.tiny_model import make_model
from tests.trainer.forked_ranks import launch
from tests.trainer.lone_run import make_lone_run
from tests.trainer.ranked_sft import stop_at
from tests.trainer.test_ranks import process_of_rank

pytestmark = pytest.mark.slow

TEMPLATE = (
    "{% for message in messages %}<start>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<end>{% endgeneration %}\n"
    "{% else %}{{ message.content }}<end>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant\n{% endif %}"
)
ROWS, PER_STEP, STEPS = 40, 6, 20
TRAINING: dict[str, Any] = {"learning_rate": 7e-4, "betas": [0.9, 0.95]}
"""AdamW divides by the root of the squared gradient, so rounding a gradient near zero moves a weight by a share of the learning
rate: by 0.008 of it on a CPU with AVX2. A lower rate keeps that below the bound on weights."""
LORA: dict[str, Any] = {"rank": 4, "alpha": 8.0, "target_modules": ["q_proj", "v_proj", "down_proj"]}


def messages_of(index: int) -> list[dict[str, str]]:
    """One to three turns of some letters; odd ones begin with a system prompt."""
    generator = np.random.default_rng(index)

    def text() -> str:
        return "".join(chr(97 + letter) for letter in generator.integers(0, 26, generator.integers(3, 20)))

    system = [{"role": "system", "content": "be brief"}] if index % 2 else []
    turns = [
        [{"role": "user", "content": text()}, {"role": "assistant", "content": text()}] for _ in range(index % 3 + 1)
    ]
    return [*system, *(message for turn in turns for message in turn)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with models whose template marks the assistant's text, and a file of conversations."""
    root = tmp_path_factory.mktemp("sft")
    for name in ("model", "mixture"):
        make_model(root / name, moe=name == "mixture", seed=0)
        (root / name / "chat_template.jinja").write_text(TEMPLATE)
    (root / "rows.jsonl").write_bytes(b"".join(orjson.dumps({"messages": messages_of(i)}) + b"\n" for i in range(ROWS)))
    return root


@pytest.fixture(autouse=True)
def _no_manager_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager, "_manager", None)


def run(config: SftConfig) -> int:
    """Runs it as a process of its own would, which has one manager."""
    manager._manager = None
    return train.run(config)


def make_config(place: Path, output_dir: Path, **fields: Any) -> SftConfig:
    values: dict[str, Any] = {
        "output_dir": output_dir,
        "model": str(place / "model"),
        "data": {"path": str(place / "rows.jsonl")},
        "epochs": 3,
        "samples_per_step": PER_STEP,
        "training": TRAINING,
        "trainer": {"device": "cpu", "dtype": "float32", "threads": 1, "max_tokens": 300},
    }
    return SftConfig.model_validate(values | fields)


def lines_of(output_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output_dir / "trainer" / "metrics.jsonl").read_text().splitlines()]


def weights_in(directory: Path) -> dict[str, torch.Tensor]:
    adapter = directory / "adapter_model.safetensors"
    return load_file(adapter if adapter.exists() else directory / "model.safetensors")


def order_of(config: SftConfig) -> list[int]:
    """The rows of all steps in order, as the ids of the samples name them."""
    batches = SftBatches(config)
    names = [sample.rollout_id for step in range(1, batches.steps + 1) for sample in batches.batch(step).samples]
    return [int(name.split("-")[1]) for name in names]


@contextmanager
def as_it_was() -> Iterator[None]:
    """Puts back what transformers and accelerate change in a process: the generators' states, and accelerate's own."""
    from accelerate.state import AcceleratorState, GradientState  # type: ignore[import-untyped]

    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(before[0])  # noqa: TID251 - transformers seeds it
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def train_by_trl(
    place: Path, output_dir: Path, rows: list[int], adapter: Path | None
) -> tuple[dict[str, Any], list[float]]:
    """Returns the weights and the losses of TRL's trainer on these rows, which it tokenizes and masks itself."""
    from datasets import Dataset
    from peft import PeftModel
    from torch.utils.data import SequentialSampler
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    class InOrder(SFTTrainer):
        def _get_train_sampler(self, *arguments: Any) -> SequentialSampler:
            return SequentialSampler(self.train_dataset)

    model: Any = AutoModelForCausalLM.from_pretrained(place / "model", dtype=torch.float32)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter, is_trainable=True)
    settings = SFTConfig(
        output_dir=str(output_dir),
        per_device_train_batch_size=PER_STEP,
        max_steps=STEPS,
        learning_rate=TRAINING["learning_rate"],
        adam_beta1=TRAINING["betas"][0],
        adam_beta2=TRAINING["betas"][1],
        weight_decay=0.0,
        max_grad_norm=1.0,
        lr_scheduler_type="constant",
        assistant_only_loss=True,
        max_length=300,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
    )
    dataset = Dataset.from_list([{"messages": messages_of(row)} for row in rows])
    tokenizer = AutoTokenizer.from_pretrained(place / "model")
    trainer = InOrder(model=model, args=settings, train_dataset=dataset, processing_class=tokenizer)
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    trained = trainer.accelerator.unwrap_model(trainer.model)
    if adapter is not None:
        trained.save_pretrained(output_dir)
        return weights_in(output_dir), losses
    return {name: tensor.detach() for name, tensor in trained.state_dict().items()}, losses


def new_adapter(place: Path, directory: Path) -> Path:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_pretrained(place / "model", dtype=torch.float32)
    lora = LoraConfig(
        r=LORA["rank"], lora_alpha=LORA["alpha"], target_modules=LORA["target_modules"], task_type="CAUSAL_LM"
    )
    get_peft_model(model, lora).save_pretrained(directory)
    return directory


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_twenty_steps_are_those_of_trl(place: Path, tmp_path: Path, kind: str) -> None:
    adapter = new_adapter(place, tmp_path / "adapter") if kind == "lora" else None
    lora = {"lora": {**LORA, "start_from": str(adapter)}} if adapter is not None else {}
    config = make_config(place, tmp_path / "ours", training={**TRAINING, **lora})
    assert run(config) == 0
    ours = weights_in(newest_weights(config))
    with as_it_was():
        theirs, losses = train_by_trl(place, tmp_path / "theirs", order_of(config), adapter)
    lines = lines_of(config.output_dir)
    assert [line["loss"] for line in lines] == pytest.approx(losses, abs=2e-4)  # TRL rounds to four digits
    assert set(ours) <= set(theirs)
    furthest = max(float((ours[name] - theirs[name]).abs().max()) for name in ours)
    assert furthest < 1e-5
    before = weights_in(adapter) if adapter is not None else weights_in(place / "model")
    assert max(float((ours[name] - before[name]).abs().max()) for name in ours) > 1e-2
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert lines[-1]["epoch"] == 3.0
    assert not {name for name in lines[-1] if name.startswith(("mismatch_kl", "importance_ratio")) or "/sft" in name}


def test_a_resume_needs_the_same_model_and_template(place: Path, tmp_path: Path) -> None:
    config = make_config(place, tmp_path / "out")
    another = shutil.copytree(place / "model", tmp_path / "another")
    changed = config.model_copy(update={"model": str(another)})
    identity = SftBatches(config).identity
    assert SftBatches(changed).identity == identity | {"model": str(another)}
    (another / "chat_template.jinja").write_text(TEMPLATE.replace("<start>", "<begin>"))
    assert SftBatches(changed).identity["chat_template"] != identity["chat_template"]


def test_a_resume_is_exact(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped by a signal in the middle of an epoch, between two checkpoints."""
    training = {**TRAINING, "lora": LORA, "warmup_steps": 3, "lr_schedule": "linear"}
    whole = make_config(place, tmp_path / "whole", training=training, epochs=1.5)
    assert run(whole) == 0
    halves = make_config(place, tmp_path / "halves", training=training, epochs=1.5)
    with monkeypatch.context() as patch:
        stop_at(7, patch)
        assert run(halves) == 143
    reached = lines_of(halves.output_dir)[-1]["step"]
    assert 1 <= reached < 8
    changed = halves.model_copy(update={"resume": True, "samples_per_step": 5})
    with pytest.raises(ValueError, match=r"sft.json: samples_per_step changed since the run began"):
        run(changed)
    resumed = make_config(place, tmp_path / "halves", training=training, epochs=1.5, resume=True)
    another = shutil.copytree(place / "model", tmp_path / "another")
    with pytest.raises(ValueError, match=r"sft.json: model changed since the run began"):
        run(resumed.model_copy(update={"model": str(another)}))
    assert run(resumed) == 0
    one, other = weights_in(newest_weights(whole)), weights_in(newest_weights(resumed))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    shown = ("step", "loss", "epoch", "learning_rate", "tokens")
    assert [[line[name] for name in shown] for line in lines_of(whole.output_dir)] == [
        [line[name] for name in shown] for line in lines_of(halves.output_dir)
    ]
    assert run(resumed) == 0, "a run that is trained to its end"
    shutil.move(tmp_path / "halves" / "trainer", tmp_path / "lost")
    with pytest.raises(ValueError, match=r"has no checkpoint.*restore .*trainer/sft"):
        run(resumed)
    assert published_steps(newest_weights(resumed).parent), "nothing was removed"
    shutil.move(tmp_path / "lost", tmp_path / "halves" / "trainer")
    assert run(resumed) == 0
    with pytest.raises(ValueError, match=r"--resume .* --fresh"):
        run(whole)


def test_no_row_is_left_out_where_epochs_grow_after_a_shorter_batch(place: Path, tmp_path: Path) -> None:
    data = {"rows": [{"messages": messages_of(index)} for index in range(5)]}

    def train_for(epochs: float) -> SftBatches:
        config = make_config(place, tmp_path, data=data, epochs=epochs, samples_per_step=3, resume=epochs > 1)
        assert run(config) == 0
        described = json.loads((tmp_path / "run_sft" / "sft.json").read_text())
        return SftBatches(config, {int(step): end for step, end in described["ends"].items()})

    for epochs, ends in ((1, {2: 5}), (1.6, {2: 5}), (2, {2: 5, 4: 10}), (2, {2: 5, 4: 10}), (3, {2: 5, 4: 10, 6: 15})):
        batches = train_for(epochs)
        assert batches.ends == ends
    assert [len(batches.batch(step).samples) for step in range(1, 7)] == [3, 2, 3, 2, 3, 2]
    positions = [int(each.rollout_id.split("-")[0]) for step in range(1, 7) for each in batches.batch(step).samples]
    assert positions == list(range(15))
    lines = [(line["step"], line["epoch"], line["samples"]) for line in lines_of(tmp_path)]
    assert lines == [(1, 0.6, 3), (2, 1.0, 2), (3, 1.6, 3), (4, 2.0, 2), (5, 2.6, 3), (6, 3.0, 2)]


def test_epochs_that_end_before_what_is_trained_are_refused(place: Path, tmp_path: Path) -> None:
    """Their end would take the place of that of a whole batch, and a later growth would train a row twice."""
    data = {"rows": [{"messages": messages_of(index)} for index in range(10)]}

    def config(epochs: float, **fields: Any) -> SftConfig:
        return make_config(place, tmp_path, data=data, epochs=epochs, samples_per_step=4, **fields)

    assert run(config(0.8)) == 0
    noted = (tmp_path / "run_sft" / "sft.json").read_bytes()
    with pytest.raises(ValueError, match=r"epochs = 0\.5 are 5 rows, and 8 .*step 2"):
        run(config(0.5, resume=True))
    assert (tmp_path / "run_sft" / "sft.json").read_bytes() == noted
    assert run(config(2, resume=True)) == 0
    assert [line["epoch"] for line in lines_of(tmp_path)] == [0.4, 0.8, 1.2, 1.6, 2.0]


def test_other_weights_of_rows_are_other_data(place: Path, tmp_path: Path) -> None:
    rows = [{"messages": messages_of(index), "v": 1 + index % 2, "w": 1 + index % 3} for index in range(6)]

    def identity(weight: str | None) -> dict[str, object]:
        return SftBatches(make_config(place, tmp_path, data={"rows": rows, "weight": weight})).identity

    assert identity(None)["weights"] is None
    assert identity("v") == identity("v")
    assert len({str(identity(weight)) for weight in (None, "v", "w")}) == 3


def furthest(one: SftConfig, other: SftConfig) -> float:
    """The largest difference of two results in any weight."""
    ours, theirs = weights_in(newest_weights(one)), weights_in(newest_weights(other))
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


BAD_ROWS = [{"messages": messages_of(0)}, {"messages": [{"role": "user", "content": "hi"}]}]
LAYOUTS: list[tuple[str, str, dict[str, Any]]] = [
    ("model", "lora", {}),
    ("model", "lora", {"sharding": True}),
    ("model", "full", {}),
    ("mixture", "full", {"expert_parallel": 2, "context_parallel": 2, "max_tokens": 150}),
    ("model", "full", {"sharding": True}),
]
"""Model, what is trained, and how two ranks divide it; the last one is stopped on two ranks, and goes on on one."""


def test_two_ranks_train_as_one_and_one_goes_on_where_two_were_stopped(place: Path, tmp_path: Path) -> None:
    # AdamW divides by the gradient's size: where that is near zero, the order of a sum moves a weight by a share of the rate.
    rate = {**TRAINING, "learning_rate": 1e-4}
    training: dict[str, Any] = {"full": rate, "lora": {**rate, "lora": LORA}}

    def config(name: str, model: str, kind: str, trainer: dict[str, Any], **fields: Any) -> SftConfig:
        trainer = {"device": "cpu", "threads": 1, "max_tokens": 300, **trainer}
        given = {"model": str(place / model), "epochs": 0.9, "training": training[kind], "trainer": trainer}
        return make_config(place, tmp_path / name, **given, **fields)

    two = [
        config(f"two-{index}", model, kind, {"processes": 2, **trainer})
        for index, (model, kind, trainer) in enumerate(LAYOUTS)
    ]
    bad = config("bad", "model", "lora", {"processes": 2}, data={"rows": BAD_ROWS})
    work = [(bad, 0), *((each, 0) for each in two[:-1]), (two[-1], 5)]
    launch(
        2,
        tmp_path,
        [(each, free_port(), last) for each, last in work],
        module="tests.trainer.ranked_sft",
        seconds=DEADLINE_SECONDS,
    )
    refused, *codes = (tmp_path / "ended").read_text().splitlines()
    assert refused == "rows[1]: it has no message of role assistant; there is nothing to train"
    assert codes == ["0", "0", "0", "0", "143"]

    assert 1 <= lines_of(two[-1].output_dir)[-1]["step"] < 6
    model, kind, _ = LAYOUTS[-1]
    assert run(config(two[-1].output_dir.name, model, kind, {}, resume=True)) == 0
    for (model, kind, trainer), divided in zip(LAYOUTS, two, strict=True):
        alone = config(f"{model}-{kind}", model, kind, {})
        assert alone.output_dir.exists() or run(alone) == 0
        assert furthest(divided, alone) < 1e-5, (model, kind, trainer)
        ours, theirs = (
            [(line["step"], line["loss"]) for line in lines_of(each.output_dir)] for each in (divided, alone)
        )
        assert ours == [(step, pytest.approx(loss, abs=1e-5)) for step, loss in theirs]
        assert len(theirs) == 6


def test_the_command_ends_when_one_of_its_ranks_was_killed(place: Path, tmp_path: Path) -> None:
    training = {**TRAINING, "checkpoint_interval": 2, "max_grad_norm": math.inf}  # which JSON does not have
    config = make_config(place, tmp_path / "out", epochs=10_000, training=training)
    config = config.model_copy(update={"trainer": config.trainer.model_copy(update={"processes": 2})})
    file, log = tmp_path / "sft.toml", tmp_path / "log"
    file.write_text(tomli_w.dumps(config.model_dump(mode="json", exclude_unset=True, exclude_none=True)))
    with log.open("wb") as output:
        process = subprocess.Popen([sys.executable, "-m", "counterpoint.cli.main", "sft", str(file)], stderr=output)
    try:
        checkpoints = config.output_dir / "trainer" / "sft" / "checkpoints"
        wait_until(lambda: bool(published_steps(checkpoints)), "a checkpoint")
        children = descendants(process.pid)
        os.kill(process_of_rank(children, 1), signal.SIGKILL)
        assert process.wait(DEADLINE_SECONDS) == 1
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children), f"the end of {children}")
        assert "a rank of the trainer died (rank 1" in log.read_text()
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_a_run_begins_with_the_result(place: Path, tmp_path: Path, kind: str) -> None:
    training = {**TRAINING, "lora": LORA} if kind == "lora" else TRAINING
    config = make_config(place, tmp_path / "sft", training=training, epochs=0.5)
    assert run(config) == 0
    result = newest_weights(config)
    if kind == "full":
        later = make_lone_run(tmp_path / "job", result)
    else:
        later = make_lone_run(tmp_path / "job", place / "model", lora={**LORA, "start_from": str(result)})
    written, held = (
        sorted(float(tensor.double().abs().sum()) for tensor in weights.values())
        for weights in (weights_in(result), later.weights())
    )
    assert written == held
    assert held != sorted(
        float(tensor.double().abs().sum())
        for tensor in make_lone_run(tmp_path / "other", place / "model").weights().values()
    )


def test_a_row_that_cannot_be_used_is_named(place: Path, tmp_path: Path) -> None:
    bad = tmp_path / "rows.jsonl"
    rows = [{"messages": messages_of(0)}, {"messages": "hello"}, {"messages": [{"role": "user", "content": "hi"}]}]
    bad.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    for select, said in (
        (":2", r"rows.jsonl:2: messages is 'hello'; expected a list"),
        ("::2", "rows.jsonl:3: it has no message"),
    ):
        config = make_config(place, tmp_path / "out", data={"path": str(bad), "select": select})
        with pytest.raises(ValueError, match=said):
            run(config)


@pytest.mark.parametrize(("on_long", "kept"), [("truncate", [20, 60, 60]), ("drop", [20])])
def test_a_long_conversation_is_cut_or_left_out(place: Path, tmp_path: Path, on_long: str, kept: list[int]) -> None:
    short = [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}]
    data = {"rows": [{"messages": messages} for messages in (messages_of(2), short, messages_of(2))]}
    config = make_config(place, tmp_path, data=data, epochs=1, max_length=60, on_long=on_long)
    batches = SftBatches(config)
    assert batches.steps == 1
    assert sorted(np.diff(batches.batch(1).sample_offsets).tolist()) == kept
    with pytest.raises(
        ValueError,
        match=r"rows\[.\]: .*\d+ tokens; at most 60 .*max_length",
    ):
        SftBatches(config.model_copy(update={"on_long": "error"})).batch(1)


@pytest.mark.parametrize("on_long", ["truncate", "drop"])
def test_a_row_of_which_nothing_is_trained_is_left_out_and_counted(
    place: Path, tmp_path: Path, on_long: str, caplog: pytest.LogCaptureFixture
) -> None:
    late = [{"role": "user", "content": "a" * 80}, {"role": "assistant", "content": "b"}]
    data = {"rows": [{"messages": late}, {"messages": messages_of(0)}, {"messages": late}]}
    settings: dict[str, Any] = {"epochs": 1, "samples_per_step": 2, "max_length": 80, "on_long": on_long}
    batches = SftBatches(make_config(place, tmp_path, data=data, **settings))
    assert sum(len(batches.batch(step).samples) for step in (1, 2)) == 1
    assert "2 conversations were left out, and not trained" in caplog.text
    # A run that would train nothing at all is an error.
    data = {"rows": [{"messages": late}] * 3}
    config = make_config(place, tmp_path, data=data, **settings)
    with pytest.raises(ValueError, match=r"none of the 3 rows .* 80 tokens"):
        run(config)


def test_every_epoch_has_every_row_once(place: Path, tmp_path: Path) -> None:
    order = order_of(make_config(place, tmp_path, epochs=2.5))
    epochs = [order[:ROWS], order[ROWS : 2 * ROWS], order[2 * ROWS :]]
    assert [sorted(epoch) for epoch in epochs[:2]] == [list(range(ROWS))] * 2
    assert len(set(epochs[2])) == len(epochs[2]) == ROWS // 2
    assert epochs[0] != epochs[1]
    assert order == order_of(make_config(place, tmp_path, epochs=2.5))
    assert order != order_of(make_config(place, tmp_path, epochs=2.5, seed=1))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"schedule": {"max_off_policy_steps": 2}}, r"\[schedule\] is about rollouts, and counterpoint sft makes none"),
        ({"environments": []}, r"\[environments\] is about rollouts"),
        (
            {"training": {"loss": {"kind": "importance_ratio", "ratio_low": 0.5}}},
            "training.loss has no meaning for counterpoint sft",
        ),
        ({"training": {"weight": 2.0}}, "training.weight has no meaning for counterpoint sft: no other run"),
        ({"training": {"updates_per_step": 2}}, "training.updates_per_step has no meaning"),
        ({"training": {"value_head": {}}}, "training.value_head has no meaning"),
        ({"trainer": {"max_runs": 2}}, "trainer.max_runs = 2: counterpoint sft trains one run"),
        ({"trainer": {"nodes": 2}}, "trainer.nodes = 2: counterpoint sft trains one run on one machine"),
        ({"trainer": {"model": "other"}}, "trainer.model: model is set once, at the top"),
        ({"max_length": 400}, "max_length = 400 is more than trainer.max_tokens = 300"),
        ({"epochs": 0}, "greater than 0"),
    ],
)
def test_what_makes_no_sense_is_refused(place: Path, tmp_path: Path, fields: dict[str, Any], said: str) -> None:
    if "trainer" in fields:
        fields = {"trainer": {"max_tokens": 300, **fields["trainer"]}}
    with pytest.raises(ValidationError, match=said):
        make_config(place, tmp_path, **fields)
