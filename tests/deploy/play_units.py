"""Plays the life of units under a systemd of its own: start, kills, reload, STOP, a reboot, a stop and a wrong file.

First the unit of a whole job, then those of the three roles, then those with the service for the Tinker SDK.

`make systemd-test` runs it as root. `debootstrap` makes a root once, below `build/`; podman boots it, without a network. There
this checkout is at `/opt/counterpoint`, and the commands of `docs/operations.md` install it; only `.venv` is put together from
the packages of this checkout's. Servers and trainer are real. Where this cannot be, it says why and passes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from counterpoint.run.changes import JOURNAL

HERE = Path(__file__).resolve().parents[2]
LAB = HERE / "build" / "systemd-test"
INSTALLED = "/opt/counterpoint"
UNIT = "counterpoint-job@demo"
OUTPUT = "/var/lib/counterpoint/demo"
ROLES = ("orchestrator", "trainer", "inference")
"""Each has a unit, and a file of its own name."""
ROLES_OUTPUT = "/var/lib/counterpoint/outputs/roles"
INSIDE = "COUNTERPOINT_PLAYS_UNITS"
DEADLINE_SECONDS = 600.0
PACKAGES = "systemd,systemd-sysv,dbus,ca-certificates,procps,python3,libgomp1,libnuma1"
JOB = f"""
output_dir = "{OUTPUT}"
model = "/var/lib/counterpoint/model"
[inference]
port = 8000
dtype = "float32"
max_model_len = 128
max_num_seqs = 16
max_num_batched_tokens = 4096
[trainer]
device = "cpu"
dtype = "float32"
max_tokens = 2048
threads = 1
[orchestrator]
run_id = "demo"
steps = 1000000
[[orchestrator.environments]]
name = "reverse-text"
kind = "reverse-text"
[orchestrator.sampling]
max_tokens = 16
[orchestrator.schedule]
group_size = 4
rollouts_per_step = 16
max_inflight_rollouts = 32
[orchestrator.training]
checkpoint_interval = 5
"""


def obstacle() -> str:
    """Why nothing can be played here; empty if it can."""
    if os.geteuid() != 0:
        return "it needs root"
    if lacking := [name for name in ("podman", "debootstrap", "unshare") if shutil.which(name) is None]:
        return f"{', '.join(lacking)} not installed"
    if sys.version_info[:2] != (3, 11):
        return f"Debian 12 has Python 3.11, and .venv has {sys.version.split()[0]}"
    return ""


class Machine:
    """A container in which systemd has booted."""

    def __init__(self) -> None:
        self._podman = ["podman", "--root", str(LAB / "store"), "--runroot", str(LAB / "run")]
        self._podman += ["--cgroup-manager=cgroupfs"]

    def boot(self) -> None:
        """Makes and starts it."""
        root, machine, venv = LAB / "root", LAB / "machine", LAB / "venv"
        if not (root / "sbin" / "init").exists():
            call("debootstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", str(root))
        self.remove()
        shutil.rmtree(machine, ignore_errors=True)
        call("cp", "--archive", "--reflink=auto", str(root), str(machine))
        write_venv(venv)
        packages = f"{INSTALLED}/.venv/lib/python3.11/site-packages"
        # Also at its own path, by which the editable install among the packages names it.
        mounts = ((HERE, HERE), (HERE, INSTALLED), (venv, f"{INSTALLED}/.venv"), (site_packages(), packages))
        volumes = [f"--volume={source}:{target}:ro" for source, target in mounts]
        # The limits: crun may not raise those of this machine.
        limits = ["--ulimit=nofile=20000:20000", "--ulimit=nproc=20000:20000"]
        call(*self._podman, "run", "--detach", "--name=units", "--systemd=always", "--privileged", "--network=none",
             *limits, *volumes, "--rootfs", str(machine), "/sbin/init")  # fmt: skip
        self._until_booted()

    def reboot(self) -> None:
        """Shuts it down in order, and boots it again."""
        call(*self._podman, "stop", "--time=400", "units")
        call(*self._podman, "start", "units")
        self._until_booted()

    def remove(self) -> None:
        """Removes what an earlier play left."""
        subprocess.run([*self._podman, "rm", "--force", "--time=0", "units"], check=False, capture_output=True)

    def run(self, command: str, check: bool = True, given: str = "") -> str:
        """Runs a line of bash in it, and returns what it prints. Raises `CalledProcessError` if it fails."""
        return call(*self._podman, "exec", "--interactive", "units", "bash", "-c", command, check=check, given=given)

    def show(self, name: str, unit: str = UNIT) -> str:
        """Returns a property of a unit."""
        return self.run(f"systemctl show --property={name} --value {unit}").strip()

    def steps(self, run: str = f"{OUTPUT}/run_demo") -> list[int]:
        """Returns the committed steps of a run, in order."""
        lines = self.run(f"cat {run}/metrics.jsonl", check=False).rpartition("\n")[0].splitlines()
        return [json.loads(line)["step"] for line in lines]

    def pid_of(self, role: str) -> str:
        """Returns the process of a role; empty for none."""
        return self.run(f"pgrep --full '^[^ ]*python -m counterpoint.cli.main {role} '", check=False).strip()

    def until_it_goes_on(self) -> None:
        """Waits until the unit is active and a further step is committed."""
        wait_for(lambda: self.show("ActiveState") == "active", f"{UNIT} to be active")
        before = len(self.steps())
        wait_for(lambda: len(self.steps()) > before, "a further step")

    def _until_booted(self) -> None:
        wait_for(lambda: "running" in self.run("systemctl is-system-running", check=False), "systemd to have booted")


def start(machine: Machine) -> str:
    """Installs by the commands of the documentation, the last of which starts the unit."""
    page = (HERE / "docs" / "operations.md").read_text()
    found = re.search(r"## As systemd services.*?```\n(.*?)```", page, re.DOTALL)
    assert found is not None
    model = call(f"{HERE}/.venv/bin/counterpoint", "make-model", "tiny-dense").split()[-1]
    for command in found.group(1).replace("NAME", "demo").splitlines():
        if command.startswith("make "):
            continue  # see the module's first paragraph
        if command.startswith("systemctl enable"):
            call("cp", "--recursive", model, str(LAB / "machine" / "var/lib/counterpoint/model"))
            machine.run("chown --recursive counterpoint: /var/lib/counterpoint/model")
        machine.run(f"cd /root && cat > job.toml && {command}", given=JOB)
    machine.until_it_goes_on()
    status = machine.show("StatusText")
    assert "step" in status, status
    return status


def reload(machine: Machine) -> str:
    """A key that may change is changed in the file, and takes effect without a restart."""
    main = machine.show("MainPID")
    machine.run("sed --in-place 's/max_inflight_rollouts = 32/max_inflight_rollouts = 24/' /etc/counterpoint/demo.toml")
    machine.run(f"systemctl reload {UNIT}")
    journal = f"{OUTPUT}/run_demo/control/{JOURNAL}"
    wait_for(lambda: "24" in machine.run(f"cat {journal}", check=False), "the change in the run's journal")
    machine.until_it_goes_on()
    assert machine.show("MainPID") == main
    return "the run's journal has the change"


def kill_supervisor(machine: Machine) -> str:
    """SIGKILL of the main process: the next start takes the roles over."""
    main, roles = machine.show("MainPID"), [machine.pid_of(role) for role in ("trainer", "inference")]
    machine.run(f"kill -KILL {main}")
    wait_for(lambda: machine.show("MainPID") not in (main, "0"), "another supervisor")
    machine.until_it_goes_on()
    assert [machine.pid_of(role) for role in ("trainer", "inference")] == roles, "the roles were started again"
    return "the roles went on"


def kill_everything(machine: Machine) -> str:
    """SIGKILL of every process of the unit."""
    main = machine.show("MainPID")
    machine.run(f"systemctl kill --signal=KILL {UNIT}")
    wait_for(lambda: machine.show("MainPID") not in (main, "0"), "another supervisor")
    machine.until_it_goes_on()
    return "started again"


def stop_supervisor_by_signal(machine: Machine) -> str:
    """SIGSTOP of the main process: the watchdog of systemd ends it."""
    main = machine.show("MainPID")
    machine.run(f"kill -STOP {main}")
    wait_for(lambda: machine.show("MainPID") not in (main, "0"), "another supervisor")
    assert "watchdog" in machine.run(f"journalctl --unit={UNIT} --output=cat").lower()
    machine.until_it_goes_on()
    return "the watchdog ended it, and it was started again"


def reboot(machine: Machine) -> str:
    """A reboot drains the job, which goes on after the boot."""
    before = len(machine.steps())
    machine.reboot()
    machine.until_it_goes_on()
    assert len(machine.steps()) > before
    return "enabled, it goes on"


def stop(machine: Machine) -> str:
    """A stop drains, is no failure, and leaves nothing behind."""
    machine.run(f"systemctl stop {UNIT}")
    assert (machine.show("ActiveState"), machine.show("Result")) == ("inactive", "success")
    left = machine.run("pgrep --full --list-full counterpoint.cli.main", check=False)
    assert not left, left
    litter = machine.run("find /run/counterpoint -type s -o -type f -o -name 'cntp-tmp-*'")
    assert not litter, litter
    return "no process and no file is left"


def wrong_file(machine: Machine) -> str:
    """A wrong file fails at once, is not retried, and may be corrected as often as it takes."""
    machine.run("sed --in-place 's/steps =/stepz =/' /etc/counterpoint/demo.toml")
    for _ in range(7):
        machine.run(f"systemctl start {UNIT}", check=False)
        assert (machine.show("ActiveState"), machine.show("ExecMainStatus")) == ("failed", "2")
    assert "stepz" in machine.run(f"journalctl --unit={UNIT} --priority=err --output=cat")
    machine.run("sed --in-place 's/stepz =/steps =/' /etc/counterpoint/demo.toml")
    machine.run(f"systemctl start {UNIT}")
    machine.until_it_goes_on()
    return "7 failed starts, then a right file"


def audit(machine: Machine) -> str:
    """Every step was committed exactly once, whatever was played."""
    steps = machine.steps()
    assert steps == list(range(1, len(steps) + 1)), steps
    return f"{len(steps)} steps, each once"


def roles(machine: Machine) -> str:
    """The units of the three roles, started in the order in which each waits for the next; each is killed, all are stopped."""
    units, run = [f"counterpoint-{role}@{role}" for role in ROLES], f"{ROLES_OUTPUT}/run_reverse"
    machine.run(f"systemctl disable --now {UNIT}", check=False)
    for role in ROLES:  # of the model that `start` has put there
        text = (HERE / "configs" / "roles" / f"{role}.toml").read_text()
        text = text.replace('"tiny-moe"', '"/var/lib/counterpoint/model"').replace("return_routed_experts = true\n", "")
        machine.run(f"cat > {role}.toml && install -m 600 -o counterpoint {role}.toml /etc/counterpoint/", given=text)
    machine.run("echo COUNTERPOINT_STEPS=1000000 > /etc/counterpoint/orchestrator.env")
    for unit in units:
        machine.run(f"systemctl start --no-block {unit}")

    def go_on() -> None:
        for unit in units:
            wait_for(lambda unit=unit: machine.show("ActiveState", unit) == "active", f"{unit} to be active")  # type: ignore[misc]
        before = len(machine.steps(run))
        wait_for(lambda: len(machine.steps(run)) > before, "a further step")

    go_on()
    for unit in units:
        main = machine.show("MainPID", unit)
        machine.run(f"systemctl kill --signal=KILL {unit}")
        wait_for(lambda main=main, unit=unit: machine.show("MainPID", unit) not in (main, "0"), f"{unit} to be back")  # type: ignore[misc]
        go_on()
    said = [machine.show("StatusText", unit) for unit in units]
    assert all(said), said
    machine.run(f"systemctl stop {' '.join(units)}")
    ends = {unit: (machine.show("ActiveState", unit), machine.show("Result", unit)) for unit in units}
    assert set(ends.values()) == {("inactive", "success")}, ends
    steps = machine.steps(run)
    assert steps == list(range(1, len(steps) + 1)), steps
    return f"{len(steps)} steps, each once, although each role was killed"


def service(machine: Machine) -> str:
    """The units of a server, a trainer and the service for the Tinker SDK; the service is killed, and a client plays the SDK."""
    units = [f"counterpoint-{role}@tinker-{role}" for role in ("inference", "trainer", "service")]
    keys = {
        "inference": "[lora]\nmax_rank = 8\n",
        "trainer": 'max_runs = 8\nmax_lora_rank = 8\nstay = true\ndevice = "cpu"\n',
        "service": "",
    }
    for role, more in keys.items():
        text = (HERE / "configs" / "roles" / f"{role}.toml").read_text()
        text = text.replace('"tiny-moe"', '"/var/lib/counterpoint/model"').replace("return_routed_experts = true\n", "")
        text = text.replace("outputs/roles", "outputs/tinker") + more
        file = f"tinker-{role}.toml"
        machine.run(f"cat > {file} && install -m 600 -o counterpoint {file} /etc/counterpoint/", given=text)
    for unit in units:
        machine.run(f"systemctl start --no-block {unit}")

    def all_active() -> bool:
        return all(machine.show("ActiveState", unit) == "active" for unit in units)

    wait_for(all_active, "the service and what it needs")
    main = machine.show("MainPID", units[-1])
    machine.run(f"systemctl kill --signal=KILL {units[-1]}")
    wait_for(lambda: machine.show("MainPID", units[-1]) not in (main, "0") and all_active(), "the service to be back")
    assert "http://127.0.0.1:8200" in machine.show("StatusText", units[-1])
    client = (
        f"{INSTALLED}/.venv/bin/python -m tests.service.sdk_client http://127.0.0.1:8200 /var/lib/counterpoint/model"
    )
    said = machine.run(f"cd {INSTALLED} && HF_HUB_OFFLINE=1 {client}", given="go on\n").splitlines()[-1]
    losses = json.loads(said)["undisturbed"]
    assert losses[-1] < losses[0] / 2, losses
    machine.run(f"systemctl stop {' '.join(units)}")
    ends = {unit: (machine.show("ActiveState", unit), machine.show("Result", unit)) for unit in units}
    assert set(ends.values()) == {("inactive", "success")}, ends
    return f"a client's loss went from {losses[0]:.1f} to {losses[-1]:.1f}"


PLAYS: tuple[Callable[[Machine], str], ...] = (
    start, kill_supervisor, reload, kill_everything, stop_supervisor_by_signal, reboot, stop, wrong_file, audit, roles,
    service,
)  # fmt: skip


def site_packages() -> Path:
    """The packages of this checkout's `.venv`."""
    return HERE / ".venv" / "lib" / "python3.11" / "site-packages"


def write_venv(directory: Path) -> None:
    """Makes a virtual environment for the machine's own Python, whose packages are mounted."""
    (directory / "bin").mkdir(parents=True, exist_ok=True)
    (directory / "lib" / "python3.11" / "site-packages").mkdir(parents=True, exist_ok=True)
    (directory / "pyvenv.cfg").write_text("home = /usr/bin\ninclude-system-site-packages = false\nversion = 3.11\n")
    python, command = directory / "bin" / "python", directory / "bin" / "counterpoint"
    python.unlink(missing_ok=True)
    python.symlink_to("/usr/bin/python3")
    lines = (
        f"#!{INSTALLED}/.venv/bin/python",
        "import sys",
        "from counterpoint.cli.main import main",
        "sys.exit(main())",
        "",
    )
    command.write_text("\n".join(lines))
    command.chmod(0o755)


def call(*command: str, check: bool = True, given: str = "") -> str:
    """Runs a command and returns what it prints; what it says when it fails goes to standard error."""
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    if check and done.returncode:
        sys.stderr.write(done.stdout + done.stderr)
        raise subprocess.CalledProcessError(done.returncode, command)
    return done.stdout


def wait_for(condition: Callable[[], bool], what: str) -> None:
    """Waits for a condition. Raises `TimeoutError`."""
    end = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"waited {DEADLINE_SECONDS:g} s for {what}")
        time.sleep(1.0)


def main() -> int:
    """Plays everything. Returns the exit code."""
    if reason := obstacle():
        print(f"the units are not played: {reason}")
        return 0
    if INSIDE not in os.environ:  # podman refuses a hybrid hierarchy of cgroups, so it is run where there is none
        LAB.mkdir(parents=True, exist_ok=True)
        again = [sys.executable, "-m", "tests.deploy.play_units"]
        unshared = ["unshare", "--mount", "--propagation", "private", *again]
        return subprocess.run(unshared, env=os.environ | {INSIDE: "1"}, cwd=HERE, check=False).returncode
    if Path("/sys/fs/cgroup/unified").is_mount():
        call("umount", "/sys/fs/cgroup/unified")
    machine = Machine()
    machine.boot()
    try:
        for play in PLAYS:
            began = time.monotonic()
            said = play(machine)
            print(f"{play.__name__:<26} {time.monotonic() - began:4.0f} s  {said}", flush=True)
    except Exception:
        print(machine.run(f"systemctl status --no-pager --full {UNIT}; journalctl -n 60 --no-pager", check=False))
        raise
    finally:
        machine.remove()
    return 0


if __name__ == "__main__":
    sys.exit(main())
