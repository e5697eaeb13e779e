"""`counterpoint keys DIRECTORY`: makes the keys and the token by which roles on several machines trust each other."""

from __future__ import annotations

import argparse
from pathlib import Path


def main(arguments: list[str]) -> int:
    """Runs the command. Raises `UserError` for a secret that others can read, or a pair of which a part is missing or wrong."""
    parser = argparse.ArgumentParser(
        prog="counterpoint keys",
        description="Makes a pair of CURVE keys for the trainer and one for the orchestrators, the directory of the keys that "
        "the trainer accepts, and a token for the inference servers. What is there stays as it is.",
        allow_abbrev=False,
    )
    parser.add_argument("directory", type=Path, metavar="DIRECTORY", help="where the files are made")
    directory: Path = parser.parse_args(arguments).directory
    from counterpoint.transport.wires.key_files import PURPOSES, make_key_files

    made = make_key_files(directory)
    for name, purpose in PURPOSES.items():
        print(f"{'made' if name in made else 'kept'}  {directory / name}: {purpose}")
    return 0
