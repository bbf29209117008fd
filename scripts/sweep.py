"""Search for the best settings: many trainings, each in its own run folder, each next one chosen by earlier results.

    python scripts/sweep.py configs/sweeps/seeds.yaml --out runs/sweeps/seeds
    python scripts/sweep.py configs/sweeps/detr_shapes.yaml --out runs/sweeps/shapes --trials 20

The study is an Optuna database, OUT/study.db. After a kill, the same command resumes the study. If the command is
started several times, each process is a worker of the same study, on all machines that share the disk. With
`early_terminate` in the sweep, a trial whose evaluations stay worse than the median of the others is ended.
OUT/trials.csv lists every trial. A trial is reproduced bit for bit by its training script with `--config
OUT/trial_00003/config.yaml --run.name again`.

Exit code 0: done, 2: bad input, 85: interrupted; the same command goes on.
"""

import argparse
import csv
import itertools
import math
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from urllib.parse import quote

from toolkit.base.errors import BadInput, Preempted, exit_on_bad_input
from toolkit.base.files import write_json_atomic
from toolkit.base.imports import import_extra
from toolkit.base.signals import StopSignals
from toolkit.base.text import as_cell, in_utf_8
from toolkit.run.settings_file import CONFIG_FILE, read_groups
from toolkit.tools.arguments import Program, whole_number
from toolkit.tools.sweeps.locks import locked, wait_until_free
from toolkit.tools.sweeps.sweep_file import Parameter, Sweep, read_sweep
from toolkit.tools.watch import WatchedRun

MAX_SEED = 2**32 - 1  # of the samplers of Optuna
HOPELESS = 3  # failed trials without a successful one
STORAGE = "sqlite:///{}/study.db"


def open_study(optuna: ModuleType, sweep: Sweep, out: Path, seed: int):
    """Open the Optuna study in the folder `out`, or create it. Raises BadInput if the folder has the study of another
    sweep.

    optuna: the module, which is an optional dependency. seed: of the search.
    """
    (out / "locks").mkdir(parents=True, exist_ok=True)
    direction = "maximize" if sweep.maximize else "minimize"
    pruner = optuna.pruners.NopPruner()
    if sweep.min_evaluations is not None:
        pruner = optuna.pruners.MedianPruner(n_startup_trials=4, n_min_trials=2)
    with locked(out / "locks" / "study"):  # else two workers that start together would both create the tables
        address = STORAGE.format(quote(str(out)))  # braces, % and ? have a meaning in it
        storage = optuna.storages.RDBStorage(address, engine_kwargs={"connect_args": {"timeout": 100}})
        how = {"direction": direction, "pruner": pruner, "sampler": sampler(optuna, sweep, seed)}
        study = optuna.create_study(study_name="sweep", storage=storage, load_if_exists=True, **how)
        about = {"program": sweep.program, "metric": sweep.metric, "parameters": sorted(sweep.parameters)}
        recorded = study.user_attrs.get("about", about)
        if recorded != about:
            raise BadInput(f"{out}: holds the study of another sweep ({recorded}); give another --out")
        study.set_user_attr("about", about)
    return study


def sampler(optuna: ModuleType, sweep: Sweep, seed: int):
    kind = optuna.samplers.TPESampler if sweep.method == "bayes" else optuna.samplers.RandomSampler
    return kind(seed=seed)


def suggest(trial, name: str, p: Parameter):
    """Return the value of parameter `name` in a trial. It is drawn at the first call; further calls return the same
    value."""
    if p.values is not None:
        return trial.suggest_categorical(name, p.values)
    if p.is_int:
        return trial.suggest_int(name, int(p.low), int(p.high))
    return trial.suggest_float(name, p.low, p.high, log=p.log and p.q is None, step=p.q)


@contextmanager
def next_trial(optuna: ModuleType, study, out: Path, limit: int, grid: list[dict]) -> Iterator:
    """Yield the next trial to train, with its lock held: one that a killed worker has left unfinished, else a new one.
    Yield None if `limit` trials have already begun.

    grid: the values of each trial, in order; empty: the sampler chooses the values.
    """
    with ExitStack() as held:
        with locked(out / "locks" / "study"):
            trials = study.get_trials(deepcopy=False)
            trial = None
            states = optuna.trial.TrialState
            waiting = [t for t in trials if t.state == states.WAITING]  # its worker was killed before the trial began
            for frozen in trials:
                open_one = frozen.state == states.RUNNING
                if open_one and held.enter_context(locked(out / "locks" / f"{frozen.number:05d}", wait=False)):
                    if study.get_trials(deepcopy=False)[frozen.number].state != states.RUNNING:
                        continue  # its worker has ended it since the list was read
                    trial = optuna.Trial(study, frozen._trial_id)  # Optuna has no public way to continue a trial
                    break
            if trial is None and (waiting or len(trials) < limit):
                if grid and not waiting:
                    study.enqueue_trial(grid[len(trials)])
                trial = study.ask()
                held.enter_context(locked(out / "locks" / f"{trial.number:05d}"))
        yield trial


def run_trial(optuna: ModuleType, study, trial, sweep: Sweep, out: Path, signals: StopSignals) -> None:
    """Train one trial to its end, or until it is pruned, and record its result in the study.

    Raises:
        Preempted: this program was asked to stop; the trial has saved, and can be resumed.
    """
    values = {name: suggest(trial, name, p) for name, p in sweep.parameters.items()}
    name = f"trial_{trial.number:05d}"
    extra = ["--run.output_dir", str(out), "--run.name", name, "--run.resume", "latest", "--run.group", out.name]
    print(f"{name}: {values}", flush=True)
    wait_until_free(out / name, signals)
    run = WatchedRun(sweep.command_of(values, extra), out / name, out / "logs" / f"{name}.txt")
    best = None
    pruned = False
    for row in run.rows(stop=lambda: signals.received):
        value = row.get(sweep.metric)
        if value is None or math.isnan(value):
            continue
        best = value if best is None else max(best, value) if sweep.maximize else min(best, value)
        reported = trial.storage.get_trial(trial._trial_id).intermediate_values
        if row["step"] not in reported:
            trial.report(value, row["step"])
        if sweep.min_evaluations is not None and len(reported) >= sweep.min_evaluations and trial.should_prune():
            pruned = True
            run.stop()
            break
    if signals.received:
        run.stop()
        raise Preempted(f"{signals.name}: {name} has saved; the same command goes on")
    state = "PRUNED" if pruned else "COMPLETE" if run.state == "done" and best is not None else "FAIL"
    study.tell(trial.number, best if state == "COMPLETE" else None, getattr(optuna.trial.TrialState, state))
    print(f"{name}: {state.lower()}, {sweep.metric} {'-' if best is None else f'{best:.4f}'}", flush=True)
    if state == "FAIL":
        print(run.last_words(), file=sys.stderr, flush=True)


def write_trials(study, out: Path, parameters: list[str]) -> None:
    """Write `trials.csv`, a row for each trial, and, if a trial is complete, `best.json` to the folder `out`. Print the
    best trial, and a warning if trials were trained in different precisions."""
    trials = study.get_trials(deepcopy=False)
    with locked(out / "locks" / "table"), open(out / "trials.csv", "w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["trial", "state", "value", "evaluations", "precision", *parameters])
        precisions = set()
        for t in trials:
            precision = precision_of(out / f"trial_{t.number:05d}")
            precisions.add(precision)
            numbers = [t.number, t.state.name, t.value, len(t.intermediate_values), precision]
            table.writerow([*numbers, *(as_cell(t.params.get(name)) for name in parameters)])
    known = sorted(precisions - {""})
    if len(known) > 1:
        why = "by their machines or backbones, which changes their values too"
        remedy = "give --run.precision in `command` of the sweep"
        print(f"warning: trials differ in precision ({', '.join(known)}), {why}: {remedy}", flush=True)
    if any(t.state.name == "COMPLETE" for t in trials):
        best = study.best_trial
        write_json_atomic(out / "best.json", {"trial": best.number, "value": best.value, "settings": best.params})
        print(f"best of {len(trials)}: trial_{best.number:05d}, {best.value:.4f}, {best.params}", flush=True)


def precision_of(run_folder: Path) -> str:
    """Return the precision in which a trial was trained; "" if the trial has not begun or its settings are damaged."""
    try:
        return str(read_groups(run_folder / CONFIG_FILE)["run"]["precision"])
    except (BadInput, OSError, KeyError, TypeError):
        return ""


def run_sweep(arguments: argparse.Namespace) -> None:
    optuna = import_extra("optuna", "sweeps", "Sweeps")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sweep = read_sweep(arguments.sweep)
    out = arguments.out.expanduser().absolute()
    written = in_utf_8(str(out))
    if written != str(out):
        raise BadInput(f"--out {written}: the name is not UTF-8, and a study's database needs it; give another")
    limit = arguments.trials or sweep.trials
    grid = []
    if sweep.method == "grid":
        values = itertools.product(*(p.values for p in sweep.parameters.values()))
        grid = [dict(zip(sweep.parameters, combination, strict=True)) for combination in values]
        limit = min(limit or len(grid), len(grid))
    if limit is None:
        raise BadInput(f"{arguments.sweep}: how many trials? Give --trials N, or run_cap in the file.")
    study = open_study(optuna, sweep, out, arguments.seed)
    with StopSignals() as signals:
        while True:
            with next_trial(optuna, study, out, limit, grid) as trial:
                if trial is None:
                    break
                # The seed depends only on the number of the trial, so that a kill changes nothing.
                study.sampler = sampler(optuna, sweep, (arguments.seed * 100_003 + trial.number) % (MAX_SEED + 1))
                run_trial(optuna, study, trial, sweep, out, signals)
            write_trials(study, out, list(sweep.parameters))
            ended = [t for t in study.get_trials(deepcopy=False) if t.state.is_finished()]
            if len(ended) >= HOPELESS and all(t.state == optuna.trial.TrialState.FAIL for t in ended):
                raise BadInput(f"{len(ended)} trials have failed and none has succeeded: see {out}/logs")
    write_trials(study, out, list(sweep.parameters))  # in case no trial was left


@exit_on_bad_input
def main(argv: list[str] | None = None) -> None:
    parser = Program(__doc__)
    parser.add_argument("sweep", type=Path, help="file of a sweep, as W&B has it: configs/sweeps/*.yaml")
    parser.add_argument("--out", type=Path, required=True, help="folder of the study and of its runs")
    trials = "total number of trials, with those of earlier starts and workers"
    parser.add_argument("--trials", type=whole_number(1), help=trials)
    seed = "random seed of the search (default 0)"
    parser.add_argument("--seed", type=whole_number(0, MAX_SEED), default=0, help=seed)
    run_sweep(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
