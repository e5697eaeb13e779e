"""A field's docstring is read from the source as pydantic itself reads it, and only when somebody asks."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, create_model

from counterpoint.transport.config import Config
from counterpoint.transport.configuration.docstrings import docstring_of


class Base(Config):
    """Pydantic reads the docstrings of these models, too: what it finds is expected."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    inherited: int = 1
    """Of the base."""
    again: int = 1
    """Of the base's."""


class Derived(Base):
    """With fields of every kind."""

    class Inner(Base):
        """One within another."""

        inherited: int = 3
        """Of the inner class."""

    own: Inner = Inner()
    """Of more than one line:

        with an indent,
    and without."""
    without: int = 1
    again: int = 2
    """Of the derived."""
    last: str | None = None
    """The last."""


def read_by_pydantic(model: type[BaseModel]) -> dict[str, str]:
    return {name: field.description or "" for name, field in model.model_fields.items()}


def read(model: type[BaseModel]) -> dict[str, str]:
    return {name: docstring_of(model, name) for name in model.model_fields}


def test_every_docstring_is_what_pydantic_reads() -> None:
    class Local(Derived):
        """Within a function."""

        here: int = 1
        """Of a local class."""

    assert read(Local) == {
        "inherited": "Of the base.",
        "again": "Of the derived.",
        "own": "Of more than one line:\n\n    with an indent,\nand without.",
        "without": "",
        "last": "The last.",
        "here": "Of a local class.",
    }
    for model in (Base, Derived, Derived.Inner, Local):
        assert read(model) == read_by_pydantic(model)


def test_a_model_without_source_has_those_of_its_bases() -> None:
    made = create_model("Made", __base__=Derived, __module__="no.such.module", more=(int, 1))
    assert read(made) == {**read(Derived), "more": ""}


def test_pydantic_does_not_read_them_when_it_builds_a_model() -> None:
    """It would read the source of every model in every process."""

    class Plain(Config):
        """As all models are."""

        field: int = 1
        """A docstring."""

    assert Plain.model_fields["field"].description is None
    assert docstring_of(Plain, "field") == "A docstring."
