"""Study files: what they describe, what is wrong with them, and that the ones we ship are good."""

from pathlib import Path

import pytest

from atoll.errors import ConfigError
from atoll.settings.study import Claim, read, shipped, titles

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
    (tmp_path / "named.toml").write_text('name = "three"\nout = "elsewhere"')
    one, two, named = (tmp_path / f"{name}.toml" for name in ("one", "two", "named"))
    study = read([one, two, named])
    assert list(study.runs) == ["one", "two", "three"] and not study.claims
    assert [run.name for run in study.runs.values()] == ["one", "two", "three"]
    assert {Path(run.out) for run in study.runs.values()} == {Path("runs/one-two-named")}
    assert {Path(run.out) for run in read([named, one]).runs.values()} == {Path("elsewhere/named-one")}
    assert {Path(run.out) for run in read([one], ["out=o"]).runs.values()} == {Path("o/one")}
    assert {run.out for run in read([one, named], out=tmp_path).runs.values()} == {str(tmp_path)}
    with pytest.raises(ConfigError, match='two runs have the name "one"'):
        read([one, one])


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('name = "half"', 'name = "none"', 'study.runs 2: name: two runs have the name "none"'),
        ('run = "half"', 'run = "hlaf"', 'study.claims 1: run: no run has the name "hlaf"; did you mean "half"?'),
        ('run = "half"', 'run = "xyz"', "; the runs are none, half"),
        ('run = "half"', "", "study.claims 1: run: is missing: name of the run that it is about"),
        ('run = "half"', "rum = 3", "study.claims 1: rum: unknown key; did you mean run?"),
        ('run = "half"', "zzzzz = 3", "study.claims 1: zzzzz: unknown key; a claim has say, run"),
        ('name = "half"', "", "study.runs 2: name: is missing"),
        ('name = "half"', 'name = "pictures"', 'study.runs 2: name: "pictures" is the name of a file'),
        ('name = "half"', 'name = "report.html"', 'study.runs 2: name: "report.html" is the name of a file'),
        ('name = "half"', 'name = "half"\nout = "x"', "study.runs 2: out: is the same for all runs"),
        ("at_most = 0.05", "at_most = 0.05\nat_least = 0.1", "at_least (0.1) is above at_most (0.05)"),
        ("at_most = 0.05", "", "needs at_most, at_least or both"),
        ("at_most = 0.05", 'at_most = "little"', 'study.claims 1: at_most: must be a number, got "little"'),
        ("faults.drop = 0.5", "faults.drpo = 0.5", "study.runs 2: faults.drpo: unknown key; did you mean faults.drop"),
        ("steps = 30", "stesp = 30", "drops.toml: train.stesp: unknown key; did you mean train.steps?"),
        ('title = "Drops"', 'titel = "Drops"', "study.titel: unknown key; did you mean study.title?"),
        ('title = "Drops"', "title = 3", "study.title: must be text in quotes, got 3"),
        ("[train]", "[train", "not valid TOML"),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, old: str, new: str, told: str) -> None:
    with pytest.raises(ConfigError) as error:
        read([write(tmp_path, STUDY.replace(old, new))])
    assert told in str(error.value)


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ("study = 3", "study: must be a table, got 3"),
        ("[study]", "study.runs: is missing: a name for each run"),
        ("[study]\nruns = []", "study.runs: must be one table or more, each under [[study.runs]], got []"),
        ("[study]\nruns = [3]", "study.runs: must be one table or more"),
        ('[study]\nclaims = 3\n[[study.runs]]\nname = "a"', "study.claims: must be tables, each under"),
    ],
)
def test_a_study_needs_runs(tmp_path: Path, section: str, told: str) -> None:
    with pytest.raises(ConfigError) as error:
        read([write(tmp_path, section)])
    assert f"drops.toml: {told}" in str(error.value) and "\n" not in str(error.value)


def test_all_mistakes_come_at_once_and_those_of_the_whole_file_once(tmp_path: Path) -> None:
    text = STUDY.replace("title", "titel").replace("at_most", "at_mots").replace("sync.period = 6", "sync.codec = 3")
    file = write(tmp_path, text.replace("steps = 30", "stesp = 30"))
    with pytest.raises(ConfigError) as error:
        read([file], ["train.batch=x", "seed=3"])
    lines = str(error.value).splitlines()
    assert lines[0] == f"{file} with train.batch=x: 5 problems"
    starts = ["study.titel:", "study.claims 1: at_mots:", "train.batch:", "train.stesp:", "study.runs 2: sync.codec:"]
    assert [line.strip().startswith(start) for line, start in zip(lines[1:], starts, strict=True)] == [True] * 5


def test_mistakes_of_several_files_are_told_file_by_file(tmp_path: Path) -> None:
    files = [tmp_path / "one.toml", tmp_path / "two.toml"]
    for file in files:
        file.write_text("sed = 3")
    with pytest.raises(ConfigError) as error:
        read(files)
    assert [line.split(": ")[:2] for line in str(error.value).splitlines()] == [[str(file), "sed"] for file in files]


def test_a_study_that_is_not_there(tmp_path: Path) -> None:
    hints = {tmp_path / "absent.toml": "", Path("drop"): "; did you mean drops?", tmp_path / "drops": ""}
    for path, hint in hints.items():
        with pytest.raises(ConfigError) as error:
            read([path])
        known = f"its studies are {', '.join(shipped())}"
        assert str(error.value) == f"{path}: no such file, and no study of atoll has this name{hint}; {known}"
    assert {"codecs", "drops", "eager", "start"} <= set(shipped())


def test_a_study_that_comes_with_atoll_has_a_name_unless_a_file_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "drops").mkdir()  # such as the folder of its runs
    study = read([Path("drops"), Path("period")], ["train.steps=20"])
    assert {"drop-00", "drop-50", "period-004"} <= study.runs.keys()
    assert {(run.out, run.train.steps) for run in study.runs.values()} == {("runs/drops-period", 20)}
    assert titles()["drops"] == "What do lost messages cost?" == study.title.partition(";")[0]
    (tmp_path / "period").write_text('name = "mine"')
    assert list(read([Path("period")]).runs) == ["mine"]


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


@pytest.mark.parametrize("name", shipped())
def test_the_studies_we_ship_are_good(name: str) -> None:
    study = read([Path(name)])
    assert study.title and study.claims and len(study.runs) >= 3
    for run in study.runs.values():
        assert (run.synchronisation() is None) == (run.sync.method == "none")
        assert run.faults_of_link() is not None and run.train.lr


def test_the_runs_of_start_begin_with_models_of_pretrained() -> None:
    pretrained, start = read([Path("pretrained")]).runs, read([Path("start")]).runs
    models = {f"{run.out}/{run.name}/model": run.train.steps or 0 for run in pretrained.values()}
    begun = {name: models[run.model.hf] for name, run in start.items() if run.model.hf}
    assert begun == {"after-120": 120, "after-240": 240}
    assert {(run.train.steps or 0) + begun.get(name, 0) for name, run in start.items()} == {480}


@pytest.mark.parametrize("bound", [{"at_most": 0.1}, {"at_least": -0.1}])
def test_no_claim_holds_of_what_is_no_number(bound: dict[str, float]) -> None:
    claim = Claim(say="it", run="a", against="b", **bound)
    assert claim.holds(0.0) and not claim.holds(float("nan"))
