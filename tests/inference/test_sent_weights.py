"""What is offered of a published version, and which offers are refused."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import orjson
import pytest

from counterpoint.inference.sent_weights import LENGTH_BYTES, WeightOffer, opened
from tests.support.fake_inference import CLAIM, weight_update


def published(directory: Path, *names: str) -> Path:
    for index, name in enumerate((*names, "STABLE"), 1):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(bytes([index]) * index)
    return directory


def test_a_server_gets_what_it_loads_and_nothing_else(tmp_path: Path) -> None:
    whole = published(tmp_path / "whole", "model-1.safetensors", "model-2.safetensors", "config.json", "probe.json")
    changed = published(tmp_path / "changed", "base/model.safetensors", "delta.safetensors", "tokenizer.json")
    adapter = published(tmp_path / "adapter", "adapter_config.json", "adapter_model.safetensors", "probe.json")
    for directory, name, files in (
        (whole, None, {"model-1.safetensors": 1, "model-2.safetensors": 2}),
        (changed, None, {"base/model.safetensors": 1, "delta.safetensors": 2}),
        (adapter, "blue", {"adapter_config.json": 1, "adapter_model.safetensors": 2}),
    ):
        with opened(replace(weight_update(3, name), directory=directory), CLAIM) as (offer, opened_files):
            assert (offer.version, offer.adapter, offer.files, offer.left_out) == (3, name, files, frozenset())
            assert list(offer.identities) == [name for name in files if name.startswith("base/")]
            assert {name: len(file.read()) for name, file in opened_files.items()} == files
        assert all(file.closed for file in opened_files.values())
        assert WeightOffer.decode(offer.preamble()[LENGTH_BYTES:]) == offer


def test_a_base_is_known_again_in_the_next_version_and_no_other(tmp_path: Path) -> None:
    first = published(tmp_path / "first", "base/model.safetensors", "delta.safetensors")
    second, other = shutil.copytree(first, tmp_path / "second"), shutil.copytree(first, tmp_path / "other")
    (second / "base" / "model.safetensors").unlink()
    os.link(first / "base" / "model.safetensors", second / "base" / "model.safetensors")
    identities = []
    for directory in (first, second, other):
        with opened(replace(weight_update(3), directory=directory), CLAIM) as (offer, _):
            identities.append(offer.identities)
    assert identities[0] == identities[1] != identities[2]


def test_what_is_not_published_is_not_sent(tmp_path: Path) -> None:
    directory = published(tmp_path / "step_1", "model.safetensors")
    (directory / "STABLE").unlink()
    with (
        pytest.raises(ValueError, match="step_1 is not a published directory"),
        opened(replace(weight_update(1), directory=directory), CLAIM),
    ):
        pass


@pytest.mark.parametrize(
    "name",
    ["../model.safetensors", "/model.safetensors", "base/../model.safetensors", "a/b.safetensors", ".safetensors", "",
     "base/", "config.json", "STABLE", "model.safetensors\n", "m\0.safetensors", f"{'m' * 129}.safetensors"],
)  # fmt: skip
def test_a_name_that_is_no_file_of_weights_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="expected weights and their size"):
        WeightOffer.decode(WeightOffer(1, None, CLAIM, {name: 1}).encode())


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b'{"version": 1, "adapter": null}'])
def test_what_is_no_offer_is_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match="offer"):
        WeightOffer.decode(content)


@pytest.mark.parametrize(
    "fields",
    [{"version": "1"}, {"version": True}, {"adapter": 2}, {"files": {}},
     {"files": {"a.safetensors": -1}}, {"files": {"a.safetensors": True}},
     {"identities": {"b.safetensors": "1"}}, {"identities": {"a.safetensors": 1}},
     {"identities": {"a.safetensors": "1" * 129}}, {"left_out": ["a.safetensors"]}, {"left_out": [1]}, {"left_out": None}],
)  # fmt: skip
def test_an_offer_with_a_wrong_field_is_refused(fields: dict[str, object]) -> None:
    good = orjson.loads(WeightOffer(1, None, CLAIM, {"a.safetensors": 1}).encode())
    assert WeightOffer.decode(orjson.dumps(good)) == WeightOffer(1, None, CLAIM, {"a.safetensors": 1})
    with pytest.raises(ValueError, match="offer"):
        WeightOffer.decode(orjson.dumps(good | fields))
