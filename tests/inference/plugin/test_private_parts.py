"""docs/vllm_parts.md names each private module of vLLM in the row of the file of ours that imports it, and no other."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

REPOSITORY = Path(__file__).parents[3]

GIVEN = {
    "vllm.config", "vllm.distributed.weight_transfer.base", "vllm.distributed.weight_transfer.factory", "vllm.engine.protocol",
    "vllm.envs", "vllm.exceptions", "vllm.inputs", "vllm.logger", "vllm.lora.request", "vllm.platforms", "vllm.sampling_params",
}  # fmt: skip
"""What vLLM's plugins, workers' extensions and weight-transfer engines are made with."""


def imported() -> dict[str, set[str]]:
    """By file of the product: the modules of vLLM that it imports, at its top or inside functions."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in (REPOSITORY / "counterpoint" / "inference").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module] if isinstance(node, ast.ImportFrom) else []
            names += [each.name for each in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                if name == "vllm":
                    assert isinstance(node, ast.ImportFrom)
                    found[str(path.relative_to(REPOSITORY))] |= {f"vllm.{each.name}" for each in node.names}
                elif (name or "").startswith("vllm."):
                    found[str(path.relative_to(REPOSITORY))].add(name or "")
    return {file: modules - GIVEN for file, modules in found.items() if modules - GIVEN}


def listed() -> dict[str, set[str]]:
    """By file: the modules in its rows."""
    found: dict[str, set[str]] = defaultdict(set)
    for line in (REPOSITORY / "docs" / "vllm_parts.md").read_text().splitlines():
        if line.startswith("| `"):
            files, modules = line.split("|")[1:3]
            for file in re.findall(r"`(counterpoint/inference/\S+\.py)`", files):
                found[file] |= set(re.findall(r"`(vllm\.[\w.]+)`", modules))
    return found


def test_each_private_part_is_listed_and_no_other() -> None:
    rows, found = listed(), imported()
    assert len(found) > 10
    assert {file: modules - rows[file] for file, modules in found.items() if modules - rows[file]} == {}, "not listed"
    in_use = set().union(*found.values())
    assert {file: modules - in_use for file, modules in rows.items() if modules - in_use} == {}, "no longer imported"
    assert [file for file in rows if not (REPOSITORY / file).is_file()] == []
