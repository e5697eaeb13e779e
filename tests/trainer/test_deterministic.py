"""`trainer.deterministic`: torch's mode is on where steps are trained; what has no algorithm in it is refused, by the key."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from counterpoint.cli.main import main
from counterpoint.run.loss import LossConfig
from counterpoint.trainer.again.kept import NotKept, find
from counterpoint.trainer.again.verified import train_again
from counterpoint.trainer.config import TrainerConfig
from counterpoint.trainer.losses.contract import LossInputs, LossOutputs
from counterpoint.trainer.losses.load import TRIED_TOKENS, load_loss
from counterpoint.trainer.model.deterministic import use_deterministic_algorithms
from counterpoint.trainer.model.kernels.proof import _as_in_training
from counterpoint.trainer.model.packing_proof import _same_bits
from counterpoint.trainer.packer import InvalidBatch
from counterpoint.trainer.train import train
from tests.trainer.again.recorded import record
from tests.trainer.conftest import make_batch
from tests.trainer.lone_run import make_lone_run

pytestmark = pytest.mark.slow

REFUSED = (
    r"put_ does not have a deterministic implementation.*; trainer.deterministic = true asks for it: set it to false"
)


@pytest.fixture(autouse=True)
def _mode_of_other_tests() -> Iterator[None]:
    yield
    use_deterministic_algorithms(False)


def put(inputs: LossInputs) -> LossOutputs:
    """A loss with an operation that has no deterministic algorithm, even on a CPU, once it is trained."""
    loss_P = -inputs.trainer_log_probabilities_P
    if len(loss_P) > TRIED_TOKENS:
        torch.zeros(1).put_(torch.tensor([0]), torch.ones(1))
    return LossOutputs(loss_P, torch.zeros_like(loss_P, dtype=torch.bool))


def put_at_once(inputs: LossInputs) -> LossOutputs:
    """The same for the made-up batch."""
    torch.zeros(1).put_(torch.tensor([0]), torch.ones(1))
    return put(inputs)


def in_the_mode(inputs: LossInputs) -> LossOutputs:
    """A loss that is refused by a process that adds in any order."""
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    loss_P = -inputs.trainer_log_probabilities_P * inputs.advantages_P
    return LossOutputs(loss_P, torch.zeros_like(loss_P, dtype=torch.bool))


def test_an_operation_without_an_algorithm_is_refused_by_the_key(dense_directory: Path, tmp_path: Path) -> None:
    """A loss may have one, when it is loaded and when it is trained, and a model's layer may."""
    kind = {"kind": f"{__name__}:put"}
    with pytest.raises(InvalidBatch, match=REFUSED):
        make_lone_run(tmp_path / "loss", dense_directory, {"deterministic": True}, loss=kind).train(make_batch(1))
    with pytest.raises(ValueError, match=REFUSED):
        load_loss(LossConfig(kind=f"{__name__}:put_at_once"))
    lone = make_lone_run(tmp_path / "layer", dense_directory, {"deterministic": True})
    lone.model.register_forward_hook(lambda *_: torch.zeros(1).put_(torch.tensor([0]), torch.ones(1)) and None)
    with pytest.raises(InvalidBatch, match=REFUSED):
        lone.train(make_batch(1))
    make_lone_run(tmp_path / "free", dense_directory, loss=kind).train(make_batch(1))


def test_a_trainer_ends_with_the_key_if_its_model_cannot_be_loaded(
    dense_directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: object) -> torch.Tensor:
        use_deterministic_algorithms(True)
        return torch.zeros(1).put_(torch.tensor([0]), torch.ones(1))

    monkeypatch.setattr("counterpoint.trainer.learner.LoadedModel.load", load)
    config = TrainerConfig(output_dir=tmp_path, model=str(dense_directory), deterministic=True, device="cpu", threads=1)
    assert train(config, lambda: None) == 2
    assert re.search(f"cannot be loaded: {REFUSED}", caplog.text)


@pytest.mark.parametrize("wanted", [True, False])
def test_what_proves_a_kernel_takes_the_algorithms_of_training(wanted: bool) -> None:
    """Also inside the proof of packing, which computes the same bits twice in any case."""
    use_deterministic_algorithms(wanted)
    with _same_bits():
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled() != wanted
        with _as_in_training():
            assert torch.are_deterministic_algorithms_enabled() == wanted
    assert torch.are_deterministic_algorithms_enabled() == wanted


def test_a_cpu_computes_the_same_bits_without_it(moe_directory: Path, tmp_path: Path) -> None:
    found = []
    for wanted in (True, False):
        lone = make_lone_run(tmp_path / str(wanted), moe_directory, {"deterministic": wanted})
        metrics = [lone.train(make_batch(step, routed=True)) for step in (1, 2)]
        found.append(([line["grad_norm"] for line in metrics], lone.weights()))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(weight, found[1][1][name]) for name, weight in found[0][1].items())


@pytest.mark.parametrize("ranks", [1, 2])
async def test_the_trainers_processes_have_it_and_the_one_that_trains_again(
    ranks: int, dense_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One rank that has not would refuse the run, and with it all."""
    kind = f"{__name__}:in_the_mode"
    trainer = {"deterministic": True, "allowed_imports": [kind], "processes": ranks}
    config = await record(tmp_path / "job", dense_directory, trainer, loss={"kind": kind})
    assert main(["verify", str(tmp_path / "job"), "--step", "4"]) == 0
    said = capsys.readouterr().out
    assert "trained with trainer.deterministic = true, and so again" in said
    assert ("bit-equal" in said) == (ranks == 1), said

    kept = find(config.output_dir, "default", 4, config.transport.max_batch_bytes)
    (tmp_path / "again").mkdir()
    with pytest.raises(NotKept, match="are_deterministic_algorithms_enabled"):
        train_again(config.model_copy(update={"deterministic": False}), kept, tmp_path / "again")
