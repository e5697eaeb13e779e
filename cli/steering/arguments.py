"""What the commands that steer a job share: RUN, `--job`, `--json`, and how a result is printed."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from cli.arguments.job import add_job
from transport.printable import printable


def parser_of(command: str, description: str, *, run: bool = True) -> argparse.ArgumentParser:
    """Returns a parser with the arguments that all commands have; without `run` it is about the whole job."""
    parser = argparse.ArgumentParser(prog=f"counterpoint {command}", description=description, allow_abbrev=False)
    if run:
        parser.add_argument("run", metavar="RUN", help="the run's id")
    add_job(parser)
    parser.add_argument("--json", action="store_true", help="print the result as JSON, for programs")
    return parser


def show(given: argparse.Namespace, result: object, sentence: str) -> int:
    """Prints the result, as a sentence or as JSON. Returns 0."""
    print(json.dumps(_plain(result)) if given.json else printable(sentence))
    return 0


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return _plain(value.model_dump())
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, Path) else value
