"""Artefacts: equal files are one version, and nothing that could not be served becomes one."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from core.checkpoint import write_checkpoint
from core.config import Config, dump_config, parse_config
from core.errors import RunBroken, UserError
from serve.artefacts.artefact import MANIFEST, artefacts_folder, flaw, load_artefact, record
from serve.artefacts.export import export_run
from serve.artefacts.tensors import find_nonfinite, read_tensors

pytestmark = pytest.mark.fast
CHECKOUT = Path(__file__).parents[2]


@pytest.fixture
def model(tiny_model, tmp_path) -> Path:
    """A copy of the tiny model that a test may break."""
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def make_run(run_dir: Path, model: Path, step: int = 3, with_tokenizer: bool = True) -> Path:
    """A run folder whose checkpoint holds the model's weights."""
    run_dir.mkdir(exist_ok=True)
    config = parse_config({"num_steps": 9, "policy": {"model": str(model)}}, "test", Config)
    (run_dir / "config.yaml").write_text(dump_config(config))

    def fill(folder: Path) -> None:
        (folder / "policy").mkdir()
        for name in [path.name for path in model.iterdir()] if with_tokenizer else ["config.json", "model.safetensors"]:
            shutil.copyfile(model / name, folder / "policy" / name)

    write_checkpoint(run_dir, step, fill, keep=9)
    return run_dir


def weights_of(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step_{step:06d}" / "policy" / "model.safetensors"


def scale(file: Path, factor: float) -> None:
    save_file({name: tensor * factor for name, tensor in load_file(file).items()}, file, metadata={"format": "pt"})


def test_the_newest_checkpoint_of_a_run_becomes_an_artefact(model, tmp_path):
    made = export_run(make_run(tmp_path / "run", model), tmp_path / "serve")
    assert made.folder == artefacts_folder(tmp_path / "serve") / made.digest
    assert flaw(made.folder) is None
    assert (made.origin.step, made.origin.parent, made.origin.quantization) == (3, None, "none")
    assert made.origin.config is not None
    assert made.origin.config["policy"]["model"] == str(model)
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= set(made.files)


def test_the_same_files_are_one_version_wherever_they_come_from(model, tmp_path):
    of_run = export_run(make_run(tmp_path / "run", model), tmp_path / "serve")
    again = export_run(tmp_path / "run", tmp_path / "serve")
    of_model = export_run(model, tmp_path / "serve")
    of_artefact = export_run(of_run.folder, tmp_path / "serve")
    assert of_run == again == of_model == of_artefact
    assert [path.name for path in artefacts_folder(tmp_path / "serve").iterdir()] == [of_run.digest]


def test_other_weights_or_another_chat_template_are_another_version(model, tmp_path):
    first = export_run(model, tmp_path / "serve")
    with (model / "chat_template.jinja").open("a") as stream:
        stream.write(" ")
    second = export_run(model, tmp_path / "serve")
    scale(model / "model.safetensors", 0.5)
    third = export_run(model, tmp_path / "serve")
    assert len({first.digest, second.digest, third.digest}) == 3


def test_a_checkpoint_without_a_tokenizer_gets_that_of_the_run(model, tmp_path):
    whole = export_run(model, tmp_path / "serve")
    bare = export_run(make_run(tmp_path / "run", model, with_tokenizer=False), tmp_path / "serve")
    assert bare.digest == whole.digest


def test_a_damaged_newest_checkpoint_is_passed_over_and_said(model, tmp_path):
    run = make_run(tmp_path / "run", model, step=3)
    make_run(run, model, step=5)
    os.truncate(weights_of(run, 5), 100)
    made = export_run(run, tmp_path / "serve")
    assert made.origin.step == 3
    assert "step_000005 is not whole: model.safetensors must have" in made.origin.notes[0]


def test_a_run_with_nothing_but_damaged_checkpoints_is_refused(model, tmp_path):
    run = make_run(tmp_path / "run", model)
    os.truncate(weights_of(run, 3), 100)
    with pytest.raises(RunBroken, match=r"must hold a whole checkpoint, got 1 broken"):
        export_run(run, tmp_path / "serve")
    assert not artefacts_folder(tmp_path / "serve").exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_that_are_not_finite_are_refused_by_name(model, tmp_path, value, dtype):
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(model / "model.safetensors").items()}
    tensors["model.layers.1.mlp.up_proj.weight"][3, 7] = value
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"model\.layers\.1\.mlp\.up_proj\.weight \(1 of 8192 numbers"):
        export_run(model, tmp_path / "serve")
    assert list(artefacts_folder(tmp_path / "serve").iterdir()) == []


def test_the_largest_finite_numbers_count_as_finite(tmp_path):
    largest = {str(dtype): torch.tensor([torch.finfo(dtype).max, torch.finfo(dtype).min]) for dtype in (torch.float32,)}
    largest["bfloat16"] = torch.tensor([torch.finfo(torch.bfloat16).max], dtype=torch.bfloat16)
    save_file(largest | {"counts": torch.tensor([-1, 2**31 - 1])}, tmp_path / "model.safetensors")
    assert find_nonfinite(tmp_path) is None
    assert {tensor.name: tensor.shape for tensor in read_tensors(tmp_path)}["counts"] == (2,)


def test_a_model_without_a_chat_template_is_refused(model, tmp_path):
    (model / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match="must have a chat template to be served"):
        export_run(model, tmp_path / "serve")


def test_a_model_without_a_tokenizer_is_refused(model, tmp_path):
    (model / "tokenizer_config.json").unlink()
    with pytest.raises(UserError, match=r"lacks tokenizer_config\.json"):
        export_run(model, tmp_path / "serve")


def cut_the_weights(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 500)


def flip_a_byte(folder: Path) -> None:
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)


def delete_the_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def add_weights(folder: Path) -> None:
    shutil.copyfile(folder / "model.safetensors", folder / "more.safetensors")


def forge_the_manifest(folder: Path) -> None:
    tree = json.loads((folder / MANIFEST).read_text())
    del tree["files"]["tokenizer.json"]
    (folder / MANIFEST).write_text(json.dumps(tree))
    delete_the_tokenizer(folder)


def cut_the_manifest(folder: Path) -> None:
    os.truncate(folder / MANIFEST, 40)


def delete_the_manifest(folder: Path) -> None:
    (folder / MANIFEST).unlink()


DAMAGES = {
    cut_the_weights: "model.safetensors must have",
    flip_a_byte: "model.safetensors does not match its sha256",
    delete_the_tokenizer: "tokenizer.json is missing",
    add_weights: "more.safetensors does not belong to it",
    forge_the_manifest: "its digest is not that of the files",
    cut_the_manifest: "must be that of an artefact, got JSONDecodeError",
    delete_the_manifest: "must have a manifest.json, got none",
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damage_is_named_and_mended_by_exporting_again(model, tmp_path, damage):
    made = export_run(model, tmp_path / "serve")
    damage(made.folder)
    assert DAMAGES[damage] in (flaw(made.folder) or "whole")
    assert export_run(model, tmp_path / "serve").digest == made.digest
    assert flaw(made.folder) is None
    assert [path.name for path in made.folder.parent.iterdir()] == [made.digest]


def test_a_folder_under_another_digest_is_flawed(model, tmp_path):
    made = export_run(model, tmp_path / "serve")
    moved = made.folder.rename(made.folder.with_name("0" * 64))
    assert flaw(moved) == f"its manifest is that of {made.digest}"


def test_what_is_learned_later_does_not_change_the_version(model, tmp_path):
    made = export_run(model, tmp_path / "serve")
    record(made, gate={"passed": True}, tokens_per_second=12.5)
    record(made, size_bytes=7)
    found = load_artefact(made.folder)
    assert (found.gate, found.measurements) == ({"passed": True}, {"tokens_per_second": 12.5, "size_bytes": 7})
    assert (found.digest, flaw(found.folder)) == (made.digest, None)


def test_a_manifest_being_replaced_is_no_damage(model, tmp_path):
    made = export_run(model, tmp_path / "serve")
    (made.folder / f".{MANIFEST}.tmp").write_text("{")  # as a kill in the middle of record() leaves it
    assert flaw(made.folder) is None


def test_a_killed_export_leaves_no_version_and_the_next_one_cleans_up(model, tmp_path):
    serve = tmp_path / "serve"
    code = (
        "import shutil, sys, time; from pathlib import Path; from serve.artefacts.artefact import Origin, store\n"
        "def fill(folder):\n"
        "    shutil.copyfile(sys.argv[2] + '/model.safetensors', folder / 'model.safetensors')\n"
        "    print('filled', flush=True); time.sleep(60)\n"
        "store(Path(sys.argv[1]), fill, Origin('test'))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(serve), str(model)], cwd=CHECKOUT, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "filled\n"
        child.send_signal(signal.SIGKILL)
    left = list(artefacts_folder(serve).iterdir())
    assert [path.name.startswith(".writing-") for path in left] == [True]
    made = export_run(model, serve)
    assert [path.name for path in artefacts_folder(serve).iterdir()] == [made.digest]


def test_two_exports_at_once_make_one_version(model, tmp_path):
    serve = tmp_path / "serve"
    code = (
        "import shutil, sys; from pathlib import Path; from serve.artefacts.artefact import Origin, store\n"
        "copy = lambda folder: shutil.copyfile(sys.argv[2], folder / 'model.safetensors') and None\n"
        "print({store(Path(sys.argv[1]), copy, Origin('test')).digest for _ in range(30)})"
    )
    command = [sys.executable, "-c", code, str(serve), str(model / "model.safetensors")]
    children = [subprocess.Popen(command, cwd=CHECKOUT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = {child.communicate(timeout=60)[0].strip() for child in children}
    assert [child.returncode for child in children] == [0, 0]
    assert said == {str({path.name for path in artefacts_folder(serve).iterdir()})}


def test_a_model_that_lacks_a_weight_is_refused_by_its_name(model, tmp_path):
    file = model / "model.safetensors"
    weights = load_file(file)
    lost = next(name for name in weights if name.endswith("mlp.up_proj.weight"))
    del weights[lost]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=f"must be whole, got none for {lost}"):
        export_run(model, tmp_path / "serving")
