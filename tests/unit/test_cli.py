"""The command line: help that helps, one line for each mistake, and exit codes that scripts can use."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner, Result

from atoll.cli import main as cli
from atoll.cli.errors import Commands
from atoll.errors import ConfigError, DataError
from atoll.settings.config import RunConfig, load
from atoll.settings.study import shipped

COMMANDS = ["demo", "init", "plan", "train", "launch", "compare", "report", "sample", "eval", "keys", "registry"]


def atoll(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def complaint(*arguments: str | Path, code: int) -> str:
    """What a command that fails says, on stderr alone and without a traceback."""
    result = atoll(*arguments)
    assert result.exit_code == code, result.output
    assert result.stdout == "" and "Traceback" not in result.stderr
    return result.stderr


# ---------------------------------------------------------------------- help


def test_help_names_every_command_and_how_to_begin() -> None:
    result = atoll("--help")
    assert result.exit_code == 0
    assert all(command in result.stdout for command in COMMANDS)
    assert "atoll train run.toml" in result.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_all_its_options(command: str) -> None:
    assert atoll(command, "-h").exit_code == 0
    for parameter in typer.main.get_command(cli.app).commands[command].params:  # type: ignore[attr-defined]
        assert getattr(parameter, "help", None), f"{command} {parameter.name}"


def test_the_demo_has_the_steps_its_help_says() -> None:
    from atoll.cli.compare import DEMO

    steps = tomllib.loads(DEMO.read_text())["train"]["steps"]
    assert f"left out: {steps}." in " ".join(atoll("demo", "--help").stdout.replace("│", " ").split())


def test_help_of_eval_says_how_to_install_the_harness_in_any_shell() -> None:
    assert "pip install 'atoll[eval]'" in atoll("eval", "--help").stdout  # zsh expands brackets without quotes


def test_help_imports_nothing_slow() -> None:
    script = (
        "import sys\n"
        "from atoll.cli.main import app\n"
        "app(['train', '--help'], standalone_mode=False)\n"
        "slow = {'torch', 'numpy', 'matplotlib', 'transformers', 'datasets', 'atoll.settings.config'}\n"
        "slow &= set(sys.modules)\n"
        "assert not slow, slow"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60, stdout=subprocess.DEVNULL)


def test_the_version() -> None:
    import atoll as package

    assert atoll("--version").stdout == f"atoll {package.__version__}\n"


def test_a_misspelt_command_is_guessed() -> None:
    assert "Did you mean 'train'?" in complaint("trian", code=2)


# ---------------------------------------------------------------------- init


def test_init_writes_a_run_file_once(tmp_path: Path) -> None:
    file = tmp_path / "new folder" / "run.toml"
    result = atoll("init", file)
    assert result.exit_code == 0 and f"atoll train {file}" in result.stdout
    assert load(file) == RunConfig()
    file.write_text("seed = 3")
    assert "exists already; give another path, or --force" in complaint("init", file, code=2)
    assert file.read_text() == "seed = 3"
    assert atoll("init", file, "--force").exit_code == 0 and load(file) == RunConfig()


def test_init_without_a_path_writes_run_toml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert atoll("init").exit_code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_line() -> None:
    text = complaint("init", "/dev/full", "--force", code=1)
    assert text.startswith("error: No space left on device; free some space") and text.count("\n") == 1


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    text = complaint("init", tmp_path / "file" / "deeper" / "run.toml", code=1)
    assert text.startswith(f"error: {tmp_path / 'file'}") and text.count("\n") == 1


# ---------------------------------------------------------------------- mistakes in a run file


def test_a_missing_run_file_says_how_to_get_one(tmp_path: Path) -> None:
    text = complaint("train", tmp_path / "absent.toml", code=2)
    assert "absent.toml: no such file; `atoll init" in text and text.count("\n") == 1
    text = complaint("train", tmp_path / "typo", "--resume", code=2)
    assert text == f"error: {tmp_path / 'typo'}: no such run or run file\n"
    text = complaint("compare", tmp_path / "absent.toml", code=2)
    names = f"its studies are {', '.join(shipped())}"
    assert text == f"error: {tmp_path / 'absent.toml'}: no such file, and no study of atoll has this name; {names}\n"


def test_compare_without_a_study_lists_those_that_come_with_atoll() -> None:
    result = atoll("compare")
    lines = [line.split(maxsplit=3) for line in result.stdout.splitlines()]
    assert result.exit_code == 0 and {line[2] for line in lines} == shipped().keys()
    assert ["atoll", "compare", "drops", "What do lost messages cost?"] in lines


def test_all_problems_of_a_run_file_are_lines(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[sync]\nperod = 3\ncodec = "[red]"\n')
    lines = complaint("train", file, "--set", "train.batch=x", "--set", "seed=[1]", code=2).splitlines()
    assert lines[0] == f"error: {file} with train.batch=x, seed=[1]: 4 problems"
    assert len(lines) == 5
    # Square brackets are markup to rich; what a person wrote must come out as it went in.
    assert any('got "[red]"' in line for line in lines) and any("got [1]" in line for line in lines)
    assert any(line == "  sync.perod: unknown key; did you mean sync.period?" for line in lines)


def test_options_are_checked_like_the_settings_they_stand_for(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("")
    assert "name: must be letters" in complaint("train", file, "--name", "a/b", code=2)
    for command in ("train", "compare"):
        assert "use --set KEY=VALUE" in complaint(command, file, "--set", "sync.period", code=2)
        assert "use --set KEY=VALUE" in complaint(command, file, "--set", "sync.period", "4", code=2)
    assert "--view" in complaint("train", file, "--view", "film", code=2)


def test_a_study_is_not_trained(tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text("[[study.runs]]\nname = 'a'")
    text = complaint("train", tmp_path / "study.toml", code=2)
    assert "this is a study, with several runs: atoll compare" in text


def test_a_folder_is_only_for_resuming(tmp_path: Path) -> None:
    assert "add --resume" in complaint("train", tmp_path, code=2)
    assert "it has no run.toml" in complaint("train", tmp_path, "--resume", code=2)
    assert "--out and --name cannot change" in complaint("train", tmp_path, "--resume", "--name", "x", code=2)


def test_debug_anywhere_shows_the_traceback(tmp_path: Path) -> None:
    for arguments in (("--debug", "train", tmp_path), ("train", tmp_path, "--debug")):
        result = atoll(*arguments)
        assert isinstance(result.exception, ConfigError) and result.exit_code == 1


# ---------------------------------------------------------------------- mistakes in other commands


def test_runs_that_are_none(tmp_path: Path) -> None:
    assert str(tmp_path) in complaint("report", tmp_path, "--out", tmp_path / "report.html", code=1)
    assert str(tmp_path) in complaint("sample", tmp_path, code=1)
    assert list(tmp_path.iterdir()) == []


def test_a_link_that_is_none(tmp_path: Path) -> None:
    assert "fast" in complaint("report", tmp_path, "--link", "fast", code=2)


# ---------------------------------------------------------------------- a run, from its file to its page

SMALL = """
threads = 1
model = {{layers = 2, width = 16, heads = 1, head_width = 16, feedforward = 16, context = 16}}
data = {{source = '{source}', cache = '{cache}'}}
train = {{steps = 4, batch = 1, eval_every = 2, eval_tokens = 32}}
"""


def test_a_run_is_trained_reported_and_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("texts").mkdir()
    for number in range(8):
        Path(f"texts/{number}.txt").write_text(f"{number} reef lagoon islet " * 20)
    for name in ("one", "two"):
        Path(f"{name}.toml").write_text(SMALL.format(source=tmp_path / "texts", cache=tmp_path / "tokens"))
        result = atoll("train", f"{name}.toml", "--view", "none")
        assert f"the run is in runs/{name}" in result.stdout, result.output
    pages = {
        ("runs/one",): "runs/one/report.html",
        ("runs",): "runs/report.html",
        ("runs/one", "runs/two"): "report.html",
        ("runs/one", "--out", "p.html"): "p.html",
    }
    for arguments, page in pages.items():
        assert atoll("report", *arguments).stdout == f"wrote {page}\n" and Path(page).is_file()
    texts = [atoll("sample", "runs/one", "--tokens", "5", *more).stdout for more in ([], ["--best"])]
    assert all(texts)
    shutil.rmtree("runs/one/best")
    assert "has not been evaluated" in complaint("sample", "runs/one", "--best", code=1)


def test_a_worker_is_resumed_from_the_folder_of_its_run_or_from_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def train_run(config: RunConfig, **how: object) -> Path:
        seen.append((config.out, config.name, how["worker"]))
        return Path(config.out) / config.name / "worker-1"

    monkeypatch.setattr("atoll.train.run.train", train_run)
    run = tmp_path / "runs" / "reef"
    (run / "worker-1").mkdir(parents=True)
    (run / "worker-1" / "run.toml").write_text("")
    for folder in (run, run / "worker-1"):
        result = atoll("train", str(folder), "--worker", "1", "--resume")
        assert f"to look at it: atoll report {run}, atoll sample {run / 'worker-1'}" in result.stdout, result.output
    assert seen == [(str(tmp_path / "runs"), "reef", 1)] * 2
    assert "their own processes (worker-1): add --worker and its number" in complaint("train", run, "--resume", code=2)
    told = "it has no run.toml and no worker-0, only worker-1"
    assert told in complaint("train", run, "--worker", "0", "--resume", code=2)


@pytest.mark.parametrize(
    ("given", "debug", "level"), [(None, [], "FATAL"), ("INFO", [], "INFO"), (None, ["--debug"], None)]
)
def test_torch_writes_no_pages_of_its_own_unless_asked_to(
    given: str | None, debug: list[str], level: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", given or "")  # so that it is as before afterwards
    if given is None:
        monkeypatch.delenv("TORCH_CPP_LOG_LEVEL")
    monkeypatch.setattr(sys, "argv", ["atoll", "--version", *debug])
    with pytest.raises(SystemExit):
        cli.main()
    assert os.environ.get("TORCH_CPP_LOG_LEVEL") == level


# ---------------------------------------------------------------------- what each kind of failure is answered with


def failing(fail: Callable[[], object]) -> Result:
    """A command line like atoll's, whose command fails like this."""
    app = typer.Typer(cls=Commands, pretty_exceptions_enable=False)

    @app.callback()
    def callback() -> None: ...

    @app.command()
    def run() -> None:
        fail()

    return CliRunner().invoke(app, ["run"])


def raising(error: BaseException) -> Callable[[], object]:
    def fail() -> None:
        raise error

    return fail


@pytest.mark.parametrize(
    ("fail", "code", "words"),
    [
        (raising(DataError("shard [3] is damaged")), 1, "error: shard [3] is damaged\n"),
        (raising(ConfigError("a\n  b: c")), 2, "error: a\n  b: c\n"),
        (raising(KeyboardInterrupt()), 130, "interrupted\n"),
        (raising(KeyboardInterrupt("stopped early")), 130, "stopped early\n"),
        (raising(SystemExit(130)), 130, ""),
        (
            raising(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "x/y")),
            1,
            "error: x/y: No space left on device; free",
        ),
        (raising(OSError(errno.EROFS, os.strerror(errno.EROFS), "x")), 1, "choose a folder you may write to"),
        (lambda: Path("not here").read_text(), 1, "error: not here: No such file or directory\n"),
        (lambda: bytearray(1 << 60), 1, "out of memory: lower train.batch"),
        (lambda: torch.empty(1 << 50), 1, "out of memory: lower train.batch"),
        (raising(torch.OutOfMemoryError("CUDA out of memory")), 1, "out of memory: lower train.batch"),
        (raising(typer.Exit(3)), 3, ""),
    ],
)
def test_failures_are_a_line_and_a_code(fail: Callable[[], object], code: int, words: str) -> None:
    result = failing(fail)
    assert result.exit_code == code
    assert words in result.stderr and "Traceback" not in result.stderr and (words or not result.stderr)


def test_a_bug_keeps_its_traceback() -> None:
    result = failing(raising(KeyError("ours")))
    assert isinstance(result.exception, KeyError) and result.stderr == ""


def test_the_real_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "atoll", "train", "absent.toml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == "error: absent.toml: no such file; `atoll init absent.toml` writes one to start from\n"


@pytest.mark.processes
def test_stopped_while_preparing_the_run_has_not_begun(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("reef lagoon islet tide surf sand\n" * 6_000_000)  # seconds of reading
    (tmp_path / "run.toml").write_text('[data]\nsource = "text.txt"')
    command = [sys.executable, "-m", "atoll", "train", "run.toml"]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            deadline = time.monotonic() + 60
            while not (tmp_path / "runs" / ".tokens").exists():
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.05)
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130
    assert errors.endswith("stopped before training began; the same command begins again\n") and "Trace" not in errors
