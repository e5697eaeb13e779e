"""Configuration of unit tests for code."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from counterpoint.environments.rewards.config import PartConfig


class CodeConfig(PartConfig):
    """The share of the example's tests that the completion's Python code passes."""

    kind: Literal["code"]

    style: Literal["stdio", "calls", "asserts"]
    """`stdio`: each test is `{ input, output }`, and the program's output for this input is compared word by word. `calls`: each
    is `{ args, expected }`, and a function's value is compared. `asserts`: each is Python source that fails if it raises, such as
    `assert add(1, 2) == 3`; or one source defines `check(candidate)`."""

    tests_column: str = "tests"
    """The column with the list of tests. With `asserts` it may be one source."""

    setup_column: str | None = None
    """A column of source, with `asserts`, that runs before each test, such as imports."""

    entry_point: str | None = None
    """The function's name, with `calls` and `check(candidate)`."""

    entry_point_column: str | None = None
    """Or the column that holds it."""

    all_or_nothing: bool = False
    """1 if all tests pass, else 0, instead of the share."""

    cpu_seconds: float = Field(default=5.0, gt=0, le=600)
    """Most processor time of one test."""

    memory_mib: int = Field(default=512, ge=64)
    """Most address space of one program."""

    max_tests: int = Field(default=50, ge=1, le=1000)
    """The number of tests of an example that are run, the first ones."""

    sandbox: Literal["namespaces", "none"] = "namespaces"
    """`none` runs the code without any protection, on a machine that refuses namespaces: for code that you trust."""

    @model_validator(mode="after")
    def _names_what_is_called(self) -> CodeConfig:
        if self.entry_point and self.entry_point_column:
            raise ValueError("entry_point and entry_point_column: expected one of them")
        if self.style == "calls" and not (self.entry_point or self.entry_point_column):
            raise ValueError("style = 'calls' needs entry_point or entry_point_column: the function that is called")
        return self
