"""AWQ: an artefact's weights in 4 bits, activations in 16 (W4A16), by llm-compressor in a process of its own.

llm-compressor's packages lie in `.venv-awq`, first on the path of that process alone (`make setup-awq`); torch and
transformers are this environment's. The output layer and the embedding stay as they are.
"""

import hashlib
import json
import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.durable import free_bytes
from core.errors import RunBroken, UserError
from core.machine import read_machine
from data.template import template_tokens
from policy.bundled import load_tokenizer
from serve.artefacts.artefact import Artefact, Origin, flaw, record, store
from serve.artefacts.tensors import Tensor, find_nonfinite, read_tensors
from serve.child import PROJECT, Job, Say, run_job, say_plainly
from serve.config import QuantizeConfig

SERVED_GROUP_SIZES = (32, 64, 128)  # that vLLM's kernels take, on CPU and on CUDA
WIDTH_STEP = 32  # its CPU kernel wants both widths of a layer to be multiples of it
MIN_PROMPTS = 16  # different ones; below, a channel's activations are those of a few words
MIN_TOKENS = 256  # of all calibration prompts together
LARGEST_SHARE = 0.9  # of the parent's bytes that a quantised version may still take
_KEPT_WHOLE = ("embed", "lm_head", "wte", "wpe")  # of the 2-D weights, those llm-compressor is not asked to quantise


@dataclass(frozen=True)
class Calibration:
    """What AWQ looks at to find the channels that matter."""

    token_ids: list[list[int]]
    sha256: str  # of the ids


def packages_folder() -> Path:
    """Folder of llm-compressor's packages: $GRPO_AWQ, else .venv-awq beside the project."""
    return Path(os.environ.get("GRPO_AWQ") or PROJECT / ".venv-awq")


def quantize(
    artefact: Artefact,
    serve_dir: Path,
    config: QuantizeConfig,
    calibration_prompts: list[str],
    group_size: int,
    say: Say = say_plainly,
) -> Artefact:
    """The quantised artefact, whose parent is `artefact`; says its progress.

    UserError, before any model loads, where the group size does not fit, the calibration is too small or llm-compressor
    is not there; RunBroken where the child fails or what it wrote is not finite or not smaller; DeadlineExceeded after
    config.time_limit_s.
    """
    check_group_size(artefact.folder, group_size)
    calibration = read_calibration(artefact, config, calibration_prompts)
    if not (packages_folder() / "llmcompressor").is_dir():
        raise UserError(
            f"quantising needs llm-compressor, got none in {packages_folder()}; run `make setup-awq`, or set "
            "quantize.enabled=false"
        )
    wrong = flaw(artefact.folder)
    if wrong:
        raise UserError(f"the artefact to be quantised must be whole, got {artefact.digest}: {wrong}; export it again")
    serve_dir.mkdir(parents=True, exist_ok=True)
    if free_bytes(serve_dir) < artefact.size_bytes:
        raise RunBroken(
            f"quantising needs {artefact.size_bytes} free bytes in {serve_dir}, got {free_bytes(serve_dir)}; make room"
        )
    origin = Origin(
        source=artefact.origin.source,
        step=artefact.origin.step,
        parent=artefact.digest,
        quantization=quantization_of(group_size),
        config=artefact.origin.config,
    )
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=".quantizing-", dir=serve_dir) as place:
        _run(artefact, Path(place), config, calibration, group_size, say)
        made = store(serve_dir, lambda target: _fill(target, Path(place) / "output", artefact), origin)
    return record(
        made,
        calibration_sha256=calibration.sha256,
        num_calibration_prompts=len(calibration.token_ids),
        num_calibration_tokens=sum(map(len, calibration.token_ids)),
        quantize_s=round(time.monotonic() - started, 1),
    )


def quantization_of(group_size: int) -> str:
    """What the Origin of a version so quantised says."""
    return f"awq-w4a16-g{group_size}"


def check_group_size(folder: Path, group_size: int) -> None:
    """UserError where a layer's weights cannot be cut into groups; names the layer, its width and what would fit."""
    layers = [tensor for tensor in read_tensors(folder) if is_to_be_packed(tensor)]
    if not layers:
        raise UserError(f"a model to be quantised must have linear layers in 16 or 32 bits, got none in {folder}")
    fitting = [size for size in SERVED_GROUP_SIZES if all(layer.shape[1] % size == 0 for layer in layers)]
    cure = f"choose from {', '.join(map(str, fitting))}" if fitting else "no size fits: quantize.enabled=false"
    if group_size not in SERVED_GROUP_SIZES:
        sizes = ", ".join(map(str, SERVED_GROUP_SIZES))
        raise UserError(f"a quantisation group must have {sizes} weights (what vLLM serves), got {group_size}; {cure}")
    for layer in layers:
        width = layer.shape[1]
        if width % group_size:
            raise UserError(
                f"the group size must divide the input width of every layer, got {group_size} for {layer.name} of "
                f"width {width} ({width}/{group_size} = {width / group_size:g}); {cure} (quantize.group_sizes)"
            )
        if layer.shape[0] % WIDTH_STEP:
            raise UserError(
                f"a quantised layer's output width must be a multiple of {WIDTH_STEP} (vLLM's CPU kernel), got "
                f"{layer.shape[0]} for {layer.name}; no group size changes that: quantize.enabled=false"
            )


def is_to_be_packed(tensor: Tensor) -> bool:
    """Whether AWQ is to pack this tensor: the weight of a linear layer that is neither embedding nor output layer."""
    matrix = len(tensor.shape) == 2 and tensor.name.endswith(".weight") and tensor.dtype in ("BF16", "F16", "F32")
    return matrix and not any(word in tensor.name for word in _KEPT_WHOLE)


def check_quantized(folder: Path, parent: Path) -> None:
    """RunBroken where quantised weights are not finite, not all quantised, or hardly smaller than the parent's."""
    bad = find_nonfinite(folder)
    if bad:
        raise RunBroken(
            f"quantised weights and scales must be finite, got {bad}; calibrate on other prompts, or on more of them"
        )
    whole = [tensor.name for tensor in read_tensors(folder) if is_to_be_packed(tensor)]
    if whole:
        raise RunBroken(f"every linear layer must be quantised, got {len(whole)} that are not, the first {whole[0]}")
    before, after = (sum(tensor.num_bytes for tensor in read_tensors(place)) for place in (parent, folder))
    if after > LARGEST_SHARE * before:
        raise RunBroken(
            f"quantised weights must take at most {LARGEST_SHARE:.0%} of the bytes they came from, got {after} of "
            f"{before}; the embedding, which stays whole, is most of this model: quantize.enabled=false"
        )


def read_calibration(artefact: Artefact, config: QuantizeConfig, prompts: list[str]) -> Calibration:
    """The first usable prompts, templated as in training and cut to length; UserError where too little is left.

    Blank prompts, repeated ones and those made of the tokenizer's own special tokens (padding) say nothing about the
    model's activations and are not counted.
    """
    tokenizer = load_tokenizer(artefact.folder)
    special = [token for token in tokenizer.all_special_tokens if token]
    usable = [text for text in dict.fromkeys(prompts) if _says_something(text, special)][
        : config.num_calibration_prompts
    ]
    if len(usable) < MIN_PROMPTS:
        raise UserError(
            f"calibration must have at least {MIN_PROMPTS} different prompts with words in them, got {len(usable)} of "
            f"{len(prompts)} given; give more training prompts (quantize.num_calibration_prompts)"
        )
    system = (artefact.origin.config or {}).get("data", {}).get("system_prompt")
    head = [{"role": "system", "content": system}] if system else []
    token_ids = [template_tokens(tokenizer, [*head, {"role": "user", "content": text}]) for text in usable]
    token_ids = [ids[: config.max_calibration_tokens] for ids in token_ids]
    num_tokens = sum(map(len, token_ids))
    if num_tokens < MIN_TOKENS:
        raise UserError(
            f"calibration must have at least {MIN_TOKENS} tokens in all, got {num_tokens} in {len(usable)} prompts; "
            "give longer ones or more of them"
        )
    return Calibration(token_ids, hashlib.sha256(json.dumps(token_ids).encode()).hexdigest())


def _says_something(text: str, special: list[str]) -> bool:
    for token in special:
        text = text.replace(token, "")
    return bool(text.strip())


def _run(
    artefact: Artefact, place: Path, config: QuantizeConfig, calibration: Calibration, group_size: int, say: Say
) -> None:
    job: dict[str, Any] = {
        "model": str(artefact.folder),
        "output": str(place / "output"),
        "group_size": group_size,
        "num_threads": read_machine().num_cores,
        "token_ids": calibration.token_ids,
    }
    (place / "job.json").write_text(json.dumps(job), encoding="utf-8")
    run_job(
        Job(
            what=f"quantising {artefact.digest[:12]} in groups of {group_size}",
            arguments=["-m", "serve.artefacts.awq_child", str(place / "job.json")],
            time_limit_s=config.time_limit_s,
            limit_name="quantize.time_limit_s",
            first_on_path=(str(packages_folder()),),
            environment={"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "TOKENIZERS_PARALLELISM": "false"},
        ),
        place / "log.txt",
        say,
    )


def _fill(target: Path, output: Path, parent: Artefact) -> None:
    """Copies the quantised weights and their config, and everything else from the parent; refuses unusable weights."""
    for path in [*output.glob("*.safetensors"), *output.glob("*.index.json"), output / "config.json"]:
        shutil.copyfile(path, target / path.name)
    for name in parent.files:
        weights = name.endswith((".safetensors", ".index.json"))
        if not weights and not (target / name).exists():
            shutil.copyfile(parent.folder / name, target / name)
    check_quantized(target, parent.folder)
