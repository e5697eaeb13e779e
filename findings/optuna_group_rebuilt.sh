#!/usr/bin/env bash
# Optuna 5 turns TPE's constant liar on by default. In a trial that runs it then reads what the sampler drew for all parameters of a
# group, also for those of branches that were not chosen. So a study that is rebuilt from its parameters and values alone suggests
# otherwise, by a sampler of the same seed. One expects the same suggestions, as with constant_liar=False.
# Exit 0 while that is so, 1 when it has changed.
set -eu
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet "optuna==5.0.0"
"$place/venv/bin/python" - <<'PROGRAM'
import warnings

import optuna

optuna.logging.set_verbosity(optuna.logging.ERROR)
warnings.simplefilter("ignore")


def ask(trial):
    lr = trial.suggest_float("lr", 1e-5, 1e-2, log=True)
    if trial.suggest_categorical("optimizer", ["sgd", "adam"]) == "sgd":
        trial.suggest_float("momentum", 0, 1)
    else:
        trial.suggest_float("beta", 0, 1)
    return lr


def sampler(number, **options):
    return optuna.samplers.TPESampler(seed=number, multivariate=True, group=True, **options)


def different(**options):
    """How often a study that was rebuilt from its parameters and values suggests otherwise, by a sampler of the same seed."""
    study, running, differ = optuna.create_study(), [], 0
    for number in range(40):
        study.sampler = sampler(number, **options)
        rebuilt = optuna.create_study(sampler=sampler(number, **options))
        for old in study.get_trials():
            rebuilt.add_trial(
                optuna.trial.create_trial(
                    state=old.state, params=old.params, distributions=old.distributions, values=old.values
                )
            )
        trial, again = study.ask(), rebuilt.ask()
        lr = ask(trial)
        ask(again)
        differ += trial.params != again.params
        running.append((trial, lr))
        if len(running) > 4:
            study.tell(running[0][0], 100 * running[0][1])
            del running[0]
    return differ


default, without = different(), different(constant_liar=False)
print(f"Optuna {optuna.__version__}: of 40 suggestions by TPESampler(multivariate=True, group=True) in a study rebuilt from its")
print(f"parameters and values, while 4 trials run, expected 0 to differ; seen {default}, and {without} with constant_liar=False")
raise SystemExit(not (default > 0 and without == 0))
PROGRAM
