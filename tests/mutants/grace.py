"""Rounds that do without late members: proposed too soon, too often or for too few, and told wrongly."""

from mutants.seed import Mutant

TESTS = ["tests/unit/test_grace.py"]
PROTOCOL, GRACE, VIEWS, MEMBERS = (
    "link/net/protocol.py",
    "link/net/grace.py",
    "link/net/views.py",
    "train/progress/members.py",
)
_LOOP = "tests/unit/test_elastic_loop.py"

MUTANTS = [
    Mutant(
        "what is on its way is left behind again and again",
        PROTOCOL,
        "in known.missing() if marked.get(member.seat, -1) < step}",
        "in known.missing()}",
    ),
    Mutant(
        "a round is left with fewer than min_workers", PROTOCOL, "if late and left >= self._min_workers:", "if late:"
    ),
    Mutant(
        "an older round is left with fewer than min_workers",
        PROTOCOL,
        "if other.step <= step and not known.done]",
        "if other == round_id]",
    ),
    Mutant(
        "only the round that was asked for does without late members",
        VIEWS,
        "view.late.get(member.seat, -1) < round_id.step",
        "view.late.get(member.seat, -1) != round_id.step",
    ),
    Mutant(
        "members are far behind as soon as many fragments are",
        PROTOCOL,
        "lacking = Counter(round_id.fragment for",
        "lacking = Counter(0 for",
        tests=(f"{_LOOP}::test_rounds_do_without_a_worker_that_is_late_and_its_next_delta_has_its_work",),
    ),
    Mutant(
        "a member is far behind a round early",
        PROTOCOL,
        "max(lacking.values(), default=0) > most",
        "max(lacking.values(), default=0) >= most",
    ),
    Mutant(
        "those that are far behind go at the end of a run",
        PROTOCOL,
        "        if any(round_id.last for round_id in self._rounds):\n            return []\n",
        "",
    ),
    Mutant(
        "those that are far behind go although too few remain",
        PROTOCOL,
        "return far if len(self.view.owing) - len(far) >= self._min_workers else []",
        "return far",
    ),
    Mutant(
        "rounds are kept for one that is far behind",
        GRACE,
        "for far in protocol.far_behind(MOST_BEHIND):",
        "for far in ():",
        tests=(f"{_LOOP}::test_a_worker_that_is_far_behind_joins_again",),
    ),
    Mutant("a proposal is made anew at every look", GRACE, "if asked == protocol.view.number or now_s", "if now_s"),
    Mutant(
        "nobody is given grace",
        GRACE,
        "waiting_since(now_s - grace_s)",
        "waiting_since(now_s)",
        also=(GRACE, "now_s - since_s < grace_s:", "now_s < since_s:"),
    ),
    Mutant(
        "late members are waited for",
        "link/net/elastic_link.py",
        "if options.grace_s is not None:\n                mem",
        "if False:\n                mem",
    ),
    Mutant("the last work of a late member is dropped", GRACE, " if not round_id.last]", "]"),
    Mutant(
        "members that are lost are called late",
        VIEWS,
        "if remaining := frozenset(filter(view.has, late)):",
        "if remaining := frozenset(late):",
    ),
    Mutant(
        "how often a worker was late is forgotten",
        MEMBERS,
        "        self._late += late\n",
        "        self._late = late\n",
        tests=("tests/unit/test_members.py::test_a_view_tells_who_was_left_behind_and_how_often",),
    ),
]
