"""What is said of the first value of a wrong type."""

from __future__ import annotations

import pytest
from pydantic import BaseModel, ValidationError, model_validator

from counterpoint.transport.files.wrong_types import first_wrong


class Inner(BaseModel):
    count: int
    names: tuple[str, ...] = ()


class Outer(BaseModel):
    inner: list[Inner]
    table: dict[str, int] = {}

    @model_validator(mode="after")
    def _has_one(self) -> Outer:
        if not self.inner:
            raise ValueError("expected one at least as inner")
        return self


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({}, "inner is missing"),
        ({"inner": 3}, "inner: expected a list, found 3"),
        ({"inner": []}, "expected one at least as inner"),
        ({"inner": [None]}, "inner[0]: expected an object, found None"),
        ({"inner": [{"count": 3}, {"names": []}]}, "inner[1].count is missing"),
        ({"inner": [{"count": []}]}, "inner[0].count: expected a valid integer, found []"),
        ({"inner": [{"count": 3, "names": "abc"}]}, "inner[0].names: expected a list, found 'abc'"),
        ({"inner": [{"count": 3}], "table": 3}, "table: expected an object, found 3"),
        ({"inner": "x" * 1000}, f"inner: expected a list, found '{'x' * 79}"),
    ],
)
def test_the_first_wrong_key_is_named(content: object, said: str) -> None:
    with pytest.raises(ValidationError) as error:
        Outer.model_validate(content)
    assert first_wrong(error.value) == said
