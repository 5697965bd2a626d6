"""Makes elastic links on loopback, with a registry inside this process and throw-away keys."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.link.net.elastic_link import ElasticLink, ElasticOptions
from atoll.link.net.embedded import RegistryServer
from atoll.link.net.event_loop import event_loop
from atoll.link.net.run_keys import KeyRing, throw_away


@dataclass
class ElasticRun:
    """Holds a registry and the keys of a run."""

    workers: int
    keys: KeyRing
    server: RegistryServer
    folder: Path

    def link(self, worker: int, **options: Any) -> ElasticLink:
        """Make a worker's link."""
        given = {"silent_s": 10.0, "join_s": 20.0, "listen": "127.0.0.1:0", **options}
        return ElasticLink(
            worker,
            self.workers,
            ElasticOptions(registry=self.server.address, security=self.keys.workers[worker], **given),
        )

    def links(self, **options: Any) -> list[ElasticLink]:
        """Make the links of all workers."""
        return [self.link(worker, **options) for worker in range(self.workers)]

    def restart_registry(self) -> None:
        """End the registry and start it again at the same address."""
        address = self.server.address
        event_loop().run(self.server.close())
        self.server = event_loop().run(RegistryServer.start(self.folder, address, self.keys.registry))


@contextmanager
def elastic_run(workers: int, folder: Path) -> Iterator[ElasticRun]:
    """Serve the registry of a run; nothing of it is left at the end."""
    keys = throw_away(workers)
    server = event_loop().run(RegistryServer.start(folder, "127.0.0.1:0", keys.registry))
    run = ElasticRun(workers, keys, server, folder)
    try:
        yield run
    finally:
        event_loop().run(run.server.close())
