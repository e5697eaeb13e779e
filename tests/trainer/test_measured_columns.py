"""The columns of a step: each token has what was measured of it, and a value head learns returns."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from counterpoint.run.trained import TrainingConfig
from counterpoint.trainer.packer import ModelLimits
from counterpoint.trainer.updates.columns import Columns, trained_positions
from counterpoint.trainer.updates.passes import OLD, REFERENCE, VALUES, columns_to_measure
from counterpoint.trainer.work import measure
from tests.support.batches import with_changes
from tests.trainer.conftest import make_batch

CPU = torch.device("cpu")


def test_each_run_of_a_row_gets_the_references_words_on_its_own_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    row, parts, first = [], [], 0
    for number, lengths in enumerate(((9, 17), (5, 12))):
        batch = make_batch(number + 1, lengths)
        count = len(trained_positions(batch, [0, 1]))
        run = SimpleNamespace(torch=SimpleNamespace(reference_slot=None))
        row.append(
            (
                SimpleNamespace(batch=batch, run=run, columns=Columns(batch, [REFERENCE], CPU), sums_EM=torch.zeros(1)),
                [0, 1],
            )
        )
        parts.append(SimpleNamespace(samples=[0, 1], predictions=count, tokens=sum(lengths)))
        first += count
    micro: Any = SimpleNamespace(
        parts=parts,
        **dict.fromkeys(
            (
                "token_ids_T",
                "position_ids_T",
                "sample_lengths",
                "predicting_P",
                "targets_P",
                "temperatures_P",
                "families",
            )
        ),
    )
    monkeypatch.setattr(measure, "pack", lambda *_: micro)
    monkeypatch.setattr(measure, "can_share_prompts", lambda _: False)
    monkeypatch.setattr(measure, "log_probabilities", lambda *_, **__: (-1.0 - torch.arange(first), None))
    given: Any = row
    measure._measure_reference(torch.nn.Identity(), ModelLimits(99, 99, 0, 0, 0), given)
    found = torch.cat([step.columns.of(REFERENCE, samples) for step, samples in row])
    assert found.tolist() == [-1.0 - place for place in range(first)]


def test_a_value_head_learns_returns_which_are_advantages_and_estimates() -> None:
    config = TrainingConfig.model_validate({"value_head": {"whiten": False}})
    batch = make_batch(1, (9, 17))
    columns = Columns(batch, columns_to_measure(config), CPU)
    assert columns.names == (VALUES,)
    columns.put(VALUES, [0, 1], torch.linspace(-1, 1, len(trained_positions(batch, [0, 1]))))
    columns.conclude(config, [0, 1])
    values, returns = columns.values_of([1])
    advantages = columns.advantages_of([1])
    assert values is not None
    assert returns is not None
    assert advantages is not None
    torch.testing.assert_close(returns, advantages + values)
    assert not torch.allclose(returns, advantages)
    columns.clear([0])
    kept = columns.of(VALUES, [1])
    assert kept is not None
    assert torch.equal(kept, values), "what another pass has measured stays"
    columns.clear([1])
    assert not any(column.any() for column in columns.measured.values())
    assert OLD not in columns.measured


def test_a_value_head_spreads_the_rewards_of_turns_from_where_they_were_given() -> None:
    """With estimates of 0 an advantage is the sum of the rewards from the token on. Without them a sample has one, at its end."""
    config = TrainingConfig.model_validate({"value_head": {"whiten": False, "gae_lambda": 1.0}})
    plain = make_batch(1, (9, 17))
    trained = [trained_positions(plain, [sample]) for sample in (0, 1)]
    rewards_T = np.zeros(26, np.float32)
    for position, reward in ((trained[0][-1], 0.5), (trained[1][1], 2.0), (trained[1][-1], -0.75)):
        rewards_T[position] = reward
    for batch in (plain, with_changes(plain, rewards=rewards_T)):
        columns = Columns(batch, columns_to_measure(config), CPU)
        columns.conclude(config, [0, 1])
        for sample, own in enumerate(trained):
            last = [0.0] * (len(own) - 1) + [batch.samples[sample].reward]
            received = rewards_T[own].tolist() if batch is not plain else last
            advantages = columns.advantages_of([sample])
            assert advantages is not None
            assert advantages.tolist() == [sum(received[token:]) for token in range(len(own))]
