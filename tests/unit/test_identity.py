"""Certificates of a run: what they say, whose they are, how long they last, and files that nobody else may read."""

import os
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import ConfigError
from atoll.link.net.identity import (
    CERTIFICATE_PEM,
    KEY_PEM,
    MOST_DAYS,
    MOST_GENERATIONS,
    ROLES,
    RUN_PEM,
    Authority,
    Bearer,
    Certificate,
    Identity,
    Role,
)
from atoll.link.net.run_keys import throw_away, throw_away_folder

NOW = datetime.now(UTC)


def refused(folder: Path, *words: str, now: datetime | None = None) -> None:
    """Loading a bundle fails with one line that has these words."""
    with pytest.raises(ConfigError) as caught:
        Identity.load(folder, now)
    assert caught.value.setting == "keys"
    assert "\n" not in str(caught.value) and all(word in str(caught.value) for word in words), caught.value


def modes(folder: Path) -> set[int]:
    return {stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority.new("x-1a2b3c4d")


@given(
    st.sampled_from(ROLES),
    st.integers(0, 999_999),
    st.integers(0, 99),
    st.from_regex(r"[a-z0-9]{1,63}", fullmatch=True),
)
def test_a_bearer_is_what_its_host_name_says(role: Role, seat: int, generation: int, run: str) -> None:
    bearer = Bearer(run, role, seat, generation)
    read = Bearer.read(bearer.host_name)
    assert read == bearer and read is not None and read.generation == generation
    assert all(len(label) <= 63 for label in bearer.host_name.split("."))


@pytest.mark.parametrize(
    "name",
    ["", "worker-1.x.atoll", "worker-01-0.x.atoll", "worker-1-00.x.atoll", "boss-1-0.x.atoll", "worker-1-0.x.atoll\n",
     "worker-1-0.x.atoll.", "worker-1-0.X.atoll", "worker-1-0.-x.atoll", "*.x.atoll", "worker-٣-0.x.atoll",
     f"worker-{'9' * 5000}-0.x.atoll", f"worker-1-0.{'x' * 64}.atoll", "worker-1-0.a.b.atoll"],
)  # fmt: skip
def test_other_host_names_are_nobodys(name: str) -> None:
    assert Bearer.read(name) is None


def test_a_later_certificate_is_of_the_same_bearer(authority: Authority) -> None:
    first, second = authority.issue("worker", 3), authority.issue("worker", 3, generation=2)
    assert first.bearer == second.bearer and Certificate.read(second.certificate).bearer.generation == 2


def test_a_certificate_outlives_neither_its_days_nor_the_authority(authority: Authority) -> None:
    read = Certificate.read(authority.issue("worker", 0, days=30).certificate)
    assert abs(read.valid_until - NOW - timedelta(days=30)) < timedelta(hours=1)
    assert not read.clock_fault(NOW) and not read.clock_fault(NOW - timedelta(hours=20))  # a clock that is behind
    assert "expired" in read.clock_fault(NOW + timedelta(days=31)) and "clock" in read.clock_fault(
        NOW - timedelta(days=2)
    )
    late = authority.valid_until - timedelta(days=10)
    with pytest.raises(ConfigError) as caught:
        authority.issue("worker", 0, days=11, start=late)
    assert caught.value.setting == "days" and "at most 10" in str(caught.value)
    authority.issue("worker", 0, days=9, start=late)


def test_arguments_out_of_bounds_are_refused(authority: Authority) -> None:
    def setting(**arguments: object) -> str | None:
        with pytest.raises(ConfigError) as caught:
            authority.issue(**{"role": "worker", **arguments})  # type: ignore[arg-type]
        return caught.value.setting

    assert setting(role="boss") == "role" and setting(seat=-1) == "seat" and setting(seat=10**6) == "seat"
    assert setting(days=0) == setting(days=MOST_DAYS + 1) == setting(days=10**12) == "days"
    assert setting(generation=MOST_GENERATIONS) == "generation"
    for run in ("X", "a.b", "-a", "a" * 64, "a b", "ü"):
        with pytest.raises(ConfigError):
            Authority.new(run)


# ---------------------------------------------------------------------- files


def test_a_bundle_is_read_as_it_was_written_and_closed_to_others(authority: Authority, tmp_path: Path) -> None:
    before = os.umask(0)  # nothing may hang on it
    try:
        identity = authority.issue("worker", 7)
        identity.save(tmp_path / "worker-7")
        authority.save(tmp_path / "authority")
    finally:
        os.umask(before)
    assert Identity.load(tmp_path / "worker-7") == identity
    assert Authority.load(tmp_path / "authority").run == authority.run
    assert modes(tmp_path) == {0o600} and stat.S_IMODE((tmp_path / "worker-7").stat().st_mode) == 0o700
    assert "PRIVATE" not in repr(identity)


def test_keys_are_never_overwritten_silently(authority: Authority, tmp_path: Path) -> None:
    first = authority.issue("worker", 0)
    first.save(tmp_path)
    for again in (authority.issue("worker", 0), authority):
        with pytest.raises(ConfigError, match="not overwritten"):
            again.save(tmp_path)
    assert Identity.load(tmp_path) == first
    second = authority.issue("worker", 0)
    second.save(tmp_path, replace=True)
    assert Identity.load(tmp_path) == second and modes(tmp_path) == {0o600}
    assert sorted(path.name for path in tmp_path.iterdir()) == [CERTIFICATE_PEM, KEY_PEM, RUN_PEM]


def test_a_key_that_others_may_read_is_refused(authority: Authority, tmp_path: Path) -> None:
    authority.issue("worker", 0).save(tmp_path / "bundle")
    authority.save(tmp_path / "authority")
    for mode in (0o640, 0o604):
        (tmp_path / "bundle" / KEY_PEM).chmod(mode)
        refused(tmp_path / "bundle", f"{mode:o}", "chmod 600")
    (tmp_path / "authority" / KEY_PEM).chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        Authority.load(tmp_path / "authority")


def test_files_that_do_not_belong_together_are_refused(authority: Authority, tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    mine, other = authority.issue("worker", 0), Authority.new(authority.run).issue("worker", 0)
    refused(bundle, RUN_PEM, "atoll keys new")
    mine.save(bundle)
    (bundle / KEY_PEM).write_bytes(other.key)
    refused(bundle, "is not the key")
    mine.save(bundle, replace=True)
    (bundle / RUN_PEM).write_bytes(other.run_certificate)
    refused(bundle, "two runs")
    (bundle / RUN_PEM).write_bytes(b"garbage")
    refused(bundle, "not what `atoll keys` writes")
    (bundle / RUN_PEM).write_bytes(b"x" * 10**6)
    refused(bundle, "the most that is read")
    mine.save(bundle, replace=True)
    (bundle / CERTIFICATE_PEM).write_bytes(mine.run_certificate)  # the authority's is nobody's
    refused(bundle, "of no run")
    (bundle / KEY_PEM).unlink()
    refused(bundle, KEY_PEM, "cannot be read")


def test_the_folder_of_all_bundles_is_not_one_of_them(tmp_path: Path) -> None:
    throw_away(2).save(tmp_path)
    with pytest.raises(ConfigError, match="give one of the folders in it: observer, registry, worker-0, worker-1"):
        Identity.load(tmp_path)


def test_an_expired_bundle_says_how_to_renew_it(authority: Authority, tmp_path: Path) -> None:
    authority.issue("worker", 3, days=5).save(tmp_path)
    refused(tmp_path, "worker 3", "expired on", "atoll keys renew FOLDER --worker 3", now=NOW + timedelta(days=6))
    refused(tmp_path, "clock", now=NOW - timedelta(days=6))


# ---------------------------------------------------------------------- throw-away keys


def test_throw_away_keys_take_one_call() -> None:
    ring = throw_away(3)
    assert [identity.bearer.seat for identity in ring.workers] == [0, 1, 2]
    assert {identity.bearer.run for identity in ring.all} == {ring.registry.bearer.run}
    assert throw_away(1).registry.bearer.run != ring.registry.bearer.run
    with throw_away_folder(2) as folder:
        assert Identity.load(folder / "worker-1").bearer.seat == 1
        assert {path.name for path in folder.iterdir()} == {"worker-0", "worker-1", "registry", "observer"}
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and modes(folder) == {0o600}
    assert not folder.exists()
