"""What every executor of processes must do. A file that imports these tests gives the fixture `driver`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from counterpoint.tune.errors import TuneError
from counterpoint.tune.executors.executor import Completed, Failed, Reported, Saved, Started, Stopped
from counterpoint.tune.resources import Resources
from tests.support.polling import until
from tests.tune.executors.driver import Driver, content, is_alive

pytestmark = pytest.mark.slow


async def test_a_class_reports_saves_stops_and_goes_on_from_its_checkpoint(driver: Driver) -> None:
    trial = driver.trial("Counter", config={"begin": 5}, export_formats=["model"])
    await driver.begin(trial)
    first, second = await driver.result(trial), await driver.result(trial)
    assert [first["count"], second["count"]] == [6, 7]
    assert [first["training_iteration"], second["training_iteration"]] == [1, 2]
    assert second["time_total_s"] >= first["time_this_iter_s"] + second["time_this_iter_s"] - 1e-6
    assert second["trial_id"] == trial.trial_id
    assert second["config"] == {"begin": 5}
    checkpoint = driver.checkpoint(trial, 2)
    driver.executor.save_to(trial, checkpoint)
    assert (await driver.next(Saved, trial)).checkpoint == checkpoint
    await driver.stop(trial)
    assert content(trial.logdir, "cleaned") == ""
    assert content(driver.executor.export_trial_if_needed(trial)["model"]) == "7"

    await driver.begin(trial, checkpoint)
    third = await driver.result(trial)
    assert [third["count"], third["training_iteration"], third["iterations_since_restore"]] == [8, 3, 1]
    assert third["time_total_s"] > second["time_total_s"]
    driver.executor._attempts[trial.trial_id].restore(checkpoint)
    await driver.next(Started, trial)
    assert (await driver.result(trial))["count"] == 8
    await driver.stop(trial)


async def test_a_function_reports_until_it_returns(driver: Driver) -> None:
    heard = await driver.run([driver.trial("reports", config={"times": 2})])
    kinds = [type(event) for event in heard["reports"]]
    assert kinds == [Started, Reported, Reported, Completed, Stopped]


async def test_a_paused_trial_has_no_process_and_no_resources(driver: Driver) -> None:
    trial = driver.trial("Counter", resources=Resources(cpu=2))
    other = driver.trial("Counter", "other", Resources(cpu=2))
    await driver.begin(trial)
    assert not driver.executor.has_resources(other.resources)
    with pytest.raises(TuneError, match="has not ended"):
        driver.start(trial)
    pid = (await driver.result(trial))["pid"]
    driver.executor.proceed(trial)  # a result is in flight
    driver.executor.suspend(trial)
    assert (await driver.next(Reported, trial)).result["count"] == 2
    await driver.next(Stopped, trial)
    await until(lambda: not is_alive(pid), "the end of the paused trial's process")
    await driver.begin(other)
    await driver.stop(other)


async def test_a_trial_whose_step_raises_is_stopped_once(driver: Driver) -> None:
    trial = driver.trial("Breaks", log_to_file=True)
    await driver.begin(trial)
    await driver.result(trial)
    driver.executor.proceed(trial)
    failure = await driver.next(Failed, trial)
    assert "no second step" in failure.error
    assert content(trial.logdir, "cleaned") == "after 1\n"
    assert "nothing to clean up" in str(content(trial.logdir, "stderr"))


async def test_what_a_trial_starts_ends_with_it(driver: Driver) -> None:
    trial = driver.trial("leaves_a_child")
    await driver.begin(trial)
    result = await driver.result(trial)
    assert is_alive(result["child"])
    await driver.stop(trial)
    assert not is_alive(result["child"])


async def test_a_trainable_that_does_not_exist_fails_its_trial(driver: Driver) -> None:
    missing, astray = driver.trial("Missing"), replace(driver.trial("Counter", "astray"), trainable_name="no.module:It")
    for trial, said in ((missing, "has no 'Missing'"), (astray, "No module named 'no'")):
        driver.start(trial)
        assert said in (await driver.next(Failed, trial)).error


async def test_what_can_never_run_is_said_with_need_and_total(driver: Driver) -> None:
    trial = driver.trial("Counter", resources=Resources(cpu=2, extra_cpu=100))
    assert "it needs 102 cpu, and there are 2 in all" in str(driver.executor.could_ever_run(trial))
    assert driver.executor.could_ever_run(driver.trial("Counter")) is None


async def test_output_goes_to_files_of_the_trial(driver: Driver) -> None:
    both, one = driver.trial("writes", "both", log_to_file=True), driver.trial("writes", "one", log_to_file="log")
    await driver.run([both, one])
    assert content(both.logdir, "stdout") == "to stdout\n"
    assert content(both.logdir, "stderr") == "to stderr\n"
    assert sorted(str(content(one.logdir, "log")).splitlines()) == ["to stderr", "to stdout"]


async def test_resources_are_taken_until_the_end_is_told(driver: Driver) -> None:
    """Else whoever starts trials counts one more that runs than there is room for."""
    trial = driver.trial("Counter", resources=Resources(cpu=2))
    await driver.begin(trial)
    driver.executor.end(trial)
    await until(lambda: trial.trial_id not in driver.executor._attempts, "the end of the process")
    assert not driver.executor.has_resources(Resources(cpu=1))
    await driver.next(Stopped, trial)
    assert driver.executor.has_resources(Resources(cpu=2))
