"""Which version answers: the registry under a lease, and sessions that stay where they are."""

import itertools

import pytest

from core.errors import RunBroken
from serve.gateway.router import Router, position
from serve.registry import Routing

pytestmark = pytest.mark.fast
STABLE, CANARY = "a" * 64, "b" * 64


class Book:
    """A registry whose routing a test sets."""

    def __init__(self, routing: Routing) -> None:
        self.now = routing
        self.fails = False
        self.num_reads = 0

    def routing(self) -> Routing:
        self.num_reads += 1
        if self.fails:
            raise RunBroken("registry.json cannot be read")
        return self.now


def router_of(book: Book) -> tuple[Router, list[float]]:
    clock = [100.0]
    return Router(book, 1.0, lambda: clock[0]), clock  # type: ignore[arg-type]


def test_a_change_is_seen_within_the_lease_and_not_read_for_every_request():
    book = Book(Routing(1, STABLE, None, 0.0))
    router, clock = router_of(book)
    for _ in range(100):
        assert router.digest_for("s") == STABLE
    assert book.num_reads == 1
    book.now = Routing(2, CANARY, None, 0.0)
    clock[0] += 1.0
    assert router.digest_for("s") == CANARY


def test_a_registry_that_cannot_be_read_is_lived_without_for_the_lease_and_no_longer():
    book = Book(Routing(1, STABLE, None, 0.0))
    router, clock = router_of(book)
    router.routing()
    book.fails = True
    clock[0] += 0.9
    assert router.digest_for("s") == STABLE
    clock[0] += 0.1
    with pytest.raises(RunBroken, match="cannot be read"):
        router.digest_for("s")


def test_a_canary_gets_its_share_of_sessions_and_a_growing_share_moves_none_back():
    book = Book(Routing(1, STABLE, CANARY, 0.05))
    router, clock = router_of(book)
    sessions = [f"tenant/{number}" for number in range(4000)]
    chosen: set[str] = set()
    for share in (0.05, 0.25, 0.5):
        book.now = Routing(2, STABLE, CANARY, share)
        clock[0] += 1
        now = {session for session in sessions if router.digest_for(session) == CANARY}
        assert chosen <= now
        # 4000 draws of probability `share`: four standard deviations
        assert abs(len(now) - 4000 * share) < 4 * (4000 * share * (1 - share)) ** 0.5
        chosen = now


def test_no_version_at_all_is_a_sentence():
    router, _ = router_of(Book(Routing(0, None, None, 0.0)))
    with pytest.raises(RunBroken, match="a version must be registered"):
        router.digest_for("s")


def test_positions_fill_the_unit_interval_and_are_those_of_every_gateway():
    places = sorted(position(str(number)) for number in range(1000))
    assert places[0] >= 0
    assert places[-1] < 1
    assert max(later - earlier for earlier, later in itertools.pairwise(places)) < 0.02
    assert position("tenant/session") == position("tenant/session")
