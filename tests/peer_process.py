"""A process that has one peer, to be killed and stopped.

    python tests/peer_process.py KEYS SEAT PEER ADDRESS SILENT_S

It dials the peer at ADDRESS, or waits for it if that is "-". It prints where it listens and what happens, and echoes
control messages.
"""

import asyncio
import sys
from pathlib import Path

from atoll.link.net.identity import Identity
from atoll.link.net.peers import Peers
from atoll.link.net.views import Process


class Echo:
    """Prints what happens."""

    def __init__(self) -> None:
        self.peers: Peers | None = None
        self.over = asyncio.Event()

    def connected(self, peer: Process, greeting: bytes) -> None:
        print("connected", peer.seat, greeting.decode(), flush=True)

    def lost(self, peer: Process, why: str) -> None:
        print("lost", peer.seat, why, flush=True)
        self.over.set()

    def control(self, peer: Process, data: bytes) -> None:
        assert self.peers is not None
        self.peers.send(peer, data)

    def bulk(self, peer: Process, header: bytes, body: bytearray) -> None:
        pass


async def main(keys: str, seat: str, peer: str, address: str, silent_s: str) -> None:
    identity = Identity.load(Path(keys) / f"worker-{seat}")
    echo = Echo()
    echo.peers = Peers(Process(int(seat), 1), identity, echo, greeting=b"hello", silent_s=float(silent_s))
    print("listens", await echo.peers.start("127.0.0.1:0"), flush=True)
    echo.peers.meet(Process(int(peer), 1), [] if address == "-" else [address], dial=True)
    await echo.over.wait()
    await echo.peers.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
