"""One worker of benchmarks/wan.py: trains in its site by one method and writes down what it saw.

    python benchmarks/wan_worker.py TASK     # a Task as JSON; wan.py writes it

All methods train the same decoder from the same start, with the same inner optimizer, on the same batches in the same
order; they differ in what they do between workers. The clock covers whole periods after the warm-up. Between its steps,
wherever nothing is on its way, each worker makes a step without any exchange, on a model of its own: machines change
their speed from one moment to the next, and these show what it is at the time.
"""

import importlib
import json
import os
import random
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

import atoll
from atoll.core.schedule import Schedule
from atoll.settings.model_presets import preset
from atoll.train.model.decoder import Decoder

SEQUENCE = 64
SHAPE = preset("7M", context=SEQUENCE)
BATCH = 16
LEARNING_RATE = 1e-3
HELD_OUT_SEQUENCES = 64
TORCHFT_FRAGMENTS = 3
PORT, LIGHTHOUSE_PORT = 29500, 29510
PATIENCE = timedelta(minutes=10)
CARRYING = 50_000
"""Bytes that an interface carries in a step, both ways, if a round is on its way."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What one worker is to do."""

    method: str
    worker: int
    addresses: list[str]
    """Of all workers."""
    period: int
    delay: int
    cover: int
    """Steps after an exchange has begun in which it may still be on its way; 0 if it never outlasts its step."""
    warm_up: int
    """Steps before the clock starts."""
    steps: int
    """Steps on the clock."""
    folder: str
    """Where workers meet and results go."""

    @property
    def workers(self) -> int:
        """How many there are."""
        return len(self.addresses)


@dataclass
class Mark:
    """Sums since the worker began, or differences of them; what a worker has done by some moment."""

    wall_s: float
    step_s: float
    """In training steps."""
    backward_s: float
    """Forward and backward passes."""
    inner_s: float
    """The inner optimizer's step, with whatever is hooked to it."""
    outer_s: float
    """What follows the inner step."""
    wait_s: float
    """Of the latter, blocked on the link."""
    cpu_s: float
    """Of this process, all threads."""
    machine_s: float
    """Of all cores that this process may use, whoever used them."""
    sent_bytes: int
    """By the kernel's count of this site's interface."""
    received_bytes: int

    def since(self, before: "Mark") -> "Mark":
        """What lies between two moments."""
        return Mark(*(now - then for now, then in zip(asdict(self).values(), asdict(before).values(), strict=True)))


class Text:
    """The source of Python's standard library, as bytes; the last twentieth is held out."""

    def __init__(self) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        joined = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in files)), dtype=torch.uint8)
        self._kept = len(joined) // 20 * 19
        self._bytes = joined

    def batch(self, worker: int, step: int) -> Tensor:
        """The sequences that this worker trains on at this step, [BATCH, SEQUENCE + 1]; each method's are the same."""
        return self._cut(random.Random(f"{worker}/{step}"), 0, self._kept, BATCH)

    def held_out(self) -> Tensor:
        """The same sequences for every worker and method."""
        return self._cut(random.Random(0), self._kept, len(self._bytes), HELD_OUT_SEQUENCES)

    def _cut(self, draw: random.Random, first: int, end: int, count: int) -> Tensor:
        starts = [draw.randrange(first, end - SEQUENCE - 1) for _ in range(count)]
        return torch.stack([self._bytes[start : start + SEQUENCE + 1] for start in starts]).long()


class Alone:
    """No network: every worker trains by itself. The other methods add to this."""

    coupled = False
    """Whether a worker waits for the others; if not, it must train on until all are done, to keep the cores as busy."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.model = Decoder(SHAPE, generator=torch.Generator().manual_seed(0))
        self.inner = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)
        self.loss: Callable[[Tensor], Tensor] = lambda batch: self.model.loss(batch).total
        self.steps = 0
        self.step_s = self.backward_s = self.inner_s = self.outer_s = 0.0
        self.setup()

    def setup(self) -> None:
        """Meet the others."""

    def step(self, batch: Tensor) -> None:
        """Train one step, and note how long its parts took."""
        start = time.perf_counter()
        self.loss(batch).backward()
        backward = time.perf_counter()
        self.inner.step()
        inner = time.perf_counter()
        self.exchange()
        outer = time.perf_counter()
        self.inner.zero_grad()
        self.steps += 1
        self.step_s += time.perf_counter() - start
        self.backward_s += backward - start
        self.inner_s += inner - backward
        self.outer_s += outer - inner

    def exchange(self) -> None:
        """Do what follows every inner step."""

    def begins(self, step: int) -> bool:
        """Whether an exchange begins with this step, the first being 1."""
        return False

    def quiet(self) -> bool:
        """Whether nothing is on its way after the steps made so far: the same answer on every worker."""
        return not any(self.begins(self.steps - ago) for ago in range(self.task.cover))

    @property
    def wait_s(self) -> float:
        """Seconds blocked on the link so far, where the method counts them."""
        return 0.0

    def finish(self) -> None:
        """Leave the final outer parameters in the model."""

    def close(self) -> None:
        """Part from the others; nobody needs this worker any more."""


class DataParallel(Alone):
    """PyTorch's DistributedDataParallel over gloo: gradients in fp32, on every step, while backward goes on."""

    coupled = True

    def setup(self) -> None:
        """Join the process group; nothing is broadcast, since all start alike."""
        distributed.init_process_group(
            "gloo",
            init_method=f"tcp://{self.task.addresses[0]}:{PORT}",
            rank=self.task.worker,
            world_size=self.task.workers,
            timeout=PATIENCE,
        )
        self.loss = DistributedDataParallel(_LossOf(self.model), init_sync=False)

    def close(self) -> None:
        """Leave the process group."""
        distributed.destroy_process_group()


class _LossOf(nn.Module):
    """A decoder whose forward is its loss, because DistributedDataParallel looks at nothing but forward."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, batch: Tensor) -> Tensor:
        """The loss to descend."""
        return self.decoder.loss(batch).total


class TorchFT(Alone):
    """torchft's DiLoCo in fp32, as its documentation has it: fragments in turn, one outer optimizer for each.

    Three fragments of three consecutive blocks, what is outside blocks with the first and the last. With a delay, the
    sum of a fragment travels that many steps, and half of the local parameters is kept (alpha), as in the Streaming
    paper. It hooks itself to the inner optimizer's step.
    """

    coupled = True

    def setup(self) -> None:
        """Start a lighthouse at the first worker and a manager at each."""
        torchft = importlib.import_module("torchft")
        home, own = self.task.addresses[0], self.task.addresses[self.task.worker]
        if self.task.worker == 0:
            coordination = importlib.import_module("torchft.coordination")
            self._lighthouse = coordination.LighthouseServer(
                bind=f"0.0.0.0:{LIGHTHOUSE_PORT}", min_replicas=self.task.workers, join_timeout_ms=60_000
            )
        self._store = distributed.TCPStore(own, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        self._manager = torchft.Manager(
            pg=torchft.ProcessGroupGloo(timeout=PATIENCE),
            load_state_dict=self.model.load_state_dict,
            state_dict=self.model.state_dict,
            min_replica_size=self.task.workers,
            use_async_quorum=False,
            init_sync=False,  # all start alike
            timeout=PATIENCE,
            quorum_timeout=PATIENCE,
            connect_timeout=PATIENCE,
            rank=0,
            world_size=1,
            store_addr=own,
            store_port=self._store.port,
            lighthouse_addr=f"http://{home}:{LIGHTHOUSE_PORT}",
            replica_id=f"site{self.task.worker}",
            hostname=own,
        )
        self._diloco = importlib.import_module("torchft.local_sgd").DiLoCo(
            self._manager,
            fragments := torchft_fragments(self.model),
            self.inner,
            [torch.optim.SGD(part.parameters(), lr=0.7, momentum=0.9, nesterov=True) for part in fragments],
            sync_every=self.task.period,
            fragment_sync_delay=self.task.delay,
            fragment_update_alpha=0.5 if self.task.delay else 0.0,
        )
        self._diloco.__enter__()

    def begins(self, step: int) -> bool:
        """A fragment is sent so many steps before it is due."""
        return (step + self.task.delay) % (self.task.period // TORCHFT_FRAGMENTS) == 0

    def finish(self) -> None:
        """Take each fragment's outer parameters; torchft has nothing that exchanges what is left."""
        for fragment in self._diloco._fragments:
            fragment.restore_parameters()
        expected = (self.task.warm_up + self.task.steps) // (self.task.period // TORCHFT_FRAGMENTS)
        if self._manager.current_step() != expected:  # it goes on after failed exchanges
            raise RuntimeError(f"torchft has made {self._manager.current_step()} of {expected} outer steps")

    def close(self) -> None:
        """Stop the threads that would keep the process alive."""
        self._diloco.__exit__(None, None, None)
        self._manager.shutdown(wait=False)
        if self.task.worker == 0:
            self._lighthouse.shutdown()


def torchft_fragments(model: Decoder) -> list[nn.Module]:
    """Consecutive blocks in as many parts as torchft's rows have fragments."""
    blocks = list(model.blocks)
    each = len(blocks) // TORCHFT_FRAGMENTS
    parts: list[list[nn.Module]] = [blocks[start : start + each] for start in range(0, len(blocks), each)]
    parts[0].append(model.embedding)
    parts[-1].append(model.norm)
    return [nn.ModuleList(part) for part in parts]


class Ours(Alone):
    """atoll's outer loop: DiLoCo in fp32, Streaming in 4 bits with a delay, or Eager in 4 bits."""

    coupled = True

    def setup(self) -> None:
        """Make the outer loop and meet the others."""
        self._link = atoll.connect(
            address=f"{self.task.addresses[0]}:{PORT}",
            worker=self.task.worker,
            workers=self.task.workers,
            keys=f"{self.task.folder}/worker-{self.task.worker}",
            deadline_s=PATIENCE.total_seconds(),
        )
        sync = our_sync(self.task.method, self.task.period, self.task.delay)
        self._outer = atoll.OuterLoop(self.model, sync, self._link)
        delay = sync.delay_of(self.task.worker, self.task.workers)
        self._schedule = Schedule(sync.period, len(self._outer.fragments), delay)
        self._outer.join()

    def exchange(self) -> None:
        """Send and apply what is due."""
        self._outer.step()

    def begins(self, step: int) -> bool:
        """As the schedule has it."""
        return bool(self._schedule.due(step).send)

    @property
    def wait_s(self) -> float:
        """Seconds blocked on the link so far."""
        return self._outer.counters.wait_s

    def finish(self) -> None:
        """Exchange what is left and take the outer parameters."""
        self._outer.finish()

    def close(self) -> None:
        """Leave the link."""
        self._link.close()


def our_sync(method: str, period: int, delay: int) -> atoll.Sync:
    """The method behind a row's name; Streaming has torchft's alpha and its paper's outer learning rate."""
    if method == "diloco":
        return atoll.DiLoCo(period=period)
    if method == "streaming":
        return atoll.Streaming(period=period, delay=delay, merge=atoll.Blend(0.5), outer=atoll.Nesterov(0.4, 0.9))
    return atoll.Eager(period=period)


METHODS: dict[str, type[Alone]] = {
    "alone": Alone,
    "ddp": DataParallel,
    "torchft": TorchFT,
    "torchft-delay": TorchFT,
    "diloco": Ours,
    "streaming": Ours,
    "eager": Ours,
}


def carried() -> tuple[int, int]:
    """Bytes that this site's interface has sent and received, by the kernel's count."""
    interface = Path("/sys/class/net/line/statistics")
    sent, received = (int((interface / f"{way}_bytes").read_text()) for way in ("tx", "rx"))
    return sent, received


def mark(method: Alone) -> Mark:
    parts = (method.step_s, method.backward_s, method.inner_s, method.outer_s, method.wait_s)
    return Mark(time.perf_counter(), *parts, time.process_time(), machine_seconds(), *carried())


def machine_seconds() -> float:
    """What the cores that this process may use have worked since the machine started; in hundredths, by the kernel."""
    own = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    lines = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
    used = [list(map(int, values[:7])) for name, *values in lines if name in own]
    return sum(sum(each) - each[3] - each[4] for each in used) / 100  # less idle, and waiting for a disk


def meet(task: Task, place: str) -> None:
    """Wait until all workers are here; files will do, since all sites are on one machine and need no line for it."""
    arrive(task, place)
    while not all_at(task, place):
        time.sleep(0.01)


def arrive(task: Task, place: str) -> None:
    Path(task.folder, f"{place}-{task.worker}").touch()


def all_at(task: Task, place: str) -> bool:
    return all(Path(task.folder, f"{place}-{worker}").exists() for worker in range(task.workers))


def held_out_loss(method: Alone, text: Text) -> float:
    with torch.no_grad():
        return float(method.model.loss(text.held_out()).cross_entropy)


def training(method: Alone) -> float:
    """Seconds so far in forward and backward passes and in inner optimizers."""
    return method.backward_s + method.inner_s


def on_the_clock(method: Alone, bare: Alone, text: Text) -> tuple[list[float], Mark]:
    """Train; returns seconds of training in each step that a round travelled through, and what all of them took."""
    task = method.task
    overlapped = []
    start = mark(method)
    for step in range(task.warm_up, task.warm_up + task.steps):
        flying = not method.quiet()
        before, trained = sum(carried()), training(method)
        method.step(text.batch(task.worker, step))
        if flying and sum(carried()) - before > CARRYING:
            overlapped.append(training(method) - trained)
        if method.quiet():
            bare.step(text.batch(task.worker, step))
    return overlapped, mark(method).since(start)


def train(task: Task) -> dict[str, Any]:
    text = Text()
    method = METHODS[task.method](task)
    bare = Alone(task)
    bare.step(text.batch(task.worker, 0))  # its first step is slow
    bare_start = mark(bare)
    meet(task, "ready")
    for step in range(task.warm_up):
        method.step(text.batch(task.worker, step))
    overlapped, seen = on_the_clock(method, bare, text)
    arrive(task, "clock")
    local_loss = loss = held_out_loss(method, text)
    while not method.coupled and not all_at(task, "clock"):
        method.step(text.batch(task.worker, method.steps))
    if method.coupled:
        method.finish()
        loss = held_out_loss(method, text)
    bare_seen, bare_steps = mark(bare).since(bare_start), bare.steps - 1
    result = {
        **asdict(seen),
        **{f"bare_{part}_s": getattr(bare_seen, f"{part}_s") / bare_steps for part in ("step", "backward", "inner")},
        "bare_outer_s": 0.0,
        "overlapped_s": overlapped,
        "local_loss": local_loss,
        "loss": loss,
    }
    meet(task, "over")
    method.close()
    return result


def main() -> None:
    task = Task(**json.loads(sys.argv[1]))
    torch.set_num_threads(1)
    result = train(task)
    Path(task.folder, f"result-{task.worker}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
