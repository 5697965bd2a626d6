"""A run between machines, followed by an observer: real workers and a registry, one killed and back, and strangers."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from atoll.cli import main as cli
from atoll.errors import RegistryError
from atoll.link.net.revocations import load_bundle
from atoll.link.net.run_keys import throw_away
from atoll.runs.events import End, Event, Start, Step
from atoll.watch.registry_source import RegistryRun
from elastic_fleet import finish, running, when

pytestmark = pytest.mark.processes


class Seen:
    """Collects what an observer is told, as the page does: a Start begins a worker anew."""

    def __init__(self, source: RegistryRun) -> None:
        self.source = source
        self.events: dict[str, list[Event]] = {}
        self.troubles: dict[str, str] = {}
        self.begins = 0

    def look(self) -> "Seen":
        for news in self.source.poll():
            self.troubles[news.process] = news.trouble
            for event in news.events:
                if isinstance(event, Start):
                    self.events[news.process] = []
                    self.begins += 1
                self.events[news.process].append(event)
        return self

    def steps(self, worker: int) -> Sequence[int]:
        return [event.step for event in self.events.get(f"worker {worker}", []) if isinstance(event, Step)]


def test_an_observer_sees_events_of_all_workers_also_of_one_that_was_killed_and_is_back(tmp_path: Path) -> None:
    with running(tmp_path, 2, 100, silent_s=5.0) as run:
        source = RegistryRun(run.registry.address, load_bundle(run.keys / "observer")[0])
        try:
            seen = Seen(source)
            assert not seen.look().events and source.share == 1.0
            workers = [run.start(worker) for worker in range(2)]
            when(lambda: min(len(seen.look().steps(worker)) for worker in range(2)) >= 12)
            assert source.about().name == run.registry.address
            workers[1].kill()
            when(lambda: seen.look().troubles["worker 1"])
            assert "worker 1 cannot be reached from here" in seen.troubles["worker 1"]
            before = seen.steps(0)[-1]
            when(lambda: seen.look().steps(0)[-1] >= before + 10)
            workers[1] = run.start(1)
            when(lambda: not seen.look().troubles["worker 1"] and seen.steps(1)[-1] > before)
            when(lambda: all(isinstance(seen.look().events[f"worker {n}"][-1], End) for n in range(2)))
            finish(*workers)
            for worker in range(2):
                assert seen.events[f"worker {worker}"] == run.events(worker)
            assert not any(seen.look().troubles.values()) and source.share == 1.0
        finally:
            source.close()


def test_strangers_and_registries_that_are_not_there_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atoll.watch.registry_source._WAIT_S", 2.0)
    with running(tmp_path, 1) as run:
        with pytest.raises(RegistryError, match="check that `atoll registry` runs there"):
            RegistryRun(run.registry.address, throw_away(1).observer)
        run.registry.kill()
        with pytest.raises(RegistryError, match="does not answer within 2 s"):
            RegistryRun(run.registry.address, load_bundle(run.keys / "observer")[0])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "no run given: name its folders, or --registry ADDRESS"),
        (["runs", "--registry", "127.0.0.1:1"], "got folders and --registry 127.0.0.1:1: leave one out"),
        (["--registry", "127.0.0.1:1"], "--keys is missing"),
    ],
)
def test_options_that_do_not_fit(options: list[str], words: str) -> None:
    result = CliRunner().invoke(cli.app, ["watch", *options])
    assert result.exit_code == 2
    assert words in str(result.exception) or words in result.output
