"""Compare-and-set stays linearizable under random interleavings; a journal equals a dict, also after a kill."""

import asyncio
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import count, pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.link.net.embedded import RegistryServer
from atoll.link.net.embedded_client import EmbeddedRegistry
from atoll.link.net.etcd import EtcdRegistry
from atoll.link.net.etcd_gateway import EtcdOptions
from atoll.link.net.journal import JOURNAL, Journal
from atoll.link.net.registry import INSECURE, VIEW, WORKERS, Entry, Lease, Registry, presence_key
from example_counts import examples
from registries import Etcd

# ---------------------------------------------------------------------- clients side by side

Plans = list[list[str]]
PLANS = st.lists(
    st.lists(st.sampled_from(["get", "set", "stale", "create", "pause"]), max_size=8), min_size=2, max_size=5
)


@dataclass(frozen=True)
class Seen:
    """An operation as its client saw it."""

    began: int
    ended: int
    expected: int | None
    """The version of a compare-and-set; None for a get."""
    accepted: bool
    entry: Entry | None
    """What it read, wrote or was refused for."""

    @property
    def version(self) -> int:
        return self.entry.version if self.entry else 0


async def interleave(registries: list[Registry], plans: Plans) -> list[Seen]:
    clock, seen = count(), list[Seen]()

    async def client(number: int, registry: Registry, plan: list[str]) -> None:
        known = older = 0
        for step, what in enumerate(plan):
            began = next(clock)
            if what == "pause":
                await asyncio.sleep(0.001 * number)
                continue
            if what == "get":
                entry = await registry.get(VIEW)
                seen.append(Seen(began, next(clock), None, False, entry))
            else:
                expected = {"set": known, "stale": older, "create": 0}[what]
                outcome = await registry.compare_and_set(VIEW, f"{number} {step}".encode(), expected)
                entry = outcome.entry
                assert not outcome.accepted or (entry and entry.value == f"{number} {step}".encode())
                seen.append(Seen(began, next(clock), expected, outcome.accepted, entry))
            older, known = known, entry.version if entry else 0

    await asyncio.gather(*(client(n, *both) for n, both in enumerate(zip(registries, plans, strict=True))))
    return seen


def check_linearizable(seen: list[Seen], start: Entry | None) -> None:
    """Versions say in which order changes took effect; a plain dict replays them."""
    store = {VIEW: start}
    history = {0 if start is None else start.version: start}
    for change in sorted((one for one in seen if one.accepted), key=lambda one: one.version):
        there = store[VIEW]
        assert change.expected == (there.version if there else 0), "accepted on top of another version"
        assert change.version > (there.version if there else 0) and change.version not in history
        store[VIEW] = history[change.version] = change.entry
    for one in seen:
        assert one.version in history and history[one.version] == one.entry, "a value that nobody wrote"
        assert one.accepted or one.expected is None or one.expected != one.version, "refused for no reason"
    for first in seen:
        for second in seen:
            if first.ended < second.began:  # what was over before took effect before
                assert second.version > first.version or (second.version == first.version and not second.accepted)


@examples(100)
@given(PLANS)
def test_embedded_is_linearizable(plans: Plans) -> None:
    async def main(folder: Path) -> None:
        async with AsyncExitStack() as stack:
            server = await RegistryServer.start(folder, "127.0.0.1:0", INSECURE)
            stack.push_async_callback(server.close)
            registries: list[Registry] = [EmbeddedRegistry(server.address, INSECURE) for _ in plans]
            for registry in registries:
                await stack.enter_async_context(registry)
            check_linearizable(await interleave(registries, plans), None)

    with tempfile.TemporaryDirectory() as made:
        asyncio.run(main(Path(made)))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    with Etcd(tmp_path_factory.mktemp("etcd"), 3) as etcd:
        yield etcd


NAMES = count()


@pytest.mark.processes
@examples(60)
@given(PLANS)
def test_etcd_is_linearizable(cluster: Etcd, plans: Plans) -> None:
    """Each client talks to another member."""

    async def main() -> None:
        base = EtcdOptions.read(f"{cluster.url}/run{next(NAMES)}", INSECURE)
        async with AsyncExitStack() as stack:
            registries = list[Registry]()
            for number in range(len(plans)):
                turned = base.endpoints[number % 3 :] + base.endpoints[: number % 3]
                registry = EtcdRegistry(EtcdOptions(turned, INSECURE, base.name))
                registries.append(await stack.enter_async_context(registry))
            check_linearizable(await interleave(registries, plans), None)

    asyncio.run(main())


# ---------------------------------------------------------------------- the journal

SEATS = st.integers(0, 2)
STEPS = st.one_of(
    st.tuples(st.just("set"), st.binary(max_size=4), st.integers(0, 2)),
    st.tuples(st.just("grant"), SEATS, st.booleans(), st.integers(1, 3)),
    st.tuples(st.just("withdraw"), SEATS, st.integers(1, 3)),
    st.tuples(st.just("reopen")),
    st.tuples(st.just("kill")),
)


@examples(200)
@given(st.lists(STEPS, max_size=25))
def test_a_journal_is_a_dict_that_survives(steps: list[tuple[object, ...]]) -> None:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        journal = Journal(folder / "0")
        copies = count(1)
        values: dict[str, Entry] = {}
        leases: dict[str, int] = {}
        versions, told = [journal.version], list[tuple[int, str, bytes | None]]()

        def changed(key: str, value: bytes | None, lease: int | None = None) -> None:
            versions.append(journal.version)
            told.append((journal.version, key, value))
            values.pop(key, None)
            leases.pop(key, None)
            if value is not None:
                values[key] = Entry(value, journal.version)
            if lease is not None:
                leases[key] = lease

        for step in steps:
            match step:
                case ("set", bytes() as value, int() as off):
                    there = values[VIEW].version if VIEW in values else 0
                    outcome = journal.compare_and_set(VIEW, value, there + off)
                    assert outcome.accepted == (off == 0)
                    if outcome.accepted:
                        changed(VIEW, value)
                    assert outcome.entry == values.get(VIEW)
                case ("grant", int() as seat, bool() as if_absent, int() as number):
                    key = presence_key(seat)
                    lease = Lease(key, b"%d" % number, 5.0, number)
                    is_written = not (if_absent and key in values)
                    assert journal.grant(lease, if_absent=if_absent) == (is_written or leases[key] == number)
                    if is_written:
                        changed(key, lease.value, number)
                case ("withdraw", int() as seat, int() as number):
                    key = presence_key(seat)
                    assert journal.withdraw(key, number) == (leases.get(key) == number)
                    if leases.get(key) == number:
                        changed(key, None)
                case ("reopen",):
                    journal.close()
                    journal = Journal(Path(journal.path).parent)
                case ("kill",):  # the files as they are at this moment
                    copy = folder / str(next(copies))
                    shutil.copytree(journal.path.parent, copy)
                    journal.close()
                    journal = Journal(copy)
            assert journal.version == versions[-1]
        assert all(before < after for before, after in pairwise(versions))
        assert {key: journal.get(key) for key in (VIEW, *map(presence_key, range(3)))} == {
            key: values.get(key) for key in (VIEW, *map(presence_key, range(3)))
        }
        assert {key: number for key, (number, _) in journal.leases().items()} == leases
        snapshot = journal.page("", 0)
        assert {change.key: Entry(change.value or b"", change.version) for change in snapshot.changes} == values
        for since in versions:
            for prefix in ("", VIEW, WORKERS):
                page = journal.page(prefix, since)
                assert [(change.version, change.key, change.value) for change in page.changes] == [
                    one for one in told if one[0] > since and one[1].startswith(prefix)
                ]
                assert page.version == journal.version and not page.is_snapshot
        journal.close()
        assert (journal.path.parent / JOURNAL).is_file()
