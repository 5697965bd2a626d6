"""`atoll keys`: keys are made, shown, renewed and revoked, and each mistake is one line."""

import re
import shlex
import stat
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import typer
from pydantic import ValidationError
from typer.testing import CliRunner, Result

from atoll.cli import main as cli
from atoll.cli.keys import keys
from atoll.errors import AtollError, ConfigError
from atoll.link.net.identity import KEY_PEM, MOST_DAYS, Bearer, Certificate, Identity
from atoll.link.net.revocations import REVOKED, Revocations, load_bundle
from atoll.link.net.run_keys import AUTHORITY, MOST_WORKERS, RunKeys
from atoll.settings.config import RunConfig


def atoll(*arguments: str | int | Path) -> Result:
    return CliRunner().invoke(cli.app, ["keys", *(str(argument) for argument in arguments)])


def said(*arguments: str | int | Path) -> str:
    result = atoll(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def complaint(*arguments: str | int | Path) -> str:
    """What a command that fails says: one line on stderr."""
    result = atoll(*arguments)
    assert result.exit_code == 2 and result.stdout == "", result.output
    assert result.stderr.count("\n") == 1 and result.stderr.startswith("error: "), result.stderr
    return result.stderr


@pytest.fixture
def run(tmp_path: Path) -> Path:
    said("new", tmp_path / "x", "--workers", "3")
    return tmp_path / "x"


def bundle(run: Path, worker: int) -> Path:
    return run / "keys" / f"worker-{worker}"


def revocations(folder: Path) -> Revocations:
    identity = Identity.load(folder)
    return Revocations.load(folder, identity.bearer.run, identity.run_certificate)


# ---------------------------------------------------------------------- new


def test_new_makes_a_bundle_for_every_seat(tmp_path: Path) -> None:
    out = said("new", tmp_path / "My Run", "--workers", "3", "--days", "30")
    place = tmp_path / "My Run" / "keys"
    assert {path.name for path in place.iterdir()} == {
        "authority", "observer", "registry", "worker-0", "worker-1", "worker-2"
    }  # fmt: skip
    for name, role, seat in (("worker-2", "worker", 2), ("registry", "registry", 0), ("observer", "observer", 0)):
        identity = Identity.load(place / name)
        assert (identity.bearer.role, identity.bearer.seat) == (role, seat)
        end = Certificate.read(identity.certificate).valid_until
        assert abs(end - datetime.now(UTC) - timedelta(days=30)) < timedelta(hours=1)
    assert identity.bearer.run.startswith("my-run-") and identity.bearer.run in out
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    assert all(word in out for word in ("worker-0 to worker-2", "registry", "observer", "authority", "30 days"))


def test_new_says_what_to_copy_in_words_that_a_shell_understands(tmp_path: Path) -> None:
    out = said("new", tmp_path / "my run", "--workers", "1")
    (command,) = [line.strip() for line in out.splitlines() if "scp" in line]
    there = tmp_path / "there"
    local = command.replace("ssh HOST ", "").replace("scp -rp", "cp -rp").replace("HOST:", str(there))
    local = local.replace("mkdir -p ", f"mkdir -p {shlex.quote(str(there))}")
    subprocess.run(local, shell=True, check=True)
    copied = Path(f"{there}{tmp_path}") / "my run" / "keys"
    assert [path.name for path in copied.iterdir()] == ["worker-0"]
    assert Identity.load(copied / "worker-0").bearer.seat == 0


def test_new_overwrites_nothing(run: Path) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*.pem")}
    assert "not overwritten" in complaint("new", run, "--workers", "2")
    assert {path: path.read_bytes() for path in run.rglob("*.pem")} == before
    (run / "keys").rename(run / "elsewhere")
    (run / "keys").symlink_to(run / "nowhere")
    assert "not overwritten" in complaint("new", run, "--workers", "2")


def test_new_makes_all_or_nothing(small_disk: Callable[[str], Path]) -> None:
    disk = small_disk("1m")
    with pytest.raises(AtollError, match="No space left"):
        RunKeys.new(disk, 100)
    assert list(disk.iterdir()) == []
    assert RunKeys.new(disk, 2).authority()


def test_new_fits_into_the_folder_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("")
    said("new", tmp_path, "--workers", "1")
    assert Identity.load(tmp_path / "keys" / "worker-0")


# ---------------------------------------------------------------------- show


def test_show_tells_run_seat_and_end(run: Path) -> None:
    name = Identity.load(bundle(run, 0)).bearer.run
    lines = said("show", run).splitlines()
    assert [line.split()[0] for line in lines] == [
        "authority",
        "worker-0",
        "worker-1",
        "worker-2",
        "observer",
        "registry",
    ]
    assert all(name in line and "valid until" in line for line in lines) and "(365 days)" in lines[1]
    assert said("show", run / "keys") == said("show", run)
    assert said("show", bundle(run, 1)).split() == lines[2].split()


def test_show_sorts_workers_by_number(tmp_path: Path) -> None:
    said("new", tmp_path, "--workers", "11")
    shown = [line.split()[0] for line in said("show", tmp_path).splitlines()]
    assert shown[1:12] == [f"worker-{k}" for k in range(11)]


def test_show_works_where_only_a_bundle_is(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(bundle(run, 2))
    assert said("show", ".").startswith("worker-2 ")


def test_show_tells_what_cannot_be_used(run: Path) -> None:
    (bundle(run, 0) / KEY_PEM).chmod(0o644)
    (bundle(run, 1) / KEY_PEM).write_bytes((bundle(run, 2) / KEY_PEM).read_bytes())
    said("revoke", run, "--worker", "2")
    lines = said("show", run).splitlines()
    assert "chmod 600" in lines[1] and "is not the key" in lines[2] and "revoked" in lines[3]
    later = RunKeys(run).show(datetime.now(UTC) + timedelta(days=400))
    assert "expired on" in next(row.state for row in later if row.name == "registry")


# ---------------------------------------------------------------------- renew and revoke


def test_renew_replaces_one_bundle_and_says_so(run: Path) -> None:
    before = {worker: Identity.load(bundle(run, worker)) for worker in range(3)}
    out = said("renew", run, "--worker", "1", "--days", "700")
    assert f"replaced {bundle(run, 1)}" in out and "scp" in out and "700 days" in out
    after = Identity.load(bundle(run, 1))
    assert after.key != before[1].key and after.bearer == before[1].bearer
    assert after.run_certificate == before[1].run_certificate
    assert (Certificate.read(after.certificate).valid_until - datetime.now(UTC)).days in (699, 700)
    assert all(Identity.load(bundle(run, worker)) == before[worker] for worker in (0, 2))


def test_renew_takes_several_and_makes_new_seats(run: Path) -> None:
    out = said("renew", run, "--worker", "0", "--worker", "7", "--registry", "--observer")
    assert [line.split()[0] for line in out.splitlines() if line[0] != " "] == [
        "replaced",
        "made",
        "replaced",
        "replaced",
    ]
    assert Identity.load(bundle(run, 7)).bearer.seat == 7


def test_renew_renews_an_expired_bundle(run: Path) -> None:
    authority = RunKeys(run).authority()
    old = authority.issue("worker", 1, days=5, start=datetime.now(UTC) - timedelta(days=10))
    old.save(bundle(run, 1), replace=True)
    assert "expired on" in said("show", bundle(run, 1))
    said("renew", run, "--worker", "1")
    assert Identity.load(bundle(run, 1)).bearer == old.bearer


def test_revoke_then_renew(run: Path) -> None:
    out = said("revoke", run, "--worker", "1")
    assert REVOKED in out and f"atoll keys renew {run} --worker 1" in out
    for place in ("worker-0", "worker-1", "worker-2", "registry", "observer"):
        known = revocations(run / "keys" / place)
        assert known.least == {("worker", 1): 1}
    assert known.has(Identity.load(bundle(run, 1)).bearer)
    assert load_bundle(bundle(run, 0)) == (Identity.load(bundle(run, 0)), known)
    with pytest.raises(ConfigError, match="worker 1 is revoked; for a new one"):
        load_bundle(bundle(run, 1))

    said("renew", run, "--worker", "1")
    said("renew", run, "--worker", "5")
    assert not known.has(Identity.load(bundle(run, 1)).bearer)
    assert revocations(bundle(run, 5)) == known  # a new bundle has the list too
    assert "revoked" not in said("show", run)

    said("revoke", run, "--worker", "1", "--registry")
    later = revocations(bundle(run, 0))
    assert later.includes(known) and later.least == {("worker", 1): 2, ("registry", 0): 1}
    assert later.has(Identity.load(bundle(run, 1)).bearer)


def test_a_seat_that_was_just_made_gets_the_list_too(run: Path) -> None:
    found = RunKeys(run)
    name = found.authority().run
    made = found.issue(Bearer(name, "worker", 5))
    found.revoke(Bearer(name, "worker", 1))
    assert revocations(made).least == {("worker", 1): 1}


def test_only_the_authority_renews_and_revokes(run: Path) -> None:
    (run / "keys" / AUTHORITY).rename(run / "safe")
    for command in ("renew", "revoke"):
        assert "run this where `atoll keys new` was run" in complaint(command, run, "--worker", "1")
    assert "valid until" in said("show", run)


def test_two_commands_at_once_lose_nothing(run: Path) -> None:
    found = RunKeys(run)
    with found._lock(), pytest.raises(AtollError, match="in use"):
        found.revoke(Bearer(found.authority().run, "worker", 1))
    assert not (run / "keys" / AUTHORITY / REVOKED).exists()


def test_a_damaged_list_is_not_built_upon(run: Path) -> None:
    said("revoke", run, "--worker", "1")
    (run / "keys" / AUTHORITY / REVOKED).write_text("atoll revocations 1\n")
    for command in ("renew", "revoke"):
        assert REVOKED in complaint(command, run, "--worker", "2")


def test_the_page_about_machines_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "machines.md").read_text(encoding="utf-8")
    commands = re.findall(r"^\$ atoll keys (.*)", page, re.MULTILINE)
    assert {command.split()[0] for command in commands} == {"new", "show", "renew", "revoke"}
    monkeypatch.chdir(tmp_path)
    printed = [said(*shlex.split(command)) for command in commands]
    (copy,) = [line.strip() for line in printed[0].splitlines() if "scp" in line]
    assert copy.replace("worker-0", "worker-1") in page
    known = revocations(tmp_path / "runs/run/keys/worker-1")
    assert known.least and not known.has(Identity.load(tmp_path / "runs/run/keys/worker-1").bearer)


# ---------------------------------------------------------------------- mistakes


def test_mistakes_are_one_line_each(run: Path, tmp_path: Path) -> None:
    assert "--worker K" in complaint("renew", run) and "--worker K" in complaint("revoke", run)
    assert "atoll keys new" in complaint("show", tmp_path / "nothing")
    assert "atoll keys new" in complaint("renew", tmp_path, "--worker", "0")
    assert "4095" in complaint("revoke", run, "--worker", "4096")
    for arguments in (("--workers", "0"), ("--workers", "4097"), ("--workers", "1", "--days", "0"), ()):
        assert atoll("new", tmp_path / "y", *arguments).exit_code == 2
    assert not (tmp_path / "y").exists()


def test_every_option_is_explained() -> None:
    for name, command in typer.main.get_command(keys).commands.items():  # type: ignore[attr-defined]
        assert "Examples:" in said(name, "--help")
        for parameter in command.params:
            assert getattr(parameter, "help", None), f"{name} {parameter.name}"


def test_the_command_line_has_the_bounds_of_the_library(run: Path) -> None:
    said("renew", run, "--worker", MOST_WORKERS - 1, "--days", MOST_DAYS)
    assert atoll("renew", run, "--worker", "1", "--days", MOST_DAYS + 1).exit_code == 2
    with pytest.raises(ValidationError):
        RunConfig.model_validate({"sync": {"workers": MOST_WORKERS + 1}})
    RunConfig.model_validate({"sync": {"workers": MOST_WORKERS}})


def test_the_library_checks_too(tmp_path: Path) -> None:
    for workers, days in ((0, 1), (4097, 1), (1, 0), (1, MOST_DAYS + 1)):
        with pytest.raises(ConfigError):
            RunKeys.new(tmp_path / "x", workers, days)
    assert not (tmp_path / "x").exists()
