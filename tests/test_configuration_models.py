"""What holds for every configuration model, and for every request that is one: a boolean is no number in any field."""

from __future__ import annotations

import importlib
import types
import typing
from collections.abc import Iterator
from typing import Annotated, Any

import pytest
from pydantic import ValidationError

from counterpoint.inference.config import InferenceConfig
from counterpoint.run.config import RunConfig
from counterpoint.trainer.config import TrainerConfig
from counterpoint.trainer.sft.config import SftConfig
from counterpoint.transport.config import NO_NUMBER, Config
from tests.test_imports import FLOOR_OF, folder_of

PACKAGES = sorted(FLOOR_OF.keys() - {"perf"})

LEAST_NUMBERS = 300
"""There are more; with fewer, most models were not found."""


def every_model() -> set[type[Config]]:
    for package in PACKAGES:
        for file in folder_of(package).rglob("*.py"):
            if "import Config" in (text := file.read_text()) or "(Config)" in text:
                parts = file.relative_to(folder_of(package).parent).with_suffix("").parts
                importlib.import_module(".".join(("counterpoint", *parts)))
    return set(subclasses(Config))


def subclasses(model: type[Config]) -> Iterator[type[Config]]:
    for each in model.__subclasses__():
        if not each.__module__.startswith("tests."):
            yield each
            yield from subclasses(each)


def with_boolean(annotation: Any) -> Any:
    """A value of the annotation's form, with a boolean in place of a number; None if it has no number."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return with_boolean(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return None if bool in arguments else next(filter(None, map(with_boolean, arguments)), None)
    if annotation in (int, float):
        return True
    inner = next(filter(None, map(with_boolean, arguments)), None)
    if inner is None or origin not in (list, tuple, dict):
        return None
    return {"a": inner} if origin is dict else [inner] * max(1, len([each for each in arguments if each is not ...]))


def errors_of(model: type[Config], values: dict[str, Any]) -> set[tuple[str, Any]]:
    try:
        model.model_validate(values)
    except ValidationError as error:
        return {(each["type"], each["loc"][0]) for each in error.errors() if each["loc"]}
    return set()


@pytest.mark.slow
def test_a_boolean_is_no_number_in_any_field_of_any_model() -> None:
    fields = [
        (model, name, value)
        for model in every_model()
        for name, field in model.model_fields.items()
        if (value := with_boolean(field.annotation)) is not None
    ]
    taken = [
        f"{model.__name__}.{name}"
        for model, name, value in fields
        if (NO_NUMBER, name) not in errors_of(model, {name: value})
    ]
    assert not taken
    assert len(fields) > LEAST_NUMBERS


def test_a_number_beyond_what_its_users_take_is_refused_at_the_start() -> None:
    for model in (RunConfig, TrainerConfig, SftConfig, InferenceConfig):
        for seed in (2**63, -(2**63) - 1, 10**400):
            assert "seed" in {name for _, name in errors_of(model, {"seed": seed})}, model
    assert ("finite_number", "epochs") in errors_of(SftConfig, {"epochs": float("inf")})
