"""Schemas of tools are held as their drafts say: beside the library `jsonschema`, and by hand where no draft is named."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterpoint.environments.tools.definition import make_definition, without_titles
from counterpoint.environments.tools.schema import check_schema, newest, violation

VALIDATORS = {
    4: jsonschema.Draft4Validator,
    6: jsonschema.Draft6Validator,
    7: jsonschema.Draft7Validator,
    2019: jsonschema.Draft201909Validator,
    2020: jsonschema.Draft202012Validator,
}
HELD: list[dict[str, Any]] = [
    # In every draft.
    {"type": ["integer", "null"]},
    {"type": "number", "minimum": 1, "maximum": 2},
    {"enum": [1, "a", None, True, [0], {"a": False}]},
    {"multipleOf": 2},
    {"minLength": 1, "maxLength": 2, "pattern": "^a+$"},
    {"minItems": 1, "maxItems": 2, "uniqueItems": True},
    {"minProperties": 1, "maxProperties": 1},
    {"properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False},
    {"patternProperties": {"^a": {"type": "string"}}, "additionalProperties": {"type": "boolean"}},
    {"patternProperties": {"^a": {"type": "integer"}}, "additionalProperties": False},
    {"items": {"type": "integer"}},
    {"anyOf": [{"type": "string", "maxLength": 2}, {"type": "integer", "minimum": 1}]},
    {"oneOf": [{"type": "integer"}, {"minimum": 1}]},
    {"allOf": [{"type": "array"}, {"maxItems": 2}], "not": {"minItems": 2}},
    {"properties": {"a": {"$ref": "#/definitions/t"}}, "definitions": {"t": {"type": "integer"}}},
    {"$ref": "#/definitions/t", "definitions": {"t": {"properties": {"a": {"$ref": "#"}}, "maxProperties": 1}}},
    {"$ref": "#/definitions/t", "maxLength": 1, "definitions": {"t": {"type": "string"}}},
    {"format": "date", "default": 3, "title": "x", "description": "y", "x-other": {"type": "string"}},
    # From some draft on, or up to one.
    {"exclusiveMinimum": 1, "exclusiveMaximum": 3},
    {"const": 1},
    {"const": {"a": [1, True]}},
    {"contains": {"type": "string"}},
    {"contains": {"type": "integer"}, "minContains": 2, "maxContains": 2},
    {"propertyNames": {"maxLength": 1}},
    {"if": {"type": "integer"}, "then": {"minimum": 1}, "else": {"type": "string"}},
    {"items": [{"type": "integer"}, {"type": "string"}], "additionalItems": False},
    {"items": [{"type": "integer"}], "additionalItems": {"type": "string"}},
    {"additionalItems": False},
    {"prefixItems": [{"type": "integer"}], "items": {"type": "string"}},
    {"dependencies": {"a": ["b"], "b": {"maxProperties": 1}}},
    {"dependentRequired": {"a": ["b"]}},
    {"dependentSchemas": {"a": {"maxProperties": 1}}},
    {"properties": {"a": {}}, "unevaluatedProperties": False},
    {"allOf": [{"prefixItems": [{}]}], "unevaluatedItems": False},
    {"properties": {"a": {"$recursiveRef": "#"}}, "maxProperties": 1},
    {"$defs": {"t": {"$anchor": "t", "type": "integer"}}, "items": {"$ref": "#t"}},
    {"$defs": {"t": {"$dynamicAnchor": "t", "type": "integer"}}, "items": {"$dynamicRef": "#t"}},
]
BOUNDED: list[dict[str, Any]] = [
    {"minimum": 1, "exclusiveMinimum": True, "maximum": 3, "exclusiveMaximum": True},
    {"minimum": 1, "exclusiveMinimum": False, "maximum": 3, "exclusiveMaximum": False},
    {"type": "array", "items": {"minimum": 0, "exclusiveMinimum": True}},
    {"anyOf": [{"type": "number", "maximum": 0, "exclusiveMaximum": True}, {"type": "string"}]},
]
"""Of draft 4, whose bounds are exclusive by a boolean; OpenAPI 3.0 has them, too."""
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 4) | st.sampled_from(["", "a", "abc", 0.5, 1.0, 2.5]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "b", "ab"]), inner, max_size=2),
    max_leaves=5,
)


def is_accepted(value: Any, schema: dict[str, Any]) -> bool:
    return violation(value, schema) == ""


@pytest.mark.slow
@settings(max_examples=400)
@given(schema=st.sampled_from(HELD), draft=st.sampled_from(list(VALIDATORS)), value=VALUES)
def test_a_schema_is_held_as_its_draft_says(schema: dict[str, Any], draft: int, value: Any) -> None:
    validator = VALIDATORS[draft]
    named = {"$schema": validator.META_SCHEMA.get("$id") or validator.META_SCHEMA["id"]} | schema
    try:
        validator.check_schema(named)
        check_schema(named)
        expected = validator(named).is_valid(value)
    except (jsonschema.SchemaError, ValueError):
        return  # `test_a_form_of_another_draft_is_kept_or_refused` has these
    except jsonschema.exceptions._WrappedReferencingError:
        return
    assert is_accepted(value, named) == expected, json.dumps([named, value])


@pytest.mark.slow
@settings(max_examples=200)
@given(schema=st.sampled_from(HELD), value=VALUES)
def test_a_schema_that_names_no_draft_has_what_each_draft_has(schema: dict[str, Any], value: Any) -> None:
    validator = next(
        VALIDATORS[draft]
        for draft in (2020, 2019, 7)
        if all(key in VALIDATORS[draft].VALIDATORS for key in keys(schema))
    )
    if "additionalItems" in schema and "items" not in schema:
        validator = VALIDATORS[2019]
    assert is_accepted(value, schema) == validator(schema).is_valid(value), json.dumps([schema, value])


def keys(schema: dict[str, Any]) -> set[str]:
    """The keys by which to tell the draft. A list of items is no schema from 2020-12 on."""
    told = {"additionalItems", "dependencies", "$recursiveRef", "prefixItems", "dependentRequired", "dependentSchemas"}
    nested = {key for part in schema.get("properties", {}).values() for key in part}
    return (schema.keys() | nested) & told


@pytest.mark.slow
@settings(max_examples=100)
@given(schema=st.sampled_from(BOUNDED), value=VALUES, is_named=st.booleans())
def test_bounds_that_a_boolean_makes_exclusive(schema: dict[str, Any], value: Any, is_named: bool) -> None:
    expected = jsonschema.Draft4Validator(schema).is_valid(value)
    named = {"$schema": "http://json-schema.org/draft-04/schema#"} if is_named else {}
    assert is_accepted(value, named | schema) == expected


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "string", "nullable": True}, ["a", None], [1]),
        ({"type": "string", "nullable": False}, ["a"], [None]),
        ({"nullable": True, "enum": ["a"]}, ["a"], [None]),
        ({"type": "string", "nullable": True, "enum": ["a", None]}, ["a", None], ["b"]),
        ({"type": "array", "items": {"type": "integer", "nullable": True}}, [[1, None]], [[""]]),
        ({"$schema": "http://json-schema.org/draft-07/schema#", "type": "string", "nullable": True}, ["a"], [None]),
        ({"nullable": True, "$ref": "#/$defs/t", "$defs": {"t": {"type": "string"}}}, ["a", None], [1]),
        ({"nullable": False, "$ref": "#/$defs/t", "$defs": {"t": {"type": "string"}}}, ["a"], [None]),
        ({"items": {"nullable": True, "$ref": "#/$defs/t"}, "$defs": {"t": {"type": "string"}}}, [["a", None]], [[1]]),
        ({"nullable": True, "allOf": [{"type": "string"}, {"minLength": 2}]}, ["ab", None], ["a"]),
        ({"nullable": True, "anyOf": [{"type": "string"}, {"type": "integer"}]}, ["a", 1, None], [1.5]),
        ({"nullable": True, "oneOf": [{"type": "string"}], "maxLength": 1}, ["a", None], ["ab"]),
        ({"nullable": True, "type": "object", "allOf": [{"required": ["a"]}]}, [{"a": 1}, None], [{}]),
        (
            {"$schema": "http://json-schema.org/draft-07/schema#", "nullable": True, "anyOf": [{"type": "string"}]},
            ["a"],
            [None],
        ),
        (
            {
                "$defs": {"n": {"nullable": True, "$anchor": "n", "allOf": [{"type": "object"}]}},
                "items": {"$ref": "#n"},
            },
            [[{}, None]],
            [[1]],
        ),
        (
            {"type": "object", "required": None, "properties": {"a": {"type": "string"}}},
            [{}, {"a": "b"}],
            [{"a": 1}, 1],
        ),
        ({"description": None, "title": None, "format": None, "type": "string"}, ["a"], [1]),
        (
            {"minimum": None, "maxLength": None, "enum": None, "pattern": None, "items": None, "anyOf": None},
            [1, "a"],
            [],
        ),
        ({"properties": None, "additionalProperties": None, "$defs": None, "nullable": None}, [{"a": 1}], []),
        (
            {"properties": {"a": {"$ref": None, "type": "string", "default": None}}},
            [{"a": "b"}],
            [{"a": 1}, {"a": None}],
        ),
        ({"type": "string", "x-nullable": True}, ["a", None], [1]),
        ({"properties": {"a": None}}, [{}, {"a": 1}], []),
        ({"$schema": "https://spec.openapis.org/oas/3.1/dialect/base", "type": "string"}, ["a"], [1]),
        ({"$schema": None, "type": "string"}, ["a"], [1]),
        ({"$schema": "http://json-schema.org/schema#", "type": "string"}, ["a"], [1]),
        ({"const": None}, [None], [1]),
        ({"enum": [None]}, [None], [1]),
        ({"properties": [], "type": "object"}, [{}, {"a": 1}], [[]]),
        (
            {"type": "object", "properties": {"a": {"items": []}}, "additionalProperties": []},
            [{"a": [1]}, {"b": 1}],
            [1],
        ),
        ({"items": [], "additionalItems": False}, [[]], [[1]]),
        ({"items": [], "additionalItems": {"type": "string"}}, [["a"]], [[1]]),
        ({"prefixItems": [], "items": False}, [[]], [[1]]),
        ({"allOf": [], "type": "string"}, ["a"], [1]),
        ({"required": ["a", "a"]}, [{"a": 1}], [{}]),
        ({"type": ["string", "string"]}, ["a"], [1]),
        ({"type": ["string", None]}, ["a", None], [1]),
        ({"properties": {"a": {"type": "string", "required": False}}}, [{}, {"a": "b"}], [{"a": 1}]),
        (
            {"type": "string", "description": ["a"], "examples": {"a": "b"}, "deprecated": "soon", "readOnly": 0},
            ["a"],
            [1],
        ),
        (
            {"properties": {"required": {"type": "null"}, "title": {"const": None}}},
            [{"required": None, "title": None}],
            [{"title": 1}],
        ),
        ({"enum": [1]}, [1, 1.0], [True, "1"]),
        ({"const": 1.0}, [1], [True]),
        ({"enum": [True]}, [True], [1]),
        ({"const": {"a": [1]}}, [{"a": [1.0]}], [{"a": [True]}]),
        ({"multipleOf": 0.01}, [19.99, 0.07, 3], [0.005]),
        ({"type": "integer", "maximum": 2**70}, [2**70, 3.0], [2**70 + 1, 0.5]),
        ({"pattern": r"^\d+$"}, ["12", 12], ["12\n", "\u0661"]),
        ({"pattern": "a|b"}, ["xbx"], ["x"]),
    ],
)
def test_what_is_right_and_what_is_wrong(schema: dict[str, Any], right: list[Any], wrong: list[Any]) -> None:
    assert [violation(value, schema) for value in right] == [""] * len(right)
    assert all(violation(value, schema) for value in wrong)


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"type": "any"}, r'"type".: .any. is not'),
        ({"required": True}, r'"required".: True is not'),
        ({"minimum": "0"}, r'"minimum".: .0. is not'),
        ({"type": None}, r'"type".: None is not'),
        ({"anyOf": []}, "anyOf"),
        ({"not": []}, "not"),
        ({"exclusiveMinimum": True}, "exclusiveMinimum is true, and there is no minimum"),
        ({"divisibleBy": 2}, "the key 'divisibleBy' is not held"),
        ({"disallow": "string"}, "the key 'disallow' is not held"),
        ({"extends": {}}, "the key 'extends' is not held"),
        ({"$recursiveAnchor": True}, r"the key .\$recursiveAnchor. is not held"),
        ({"$ref": "https://example.com/schema"}, "https://example.com/schema"),
        ({"$ref": "#/$defs/none"}, "none"),
        ({"pattern": "("}, "is not a"),
        ({"$schema": "http://json-schema.org/draft-03/schema#"}, ""),
    ],
)
def test_a_schema_that_cannot_be_held_is_refused_when_its_tool_is_made(part: dict[str, Any], said: str) -> None:
    whole = {"type": "object", "properties": {"x": part}}
    if "$schema" in part:
        whole, said = {"type": "object"} | part, r"\$schema is .*draft-03"
    with pytest.raises(ValueError, match=f"tool .f.: its parameters: .*{said}"):
        make_definition("f", "", whole)


def test_messages_name_the_place_and_the_value() -> None:
    schema = {"properties": {"a": {"items": {"anyOf": [{"type": "string", "maxLength": 2}, {"type": "integer"}]}}}}
    said = violation({"a": ["b", "x" * 10_000]}, schema, "it")
    assert said.startswith('it.a[1]: fits none of: it.a[1]: "xxx')
    assert len(said) <= 600
    assert violation({"a": {}}, {"properties": {"a": {"required": ["b"]}}}) == 'arguments.a: "b" is a required property'


@pytest.mark.parametrize("key", ["anyOf", "oneOf", "allOf"])
def test_what_a_model_nests_takes_no_time_that_doubles_with_each_level(key: str) -> None:
    part = {"properties": {"a": {"$ref": "#/$defs/n"}}, "minProperties": 2}
    schema = {"$defs": {"n": {key: [part, part]}}, "$ref": "#/$defs/n"}
    value: Any = 1
    for _ in range(100):
        value = {"a": value}
    assert violation(value, schema).startswith("arguments: not as")  # after years, if it doubled
    assert violation(1, {"$ref": "#"}) == ""
    assert violation("a" * 50_000 + "b", {"pattern": "^(?=a)(a+)+$"})


def test_a_schema_keeps_what_is_no_schema() -> None:
    schema = {
        "title": "Arguments",
        "properties": {
            "title": {"title": "Title", "enum": [{"title": "x"}], "default": {"title": "y", "exclusiveMinimum": True}}
        },
        "$defs": {"title": {"const": {"title": "z", "nullable": True}}},
        "dependentSchemas": {"title": {"title": "T"}},
    }
    assert without_titles(schema) == {
        "properties": {"title": {"enum": [{"title": "x"}], "default": {"title": "y", "exclusiveMinimum": True}}},
        "$defs": {"title": {"const": {"title": "z", "nullable": True}}},
        "dependentSchemas": {"title": {}},
    }
    assert newest(schema) == schema
