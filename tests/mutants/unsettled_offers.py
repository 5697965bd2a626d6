"""What a GPU is still computing when it is sent, and what becomes of it if it cannot be sent."""

from mutants.seed import Mutant

LATE = "tests/unit/test_unsettled_offers.py"
TESTS = [
    f"{LATE}::test_who_is_left_out_anyway_is_asked_at_once",
    f"{LATE}::test_a_round_is_opened_before_its_offer_is_known",
    f"{LATE}::test_it_is_rolled_back_at_the_next_step_where_something_is_due",
    f"{LATE}::test_who_was_rolled_back_meanwhile_is_not_rolled_back_again",
    f"{LATE}::test_a_state_saved_before_it_is_known_goes_on_to_the_bit",
    f"{LATE}::test_a_spoilt_worker_is_left_out_once_of_every_fragment",
]

MUTANTS = [
    Mutant("rolled back, a worker puts in zeros", "outer/roll_back.py", ".left_out = fragment in sending",
           ".left_out = False"),
    Mutant("who is left out is never asked", "outer/fragment.py", "now = wait or self.left_out or self",
           "now = wait or self"),
    Mutant("what could not be sent is forgotten by a save", "outer/flight.py", 'Unsendable() if state.get("unsent") else None',
           "None"),
    Mutant("rolled back twice for one loss", "outer/roll_back.py", "if flight.offer and not flight.forgotten]",
           "if flight.offer]"),
    Mutant("an offer is waited for where it is made", "outer/fragment.py", "encoding.settled() if encoding is not None and now else encoding",
           "encoding.settled() if encoding is not None else encoding"),
]  # fmt: skip
