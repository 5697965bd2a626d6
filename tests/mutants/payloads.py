"""What members send each other: messages taken as they come, and rounds made of what does not fit."""

from mutants.seed import Mutant

TESTS = ["tests/unit/test_messages.py"]
MESSAGES, GREETING, TABLE, ROUND = (
    f"link/net/{name}.py" for name in ("messages", "greeting", "round_table", "open_round")
)
_FLOOD = tuple(
    f"tests/unit/test_member.py::{test}"
    for test in (
        "test_the_others_go_on_without_a_member_that_floods_them",
        "test_a_joiner_that_is_sent_more_than_it_can_hold_ends_itself",
        "test_nobody_is_given_a_fragment_that_there_is_not",
    )
)
_OUTBOX = tuple(
    f"tests/unit/test_outbox.py::{test}"
    for test in ("test_messages_that_are_not_whole_take_bounded_memory", "test_a_peer_that_takes_nothing_is_lost")
)
_TABLE = ("tests/unit/test_round_table.py",)

MUTANTS = [
    Mutant("further keys are taken", MESSAGES, 'extra="forbid"', 'extra="ignore"'),
    Mutant("norms need not be numbers", MESSAGES, ", allow_inf_nan=False", ""),
    Mutant(
        "steps have no bound",
        MESSAGES,
        "Step = Annotated[int, Field(ge=-1, lt=1 << 63)]",
        "Step = int",
    ),
    Mutant("a name breaks the line", MESSAGES, "{where!a}", "{where}"),
    Mutant(
        "a payload of nobody has bytes",
        MESSAGES,
        "if parsed.member is None and body:",
        "if False:",
    ),
    Mutant("bytes are left over after means", MESSAGES, "if at != body.numel():", "if False:"),
    Mutant("a mean of nobody", MESSAGES, "if (length is None) != (not members):", "if False:"),
    Mutant(
        "vectors need not fill a state",
        MESSAGES,
        " or at != body.numel():\n        raise",
        ":\n        raise",
    ),
    Mutant(
        "a state shares the memory of its message",
        MESSAGES,
        "vectors[name] = body[at:end].clone().view",
        "vectors[name] = body[at:end].view",
    ),
    Mutant(
        "inner products are read one mean late",
        MESSAGES,
        "inner = body[ends[0] : ends[1]]",
        "inner = body[at : at + 8 * size * size]",
    ),
    Mutant(
        "a result of several countings is passed on",
        MESSAGES,
        "    if not headers or any((h.members, h.outliers)",
        "    if False and any((h.members, h.outliers)",
    ),
    Mutant("a run never ends", "link/net/view_record.py", "dict(record.late), record.over)", "dict(record.late))"),
    Mutant("terms have any length", GREETING, "Field(max_length=10_000)]\n\n", "Field()]\n\n"),
    Mutant(
        "any size of a payload",
        TABLE,
        "_check_size(message.payload, frozenset({reduction.payload_bytes}))",
        "pass",
        tests=_TABLE,
    ),
    Mutant(
        "a payload in another's name",
        TABLE,
        "message.payload.member.worker != message.owner.seat:",
        "False:",
        tests=_TABLE,
    ),
    Mutant("a part in another's name", TABLE, "message.payload.member.worker != sender.seat:", "False:", tests=_TABLE),
    Mutant(
        "a part fits one number of members",
        TABLE,
        "range(ONE_SHOT_MEMBERS + 1, self._workers + 1)",
        "range(self._workers, self._workers + 1)",
        tests=_TABLE,
    ),
    Mutant("a result may lack parts", TABLE, "if len(result.means) != count:", "if False:", tests=_TABLE),
    Mutant("members may send any number of rounds ahead", TABLE, "if held <= MOST_HELD:", "if True:", tests=_TABLE),
    Mutant(
        "a large model is refused on a small machine",
        TABLE,
        "return held > _ROUNDS_AHEAD * sum(",
        "return True or held > _ROUNDS_AHEAD * sum(",
        tests=_TABLE,
    ),
    Mutant(
        "messages cost only their content",
        "link/net/held_bytes.py",
        "cost = size + MESSAGE_COST",
        "cost = size",
        tests=_TABLE,
    ),
    Mutant(
        "what was applied counts for ever",
        "link/net/held_bytes.py",
        "        self._held -= self._costs.pop(round_id, Counter())\n",
        "        self._costs.pop(round_id, Counter())\n",
        tests=_TABLE,
    ),
    Mutant(
        "what one member sends counts for all",
        "link/net/held_bytes.py",
        "return self._held[sender]",
        "return self._held.total()",
        tests=_TABLE,
    ),
    Mutant(
        "a joiner blames the others for being slow",
        "link/net/member.py",
        "        if self.protocol.has_caught_up:\n            self._refuse(",
        "        if True:\n            self._refuse(",
        tests=_FLOOD,
    ),
    Mutant(
        "messages of unknown views are kept without end",
        "link/net/member.py",
        "if self.protocol.flush.has_room_for(peer, view):",
        "if True:",
        tests=_FLOOD,
    ),
    Mutant(
        "messages that are not whole take any memory",
        "link/net/frames.py",
        "if self._cost > self._most:",
        "if False:",
        tests=_OUTBOX,
    ),
    Mutant(
        "messages that are whole count for ever",
        "link/net/frames.py",
        "        self._cost -= found.cost\n",
        "",
        tests=_OUTBOX,
    ),
    Mutant(
        "control messages wait without end",
        "link/net/session.py",
        "if len(self._queue) >= QUEUED:",
        "if False:",
        tests=_OUTBOX,
    ),
    Mutant(
        "payloads wait without end",
        "link/net/peers.py",
        "if session.outbox.waiting > MOST_HELD:",
        "if False:",
        tests=_OUTBOX,
    ),
    Mutant(
        "a joiner ends its donor",
        "link/net/elastic_link.py",
        "            except IndexError:\n",
        "            except ZeroDivisionError:\n",
        tests=_FLOOD,
    ),
    Mutant(
        "all that was told is kept",
        "link/net/flush.py",
        "        for number in numbers[:-MOST_TOLD]:",
        "        for number in numbers[:0]:",
        tests=("tests/unit/test_donor.py",),
    ),
    Mutant(
        "what waited is taken again",
        TABLE,
        "return self._unchecked.pop(fragment, [])",
        "return self._unchecked.get(fragment, [])",
        tests=_TABLE,
    ),
    Mutant(
        "a reduction does not wait for what was lost before",
        TABLE,
        "if opened.reduction.residual is not None and self._has_earlier(action.round_id):",
        "if False:",
        tests=_TABLE,
    ),
    Mutant(
        "other fragments' rounds hold a reduction up",
        TABLE,
        "other < round_id and other.fragment == round_id.fragment and",
        "other < round_id and",
        tests=_TABLE,
    ),
    Mutant(
        "an outlier makes a round incomplete",
        TABLE,
        "(*completed.members, *completed.outliers)",
        "completed.members",
        tests=_TABLE,
    ),
    Mutant(
        "bytes of applied rounds are kept",
        TABLE,
        "            del self.sent_bytes[round_id]\n",
        "                pass\n",
        tests=_TABLE,
    ),
    Mutant(
        "reducers may count different members",
        ROUND,
        "if any((mean.members, mean.outliers) != (first.members, first.outliers) for mean in means):",
        "if False:",
        tests=_TABLE,
    ),
    Mutant(
        "only the first part's inner products count",
        ROUND,
        "torch.stack([mean.inner for mean in means]).sum(0)",
        "first.inner",
        tests=_TABLE,
    ),
    Mutant(
        "the cut of a round is forgotten",
        ROUND,
        "            self.reduction.residual.note(self.reduction.order, seats)\n",
        "            pass\n",
        tests=_TABLE,
    ),
    Mutant(
        "a second failure counts",
        ROUND,
        "        if not self._completed.done():\n            self._completed.set_ex",
        "        if True:\n            self._completed.set_ex",
        tests=_TABLE,
    ),
]
