"""The controller: a good version takes over, a bad one does not, and both are told why. The world is simulated."""

import json

import pytest

from core.errors import RunBroken, UserError
from serve.artefacts.artefact import artefacts_folder
from serve.registry import Routing
from serve.rollout.traffic import TrafficLog
from tests.serve.simulated import Behaviour, Scene

pytestmark = pytest.mark.fast
STEPS = ("started", "share_0", "share_1", "promoted", "drained")


@pytest.fixture
def scene(tmp_path) -> Scene:
    return Scene(tmp_path)


def test_a_good_version_takes_over_step_by_step(scene):
    first, second, _ = scene.versions
    end = scene.rollout().run(second)
    assert (end.state, end.is_settled) == ("drained", True)
    assert scene.states() == list(STEPS)
    assert scene.who() == (second, None, 0.0)
    shares = [(transition.routing.canary, transition.routing.share) for transition in scene.registry.history()]
    assert shares == [(None, 0.0), (second, 0.1), (second, 0.5), (None, 0.0)]
    assert scene.world.running == {first, second}  # the old one is warm
    assert scene.world.num_unserved == 0
    assert end.reason == f"{first} has 0 answers under way and stays warm"


def test_a_person_is_told_each_step_in_numbers(scene):
    scene.rollout().run(scene.versions[1])
    steps = [line for line in scene.said if line.startswith("share ")]
    assert len(steps) == 2
    for line, share in zip(steps, ("0.1", "0.5"), strict=True):
        assert line.startswith(f"share {share} held: canary ")
        assert "answers, 0 failed, p95 to first token 0.1" in line
        assert "; stable " in line
    # Rewards of places 0 to 63 in a full cycle below 0.8: 52 of 64
    assert "reward: 64 probes earn 0.812 by the canary, 0.812 by stable" in scene.said


def test_the_version_before_last_is_stopped_once_the_next_one_serves(scene):
    first, second, third = scene.versions
    scene.rollout().run(second)
    scene.rollout().run(third)
    assert scene.world.running == {second, third}
    assert scene.rollout().rollback("a person asked").state == "rolled_back"
    assert scene.who() == (second, None, 0.0)
    assert scene.world.running == {second}
    assert scene.rollout().run(third).state == "drained"  # its artefact stayed
    assert (scene.world.running, scene.world.num_unserved) == ({second, third}, 0)
    assert first not in scene.world.running


@pytest.mark.parametrize(
    ("behaviour", "words", "most_states"),
    [
        (Behaviour(error_rate=0.3), "errors: ", ["started", "share_0", "rolled_back", "rolled_back"]),
        (Behaviour(ttft_s=0.4), "latency: ", ["started", "share_0", "rolled_back", "rolled_back"]),
        (Behaviour(reward=0.0), "reward: 32 probes earn 0.000", ["started", "rolled_back", "rolled_back"]),
        (Behaviour(starts=False), "in state started: RuntimeError: no weights", ["started", "rolled_back"]),
    ],
)
def test_a_bad_version_is_rolled_back_with_the_reason(scene, behaviour, words, most_states):
    first, second, _ = scene.versions
    scene.world.behaviours[second] = behaviour
    end = scene.rollout().run(second)
    assert (end.state, end.is_settled) == ("rolled_back", True)
    assert end.reason.startswith(words)
    assert scene.states()[: len(most_states)] == most_states
    assert scene.who() == (first, None, 0.0)
    assert scene.world.running == {first}
    assert scene.world.num_unserved == 0
    assert (artefacts_folder(scene.config.serve_dir) / second).is_dir()
    if "share_0" in most_states:
        assert scene.registry.history()[-1].reason == end.reason


def test_half_the_reward_lost_is_found_by_the_second_step_of_probes(scene):
    scene.world.behaviours[scene.versions[1]] = Behaviour(reward=0.45)
    end = scene.rollout().run(scene.versions[1])
    assert end.state == "rolled_back"
    assert end.reason.startswith("reward: ")


def test_a_canary_without_traffic_is_rolled_back_naming_what_is_missing(scene):
    scene.world.requests_per_s = 0
    end = scene.rollout().run(scene.versions[1])
    assert end.state == "rolled_back"
    assert end.reason == (
        "share 0.1 must be judged within canary.max_step_s=120, but lacks 50 more answers of canary, which has 0; "
        "send more traffic, or raise canary.max_step_s"
    )


def test_a_canary_without_traffic_is_promoted_where_that_is_asked(scene):
    scene.world.requests_per_s = 0
    assert scene.rollout(promote_without_traffic=True).run(scene.versions[1]).state == "drained"


def test_little_bad_traffic_is_not_promoted_even_where_no_traffic_would_be(tmp_path):
    scene = Scene(tmp_path, max_step_s=20)
    scene.world.requests_per_s = 10
    scene.world.behaviours[scene.versions[1]] = Behaviour(error_rate=0.4)
    end = scene.rollout(promote_without_traffic=True).run(scene.versions[1])
    assert end.state == "rolled_back"
    assert "errors: " in end.reason


def test_a_rollback_by_another_process_ends_a_running_canary(scene):
    first, second, third = scene.versions

    def at(place: str) -> None:
        if place == "traffic" and scene.registry.routing().share == 0.5:
            scene.world.at = lambda place: None
            with pytest.raises(UserError, match=r"must have ended before another starts, got .* in state share_1"):
                scene.rollout().run(third)
            assert scene.rollout().rollback("a person saw strange answers").state == "rolled_back"

    scene.world.at = at
    end = scene.rollout().run(second)
    assert (end.state, end.reason, end.is_settled) == ("rolled_back", "a person saw strange answers", True)
    assert scene.who() == (first, None, 0.0)
    assert any("another process went on" in line for line in scene.said)


def test_a_registry_that_somebody_else_changed_ends_the_canary(scene):
    first, second, third = scene.versions

    def at(place: str) -> None:
        routing = scene.registry.routing()
        if place == "sleep" and routing.share == 0.1:
            scene.registry.compare_and_set(routing.epoch, "by hand", canary=third, share=0.2)
            scene.world.running.add(third)

    scene.world.at = at
    end = scene.rollout().run(second)
    assert end.state == "rolled_back"
    assert end.reason.endswith("somebody else changed it (by hand)")
    assert scene.who() == (first, third, 0.2)  # another's canary is left alone


def test_a_version_is_stopped_once_no_gateway_can_choose_it(tmp_path):
    scene = Scene(tmp_path, routing_lease_s=7)
    scene.rollout().run(scene.versions[1])
    scene.world.requests_per_s = 0
    asked_at = scene.world.now

    def at(place: str) -> None:
        assert place != "stop_version" or scene.world.now - asked_at >= 7

    scene.world.at = at
    scene.rollout().rollback("a person asked")
    assert scene.world.running == {scene.versions[0]}


def test_a_rollback_starts_the_version_before_where_it_was_stopped(scene):
    scene.rollout().run(scene.versions[1])
    scene.world.running.discard(scene.versions[0])
    scene.rollout().rollback("a person asked")
    assert (scene.who(), scene.world.num_unserved) == ((scene.versions[0], None, 0.0), 0)


def test_a_version_that_a_rollback_needs_stays_up_though_it_failed_as_a_canary(scene):
    first, second, _ = scene.versions
    scene.rollout().run(second)
    scene.world.behaviours[first] = Behaviour(error_rate=0.3)
    assert scene.rollout().run(first).state == "rolled_back"
    assert scene.registry.routing() == Routing(6, second, None, 0.0, previous=first)
    assert scene.world.running == {first, second}


def test_counts_that_were_lost_start_the_step_anew(scene):
    def at(place: str) -> None:
        if place == "sleep" and scene.registry.routing().share == 0.5:
            scene.world.at = lambda place: None
            flying = scene.world.log
            scene.world.log = TrafficLog()
            for _, digest in scene.world.pending:
                scene.world.log.begin(digest)
            assert flying.report().totals

    scene.world.at = at
    end = scene.rollout().run(scene.versions[1])
    assert end.state == "drained"
    assert scene.states() == ["started", "share_0", "share_1", "share_1", "promoted", "drained"]
    assert scene.lines()[3]["reason"].startswith("counts of traffic were lost")
    assert scene.lines()[3]["num_restarts"] == 1


def test_a_damaged_artefact_never_becomes_the_canary(scene):
    first, second, _ = scene.versions
    (artefacts_folder(scene.config.serve_dir) / second / "a.safetensors").write_text("version 9")
    end = scene.rollout().run(second)
    assert end.state == "rolled_back"
    assert "UserError: canary must be the digest of a whole artefact" in end.reason
    assert scene.who() == (first, None, 0.0)


def test_a_rollout_that_cannot_start_changes_nothing(scene):
    first, second, third = scene.versions
    with pytest.raises(UserError, match="must start with another stable version and no canary"):
        scene.rollout().run(first)
    scene.registry.compare_and_set(1, "by hand", canary=third, share=0.2)
    with pytest.raises(UserError, match="must start with another stable version and no canary"):
        scene.rollout().run(second)
    with pytest.raises(UserError, match="must have a rollout to take back, got none"):
        scene.rollout().rollback("why not")
    assert scene.rollout().resume() is None
    assert not (scene.config.serve_dir / "rollout.json").exists()


def test_a_rollback_needs_a_version_that_serves(scene):
    scene.world.behaviours[scene.versions[1]] = Behaviour(starts=False)
    scene.rollout().run(scene.versions[1])
    with pytest.raises(UserError, match=r"must have a rollout to take back, got .* in state rolled_back"):
        scene.rollout().rollback("again")


def test_progress_that_cannot_be_read_is_not_taken_for_none(scene):
    scene.rollout().run(scene.versions[1])
    for text in ("", "[]", '{"format": 1}', '{"format": 2}'):
        (scene.config.serve_dir / "rollout.json").write_text(text)
        with pytest.raises(RunBroken, match=r"rollout\.json must be a rollout's progress"):
            scene.rollout().resume()


@pytest.mark.parametrize("torn", [b"", b'{"number": 5, "sta', b"\0" * 30])
def test_a_torn_log_is_completed_by_the_next_transition(scene, torn):
    scene.rollout().run(scene.versions[1])
    log = scene.config.serve_dir / "rollout.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join(lines[:-1]) + torn)  # as a kill before the last line, or in its middle, leaves it
    scene.rollout().run(scene.versions[2])
    whole = [line for line in log.read_bytes().splitlines() if line.startswith(b"{") and line.endswith(b"}")]
    assert [json.loads(line)["number"] for line in whole] == list(range(1, 11))
