"""Advice for a run file goes with what the file says, or is not given."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from atoll import cli, planner
from atoll.config import load

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
    found: list[dict[str, Any]] = planned(file, *sets(own), "--step-time", "0.1", "--link", rate)["advice"]
    return found


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
        run = planned(run_file, *sets((*own, *pasted)), "--step-time", "0.1", "--link", rate)["methods"][planner.OWN]
        for same in ("memory_bytes", "bytes_of_run", "run_s", "utilisation_of_run"):
            assert run[same] == first[same], same


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
