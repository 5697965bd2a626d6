"""Defines the sections of a run file: every setting with its type, its range, its default and what it is for.

The line under a setting is its only documentation: `atoll init` writes it beside the default, and an error about the
setting ends with it. `settings/conflicts.py` checks what depends on several settings.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from atoll.settings.value_types import (
    BPE_VOCABULARY,
    LEAST_BPE_VOCABULARY,
    MANY,
    Address,
    Alert,
    Allowed,
    Amount,
    Betas,
    Chance,
    CodecName,
    Compute,
    Connections,
    Count,
    Decay,
    Delays,
    Even,
    Fragments,
    Listen,
    Method,
    Outer,
    Part,
    Positive,
    Preset,
    Registry,
    Seconds,
    Seed,
    Share,
    Silence,
    Size,
    Source,
    Sources,
    Steps,
    Text,
    Tokenizer,
    Tokens,
    View,
    Worker,
    Workers,
    worker_numbers,
)

if TYPE_CHECKING:
    from atoll.outer.presets import Gradients, Sync


# ---------------------------------------------------------------------- sections


class Section(BaseModel):
    """Validates a part of a run file strictly: unknown keys are errors, and "3" is no number."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class ModelSection(Section):
    """The model: a preset with some of its settings changed, or a Hugging Face model."""

    preset: Preset | None = "tiny"
    """Shape by name; the first three are for a CPU, the others are the papers'."""
    layers: Size | None = Field(default=None, examples=[6])
    """Number of blocks; left out, like those below: the preset's."""
    width: Size | None = Field(default=None, examples=[48])
    """Values per token between blocks."""
    heads: Size | None = Field(default=None, examples=[3])
    """Attention heads of a block."""
    head_width: Even | None = Field(default=None, examples=[16])
    """Values per head; heads * head_width may differ from width."""
    feedforward: Size | None = Field(default=None, examples=[192])
    """Values per token inside the feed-forward layer."""
    vocabulary: Size | None = Field(default=None, examples=[512])
    """Tokens the model knows; left out: the tokenizer's."""
    context: Size | None = Field(default=None, examples=[128])
    """Longest sequence in tokens."""
    tied: bool | None = Field(default=None, examples=[True])
    """One matrix for token embedding and head."""
    qk_norm: bool | None = Field(default=None, examples=[True])
    """Normalise each head's query and key, which keeps attention scores from growing."""
    z_loss: Amount | None = Field(default=None, examples=[1e-4])
    """Weight of the loss that keeps logits from drifting; 0 for none."""
    checkpoint_activations: bool | None = Field(default=None, examples=[False])
    """Recompute blocks in the backward pass: less memory, about a third more time."""
    rope_base: Annotated[float, Field(ge=1), Allowed("a number of at least 1")] | None = Field(
        default=None, examples=[10000.0]
    )
    """Base of the rotary position embedding."""
    hf: Text | None = Field(default=None, examples=["gpt2"])
    """A Hugging Face causal LM instead, a name or a folder; then leave out all above."""
    hf_weights: bool = True
    """Start from its weights, or (false) from its config alone."""

    @model_validator(mode="before")
    @classmethod
    def _no_preset_beside_hf(cls, values: Any) -> Any:
        """Drops the default preset where model.hf is given."""
        if not isinstance(values, dict):
            return values
        given = {key: value for key, value in values.items() if key != "preset" or value is not None}
        return {"preset": None} | given if given.get("hf") is not None else given


class DataSection(Section):
    """The text to train on, its tokens, and the part of each worker."""

    source: Source | Sources = "stdlib"
    """Text, JSONL or Parquet files, folders (of tokens too), globs, hf:NAME[:CONFIG], stdlib (Python's); or a list."""
    field: Text = "text"
    """The column of the text in JSONL, Parquet or datasets."""
    tokenizer: Tokenizer = "bytes"
    """bytes (no setup), bpe (trained on the source), or the path of a tokenizer.json."""
    vocabulary: (
        Annotated[
            int,
            Field(ge=LEAST_BPE_VOCABULARY, le=10**7),
            Allowed(f"a whole number from {LEAST_BPE_VOCABULARY} to 10^7"),
        ]
        | None
    ) = Field(default=None, examples=[BPE_VOCABULARY])
    """Tokens of a bpe tokenizer; left out: 8192."""
    held_out: Part = 0.02
    """Share of the documents kept from training, for evaluation."""
    split: Literal["iid", "clusters"] = "iid"
    """Documents dealt at random, or one group of like ones per worker."""
    weighting: Literal["examples", "equal"] = "examples"
    """Weight of a worker in the mean: its rows, or the same for all."""
    cache: Text = "runs/.tokens"
    """Folder for the tokens, made once and shared by all runs on the same data."""
    limit: Annotated[int, Field(ge=2, le=MANY), Allowed("a whole number from 2 to 10^12")] | None = Field(
        default=None, examples=[10000]
    )
    """Use at most this many documents; left out: all."""


class TrainSection(Section):
    """Inner training, the same on every worker."""

    steps: Count | None = Field(default=None, examples=[1000])
    """Inner steps of each worker; left out: 20 tokens per parameter."""
    batch: Count = 8
    """Sequences per worker and inner step."""
    sequence: Count | None = Field(default=None, examples=[128])
    """Tokens per sequence; left out: the model's context, at most 1024 for a Hugging Face model."""
    accumulate: Count = 1
    """Parts a batch is computed in, to save memory; must divide batch."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """Inner optimizer; muon: blocks' matrices, adamw the rest; try alpha 0.5, outer_lr 0.7, outer_momentum 0.6."""
    lr: Positive | None = Field(default=None, examples=[0.003])
    """Highest inner learning rate; left out: chosen by optimizer and model size."""
    warmup: Steps | None = Field(default=None, examples=[100])
    """Inner steps until lr is reached; left out: a tenth of all, at most 1000."""
    final_lr: Chance = 0.05
    """Share of lr that is left at the end of the cosine."""
    weight_decay: Amount | None = Field(default=None, examples=[0.001])
    """Decoupled weight decay; left out: 1 / steps."""
    betas: Betas = (0.9, 0.99)
    """Decay of AdamW's two moments."""
    clip: Amount = 1.0
    """Largest norm of a worker's gradient; 0 for no limit."""
    eval_every: Count | None = Field(default=None, examples=[100])
    """Inner steps between evaluations of the outer parameters; left out: chosen from steps."""
    eval_tokens: Count = 65536
    """Held-out tokens per evaluation."""
    log_every: Count = 10
    """Inner steps between two lines of metrics, after that of the first step."""
    save_every: Count | None = Field(default=None, examples=[500])
    """Inner steps between checkpoints; left out: chosen from steps."""
    keep: Count = 2
    """Latest checkpoints to keep; the best weights are kept as well."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """How ranks of one worker (torchrun) share it: each has the whole model, or each a part of every parameter."""


class SyncSection(Section):
    """The workers, and when, what and how they exchange."""

    workers: Workers = 2
    """Copies of the model that train apart, each on its own part of the data."""
    method: Method = "streaming"
    """How they stay together; none: one worker by itself, data-parallel: a round of gradients on every step."""
    period: Annotated[int, Field(ge=1, le=10**9), Allowed("a whole number from 1 to 10^9")] | None = Field(
        default=None, examples=[100]
    )
    """Inner steps between two sends of the same parameters (H); left out: 100 streaming, 500 diloco, else 30."""
    fragments: Fragments | None = Field(default=None, examples=["blocks"])
    """Sent together: whole, blocks[:3[:sequential]], balanced:4; left out: up to 3 blocks for streaming, else whole."""
    delay: Steps | Delays | None = Field(default=None, examples=[1])
    """Inner steps between a send and its apply, or a list, one per worker; left out: 1 for streaming, 0 for diloco."""
    codec: CodecName | None = Field(default=None, examples=["e3m0"])
    """Format of deltas; 4 bit: e3m0, e2m1, lloyd4; fewer: lloyd2, top64 (see feedback); left out: e3m0, diloco fp32."""
    stochastic: bool = False
    """Round up or down at random, right on average; for 4 and 8 bits."""
    feedback: bool | Part = False
    """Add what was lost, or a share of it, to the next round; 0.95 for top64, with outer = "sgd", outer_lr = 1.0."""
    alpha: Chance | None = Field(default=None, examples=[0.25])
    """How much of its own progress a worker keeps at an apply; left out: 0.25 for streaming, else 0."""
    outlier_ratio: Annotated[float, Field(gt=1, le=1e9), Allowed("a number above 1, up to 10^9")] = 10.0
    """Leave a delta out of its round if its norm is this many times larger than the last rounds lead to expect."""
    offload: bool = False
    """Keep anchors and outer momentum in the host's memory until they are due; on a GPU."""
    outer: Outer = "nesterov"
    """Outer optimizer: turns the mean delta into a step."""
    outer_lr: Positive | None = Field(default=None, examples=[0.6])
    """Outer learning rate; left out: nesterov 0.6 (diloco 0.7, eager, delayed 0.4), momentum 0.7, sgd 1, adam 0.3."""
    outer_momentum: Decay | None = Field(default=None, examples=[0.9])
    """Momentum of nesterov and momentum; left out: 0.9."""
    outer_betas: Betas | None = Field(default=None, examples=[(0.9, 0.95)])
    """Betas of adam; left out: 0.9 and 0.95."""
    outer_eps: Positive | None = Field(default=None, examples=[0.1])
    """Epsilon of adam, which is unstable on deltas when it is small; left out: 0.1."""

    def preset(self) -> "Sync | Gradients | None":
        """Returns the library's preset of the method: its values are the defaults of this section."""
        from atoll.outer import presets  # imports torch

        methods: dict[str, Callable[[], Sync | Gradients]] = {
            "data-parallel": presets.DataParallel,
            "diloco": presets.DiLoCo,
            "streaming": presets.Streaming,
            "eager": presets.Eager,
            "delayed": presets.Delayed,
        }
        return methods[self.method]() if self.method in methods else None

    @property
    def used_period(self) -> int:
        """The period in inner steps: the given one, else the preset's; 1 for a method without rounds."""
        if self.method in ("none", "data-parallel"):
            return 1
        return self.period or cast("Sync", self.preset()).period


class AbsenceEntry(Section):
    """Takes a worker away from inner step `first` to `last`, both included."""

    worker: Worker
    """The worker that is away, from 0."""
    first: Count = 1
    """First inner step it misses."""
    last: Count | None = None
    """Last inner step it misses; left out: it never comes back."""


class FaultSection(Section):
    """Faults on purpose, the same in every run, to study what they cost."""

    drop: Chance = 0.0
    """Chance that a worker's payload of a round is lost; it trains on from its own parameters."""
    seed: Seed = 0
    """Decides which payloads are lost."""
    compute: Compute = "constant"
    """How many workers take part over the run: all; half, then all; all, then half; one more at a time; one fewer."""
    absences: Annotated[
        tuple[AbsenceEntry, ...],
        Field(strict=False),
        Allowed("a list like [{worker = 1, first = 101, last = 200}]"),
    ] = Field(default=(), examples=[[{"worker": 1, "first": 101, "last": 200}]])
    """Workers that are away, from which inner step to which; without last, for good."""
    speeds: Annotated[
        dict[Worker, Share],
        BeforeValidator(worker_numbers),
        Allowed("a table of workers and shares like {1 = 0.5}, each above 0 and at most 1"),
    ] = Field(default={}, examples=[{"1": 0.5}])
    """Slow workers: the share of the inner steps each has time for."""


class OutageEntry(Section):
    """Cuts the emulated link for a time."""

    start_s: Amount
    """Seconds since the workers met."""
    length_s: Positive
    """Seconds it lasts."""


class LinkSection(Section):
    """The link between workers on several machines, and how slow to make it."""

    address: Address | None = Field(default=None, examples=["10.0.0.1:29500"])
    """Address that worker 0 listens on (--address); left out: all workers are in one process."""
    deadline_s: Seconds = 180.0
    """Seconds after which a round that is not complete ends the run; slower workers and the transfer must fit in."""
    silent_s: Silence = 5.0
    """Seconds after which a worker that says nothing is lost: the run ends, or, elastic, the others go on."""
    join_s: Seconds = 600.0
    """Seconds to wait for all workers at the start."""
    keys: Text | None = Field(default=None, examples=["runs/run/keys/worker-{worker}"])
    """Folder of this worker's keys (--keys), made by `atoll keys new`; {worker} stands for its number."""
    security: Literal["keys", "none"] = "keys"
    """How workers prove themselves: keys (mutual TLS), or none: on a private cable, where nobody else can send."""
    elastic: bool = False
    """Let workers die, leave, come back and join late; the others go on. They meet at registry, not at address."""
    registry: Registry | None = Field(default=None, examples=["10.0.0.1:29400"])
    """Elastic: address of `atoll registry` (--registry), or etcd://HOST:PORT,HOST:PORT/NAME."""
    min_workers: Workers = 1
    """Elastic: while fewer train, all pause."""
    grace: Seconds | None = Field(default=None, examples=[2.0])
    """Elastic: seconds after which a round does without a worker that is late; left out: it waits."""
    connections: Connections = 1
    """Elastic: TCP connections for payloads between two workers; more for lines that are both long and fast."""
    listen: Listen = "0.0.0.0:0"
    """Elastic: where this worker listens for the others; port 0: a free one."""
    emulate: Text | None = Field(default=None, examples=["100Mbit/s,50ms"])
    """Slow the link down to this rate and latency, in real time (--link); left out: as fast as it is."""
    jitter_s: Amount = 0.0
    """Emulated: the most by which a latency varies, seconds."""
    loss: Annotated[float, Field(ge=0, lt=1), Allowed("a number of at least 0 and below 1")] = 0.0
    """Emulated: chance that a packet is lost and sent again, which takes time."""
    outages: Annotated[
        tuple[OutageEntry, ...],
        Field(strict=False),
        Allowed("a list like [{start_s = 60, length_s = 10}]"),
    ] = Field(default=(), examples=[[{"start_s": 60.0, "length_s": 10.0}]])
    """Emulated: when nothing passes."""


class LogSection(Section):
    """Chooses what receives metrics besides metrics.jsonl, which is always written."""

    tensorboard: bool = False
    """Also write TensorBoard files."""
    wandb: Text | None = Field(default=None, examples=["atoll"])
    """Also send to this project of Weights & Biases."""
    trackio: Text | None = Field(default=None, examples=["atoll"])
    """Also write to this project of trackio."""
    sample: Tokens = 64
    """Tokens of text to sample at each evaluation, for metrics.jsonl; 0 for none. Not under train.parallel = "fsdp"."""
    alert: Alert | None = Field(default=None, examples=["https://example.org/hook"])
    """Tell this webhook or command, or the one in $NAME, when the run stalls, loses a worker, diverges or fails."""
    stall_s: Seconds = 600.0
    """Alert: seconds without a step after which the run is stalled; more than evaluating and saving take."""
    lost_s: Seconds = 300.0
    """Alert: seconds after which a worker that is gone counts as lost."""
    view: View = "auto"
    """How a run shows its progress; auto: live in a terminal, else lines."""
