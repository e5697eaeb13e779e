"""The start of a job, read from what its processes noted, and drawn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from counterpoint.cli.display.start_picture import LEGEND, start_picture
from counterpoint.cli.status import main as status
from counterpoint.job.reading.start import MOST_PROCESSES, read_start
from counterpoint.transport.errors import UserError
from counterpoint.transport.telemetry.start_phases import FIRST_STEP, MAX_BYTES, OVER, START_FILE

BEGAN = 1000.0


def write(directory: Path, *notes: tuple[str, int, float, str, float, float]) -> None:
    """Writes notes: process, pid, and in seconds from the command when it began; the phase, when it was entered, and CPU."""
    lines = (
        {"process": process, "pid": pid, "began": BEGAN + began, "phase": phase, "at": BEGAN + at, "cpu": cpu}
        for process, pid, began, phase, at, cpu in notes
    )
    (directory / START_FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_a_start(directory: Path) -> None:
    write(
        directory,
        ("trainer", 2, 2.0, "loads the model", 4.0, 1.5),
        ("supervisor", 1, 0.0, "checks", 1.0, 0.5),
        ("orchestrator", 3, 2.0, "waits for a server", 3.0, 0.75),
        ("supervisor", 1, 0.0, OVER, 2.0, 1.0),
        ("orchestrator", 3, 2.0, OVER, 6.0, 1.5),
        ("orchestrator", 3, 2.0, FIRST_STEP, 5.0, 1.0),
    )


def test_phases_are_those_of_each_process_in_the_order_of_their_beginnings(tmp_path: Path) -> None:
    write_a_start(tmp_path)
    processes = read_start(tmp_path)
    assert [process.process for process in processes] == ["supervisor", "trainer", "orchestrator"]
    assert [process.is_over for process in processes] == [True, False, True]
    assert [
        (each.phase, each.begin - BEGAN, each.end and each.end - BEGAN, each.cpu) for each in processes[2].phases
    ] == [
        ("imports", 2.0, 3.0, 0.75),
        ("waits for a server", 3.0, 5.0, 0.25),
        (FIRST_STEP, 5.0, 6.0, 0.5),
    ]
    assert (processes[1].phases[1].end, processes[1].phases[1].cpu) == (None, None)


def test_a_picture_has_a_bar_for_each_phase_on_one_axis(tmp_path: Path) -> None:
    write_a_start(tmp_path)
    assert start_picture(read_start(tmp_path), 83, BEGAN + 8) == [
        "the start of the job                 wall    CPU  0                   8.0 s so far",
        "supervisor, process 1",
        "  imports                            1.00   0.50  ####",
        "  checks                             1.00   0.50      ####",
        "trainer, process 2",
        "  imports                            2.00   1.50          ########",
        "  loads the model                    4.00                         ###############>",
        "orchestrator, process 3",
        "  imports                            1.00   0.75          ####",
        "  waits for a server                 2.00   0.25              ........",
        "  first step                         1.00   0.50                      ####",
        "from the command to the first step: 6.0 s",
        LEGEND,
    ]


def test_what_others_wrote_is_passed_over_and_escaped(tmp_path: Path) -> None:
    write_a_start(tmp_path)
    bad: list[Any] = [
        {"process": "x" * 300, "pid": 9, "began": 1, "phase": "p", "at": 1, "cpu": 1},
        {"process": "far", "pid": 9, "began": 1e300, "phase": "p", "at": 1, "cpu": 1},
        [1],
        {
            "process": "\x1b[2J",
            "pid": 9,
            "began": BEGAN + 7,
            "phase": "\x1b[2J" + "y" * 50,
            "at": BEGAN + 7.5,
            "cpu": 0,
        },
    ]
    with (tmp_path / START_FILE).open("a") as file:
        file.write("\n".join(map(json.dumps, bad)) + '\n{"process": "cut o')
    processes = read_start(tmp_path)
    assert [process.pid for process in processes] == [1, 2, 3, 9]
    picture = start_picture(processes, 60)
    assert all(line.isprintable() for line in picture)


def test_a_long_or_missing_file_is_no_start(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nothing is known of a start"):
        read_start(tmp_path)
    (tmp_path / START_FILE).write_bytes(b" " * (MAX_BYTES + 1))
    with pytest.raises(UserError, match=f"at most {MAX_BYTES} are read"):
        read_start(tmp_path)


def test_at_most_so_many_processes_are_shown(tmp_path: Path) -> None:
    write(tmp_path, *(("trainer", pid, float(pid), OVER, pid + 1.0, 0.5) for pid in range(MOST_PROCESSES + 5)))
    assert [process.pid for process in read_start(tmp_path)] == [*range(MOST_PROCESSES)]


def test_status_prints_a_start_for_people_and_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_a_start(tmp_path)
    assert status([str(tmp_path), "--start"]) == 0
    assert "first step" in capsys.readouterr().out
    assert status([str(tmp_path), "--start", "--json"]) == 0
    first = json.loads(capsys.readouterr().out)[0]
    assert (first["process"], first["phases"][0]) == (
        "supervisor",
        {"phase": "imports", "begin": BEGAN, "end": BEGAN + 1.0, "cpu": 0.5},
    )
