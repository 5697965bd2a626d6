"""The server of the page answers GET alone, to those that may look, and no viewer costs another anything."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asgi import Viewer, get, running
from atoll.runs.events import End, Event, Jsonl, Step
from atoll.watch import reader, server
from atoll.watch.folders import Folders
from atoll.watch.guard import HEADERS, Admission
from atoll.watch.server import MOST_VIEWERS, Watch
from made_up_runs import MadeUpRun, save, save_workers

VOYAGE = MadeUpRun()
OPEN = Admission(hosts=("localhost", "127.0.0.1", "[::1]"))
TOKEN = "s3cret-token-of-this-test"
CLOSED = Admission(token=TOKEN, cookie="atoll_watch_8420")
PATHS = ("/", "/updates", "/lanes?from=0&to=5", "/metrics", "/healthz", "/nothing", "/../secret")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_workers(tmp_path / "far", VOYAGE.events())


def served(folder: Path, use: Callable[[Watch], Awaitable[None]], admission: Admission = OPEN) -> None:
    """Runs a server for a test, after it has read all."""

    async def run() -> None:
        app = Watch(Folders([folder]), admission)
        async with running(app):
            assert await app.board.newer(0, 60.0)
            async with asyncio.timeout(40):
                await use(app)

    asyncio.run(run())


async def still(app: Watch) -> None:
    """Stops the reader, so that only the test changes the board."""
    await asyncio.to_thread(app.reader.stop)
    await asyncio.sleep(0.05)


def sections(message: bytes) -> dict[str, Any]:
    """The content of a server-sent event."""
    lines = message.decode().split("\n")
    assert lines[0] == "event: sections" and lines[1].startswith("id: ") and lines[3:] == ["", ""]
    found: dict[str, Any] = json.loads(lines[2].removeprefix("data: "))
    return found


# ---------------------------------------------------------------------- who may look


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE", "GETT"])
def test_only_get_is_served(folder: Path, method: str) -> None:
    async def use(app: Watch) -> None:
        for path in PATHS:
            answer = await get(app, path, method)
            assert (answer.status, answer.headers["allow"]) == (405, "GET")

    served(folder, use)


def test_every_answer_has_the_headers_that_confine_the_page(folder: Path) -> None:
    async def use(app: Watch) -> None:
        for path in (path for path in PATHS if path != "/updates"):
            for method in ("GET", "POST"):
                answer = await get(app, path, method)
                assert HEADERS.items() <= answer.headers.items()
                assert not any(name.startswith("access-control") for name in answer.headers)
        policy = HEADERS["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy

    served(folder, use)


def test_a_name_that_was_made_to_lead_here_is_refused(folder: Path) -> None:
    async def use(app: Watch) -> None:
        for host in ("evil.example", "evil.example:8420", "localhost.evil.example", "127.0.0.1.nip.io", "", "[::2]:80"):
            for path in PATHS:
                answer = await get(app, path, host=host)
                assert (answer.status, b"loss" in answer.body) == (421, False)
        for host in ("localhost", "LOCALHOST:8420", "127.0.0.1:1", "[::1]:9", "[::1]"):  # a tunnel has another port
            assert (await get(app, "/healthz", host=host)).status == 200

    served(folder, use)


def test_without_the_token_nothing_is_served(folder: Path) -> None:
    async def use(app: Watch) -> None:
        wrong: list[dict[str, str]] = [
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": f"Basic {TOKEN}"},
            {"authorization": f"Bearer {TOKEN}x"},
            {"cookie": f"other={TOKEN}"},
            {"cookie": "atoll_watch_8420=wrong"},
            {"cookie": "a\x00b;;;=\xff"},
        ]
        for path in PATHS:
            for headers in wrong:
                for method in ("GET", "POST"):
                    answer = await get(app, path, method, **headers)
                    assert answer.status == 401 and answer.body.startswith(b"401: use the address")
                    assert "set-cookie" not in answer.headers
            told = f"{path}{'&' if '?' in path else '?'}token=wrong"
            assert (await get(app, told)).status == 401

    served(folder, use, CLOSED)


def test_the_token_moves_from_the_address_into_a_cookie(folder: Path) -> None:
    async def use(app: Watch) -> None:
        answer = await get(app, f"/lanes?token={TOKEN}&from=0&to=5")
        assert (answer.status, answer.headers["location"]) == (303, "/lanes?from=0&to=5")
        name, *attributes = answer.headers["set-cookie"].split("; ")
        assert name == f"atoll_watch_8420={TOKEN}"
        assert {a.lower() for a in attributes} == {"httponly", "samesite=strict", "path=/"}
        assert (await get(app, "/lanes?from=0&to=5", cookie=f"x=y; {name}")).status == 200
        assert (await get(app, "/metrics", authorization=f"Bearer {TOKEN}")).status == 200
        elsewhere = await get(app, f"//evil.example/?token={TOKEN}")
        assert not elsewhere.headers["location"].startswith(("//", "http"))
        assert (await get(app, f"/metrics?token={TOKEN}", "POST")).status == 405

    served(folder, use, CLOSED)


# ---------------------------------------------------------------------- answers


def test_files_of_the_page_are_served_and_no_others(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page"
    page.mkdir()
    for name in ("index.html", "app.js", "style.css", "secret.txt"):
        (page / name).write_text(f"this is {name}")
    monkeypatch.setattr(server, "PAGE", page)

    async def use(app: Watch) -> None:
        for path, name, kind in (
            ("/", "index.html", "text/html"),
            ("/app.js", "app.js", "text/javascript"),
            ("/style.css", "style.css", "text/css"),
        ):
            answer = await get(app, path)
            assert (answer.status, answer.body) == (200, f"this is {name}".encode())
            assert answer.headers["content-type"] == f"{kind}; charset=utf-8"
        for path in ("/secret.txt", "/../server.py", "/%2e%2e/server.py", "/page/app.js", "/app.js/", "//app.js"):
            assert (await get(app, path)).status in (404, 307)

    served(folder, use)


def test_a_window_of_time(folder: Path) -> None:
    async def use(app: Watch) -> None:
        found = json.loads((await get(app, "/lanes?from=2&to=4")).body)
        assert (found["from_s"], found["to_s"], len(found["workers"])) == (2, 4, 3)
        for worker in found["workers"]:
            assert worker["flights"] and all(begin < 4 and end > 2 for begin, end, *_ in worker["flights"])
        for bad in (
            "",
            "?from=1",
            "?from=2&to=1",
            "?from=x&to=2",
            "?from=nan&to=2",
            "?from=-inf&to=inf",
            "?from=1&to=1",
        ):
            assert (await get(app, f"/lanes{bad}")).status == 400

    served(folder, use)


def test_metrics_for_prometheus(folder: Path) -> None:
    async def use(app: Watch) -> None:
        answer = await get(app, "/metrics")
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        values = {}
        for line in answer.body.decode().splitlines():
            if line.startswith("#"):
                assert line.split()[1] in ("HELP", "TYPE")
                continue
            name, _, value = line.rpartition(" ")
            values[name] = float(value)
        assert values['atoll_step{run="far"}'] == 80
        assert values['atoll_tokens_total{run="far"}'] == 80 * 512 * 3
        assert values['atoll_state{run="far",state="finished"}'] == 1
        assert values['atoll_sent_bytes_total{run="far",worker="1"}'] > 0
        assert values['atoll_held_out_loss{run="far"}'] == pytest.approx(2.069, abs=1e-3)
        assert sum(name.startswith("atoll_state{") for name in values) == 10
        assert (await get(app, "/healthz")).body == b"ok\n"

    served(folder, use)


def test_the_newest_loss_is_that_of_the_newest_step(tmp_path: Path) -> None:
    log = MadeUpRun(steps=9000).events()[0]
    last = [event for event in log if isinstance(event, Step)][-1]
    log[log.index(last)] = replace(last, loss=[7.25, None, None])

    async def use(app: Watch) -> None:
        assert b'atoll_training_loss{run="far",worker="0"} 7.25\n' in (await get(app, "/metrics")).body

    served(save(tmp_path / "far", log), use)


def test_hostile_names_do_not_break_metrics(tmp_path: Path) -> None:
    log = VOYAGE.events()[0]
    log[0] = replace(VOYAGE.start(0), name='"} 1\\ <b>\u202e')

    async def use(app: Watch) -> None:
        body = (await get(app, "/metrics")).body.decode()
        assert 'atoll_step{run="\\"} 1\\\\ <b>\ufffd"} 80' in body

    served(save(tmp_path / "far", log), use)


# ---------------------------------------------------------------------- server-sent events


def test_the_first_message_has_all_and_later_ones_what_has_changed(tmp_path: Path) -> None:
    log = VOYAGE.events()[0]
    half = [e for e in log if getattr(e, "step", 0) <= 40 and not isinstance(e, End)]
    folder = save(tmp_path / "far", half)

    async def use(app: Watch) -> None:
        async with Viewer(app) as viewer:
            first = sections(await viewer.read())
            assert viewer.answer.status == 200
            assert set(first) == {
                "run", "loss", "speed", "lanes", "now", "traffic", "outer", "faults", "samples", "settings", "scores",
            }  # fmt: skip
            assert first["run"]["step"] == 40
            sink = Jsonl(folder / "metrics.jsonl", (folder / "metrics.jsonl").stat().st_size)
            for event in log[len(half) :]:
                sink.write(event)
            sink.close()
            found = dict(first)
            while found["run"]["state"] != "finished" or found["loss"]["workers"]["0"]["step"][-1] < 80:
                later = sections(await viewer.read())
                assert "settings" not in later and later
                found |= later
            assert found["run"]["step"] == 80

    served(folder, use)


def test_a_quiet_stream_still_beats(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HEARTBEAT_S", 0.05)

    async def use(app: Watch) -> None:
        async with Viewer(app) as viewer:
            sections(await viewer.read())
            await still(app)
            while (part := await viewer.read()).startswith(b"event"):
                pass
            assert part == b": still here\n\n"

    served(folder, use)


def test_a_stuck_viewer_holds_one_message_and_delays_nobody(folder: Path) -> None:
    async def use(app: Watch) -> None:
        await still(app)
        async with Viewer(app) as stuck, Viewer(app) as viewer:
            first = sections(await viewer.read())
            while not stuck.offered:
                await asyncio.sleep(0.01)
            held = stuck.offered
            for n in range(200):
                app.board.put({"run": b'{"n":%d}' % n, "loss": b'"%s"' % (b"x" * 10_000 + b"%d" % n)})
                later = sections(await viewer.read())
                assert later["run"] == {"n": n} and set(later) == {"run", "loss"}
            assert stuck.offered == held, "nothing is queued for it"
            assert sections(await stuck.read()).keys() == first.keys()
            newest = sections(await stuck.read())  # the latest wins
            assert newest["run"] == {"n": 199} and set(newest) == {"run", "loss"}

    served(folder, use)


def test_viewers_that_keep_up_share_their_bytes(folder: Path) -> None:
    async def use(app: Watch) -> None:
        await still(app)
        async with Viewer(app) as one, Viewer(app) as other:
            assert await one.read() is await other.read()
            app.board.put({"run": b"1"})
            assert await one.read() is await other.read()
            version = app.board.version
            app.board.put({"run": b"1"})
            assert app.board.version == version, "what has not changed is not sent"

    served(folder, use)


def test_a_viewer_that_takes_nothing_for_long_is_let_go(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "STUCK_S", 0.2)

    async def use(app: Watch) -> None:
        async with Viewer(app):
            while app.viewers == 0:
                await asyncio.sleep(0.01)
            while app.viewers:
                await asyncio.sleep(0.01)

    served(folder, use)


def test_viewers_are_counted_and_one_too_many_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert MOST_VIEWERS == 256
    monkeypatch.setattr(server, "MOST_VIEWERS", 3)

    async def use(app: Watch) -> None:
        async with Viewer(app) as one, Viewer(app) as two:
            async with Viewer(app) as three:
                for viewer in (one, two, three):
                    await viewer.read()
                assert app.viewers == 3
                answer = await get(app, "/updates")
                assert (answer.status, answer.headers["retry-after"]) == (503, "30")
            while app.viewers == 3:
                await asyncio.sleep(0.01)
            async with Viewer(app) as again:
                await again.read()
                assert again.answer.status == 200
        while app.viewers:
            await asyncio.sleep(0.01)

    served(folder, use)


def test_the_end_of_the_server_ends_streams(folder: Path) -> None:
    async def run() -> None:
        app = Watch(Folders([folder]), OPEN)
        async with running(app):
            viewer = await Viewer(app).__aenter__()
            await viewer.read()
        assert await viewer.read() == b""
        await viewer.__aexit__()
        assert app.viewers == 0

    asyncio.run(run())


def test_a_server_of_a_damaged_run_lives(tmp_path: Path) -> None:
    folder = save(tmp_path / "far", VOYAGE.events()[0])
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b"\x00\xff not JSON\n")

    async def use(app: Watch) -> None:
        async with Viewer(app) as viewer:
            run = sections(await viewer.read())["run"]
            while "damaged" not in run["state_words"]:
                run = sections(await viewer.read()).get("run", run)
            assert run["step"] == 80

    served(folder, use)


# ---------------------------------------------------------------------- what may go wrong inside


def test_a_reader_that_fails_says_so_and_goes_on(folder: Path) -> None:
    class Failing(Folders):
        fault: OSError | None = None

        def poll(self) -> Any:
            if self.fault is not None:
                raise self.fault
            return super().poll()

    async def run() -> None:
        source = Failing([folder])
        app = Watch(source, OPEN)
        async with running(app), asyncio.timeout(40):
            assert await app.board.newer(0, 30.0)
            source.fault = OSError(24, "Too many open files")
            while (await get(app, "/healthz")).status != 503:
                app.reader.wake()
                await asyncio.sleep(0.05)
            assert b"Too many open files" in (await get(app, "/healthz")).body
            while b"Too many open files" not in (app.board.text("run") or b""):
                await asyncio.sleep(0.05)
            source.fault = None
            while (await get(app, "/healthz")).status != 200:
                app.reader.wake()
                await asyncio.sleep(0.05)

    asyncio.run(run())


def test_who_trains_is_shown_at_once_and_steps_when_there_is_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "EVERY_S", 0.01)
    monkeypatch.setattr(reader, "UNWATCHED_S", 3600.0)
    monkeypatch.setattr(reader, "_SHARE", 1e-9)  # so little of a core that it rests as long as it may
    polls = 0

    class Counted(Folders):
        def poll(self) -> Any:
            nonlocal polls
            polls += 1
            return super().poll()

    log = VOYAGE.events()[0]
    folder = save(tmp_path / "far", log[:-1])
    shown: list[Mapping[str, bytes]] = []
    follower = reader.Reader(Counted([folder]), shown.append, lambda: True)
    follower.start()
    try:
        wait_until(lambda: bool(shown))
        step = next(event for event in log if isinstance(event, Step))
        append(folder, replace(step, step=90))
        polled = polls
        wait_until(lambda: polls > polled + 3)
        assert len(shown) == 1
        append(folder, log[-1])  # its end
        wait_until(lambda: len(shown) > 1)
        assert b"finished" in shown[1]["run"]
    finally:
        follower.stop()


def append(folder: Path, event: Event) -> None:
    file = folder / "metrics.jsonl"
    sink = Jsonl(file, file.stat().st_size)
    sink.write(event)
    sink.close()


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_numbers_beyond_all_bounds_do_not_end_the_page(tmp_path: Path) -> None:
    log = VOYAGE.events()[0]
    number, last = [(n, event) for n, event in enumerate(log) if isinstance(event, Step)][-1]
    log[number] = replace(last, step=10**25, step_s=1.7e308)

    async def use(app: Watch) -> None:
        assert (await get(app, "/lanes?from=0&to=5")).status == 200
        assert app.reader.is_alive

    served(save(tmp_path / "far", log), use)


def test_other_sites_may_open_the_page_and_nothing_else(folder: Path) -> None:
    async def use(app: Watch) -> None:
        for path, mode, status in (("/", "navigate", 200), ("/lanes?from=0&to=5", "no-cors", 403)):
            headers = {"sec-fetch-site": "cross-site", "sec-fetch-mode": mode}
            assert (await get(app, path, **headers)).status == status

    served(folder, use)
