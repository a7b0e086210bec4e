"""The configuration: every mistake is one plain sentence that names the key, before anything starts."""

from pathlib import Path

import pytest
import yaml

from core.config import Config, dump_config, load_config, parse_config
from core.errors import UserError

pytestmark = pytest.mark.fast

CHECKOUT = Path(__file__).parents[2]


def refusal(tree: dict) -> str:
    with pytest.raises(UserError) as caught:
        parse_config({"num_steps": 1, **tree}, "run.yaml")
    return str(caught.value)


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return path


def test_every_shipped_configuration_loads_and_survives_a_round_trip():
    for path in sorted((CHECKOUT / "configs").glob("*.yaml")):
        if path.name.startswith("serve"):  # of another kind: tests/serve/test_config.py
            continue
        config = load_config(path)
        assert parse_config(yaml.safe_load(dump_config(config)), "dumped") == config, path


def test_the_smallest_configuration_survives_a_round_trip():
    tree = {"num_epochs": 2, "run_dir": "runs/a", "rollout": {"stop": ["\n"]}, "learner": {"learning_rate": 3e-7}}
    config = parse_config(tree, "here")
    assert parse_config(yaml.safe_load(dump_config(config)), "dumped") == config
    assert (config.run_dir, config.rollout.stop, config.learner.learning_rate) == (Path("runs/a"), ("\n",), 3e-7)


@pytest.mark.parametrize(
    ("tree", "sentence"),
    [
        ({"learner": {"learnig_rate": 1e-5}}, "unknown config key learner.learnig_rate; did you mean learning_rate?"),
        ({"promts_per_step": 4}, "unknown config key promts_per_step; did you mean prompts_per_step?"),
        (
            {"data": {"arithmetic": {"num_promts": 4}}},
            "unknown config key data.arithmetic.num_promts; did you mean num_prompts?",
        ),
        (
            {"reward": {"terms": [{"kind": "exact", "wieght": 1}]}},
            "unknown config key reward.terms.0.wieght; did you mean weight?",
        ),
    ],
)
def test_an_unknown_key_is_answered_with_the_nearest_known_one(tree, sentence):
    assert refusal(tree) == f"{sentence} (run.yaml)"


def test_an_unknown_key_like_no_other_is_answered_with_the_known_ones():
    assert refusal({"evaluation": {"zzz": 1}}) == (
        "unknown config key evaluation.zzz; known here: every, num_prompts, num_samples_shown (run.yaml)"
    )


@pytest.mark.parametrize(
    ("tree", "sentence"),
    [
        ({"learner": {"learning_rate": -1}}, "learner.learning_rate must be greater than 0, got -1"),
        ({"learner": {"learning_rate": float("nan")}}, "learner.learning_rate must be a finite number, got nan"),
        ({"learner": {"zero_stage": 4}}, "learner.zero_stage must be less than or equal to 3, got 4"),
        ({"rollout": {"dtype": "fp16"}}, "rollout.dtype must be 'auto', 'float32' or 'bfloat16', got 'fp16'"),
        ({"learner": 3}, "learner must hold keys and values, got 3"),
        ({"learner": None}, "learner must hold keys and values, got None"),
        ({"reward": {"terms": []}}, "reward.terms must have at least 1 item, got 0"),
    ],
)
def test_a_value_out_of_bounds_is_named_with_its_bound(tree, sentence):
    assert refusal(tree) == f"{sentence} (run.yaml)"


@pytest.mark.parametrize(
    ("tree", "key"),
    [
        ({"reward": {"terms": [{"kind": "exactt"}]}}, "reward.terms.0.kind"),
        ({"reward": {"terms": [3]}}, "reward.terms.0"),
        ({"data": {"arithmetic": {"operations": ["*"]}}}, "data.arithmetic.operations.0"),
    ],
)
def test_a_bad_item_is_blamed_once_and_not_also_the_list_that_holds_it(tree, key):
    sentence = refusal(tree)
    assert sentence.startswith(f"{key} must ")
    assert "at least 1 item" not in sentence
    assert ";" not in sentence


def test_two_mistakes_are_both_told():
    sentence = refusal({"seed": -1, "learner": {"num_ranks": 0}})
    assert "seed must be" in sentence
    assert "learner.num_ranks must be" in sentence


@pytest.mark.parametrize(
    ("tree", "sentence"),
    [
        ({"num_epochs": 1}, "exactly one of num_steps and num_epochs must be set"),
        ({"num_steps": None}, "exactly one of num_steps and num_epochs must be set"),
        ({"data": {"source": "jsonl"}}, "data.path must name a JSONL file"),
        (
            {"grouping": {"baseline": "prompt"}, "rollout": {"samples_per_prompt": 1}},
            "rollout.samples_per_prompt must be at least 2 with grouping.baseline=prompt",
        ),
        (
            {"prompts_per_step": 4, "learner": {"num_minibatches": 5}},
            "learner.num_minibatches must be at most prompts_per_step (4), got 5",
        ),
        (
            {"prompts_per_step": 4, "learner": {"num_ranks": 5}},
            "learner.num_ranks must be at most prompts_per_step (4), got 5",
        ),
        ({"learner": {"offload": "nvme"}}, "learner.nvme_path must be set when learner.offload is nvme"),
        ({"reward": {"terms": [{"kind": "regex"}]}}, "reward.terms[0].pattern must be set for kind regex"),
        ({"reward": {"terms": [{"kind": "python"}]}}, "reward.terms[0].path must be set for kind python"),
    ],
)
def test_sections_that_do_not_fit_together_are_refused(tree, sentence):
    assert sentence in refusal(tree)


def test_overrides_are_laid_over_the_file(tmp_path):
    path = write(tmp_path, "num_steps: 3\nlearner: {learning_rate: 1.0e-6}\n")
    words = ["learner.learning_rate=1e-5", "rollout.samples_per_prompt=4", "data.system_prompt=", "num_steps=7"]
    config = load_config(path, [*words, "rollout.stop=[a, b]", "policy.model=nan"])
    assert config.learner.learning_rate == 1e-5  # YAML itself reads 1e-5 as text
    assert (config.rollout.samples_per_prompt, config.num_steps, config.data.system_prompt) == (4, 7, None)
    assert (config.rollout.stop, config.policy.model) == (("a", "b"), "nan")


def test_1e_minus_5_in_the_file_is_a_number(tmp_path):
    path = write(tmp_path, "num_steps: 3\nlearner:\n  learning_rate: 1e-5\n")
    assert load_config(path).learner.learning_rate == 1e-5


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("num_steps", "an override must look like section.key=value, got 'num_steps'"),
        ("=3", "an override must look like section.key=value, got '=3'"),
        ("num_steps.a=3", "override 'num_steps.a=3': num_steps is not a section"),
        ("learner.learnig_rate=3", "did you mean learning_rate?"),
        ("learner.learning_rate=fast", "learner.learning_rate must be a valid number"),
    ],
)
def test_an_override_that_makes_no_sense_is_refused(tmp_path, word, sentence):
    with pytest.raises(UserError) as caught:
        load_config(write(tmp_path, "num_steps: 3\n"), [word])
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [("num_steps: [1", "could not be read as YAML"), ("- 1\n", "must hold keys and values, got list")],
)
def test_a_file_that_is_no_configuration_is_refused(tmp_path, text, sentence):
    with pytest.raises(UserError, match=sentence):
        load_config(write(tmp_path, text))
    with pytest.raises(UserError, match="must be an existing file"):
        load_config(tmp_path / "absent.yaml")


def test_a_configuration_does_not_change_once_made():
    config = parse_config({"num_steps": 1}, "here")
    with pytest.raises(ValueError, match="frozen"):
        config.seed = 3
    assert isinstance(config, Config)
    assert config.max_model_len == config.data.max_prompt_tokens + config.rollout.max_new_tokens


@pytest.mark.parametrize(
    ("tree", "sentence"),
    [
        ({"reward": {"terms": {"kind": "exact"}}}, "reward.terms must be a list, got {'kind': 'exact'}"),
        ({"run_dir": 5}, "run_dir must be a path, got 5; put it in quotes"),
        ({"rollout": {"stop": [""]}}, "rollout.stop: each stop text must have at least one character, got ['']"),
        ({"learner": {"offload": "cpu"}}, "learner.zero_stage must be 1 to 3 with learner.offload=cpu, got 0"),
        ({"rollout": {"cpus": 1.5}}, "rollout.cpus must be whole above 1 (Ray's rule), got 1.5"),
        ({"data": {"path": "a.jsonl"}}, "data.source must be jsonl where data.path is set, got arithmetic"),
        ({"cluster": {"object_store_bytes": 1}}, "cluster.object_store_bytes must be 0 or at least 78643200, got 1"),
        (
            {"rollout": {"tensor_parallel_size": 2}},
            "rollout.tensor_parallel_size must be 1 with rollout.device=cpu, got 2; raise rollout.num_workers instead",
        ),
        (
            {"reward": {"terms": [{"kind": "exact", "path": "a.py"}]}},
            "reward.terms[0] must have pattern only for kind regex and path only for kind python, got kind exact",
        ),
        (
            {"num_epochs": 2},
            "exactly one of num_steps and num_epochs must be set, got 1 and 2; set one to null",
        ),
    ],
)
def test_what_would_fail_late_or_be_ignored_is_refused_in_one_sentence(tree, sentence):
    assert refusal(tree) == f"{sentence} (run.yaml)"


@pytest.mark.parametrize("name", ["a\0b", "x" * 300, "/".join(["y" * 100] * 50)])
def test_a_path_that_no_file_can_have_is_refused(name):
    assert "a path must have no NUL character, no name above 255 bytes" in refusal({"run_dir": name})


def test_a_long_wrong_value_is_shown_short():
    assert len(refusal({"prompts_per_step": "x" * 20_000})) < 300


@pytest.mark.parametrize("text", ["num_steps: " + "9" * 5000, "num_steps: " + "[" * 5000, "seed: 1\nseed: 2\n"])
def test_yaml_that_python_or_a_person_gets_wrong_is_one_sentence(tmp_path, text):
    with pytest.raises(UserError, match="could not be read as YAML"):
        load_config(write(tmp_path, text))


def test_a_key_may_override_a_merged_one(tmp_path):
    text = "num_steps: 1\nrollout: &a {cpus: 2}\nlearner: {<<: *a, cpus: 1}\n"
    assert load_config(write(tmp_path, text)).learner.cpus == 1


@pytest.mark.parametrize("name", ["7", "1e5", "2024-01-01", "yes"])
def test_an_override_of_a_text_stays_text(tmp_path, name):
    path = write(tmp_path, "num_steps: 1\n")
    config = load_config(path, [f"run_dir={name}", f"policy.model={name}", f"data.system_prompt={name}"])
    assert (config.run_dir, config.policy.model, config.data.system_prompt) == (Path(name), name, name)


def test_a_tilde_in_a_path_is_the_home_folder():
    assert parse_config({"num_steps": 1, "run_dir": "~/runs"}, "here").run_dir == Path.home() / "runs"
