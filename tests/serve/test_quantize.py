"""Quantisation: refused early with what would fit, or a version that is smaller, finite and served."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from core.errors import RunBroken, UserError
from policy.bundled import load_tokenizer
from serve.artefacts.artefact import Artefact
from serve.artefacts.export import export_run
from serve.artefacts.quantize import check_group_size, check_quantized, quantize, read_calibration
from serve.config import QuantizeConfig

pytestmark = pytest.mark.fast
PROMPTS = [f"What is {number} + {number + 1}? Reply with the number only." for number in range(16)]


@pytest.fixture
def artefact(tiny_model, tmp_path) -> Artefact:
    return export_run(tiny_model, tmp_path)


def save_layers(folder: Path, **widths: tuple[int, int]) -> Path:
    """A folder whose only weights have these (output, input) widths."""
    tensors = {f"model.layers.0.mlp.{name}.weight": torch.zeros(shape) for name, shape in widths.items()}
    tensors |= {"model.embed_tokens.weight": torch.zeros(7, 5), "model.norm.weight": torch.zeros(5)}
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("group_size", [32, 64])
def test_a_group_size_that_divides_every_width_is_taken(tmp_path, group_size):
    check_group_size(save_layers(tmp_path, up_proj=(1536, 576), down_proj=(576, 1536)), group_size)


def test_a_group_size_that_divides_one_width_only_is_refused_with_what_fits(tmp_path):
    # 576 / 128 = 4.5, as in SmolLM2-135M; 1536 / 128 = 12 would do
    folder = save_layers(tmp_path, down_proj=(576, 1536), up_proj=(1536, 576))
    with pytest.raises(UserError) as caught:
        check_group_size(folder, 128)
    assert str(caught.value) == (
        "the group size must divide the input width of every layer, got 128 for model.layers.0.mlp.up_proj.weight of "
        "width 576 (576/128 = 4.5); choose from 32, 64 (quantize.group_sizes)"
    )


@pytest.mark.parametrize("group_size", [-1, 0, 7, 8, 16, 48, 256])
def test_a_group_size_that_no_kernel_takes_is_refused(tmp_path, group_size):
    with pytest.raises(
        UserError, match=rf"must have 32, 64, 128 weights \(what vLLM serves\), got {group_size}; choose"
    ):
        check_group_size(save_layers(tmp_path, up_proj=(1536, 576)), group_size)


def test_widths_that_fit_no_group_say_so(tmp_path):
    with pytest.raises(UserError, match=r"width 80 .* no size fits: quantize\.enabled=false"):
        check_group_size(save_layers(tmp_path, up_proj=(64, 80)), 64)
    with pytest.raises(UserError, match=r"output width must be a multiple of 32 .* got 72 for .*gate_proj"):
        check_group_size(save_layers(tmp_path, gate_proj=(72, 64)), 64)


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        ([], "at least 16 different prompts with words in them, got 0 of 0 given"),
        (["hi"], "got 1 of 1 given"),
        (["a", "b", "c"], "got 3 of 3 given"),
        (["", "  ", "\n"] * 20, "got 0 of 60 given"),
        (["<|end|><|end|>", " <|end|>"] * 20, "got 0 of 40 given"),
        (["the same words"] * 200, "got 1 of 200 given"),
    ],
)
def test_too_little_calibration_is_refused(artefact, prompts, words):
    with pytest.raises(UserError, match=words):
        read_calibration(artefact, QuantizeConfig(), prompts)


def test_calibration_of_few_tokens_is_refused(artefact):
    with pytest.raises(UserError, match="at least 256 tokens in all, got 240 in 16 prompts"):
        # 15 tokens of each prompt at most
        read_calibration(
            artefact, QuantizeConfig.model_construct(num_calibration_prompts=16, max_calibration_tokens=15), PROMPTS
        )


def test_calibration_is_templated_cut_and_named_by_its_hash(artefact):
    config = QuantizeConfig(max_calibration_tokens=40)
    found = read_calibration(artefact, config, [*PROMPTS, "", "<|end|>", "w" * 100])
    assert len(found.token_ids) == 17  # blank and padding left out
    assert max(map(len, found.token_ids)) == 40
    tokenizer = load_tokenizer(artefact.folder)
    assert tokenizer.decode(found.token_ids[0]).startswith("<|start|>user\nWhat is 0 + 1?")
    assert found.sha256 == read_calibration(artefact, config, [*PROMPTS, "w" * 100]).sha256
    assert found.sha256 != read_calibration(artefact, config, PROMPTS).sha256


def test_missing_packages_are_named_with_the_command_that_brings_them(artefact, tmp_path, monkeypatch):
    monkeypatch.setenv("GRPO_AWQ", str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match=r"needs llm-compressor, got none in .*nowhere; run `make setup-awq`"):
        quantize(artefact, tmp_path, QuantizeConfig(), PROMPTS, 64)


def test_a_damaged_artefact_is_not_quantised(artefact, tmp_path):
    (artefact.folder / "tokenizer.json").write_text((artefact.folder / "tokenizer.json").read_text() + " ")
    with pytest.raises(UserError, match=r"must be whole, got .*tokenizer\.json must have"):
        quantize(artefact, tmp_path, QuantizeConfig(), PROMPTS, 64)


@pytest.mark.parametrize(
    ("scale", "num_packed", "extra", "words"),
    [
        (1.0, 32, {}, None),
        (float("nan"), 32, {}, r"must be finite, got model\.layers\.0\.mlp\.up_proj\.weight_scale \(1 of 8 numbers"),
        (float("inf"), 32, {}, "must be finite"),
        (1.0, 32, {"model.layers.0.mlp.gate_proj.weight": torch.zeros(2, 2)}, "1 that are not, the first .*gate_proj"),
        # 64 x 64 float32 are 16,384 bytes: 90 % of them are 14,745, and 3,700 int32 with 8 scales take 14,832
        (1.0, 3700, {}, "at most 90% of the bytes they came from, got 14832 of 16384"),
    ],
)
def test_what_a_quantiser_wrote_is_looked_at(tmp_path, scale, num_packed, extra, words):
    parent, folder = tmp_path / "parent", tmp_path / "quantised"
    parent.mkdir()
    folder.mkdir()
    save_file({"model.layers.0.mlp.up_proj.weight": torch.zeros(64, 64)}, parent / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    scales = torch.ones(8)
    scales[3] = scale
    packed = {f"{name}_packed": torch.zeros(num_packed, dtype=torch.int32), f"{name}_scale": scales}
    save_file(packed | extra, folder / "model.safetensors")
    if words is None:
        check_quantized(folder, parent)
        return
    with pytest.raises(RunBroken, match=words):
        check_quantized(folder, parent)
