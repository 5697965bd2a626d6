"""`atoll registry`: what it refuses, and how it stops."""

import asyncio
import signal
from pathlib import Path

import pytest

from atoll.cli.registry import registry
from atoll.errors import ConfigError
from atoll.link.net.embedded_client import EmbeddedRegistry
from atoll.link.net.identity import Authority
from atoll.link.net.registry import INSECURE, VIEW
from registries import PATIENCE_S, RegistryProcess

pytestmark = pytest.mark.processes  # waits for connections more than it computes


@pytest.mark.parametrize(
    ("keys", "security", "setting"),
    [
        (None, "keys", "keys"),
        ("worker", "keys", "keys"),
        ("observer", "keys", "keys"),
        ("nowhere", "keys", "keys"),
        ("registry", "none", "keys"),
        ("registry", "no", "security"),
        (None, "", "security"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, keys: str | None, security: str, setting: str) -> None:
    authority = Authority.new()
    for role in ("registry", "worker", "observer"):
        authority.issue(role).save(tmp_path / role)
    folder = tmp_path / keys if keys else None
    with pytest.raises(ConfigError) as caught:
        registry(tmp_path / "folder", "127.0.0.1:0", folder, security)
    assert caught.value.setting == setting and not (tmp_path / "folder").exists()


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_stops_when_asked_and_goes_on_from_there(tmp_path: Path, number: signal.Signals) -> None:
    async def write(address: str, value: bytes, version: int) -> int:
        async with EmbeddedRegistry(address, INSECURE) as client:
            watch = client.watch("")  # one that is open does not keep it from stopping
            await anext(watch)
            outcome = await client.compare_and_set(VIEW, value, version)
            assert outcome.accepted and outcome.entry is not None and process.child is not None
            process.child.kill(number)
            assert await asyncio.to_thread(process.child.process.wait, PATIENCE_S) == 0
            await watch.aclose()
            return outcome.entry.version

    with RegistryProcess(tmp_path / "registry", None) as process:
        assert process.child is not None and "no security" in process.child.said()
        version = asyncio.run(write(process.address, b"first", 0))
        process.start()
        assert asyncio.run(write(process.address, b"second", version)) > version
        assert process.child.said().count("goes on from there") == 2
