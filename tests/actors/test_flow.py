"""The flow of groups on a real Ray, with pretended samplers and scorers: what is asked comes back whole, once."""

import os
import time

import numpy as np
import pytest
import ray

from actors.flow import Flow
from actors.rollout import Ask, describe, group_of
from cluster.pool import Pool
from core.config import ClusterConfig, DeadlineConfig
from core.errors import RunBroken, UserError
from core.trajectory import Group, Prompt
from policy.engine import Answer

pytestmark = pytest.mark.ray


def rebuild(driver: int, columns: dict) -> Group:
    """A group on its arrival in a process; the driver must never be one."""
    if os.getpid() == driver:
        raise AssertionError("the driver deserialised a group")
    return Group(**columns)


class WatchedGroup(Group):
    def __reduce__(self):
        return rebuild, (
            int(os.environ["DRIVER_PID"]),
            {name: getattr(self, name) for name in Group.__dataclass_fields__},
        )


class Sampler:
    """Answers at once; a prompt named die-* kills it on its first asking, always-* on every one, hang-* silences it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def ready(self) -> str:
        return self.name

    def sample(self, ask: Ask):
        kind = ask.prompt.prompt_id.split("-")[0]
        if kind == "always" or (kind == "die" and ask.attempt == 0):
            os._exit(1)
        if kind == "hang" and ask.attempt == 0:
            time.sleep(600)
        group = group_of(
            ask, [Answer([1, 2], [-0.5, -0.5], [0, 0], "stop", "a"), Answer([3], [-1.0], [0], "length", "b")]
        )
        watched = WatchedGroup(**{name: getattr(group, name) for name in Group.__dataclass_fields__})
        return watched, describe(group, self.name, 0.1)


class Scorer:
    def __init__(self, name: str) -> None:
        self.name = name

    def ready(self) -> str:
        return self.name

    def score(self, group: Group) -> list[float]:
        if group.prompt_id.startswith("wrong"):
            raise UserError(f"sample 1 of group {group.group_id} must have a number, got None (reward.terms[0])")
        if group.prompt_id.startswith("kill") and not os.path.exists(os.environ["KILLED"]):
            open(os.environ["KILLED"], "w").close()
            os._exit(1)
        return [float(len(text)) + group.num_tokens for text in group.text]


@pytest.fixture
def flow(ray_session, tmp_path):
    environment = {"env_vars": {"DRIVER_PID": str(os.getpid()), "KILLED": str(tmp_path / "killed")}}
    limits = ClusterConfig(restart_limit=3, restart_backoff_s=0.01)

    def pool(kind, cls, num_workers):
        actor = ray.remote(num_cpus=0, runtime_env=environment)(cls)

        def spawn(name):
            handle = actor.remote(name)
            return handle, handle.ready.remote()

        return Pool(kind, num_workers, spawn, limits)

    made = Flow(pool("rollout", Sampler, 2), pool("reward", Scorer, 1), DeadlineConfig(rollout_s=4), lambda text: None)
    made.rollouts.wait_ready(60, made.say)
    made.rewards.wait_ready(60, made.say)
    yield made
    made.close()


def asks(*names: str, step: int = 0) -> list[Ask]:
    return [Ask(0, order, 0, step, Prompt(name, name, (1,), "5"), 0, 0) for order, name in enumerate(names)]


def test_groups_come_back_scored_in_the_order_they_were_asked_and_the_driver_sees_no_token(flow):
    flow.ask(asks("a", "b", "c"))
    scored = flow.collect(0)
    assert [item.ask.prompt.prompt_id for item in scored] == ["a", "b", "c"]
    assert all(np.array_equal(item.rewards, [4.0, 4.0]) for item in scored)  # one letter and three tokens
    assert [item.info.num_truncated for item in scored] == [1, 1, 1]
    with pytest.raises(Exception, match="the driver deserialised a group"):  # and the watch itself works
        ray.get(scored[0].group)


def test_only_the_groups_of_the_step_are_handed_out(flow):
    flow.ask(asks("a", "b"))
    flow.ask(asks("later", step=1))
    assert len(flow.collect(0)) == 2
    assert [item.ask.prompt.prompt_id for item in flow.collect(1)] == ["later"]


def test_groups_of_a_dead_sampler_are_asked_again_under_a_new_id(flow):
    flow.ask(asks("die-1", "a", "b", "c"))
    scored = flow.collect(0)
    assert [item.ask.prompt.prompt_id for item in scored] == ["die-1", "a", "b", "c"]
    assert scored[0].ask.group_id == "0:die-1:1"
    assert scored[0].info.group_id == "0:die-1:1"
    assert flow.rollouts.num_replaced == 1


def test_a_dead_scorer_costs_no_group_its_samples(flow):
    flow.ask(asks("kill-1", "a"))
    scored = flow.collect(0)
    assert [item.ask.group_id for item in scored] == ["0:kill-1:0", "0:a:0"]
    assert (flow.rewards.num_replaced, flow.rollouts.num_replaced) == (1, 0)


def test_a_silent_sampler_is_replaced_after_its_deadline(flow):
    flow.ask(asks("hang-1"))
    assert flow.collect(0)[0].ask.group_id == "0:hang-1:1"


def test_a_prompt_that_kills_every_sampler_ends_the_run(flow):
    flow.ask(asks("always-1"))
    with pytest.raises(RunBroken, match=r"rollout-\d must stay alive|group 0:always-1"):
        flow.collect(0)


def test_a_wrong_reward_reaches_the_driver_as_its_own_sentence(flow):
    flow.ask(asks("wrong-1"))
    with pytest.raises(UserError, match="sample 1 of group 0:wrong-1:0 must have a number"):
        flow.collect(0)
