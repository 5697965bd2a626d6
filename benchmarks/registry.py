"""Prints how long a registry takes to tell a watcher of a change, on loopback.

    python benchmarks/registry.py [etcd://HOST:PORT/NAME]

Without an argument: an embedded registry with mutual TLS, in this process.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path

from atoll.link.net.embedded import RegistryServer
from atoll.link.net.embedded_client import EmbeddedRegistry
from atoll.link.net.etcd import EtcdRegistry
from atoll.link.net.etcd_gateway import EtcdOptions
from atoll.link.net.identity import Authority
from atoll.link.net.registry import INSECURE, VIEW, Registry

CHANGES = 200


async def measure(name: str, writer: Registry, reader: Registry) -> None:
    watch = reader.watch(VIEW)
    await anext(watch)
    entry = await writer.get(VIEW)
    version, until_told, until_answered = entry.version if entry else 0, list[float](), list[float]()
    for number in range(CHANGES):
        told = asyncio.ensure_future(anext(watch))
        await asyncio.sleep(0.005)
        began = time.perf_counter()
        outcome = await writer.compare_and_set(VIEW, b"%d" % number, version)
        until_answered.append(time.perf_counter() - began)
        update = await told
        until_told.append(time.perf_counter() - began)
        assert outcome.entry is not None and update.version == outcome.entry.version
        version = update.version
    await watch.aclose()
    for what, times in (("compare-and-set", until_answered), ("and the watcher is told", until_told)):
        worst = sorted(times)[int(0.99 * len(times))]
        print(f"{name:10} {what:24} {1e3 * statistics.median(times):6.1f} ms (99 %: {1e3 * worst:.1f} ms)")


async def main(url: str | None) -> None:
    if url is not None:
        options = EtcdOptions.read(url, INSECURE)
        async with EtcdRegistry(options) as writer, EtcdRegistry(options) as reader:
            await measure("etcd", writer, reader)
        return
    authority = Authority.new()
    with tempfile.TemporaryDirectory() as folder:
        server = await RegistryServer.start(Path(folder), "127.0.0.1:0", authority.issue("registry"))
        async with (
            EmbeddedRegistry(server.address, authority.issue("worker", 0)) as writer,
            EmbeddedRegistry(server.address, authority.issue("worker", 1)) as reader,
        ):
            await measure("embedded", writer, reader)
        await server.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", nargs="?", help="etcd://HOST:PORT,HOST:PORT/NAME; left out: the embedded registry")
    asyncio.run(main(parser.parse_args().url))
