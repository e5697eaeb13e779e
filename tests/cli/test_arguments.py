"""What can be typed: a file anywhere, dashes, switches with values, list entries, help by section, completion, the version."""

from __future__ import annotations

import re
import subprocess
import tomllib
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from counterpoint.cli.main import COMMANDS, main

REPOSITORY = Path(__file__).parents[2]


def said(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    """What a command line that ends with `code` prints."""
    assert main(list(arguments)) == code
    printed = capsys.readouterr()
    return printed.out if code == 0 else printed.err


def dry_run(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    return tomllib.loads(said(capsys, *arguments, "--dry-run"))


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    version = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]
    assert said(capsys, "--version") == f"counterpoint {version}\n"


def test_the_file_may_stand_anywhere(capsys: pytest.CaptureFixture[str], job_file: Path) -> None:
    file = str(job_file)
    for words in (
        ["--seed", "3", file],
        ["--seed=3", "--dry-run", file],
        [file, "--seed", "3"],
        ["--resume", file, "--seed=3"],
    ):
        assert dry_run(capsys, "run", *words)["seed"] == 3
    assert "other.toml: unexpected argument: the file is" in said(capsys, "run", file, "other.toml", code=2)
    assert "which file?" in said(capsys, "run", "--seed", "3", code=2)


def test_dashes_stand_for_underscores(capsys: pytest.CaptureFixture[str], job_file: Path) -> None:
    resolved = dry_run(capsys, "run", str(job_file), "--output-dir", "elsewhere", "--inference.max-model-len=512")
    assert resolved["output_dir"] == "elsewhere"
    assert resolved["inference"]["max_model_len"] == 512  # type: ignore[index]


@pytest.mark.parametrize(
    ("words", "resume"),
    [
        (["--resume"], True),
        (["--resume=true"], True),
        (["--resume", "true"], True),
        (["--resume=false"], False),
        ([], False),
    ],
)
def test_a_switch_may_have_a_value(
    capsys: pytest.CaptureFixture[str], job_file: Path, words: list[str], resume: bool
) -> None:
    assert dry_run(capsys, "run", *words, str(job_file))["resume"] is resume
    assert "--resume=maybe: expected true or false" in said(capsys, "run", str(job_file), "--resume=maybe", code=2)


@pytest.mark.parametrize(
    ("flag", "meant"),
    [
        ("--dryrun", "--dry-run"),
        ("--dry_run_", "--dry-run"),
        ("--resum", "--resume"),
        ("--trainer.treads", "--trainer.threads"),
        ("--orchestrator.environments.0.rato", "--orchestrator.environments.0.ratio"),
        ("--orchestrator.environments.rato", "--orchestrator.environments.0.ratio"),
    ],
)
def test_a_flag_that_does_not_exist_is_answered_with_one_that_does(
    capsys: pytest.CaptureFixture[str], job_file: Path, flag: str, meant: str
) -> None:
    """The advice, typed, works: it is no unknown flag."""
    assert f"did you mean {meant}?" in said(capsys, "run", flag, str(job_file), code=2)
    value = [] if meant in ("--dry-run", "--resume") else ["1"]
    dry_run(capsys, "run", meant, *value, str(job_file))


def test_a_variable_in_small_letters_reaches_into_lists(
    capsys: pytest.CaptureFixture[str], job_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COUNTERPOINT_orchestrator__environments__0__name", "renamed")
    resolved = dry_run(capsys, "run", str(job_file))
    assert resolved["orchestrator"]["environments"][0]["name"] == "renamed"  # type: ignore[index]


def test_flags_and_variables_reach_into_lists(
    capsys: pytest.CaptureFixture[str], job_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COUNTERPOINT_ORCHESTRATOR__ENVIRONMENTS__0__NAME", "renamed")
    resolved = dry_run(
        capsys, "run", str(job_file), "--orchestrator.environments.0.ratio", "2.5",
        "--orchestrator.environments.0.kind=guess-number", "--orchestrator.environments.0.args.largest", "20",
    )  # fmt: skip
    (environment,) = resolved["orchestrator"]["environments"]  # type: ignore[index]
    assert environment == environment | {
        "name": "renamed",
        "kind": "guess-number",
        "ratio": 2.5,
        "args": {"largest": 20},
    }


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--orchestrator.environments.1.ratio", "2"], "flags: environments has 1 entry; there is no entry 1 (the first is 0)"),
        (["--orchestrator.environments.0.ratio", "-2"], "--orchestrator.environments.0.ratio: orchestrator.env"),
        (["--orchestrator.environments.0.args", "{"], "this is not JSON"),
        (["--orchestrator.environments=[1]", "--orchestrator.environments.0.ratio=2"], "environments.0 = 1; expected a table"),
        (["--orchestrator.environments=null", "--orchestrator.environments.0.ratio=2"], "environments.0 = None; expected"),
        (["--orchestrator.environments.0.ratio"], "a value must follow"),
        (["--orchestrator.environments.².ratio=2"], "there is no key orchestrator.environments.².ratio"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_a_list_is_told(
    capsys: pytest.CaptureFixture[str], job_file: Path, words: list[str], expected: str
) -> None:
    assert expected in said(capsys, "run", str(job_file), *words, code=2)


@pytest.mark.parametrize("command", ["trainer", "orchestrator", "inference", "sweep"])
def test_a_job_file_given_to_another_command_is_known(capsys: pytest.CaptureFixture[str], command: str) -> None:
    file = str(REPOSITORY / "configs" / "demo.toml")
    assert f"{file}: this is a job file: use `counterpoint run {file}`" in said(capsys, command, file, code=2)
    assert "this is a trainer file" in said(capsys, "run", str(REPOSITORY / "configs/roles/trainer.toml"), code=2)


@pytest.mark.parametrize(
    ("old", "new", "flags", "expected"),
    [
        ('kind = "reverse-text"', 'kind = "revers-text"', [], r":17:1: environments\[0\]: .*\n    17 \| kind = "),
        ('kind = "reverse-text"', 'kind = "reverse-text"\nargs = { wrods = 3 }', [], ":18:1: .* args: .*'wrods'"),
        ("steps = 20", 'steps = 20\nadvantage.kind = "mean"', [], ":14:11: advantage.kind = 'mean': expected one of"),
        ("steps", "steps", ["--orchestrator.environments.0.kind=x"], "error: --orchestrator.environments.0.kind: env"),
    ],
)
def test_the_line_of_an_environment_or_advantage_that_cannot_be_used_is_told(
    capsys: pytest.CaptureFixture[str], job_file: Path, old: str, new: str, flags: list[str], expected: str
) -> None:
    job_file.write_text(job_file.read_text().replace(old, new))
    assert re.search(expected, said(capsys, "run", str(job_file), "--dry-run", *flags, code=2))


def test_help_is_by_section(capsys: pytest.CaptureFixture[str]) -> None:
    short = said(capsys, "run", "--help")
    assert "--output_dir" in short
    assert "orchestrator.environments" in short
    assert "--orchestrator.environments.N.ratio" not in short
    assert "runs.N." not in short, "what a run takes is listed once, below orchestrator"
    section = said(capsys, "run", "--help", "orchestrator.environments")
    assert "--orchestrator.environments.N.ratio  (number = 1.0)" in section
    assert "--trainer.threads" not in section
    every = said(capsys, "run", "--help", "all")
    for part in ("--output_dir", "--trainer.threads", "--orchestrator.environments.N.ratio"):
        assert part in every
    assert "did you mean trainer?" in said(capsys, "run", "--help", "trainr", code=2)


def test_no_help_points_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    """Keys are looked up one by one: what stands above one in the source is not above it on the screen."""
    for command in ("run", "sweep"):
        assert "see above" not in said(capsys, command, "--help", "all").lower()


# --- completion ---


@pytest.fixture(scope="module")
def scripts() -> dict[str, str]:
    written = {}
    for shell in ("bash", "zsh", "fish"):
        with redirect_stdout(StringIO()) as output:
            assert main(["completion", shell]) == 0
        written[shell] = output.getvalue()
    return written


def completed(script: str, *words: str) -> list[str]:
    """What bash offers for the last of the words."""
    ask = f"{script}\nCOMP_WORDS=(counterpoint {' '.join(repr(word) for word in words)})\n"
    ask += f'COMP_CWORD={len(words)}\n_counterpoint\nprintf "%s\\n" "${{COMPREPLY[@]}}"'
    found = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, check=True, cwd=REPOSITORY / "configs")
    return found.stdout.split()


@pytest.mark.slow
def test_bash_completes_commands_flags_and_files(scripts: dict[str, str]) -> None:
    bash = scripts["bash"]
    assert set(completed(bash, "")) == set(COMMANDS)
    assert completed(bash, "trai") == ["trainer"]
    assert completed(bash, "run", "--orchestrator.ste") == ["--orchestrator.steps"]
    assert completed(bash, "run", "--dry") == ["--dry-run"]
    assert "--job" in completed(bash, "stop", "--")
    assert completed(bash, "run", "--output-") == ["--output-dir"]
    assert completed(bash, "run", "--output_") == ["--output_dir"]
    for command in ("run", "plan"):
        assert "--section.key" not in completed(bash, command, "--"), "it stands for a key in the usage"
    assert "--reasoning-parser" not in completed(bash, "run", "--"), (
        "a key's description mentions it, as a flag of vLLM's"
    )
    assert "demo.toml" in completed(bash, "run", "demo")
    assert completed(bash, "completion", "z") == ["zsh"]


@pytest.mark.slow
def test_every_shells_script_knows_every_command(scripts: dict[str, str]) -> None:
    for shell in ("zsh", "fish"):
        for part in (*COMMANDS, "orchestrator.steps", "dry-run"):
            assert part in scripts[shell]


@pytest.mark.parametrize("command", ["sweep status", "tune status"])
@pytest.mark.parametrize("word", ["--json=1", "--js"])
def test_a_word_that_a_status_does_not_know_prints_how_it_is_used(
    capsys: pytest.CaptureFixture[str], command: str, word: str
) -> None:
    assert main([*command.split(), word, "somewhere"]) == 2
    assert capsys.readouterr().out.startswith(f"usage: counterpoint {command} ")


@pytest.mark.parametrize("flags", [["--gpus", "8xH100"], ["--speed", "200+800"], ["--price", "2"], ["--seed", "3"]])
def test_a_directorys_plan_takes_no_flag_that_would_change_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, flags: list[str]
) -> None:
    assert "is a directory" in said(capsys, "plan", str(tmp_path), *flags, code=2)


def test_a_price_without_a_predicted_speed_is_refused(capsys: pytest.CaptureFixture[str], job_file: Path) -> None:
    assert "--speed" in said(capsys, "plan", str(job_file), "--gpus", "8xH100", "--price", "2", code=2)
