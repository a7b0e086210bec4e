"""What gateways tell: nothing is lost or counted twice, whatever becomes of the board."""

import asyncio
import math

import pytest

from serve.rollout.traffic import (
    BOARD,
    CALL_LIMIT_S,
    EDGES_S,
    GONE_S,
    NUM_BUCKETS,
    TrafficBoard,
    TrafficLog,
    VersionTraffic,
    report_forever,
)

A, B = "a" * 64, "b" * 64


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def log_of(num: int, num_errors: int = 0, ttft_s: float = 0.1) -> TrafficLog:
    log = TrafficLog()
    for index in range(num):
        log.record(A, ttft_s, index < num_errors)
    return log


@pytest.mark.fast
def test_a_time_is_in_the_bucket_that_ends_at_or_above_it():
    log = TrafficLog()
    for seconds in (0.0, 0.001, 0.1, 100.0, 100.1):
        log.record(A, seconds, False)
    counts = log.report().totals[A].ttft_counts
    # 0 and 1 ms in the first; 0.1 s, two decades of 50 above, ends bucket 100; 100 s the last but one
    assert {bucket: count for bucket, count in enumerate(counts) if count} == {0: 2, 100: 1, 250: 1, 251: 1}
    assert (len(counts), EDGES_S[100]) == (NUM_BUCKETS, pytest.approx(0.1))


@pytest.mark.fast
def test_a_quantile_is_the_edge_that_a_share_of_answers_met():
    log = log_of(19, ttft_s=0.1)
    log.record(A, 1.0, False)
    traffic = log.report().totals[A]
    assert traffic.p(0.95) == pytest.approx(0.1)  # 19 of 20
    assert traffic.p(0.96) == pytest.approx(1.0)
    log.record(B, 1e9, False)
    assert log.report().totals[B].p(0.5) == math.inf
    assert VersionTraffic().p(0.5) is None


@pytest.mark.fast
def test_an_answer_without_a_first_token_is_counted_without_a_time():
    log = TrafficLog()
    log.record(A, None, True)
    traffic = log.report().totals[A]
    assert (traffic.num_requests, traffic.num_errors, sum(traffic.ttft_counts)) == (1, 1, 0)


@pytest.mark.fast
def test_sums_and_differences_go_count_by_count():
    early, late = log_of(3, 1).report().totals[A], log_of(8, 2, 0.5).report().totals[A]
    total = early + late
    assert (total.num_requests, total.num_errors, sum(total.ttft_counts)) == (11, 3, 11)
    assert total.minus(early) == late
    assert total.holds(early)
    assert not early.holds(total)
    assert not VersionTraffic(5, 0).holds(VersionTraffic(4, 1))


@pytest.mark.fast
def test_a_board_adds_up_gateways_and_counts_a_repeated_or_late_report_once():
    board, one, two = TrafficBoard(), log_of(3), log_of(4, 1)
    early, late = one.report(), None
    one.record(A, 0.1, True)
    late = one.report()
    for report in (late, late, early, two.report()):
        board.report(report)
    # 4 of the first, of which 1 failed, and 4 of the second, of which 1 failed
    assert (board.traffic(A).num_requests, board.traffic(A).num_errors) == (8, 2)
    assert board.traffic(B) == VersionTraffic()


@pytest.mark.fast
def test_a_board_that_starts_again_knows_all_after_a_report():
    log = log_of(5)
    TrafficBoard().report(log.report())
    log.record(A, 0.1, False)
    second = TrafficBoard()
    second.report(log.report())
    assert second.traffic(A).num_requests == 6


@pytest.mark.fast
def test_answers_under_way_are_known_once_every_gateway_has_counted_since():
    clock = Clock()
    board, one, two = TrafficBoard(clock), TrafficLog(), TrafficLog()
    one.begin(A)
    two.begin(A)
    two.begin(B)
    for _ in range(2):
        board.report(one.report())
        board.report(two.report())
    assert (board.in_flight(A, 0.0), board.in_flight(B, 0.0)) == (2, 1)
    clock.now += 1.0
    one.end(A)
    board.report(one.report())
    # This report may have been taken before the last second began: it was sent at some time after the one before
    assert board.in_flight(A, 0.5) is None
    clock.now += 0.1
    board.report(one.report())
    assert board.in_flight(A, 0.5) is None  # the second gateway has said nothing
    board.report(two.report())
    clock.now += 0.1
    board.report(two.report())
    assert board.in_flight(A, 0.5) == 1
    assert board.in_flight(A, 0.15) is None


@pytest.mark.fast
def test_the_first_report_of_a_gateway_proves_nothing_about_its_age():
    board = TrafficBoard()
    board.report(TrafficLog().report())
    assert board.in_flight(A, 60.0) is None


@pytest.mark.fast
def test_a_gateway_that_fell_silent_has_no_answers_under_way_but_its_counts_stay():
    clock = Clock()
    board, log = TrafficBoard(clock), log_of(2)
    log.begin(A)
    board.report(log.report())
    clock.now += GONE_S
    assert board.in_flight(A, 1.0) == 0
    assert board.traffic(A).num_requests == 2


@pytest.mark.ray
def test_reports_go_on_over_a_board_that_dies_and_comes_back(ray_session):
    import ray

    def start_board():
        return ray.remote(TrafficBoard).options(name=BOARD, num_cpus=0, get_if_exists=True).remote()

    async def total(board, num: int) -> None:
        async with asyncio.timeout(60):
            while (await board.traffic.remote(A)).num_requests != num:
                await asyncio.sleep(0.05)

    async def story() -> None:
        log = log_of(3)
        task = asyncio.create_task(report_forever(log, lambda: ray.get_actor(BOARD), 0.05))
        await asyncio.sleep(0.2)  # there is no board yet
        board = start_board()
        await total(board, 3)
        ray.kill(board)
        log.record(A, 0.1, True)
        await asyncio.sleep(0.3)
        log.record(A, 0.1, False)
        assert not task.done()
        board = start_board()
        await total(board, 5)
        assert (await board.traffic.remote(A)).num_errors == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        ray.kill(board)

    asyncio.run(asyncio.wait_for(story(), 60 + 4 * CALL_LIMIT_S))
