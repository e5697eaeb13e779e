"""Single alterations of a recorded run, each as one who forges would make it."""

from __future__ import annotations

import hashlib
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from counterpoint.transport import codec

Forgery = Callable[[Path, int, random.Random], None]


def records(run_dir: Path, step: int) -> Path:
    return run_dir / f"rollouts/step_{step}/rollouts.jsonl"


def lines_of(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True)


def altered_line(run_dir: Path, step: int, draw: random.Random, **values: Any) -> None:
    lines = lines_of(records(run_dir, step))
    number = draw.randrange(len(lines))
    lines[number] = orjson.dumps(orjson.loads(lines[number]) | values, option=orjson.OPT_APPEND_NEWLINE)
    records(run_dir, step).write_bytes(b"".join(lines))


def reward(run_dir: Path, step: int, draw: random.Random) -> None:
    altered_line(run_dir, step, draw, reward=draw.random())


def token(run_dir: Path, step: int, draw: random.Random) -> None:
    path = run_dir / f"rollouts/step_{step}/tokens.bin"
    data = bytearray(path.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def batch(run_dir: Path, step: int, draw: random.Random) -> None:
    path = run_dir / f"rollouts/step_{step}/batch.bin"
    found = codec.read_file(path, 1 << 30)
    column = draw.choice(["token_ids_T", "log_probabilities_T", "advantages_T", "loss_mask_T"])
    values = found.columns[column].copy()
    place = draw.choice(np.flatnonzero(found.loss_mask_T).tolist())
    values[place] = {"token_ids_T": 77, "log_probabilities_T": -3.5, "advantages_T": 9.5, "loss_mask_T": 0}[column]
    found.columns[column] = values
    path.unlink()
    codec.write_file(path, found)


def swapped_files(run_dir: Path, step: int, draw: random.Random) -> None:
    name = draw.choice(["rollouts.jsonl", "tokens.bin", "batch.bin"])
    other = draw.choice([each for each in range(1, 7) if each != step])
    one, two = (run_dir / f"rollouts/step_{each}" / name for each in (step, other))
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)


def missing_file(run_dir: Path, step: int, draw: random.Random) -> None:
    (run_dir / f"rollouts/step_{step}" / draw.choice(["rollouts.jsonl", "tokens.bin"])).unlink()


def _lines(run_dir: Path, path: Path, draw: random.Random) -> None:
    lines = lines_of(path)
    number = draw.randrange(len(lines) - 1)
    match draw.randrange(3):
        case 0:
            del lines[number]
        case 1:
            lines.insert(number, lines[number])
        case _:
            lines[number], lines[number + 1] = lines[number + 1], lines[number]
    path.write_bytes(b"".join(lines))


def lines_of_records(run_dir: Path, step: int, draw: random.Random) -> None:
    _lines(run_dir, records(run_dir, step), draw)


def lines_of_receipts(run_dir: Path, step: int, draw: random.Random) -> None:
    _lines(run_dir, run_dir / "receipts.jsonl", draw)


def receipt(run_dir: Path, step: int, draw: random.Random) -> None:
    """Alters a receipt without the ones after it."""
    path = run_dir / "receipts.jsonl"
    lines = lines_of(path)
    lines[step - 1] = orjson.dumps(_other(orjson.loads(lines[step - 1]), draw), option=orjson.OPT_APPEND_NEWLINE)
    path.write_bytes(b"".join(lines))


def _other(values: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    key = draw.choice(["batch", "configuration", "records"])
    return values | {key: hashlib.sha256(draw.randbytes(8)).hexdigest()}


def chained(run_dir: Path, step: int, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Rewrites a receipt, the chain after it, and the copies in checkpoints: what somebody noted of it before shows that."""
    path = run_dir / "receipts.jsonl"
    lines, previous = [], ""
    for line in lines_of(path):
        values = orjson.loads(line)
        values = (change(values) if values["step"] == step else values) | {"previous": previous}
        lines.append(orjson.dumps(values))
        previous = hashlib.sha256(lines[-1]).hexdigest()
        copy = run_dir / f"checkpoints/step_{values['step']}/receipt.json"
        if copy.exists():
            copy.write_bytes(lines[-1])
    path.write_bytes(b"".join(line + b"\n" for line in lines))


def rehashed(run_dir: Path, step: int) -> None:
    """Makes the receipts fit the altered records of a step."""
    lines = [hashlib.sha256(line).digest() for line in lines_of(records(run_dir, step))]
    data, frames = (run_dir / f"rollouts/step_{step}/tokens.bin").read_bytes(), []
    while data:
        length = 8 + int.from_bytes(data[:8], "little")
        frames.append(hashlib.sha256(data[:length]).digest())
        data = data[length:]
    whole = hashlib.sha256(b"".join(line + frame for line, frame in zip(lines, frames, strict=True))).hexdigest()
    shown = [line.hex()[:16] + frame.hex()[:16] for line, frame in zip(lines, frames, strict=True)]
    chained(run_dir, step, lambda values: values | {"records": whole, "rollouts": shown})


def rewritten_receipt(run_dir: Path, step: int, draw: random.Random) -> None:
    chained(run_dir, step, lambda values: _other(values, draw))


def rewritten_weights(run_dir: Path, step: int, draw: random.Random) -> None:
    """Alters the weights of a version that is not published any more."""
    chained(run_dir, step, lambda values: values | {"weights": {str(step - 1): draw.randbytes(32).hex()}})
    for version in range(step):
        shutil.rmtree(run_dir / f"broadcast/step_{version}")


def rewritten_all(run_dir: Path, step: int, draw: random.Random) -> None:
    """What no record shows, with what the trainer has noted: only who noted the head elsewhere can tell."""
    before = lines_of(run_dir / "receipts.jsonl")
    forged = {"configuration": draw.randbytes(32).hex()}
    chained(run_dir, step, lambda values: values | forged)
    notes = (noted := run_dir.parent / "trainer/one/trained.jsonl").read_bytes()
    for old, new in zip(before, lines_of(run_dir / "receipts.jsonl"), strict=True):
        old_head, new_head = (hashlib.sha256(line[:-1]).hexdigest().encode() for line in (old, new))
        notes = notes.replace(old_head, new_head)
    noted.write_bytes(notes)


def skipped_data(run_dir: Path, step: int, draw: random.Random) -> None:
    """A resume that skips an example, with receipts that say so."""

    def skip(values: dict[str, Any]) -> dict[str, Any]:
        begun = values["begun"]
        (name, example), *later = begun["examples"]
        return values | {"begun": begun | {"examples": [*later, [name, example]]}}

    with_data = [
        line["step"] for line in map(orjson.loads, lines_of(run_dir / "receipts.jsonl")) if line["begun"]["examples"]
    ]
    chained(run_dir, min(with_data, key=lambda each: abs(each - step)), skip)


def trained_twice(run_dir: Path, step: int, draw: random.Random) -> None:
    """A group that ships in two steps, with receipts that say so."""
    chained(run_dir, step, lambda values: values | {"shipped": [*values["shipped"][:-1], 0 if step > 1 else 3]})


def recorded_reward(run_dir: Path, step: int, draw: random.Random) -> None:
    reward(run_dir, step, draw)
    rehashed(run_dir, step)


def recorded_advantage(run_dir: Path, step: int, draw: random.Random) -> None:
    altered_line(run_dir, step, draw, advantage=1 + draw.random())
    rehashed(run_dir, step)


def recorded_version(run_dir: Path, step: int, draw: random.Random) -> None:
    lines = lines_of(records(run_dir, step))
    line = orjson.loads(lines[0])
    line["turns"][0]["policy_version"] = step + draw.choice([0, 1, -6])
    records(run_dir, step).write_bytes(b"".join([orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE), *lines[1:]]))
    rehashed(run_dir, step)


def recorded_example(run_dir: Path, step: int, draw: random.Random) -> None:
    altered_line(run_dir, step, draw, example_index=99)
    rehashed(run_dir, step)


def recorded_token(run_dir: Path, step: int, draw: random.Random) -> None:
    """Without the batch, only the turn's hash has this token."""
    path = run_dir / f"rollouts/step_{step}/tokens.bin"
    data = bytearray(path.read_bytes())
    header = int.from_bytes(data[12:16], "little")
    data[8 + -(-(8 + header) // 8) * 8 + 24] ^= 64  # the first id, after `kept` of two turns
    path.write_bytes(data)
    path.with_name("batch.bin").unlink()
    rehashed(run_dir, step)


def recorded_hash(run_dir: Path, step: int, draw: random.Random) -> None:
    """The hash of a prompt, which the batch has, too."""
    lines = lines_of(records(run_dir, step))
    trained = [number for number, line in enumerate(lines) if orjson.loads(line)["filtered_by"] is None]
    line = orjson.loads(lines[number := draw.choice(trained)])
    line["turns"][0]["prompt_hash"] = draw.randbytes(8).hex()
    lines[number] = orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)
    records(run_dir, step).write_bytes(b"".join(lines))
    rehashed(run_dir, step)


def recorded_filter(run_dir: Path, step: int, draw: random.Random) -> None:
    altered_line(run_dir, step, draw, filtered_by=draw.choice(["repetition", "gibberish"]))
    rehashed(run_dir, step)


FORGERIES: dict[str, Forgery] = {
    each.__name__: each
    for each in (
        reward, token, batch, swapped_files, missing_file, lines_of_records, lines_of_receipts, receipt, skipped_data,
        trained_twice, recorded_reward, recorded_advantage, recorded_version, recorded_example, recorded_filter, recorded_token,
        recorded_hash,
    )
}  # fmt: skip
"""Those that are found without a head, by what lies in the run's directory alone."""

BY_TRAINER: dict[str, Forgery] = {each.__name__: each for each in (rewritten_receipt, rewritten_weights)}
"""A receipt and all after it are written anew: found by what the trainer noted, or by the head."""
