"""Study files: what they describe, what is wrong with them, and that the ones we ship are good."""

from pathlib import Path

import pytest

from atoll.errors import ConfigError
from atoll.study import Claim, read

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.toml"))

STUDY = """
[train]
steps = 30
[sync]
workers = 4
period = 5
[study]
title = "Drops"
[[study.runs]]
name = "none"
[[study.runs]]
name = "half"
faults.drop = 0.5
sync.period = 6
[[study.claims]]
say = "costs little"
run = "half"
against = "none"
at_most = 0.05
"""


def write(folder: Path, text: str) -> Path:
    file = folder / "drops.toml"
    file.write_text(text)
    return file


def test_runs_differ_in_what_they_say_and_in_nothing_else(tmp_path: Path) -> None:
    study = read([write(tmp_path, STUDY)], ["train.batch=2"])
    assert list(study.runs) == ["none", "half"] and study.title == "Drops"
    none, half = study.runs.values()
    assert (none.faults.drop, none.sync.period, half.faults.drop, half.sync.period) == (0, 5, 0.5, 6)
    assert half.sync.workers == 4 and half.train.steps == 30 and half.train.batch == 2
    assert {Path(run.out) for run in study.runs.values()} == {Path("runs/drops")}
    assert read([write(tmp_path, STUDY)], out=tmp_path / "x").runs["half"].out == str(tmp_path / "x")


def test_plain_run_files_are_compared_by_their_names(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.toml").write_text("[train]\nsteps = 3")
    study = read([tmp_path / "one.toml", tmp_path / "two.toml"])
    assert list(study.runs) == ["one", "two"] and not study.claims


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('name = "half"', 'name = "none"', "two runs have the name 'none'"),
        ('run = "half"', 'run = "hlaf"', "no run has the name 'hlaf'; there are none, half"),
        ("at_most = 0.05", "", "needs at_most, at_least or both"),
        ("at_most = 0.05", 'at_most = "little"', "study.claims.0.at_most"),
        ("faults.drop = 0.5", "faults.drpo = 0.5", "did you mean faults.drop"),
        ('title = "Drops"', 'titel = "Drops"', "study.titel"),
        ("[train]", "[train", "not valid TOML"),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, old: str, new: str, told: str) -> None:
    with pytest.raises(ConfigError) as error:
        read([write(tmp_path, STUDY.replace(old, new))])
    assert told in str(error.value)


def test_a_claim_has_two_sides() -> None:
    claim = Claim(say="same", run="a", against="b", at_least=-0.01, at_most=0.01)
    assert [claim.holds(x) for x in (-0.02, -0.01, 0, 0.01, 0.02, float("nan"))] == [
        False,
        True,
        True,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_the_studies_we_ship_are_good(file: Path) -> None:
    study = read([file])
    assert study.title and study.claims and len(study.runs) >= 3
    for run in study.runs.values():
        assert run.synchronisation() is not None and run.faults_of_link() is not None and run.train.lr
