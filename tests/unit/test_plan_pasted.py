"""Advice for a run file goes with what the file says, or is not given."""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from atoll.cli import main as cli
from atoll.cli.plan.options import PlanOptions
from atoll.cli.plan.request import plan_request
from atoll.plan import planner
from atoll.plan.forecast import Forecast, forecast
from atoll.plan.method import RUN_FILE_METHOD
from atoll.settings.config import load

OWN: dict[str, tuple[str, ...]] = {
    "plain": (),
    "delay": ("sync.delay=3",),
    "delays": ("sync.delay=[1,2,3]",),
    "alpha": ("sync.alpha=0.7",),
    "feedback": ("sync.feedback=true",),
    "stochastic": ("sync.stochastic=true",),
    "both": ("sync.feedback=true", "sync.stochastic=true", "sync.offload=true"),
    "balanced": ("sync.fragments=balanced:3",),
    "data-parallel": ("sync.method=data-parallel", "sync.codec=fp32"),
    "eager": ("sync.method=eager", "sync.codec=int8"),
    "delayed": ("sync.method=delayed",),
    "offload": ("sync.offload=true",),
    "adam": ("sync.outer=adam", "sync.outer_betas=[0.9,0.9]"),
    "sgd": ("sync.outer=sgd",),
    "drop": ("faults.drop=0.1",),
    "away": ("faults.absences=[{worker=1,first=3}]",),
}

SAME = ("memory_bytes", "bytes_of_run", "run_s", "utilisation_of_run")


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    file = tmp_path / "mine.toml"
    file.write_text('[model]\npreset = "tiny"\n[train]\nsteps = 20000\n[sync]\nworkers = 3\nperiod = 20\n')
    return file


def planned(*arguments: str | Path) -> Any:
    result = CliRunner().invoke(cli.app, ["plan", *map(str, arguments), "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def sets(changes: tuple[str, ...]) -> list[str]:
    return [part for change in changes for part in ("--set", change)]


def advised(file: Path, own: tuple[str, ...], rate: str) -> list[dict[str, Any]]:
    """What the command advises, by the functions behind it: the command itself is tried below."""
    asked = plan_request(PlanOptions(run=file, changes=own, step_time="0.1", link=rate))
    plan = planner.make_plan(replace(asked, methods=()))
    found: list[dict[str, Any]] = planner.as_json(plan)["advice"]
    return found


def own_outlook(file: Path, changes: tuple[str, ...], rate: str) -> Forecast:
    """What the command says of the run file itself."""
    asked = plan_request(PlanOptions(run=file, changes=changes, step_time="0.1", link=rate))
    (own,) = [method for method in asked.methods if method.name == RUN_FILE_METHOD]
    return forecast(asked.model, own, asked.workers, asked.link, asked.steps or 0)


def test_functions_say_what_the_command_says(run_file: Path) -> None:
    rate = "3Mbit/s,20ms"
    said = planned(run_file, "--set", "sync.delay=3", "--step-time", "0.1", "--link", rate)
    assert advised(run_file, ("sync.delay=3",), rate) == said["advice"]
    seen = own_outlook(run_file, ("sync.delay=3",), rate)
    assert all(said["methods"][RUN_FILE_METHOD][name] == getattr(seen, name) for name in SAME)


@pytest.mark.thorough_after(4)
@pytest.mark.parametrize("own", OWN.values(), ids=list(OWN))
def test_every_choice_can_be_pasted_and_is_then_the_run(run_file: Path, own: tuple[str, ...]) -> None:
    """From data-parallel to Eager: on lines that need the one, the other, and what is in between."""
    for rate in ("1Tbit/s", "3Mbit/s,20ms", "100kbit/s,3s"):
        choices = advised(run_file, own, rate)
        assert choices
        for choice in choices:
            changes = [f"{key}={value}" for key, value in choice["settings"].items()]
            load(run_file, [*own, *changes]).synchronisation()
        first, pasted = choices[0], tuple(f"{key}={value}" for key, value in choices[0]["settings"].items())
        run = own_outlook(run_file, (*own, *pasted), rate)
        assert {name: getattr(run, name) for name in SAME} == {name: first[name] for name in SAME}


def test_what_cannot_be_unset_rules_methods_out(run_file: Path) -> None:
    def methods(*own: str) -> set[str]:
        rates = ("1Tbit/s", "3Mbit/s,20ms", "100kbit/s,3s")
        return {choice["method"] for rate in rates for choice in advised(run_file, own, rate)}

    assert {"data-parallel", "eager"} <= methods()
    assert not {"data-parallel", "eager"} & methods("sync.delay=3")
    assert "eager" not in methods("sync.outer=adam")


def test_switches_are_turned_off_where_they_are_in_the_way(run_file: Path) -> None:
    (first, *_) = advised(run_file, OWN["both"], "1Tbit/s")
    off = {"sync.stochastic": "false", "sync.feedback": "false", "sync.offload": "false"}
    assert first["method"] == "data-parallel" and off.items() <= first["settings"].items()
    words = CliRunner().invoke(cli.app, ["plan", str(run_file), *sets(OWN["both"]), "--step-time", "0.1"]).stdout
    for pasted in re.findall(r"--set(?:[^\n]+\\\n)*[^\n]+", words):
        load(run_file, [*OWN["both"], *(part for part in shlex.split(pasted.replace("\\\n", "")) if part != "--set")])


def test_memory_of_a_choice_is_that_of_the_file_s_outer_optimizer(run_file: Path) -> None:
    def added(*own: str) -> int:
        (first, *_) = advised(run_file, ("sync.delay=1", *own), "3Mbit/s,20ms")
        return int(first["memory_bytes"])

    vector = 4 * planned(run_file, "--step-time", "1")["model"]["parameters"]
    assert added("sync.outer=sgd") == added() - vector
    assert added("sync.outer=adam") == added() + vector
    assert added("sync.feedback=true") == added() + vector
    assert added("sync.offload=true") < added()
