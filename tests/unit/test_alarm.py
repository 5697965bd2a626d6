"""Alerts on their way: to a webhook, to a command, and to targets that are slow, broken or gone."""

import json
import random
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from atoll.errors import ConfigError
from atoll.runs.events import End, Step, read
from atoll.settings import config
from atoll.settings.config import RunConfig
from atoll.train import run
from atoll.train.progress import alarm, alert_target
from atoll.train.progress.alarm import Alarm
from atoll.train.trainer import Trainer

PATIENCE_S = 60.0


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(alarm, "TICK_S", 0.05)


class Hook:
    """A webhook on loopback."""

    def __init__(self) -> None:
        self.got: list[dict[str, Any]] = []
        self.status = 200
        self.pause = threading.Event()
        self.pause.set()
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                hook.got.append({**body, "type": self.headers["Content-Type"]})
                hook.pause.wait(PATIENCE_S)
                self.send_response(hook.status)
                self.send_header("Location", "/elsewhere")
                self.end_headers()

            def do_GET(self) -> None:
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                return

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self.server.server_port}/secret-path"


@pytest.fixture
def hook() -> Iterator[Hook]:
    made = Hook()
    thread = threading.Thread(target=made.server.serve_forever, args=(0.05,))
    thread.start()
    yield made
    made.pause.set()
    made.server.shutdown()
    made.server.server_close()
    thread.join()


def settings(target: str, **changes: Any) -> RunConfig:
    return config.parse({"name": "reef", "train": {"steps": 100}, "log": {"alert": target, **changes}})


def a_step(step: int, loss: float) -> Step:
    none: dict[str, Any] = {"tokens": 8, "step_s": 0.1, "bytes_sent": [], "bytes_received": [], "wait_s": []}
    return Step(step=step, seconds=1, loss=[loss], grad_norm=[1.0], lr=0.1, tokens_per_s=1, participants=1, **none)


def until(happens: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not happens():
        assert time.monotonic() < end
        time.sleep(0.005)


@contextmanager
def sounding(given: RunConfig, steps: Callable[[], int] = lambda: 7) -> Iterator[Alarm]:
    with Alarm(given, 3, steps) as made:
        yield made


def test_a_webhook_gets_one_json_object_per_alert(hook: Hook) -> None:
    step = 7
    with sounding(settings(hook.address, stall_s=0.3), lambda: step) as made:
        made.write(a_step(7, 2.0))
        made.write(a_step(8, float("nan")))
        until(lambda: len(hook.got) == 2)
        step = 9
        until(lambda: len(hook.got) == 3)
        for step in (9, 10, 11):
            made.write(a_step(step, 2.0))
        until(lambda: len(hook.got) == 4)
        step = 100  # the last: what follows is no stall
        time.sleep(0.5)
    assert [(got["kind"], got["recovered"]) for got in hook.got] == [
        ("diverged", False), ("stalled", False), ("stalled", True), ("diverged", True)
    ]  # fmt: skip
    first = hook.got[0]
    assert (first["run"], first["worker"], first["about"], first["step"]) == ("reef", 3, None, 8)
    assert first["type"] == "application/json" and abs(first["time"] - time.time()) < 600 and "nan" in first["text"]


def test_an_error_that_ends_training_is_told_before_the_process_ends(hook: Hook) -> None:
    with pytest.raises(RuntimeError), sounding(settings(hook.address)):
        raise RuntimeError("no \x1b space")
    assert [got["kind"] for got in hook.got] == ["failed"] and "no \\x1b space" in hook.got[0]["text"]
    for quiet in (KeyboardInterrupt(), SystemExit(130)):
        with pytest.raises(type(quiet)), sounding(settings(hook.address)):
            raise quiet
    assert len(hook.got) == 1


def test_a_slow_server_delays_nobody(
    hook: Hook, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(alert_target, "POST_S", 0.2)
    monkeypatch.setattr(alarm, "CLOSE_S", 0.5)
    hook.pause.clear()
    with sounding(settings(hook.address, stall_s=0.1)) as made:
        made.write(a_step(1, float("nan")))
        until(lambda: hook.got)
        began_s = time.monotonic()
        for step in range(2, 2000):
            made.write(a_step(step, 1.0))
        assert time.monotonic() - began_s < 5, "events are only put aside"
        until(lambda: len(hook.got) > 2)  # it goes on to the next
    said = capsys.readouterr().err
    assert "warning: no alert could be sent to the webhook at 127.0.0.1: it did not answer within 0.2 s" in said
    assert said.count("\n") == 1 and "secret" not in said


@pytest.mark.parametrize("status", [500, 404, 302])
def test_a_server_that_refuses_or_is_gone_is_told_once(
    hook: Hook, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    hook.status = status
    with sounding(settings(hook.address)) as made:
        for loss in (float("nan"), 1.0, 1.0, 1.0, 9.0):
            made.write(a_step(1, loss))
        until(lambda: len(hook.got) == 3)
    assert capsys.readouterr().err.count(f"status {status}") == 1
    with sounding(settings("http://127.0.0.1:1/")) as made:
        made.write(a_step(1, float("nan")))
    assert capsys.readouterr().err.count("warning: no alert could be sent") == 1


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], Path]:
    def make(body: str) -> Path:
        file = tmp_path / "pager"
        file.write_text(f"#!/bin/sh\n{body}\n")
        file.chmod(file.stat().st_mode | stat.S_IXUSR)
        return file

    return make


def test_a_command_gets_json_and_variables_and_no_shell(script: Callable[[str], Path], tmp_path: Path) -> None:
    pager = script('cat > "$1"; echo "$ATOLL_ALERT_KIND $ATOLL_ALERT_RECOVERED $ATOLL_ALERT_ABOUT." > "$1.env"')
    out = tmp_path / "a file; touch oops"
    with pytest.raises(RuntimeError), sounding(settings(f"{pager} '{out}'")):
        raise RuntimeError("$(touch oops); `touch oops`")
    told = json.loads(out.read_text())
    assert told["kind"] == "failed" and "$(touch oops)" in told["text"]
    assert out.with_name(out.name + ".env").read_text() == "failed 0 .\n"
    assert not (tmp_path / "oops").exists() and not Path("oops").exists()


def test_a_command_that_fails_or_hangs_is_told_once_and_killed(
    script: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RuntimeError), sounding(settings(str(script("exit 3")))):
        raise RuntimeError("x")
    assert "the command" in (said := capsys.readouterr().err) and "ended with status 3" in said
    monkeypatch.setattr(alert_target, "COMMAND_S", 0.3)
    pager = script(f"(sleep 1; touch {tmp_path / 'survives'}) & sleep 600")
    with pytest.raises(RuntimeError), sounding(settings(str(pager))):
        raise RuntimeError("x")
    assert "did not end within 0.3 s" in capsys.readouterr().err
    time.sleep(1.5)
    assert not (tmp_path / "survives").exists(), "what it has started is killed, too"


def test_targets_that_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    for bad in ("ftp://host/x", "http://", "https://a b", "$1", "$", "page 'me", ""):
        with pytest.raises(ConfigError, match=r"log\.alert"):
            settings(bad)
    with pytest.raises(ConfigError, match="'no-such-pager now' is neither an http"):
        alert_target.target_of("no-such-pager now")
    monkeypatch.delenv("PAGER_HOOK", raising=False)
    with pytest.raises(ConfigError, match="PAGER_HOOK is not set; set it"):
        alert_target.target_of("$PAGER_HOOK")
    for bad in ("hooks.example.org/secret", "page 'secret", "https://[secret", " "):
        monkeypatch.setenv("PAGER_HOOK", bad)
        with pytest.raises(ConfigError, match=r"log\.alert: \$PAGER_HOOK holds neither") as refused:
            alert_target.target_of("$PAGER_HOOK")
        assert "secret" not in str(refused.value), "a variable may hold one"
    monkeypatch.setenv("PAGER_HOOK", "https://example.org/hook")
    assert alert_target.target_of("$PAGER_HOOK")[0] == "the webhook at example.org"


def test_a_run_that_stalls_and_one_that_fails(hook: Hook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = tmp_path / "text.txt"
    text.write_text(" ".join(random.Random(0).choices(["reef", "lagoon", "islet", "tide"], k=2000)))
    given = {
        "name": "run",
        "out": str(tmp_path / "runs"),
        "model": {"preset": "tiny", "layers": 1, "width": 16, "heads": 1, "feedforward": 16, "context": 16},
        "train": {"steps": 6, "batch": 2, "eval_tokens": 64, "log_every": 1},
        "sync": {"workers": 2, "period": 3, "fragments": "whole"},
        "data": {"source": str(text), "cache": str(tmp_path / "tokens"), "held_out": 0.2},
        "log": {"view": "none", "alert": hook.address, "stall_s": 1.0},
    }
    step = Trainer.step

    def stalls(trainer: Trainer) -> None:
        step(trainer)
        if trainer.steps == 3:
            until(lambda: len(hook.got) == 1)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", stalls)
        folder = run.train(config.parse(given))
    assert isinstance(read(folder / "metrics.jsonl")[-1], End)
    assert [(got["kind"], got["step"], got["worker"]) for got in hook.got][:1] == [("stalled", 3, None)]
    hook.got.clear()

    def fails(trainer: Trainer) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(Trainer, "step", fails)
    with pytest.raises(RuntimeError):
        run.train(config.parse({**given, "name": "other"}))
    assert [got["kind"] for got in hook.got] == ["failed"]
    with pytest.raises(ConfigError, match="no-such-pager"):
        run.train(config.parse({**given, "name": "third", "log": {"view": "none", "alert": "no-such-pager"}}))
    assert not (tmp_path / "runs" / "third").exists() or not list((tmp_path / "runs" / "third").glob("*.jsonl"))
