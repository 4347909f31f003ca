"""From a run to the exact command that serves it: target, draft, context, type, and the flags that make it draft.

Everything is read from the run's small JSON files; nothing is loaded or started here.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from draftsmith.artifacts import MANIFEST, manifest, read_json
from draftsmith.errors import UserError
from draftsmith.export.launching import DRAFT_TOKENS, GGUF_DRAFT, GGUF_TARGET, draft_flags, engine_words, states_flags
from draftsmith.recipe import Engine, ServeSettings

VLLM_PYTHON = "DRAFTSMITH_VLLM_PYTHON"
"""Environment variable with the interpreter of an environment that has vLLM."""

LLAMACPP_CONTEXT = 8192
"""llama.cpp allocates the whole context of every slot at start, so a target's full one is not its default here."""

LLAMACPP_SLOTS = 4
PREFERRED: tuple[Engine, ...] = ("llamacpp", "vllm", "speculators", "sglang")
"""Which export is served when there are several and none was named."""

PRIVATE = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
"""Environment of every engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One engine as it is to be started."""

    engine: Engine
    target: str
    """Model folder, hub id or GGUF file."""
    draft: str | None
    """The exported folder; None serves the target alone."""
    draft_tokens: int
    context: int | None
    """Ids of a request at most; None: the engine's own."""
    parallel: int | None
    dtype: str | None
    host: str
    port: int
    python: str
    states: tuple[str, ...] = ()
    """Arguments that make it hand out hidden states."""
    extra: tuple[str, ...] = ()
    """Further arguments, as the engine knows them."""

    @property
    def url(self) -> str:
        """Where it answers, seen from this machine."""
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"


def launch_of(
    run: Path,
    settings: ServeSettings,
    extra: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Launch:
    """What to start for a run.

    Raises:
        UserError: nothing exported, not in the engine asked for, no GGUF file of the target, or a context that the
            draft was not made for; hidden states of another engine than vLLM.
    """
    engine = _engine(run, settings)
    if engine == "llamacpp":
        _refuse_for_llamacpp(settings)
    target = read_json(run / "hidden" / "target.json")
    folder = None if settings.baseline or settings.hidden_states else _exported(run, engine)
    return Launch(
        engine=engine,
        target=settings.target or _target(run, engine, target["name"]),
        draft=folder,
        draft_tokens=settings.draft_tokens or _measured_tokens(run),
        context=_context(settings.context, engine, int(target["config"]["max_position_embeddings"])),
        parallel=settings.parallel or (LLAMACPP_SLOTS if engine == "llamacpp" else None),
        dtype=target["config"].get("dtype") if settings.dtype == "auto" else settings.dtype,
        host=settings.host,
        port=settings.port,
        python=settings.python or _python(engine, os.environ if environment is None else environment),
        states=_states(run, engine, settings.hidden_states) if settings.hidden_states else (),
        extra=tuple(extra),
    )


def log_name(launch: Launch) -> str:
    """In the run's folder; engines that are served side by side have one each."""
    role = "" if launch.draft else "-states" if launch.states else "-baseline"
    return f"serve-{launch.engine}{role}.log"


def command(launch: Launch) -> list[str]:
    """The words that start it on this machine."""
    start = [launch.python, "-m"]
    if launch.engine == "llamacpp":
        slots = launch.parallel or LLAMACPP_SLOTS
        words = [*start, "draftsmith.serve.llamacpp", "--model", launch.target, "--slots", str(slots)]
        words += ["--context", str((launch.context or LLAMACPP_CONTEXT) * slots)]
        if launch.draft:
            words += ["--draft", str(Path(launch.draft) / GGUF_DRAFT), "--draft-tokens", str(launch.draft_tokens)]
        return [*words, *_address(launch), *launch.extra]
    if launch.engine == "sglang":
        return [*start, "sglang.launch_server", "--model-path", launch.target, *_flags(launch)]
    return [*start, "vllm.entrypoints.openai.api_server", "--model", launch.target, *_flags(launch)]


def elsewhere(launch: Launch) -> str:
    """The same, as it is typed on a machine where the engine is installed as its makers say, in any folder. Arguments
    given for this machine's engine are left out for llama.cpp, whose own server has others."""
    target = str(Path(launch.target).absolute()) if Path(launch.target).exists() else launch.target  # else a hub id
    there = replace(launch, target=target, draft=launch.draft and str(Path(launch.draft).absolute()))
    return shlex.join([*engine_words(there.engine, there.target), *_flags(there)])


def _flags(launch: Launch) -> list[str]:
    """Everything after the target, in the engine's own words."""
    words = draft_flags(launch.engine, launch.draft, launch.draft_tokens) if launch.draft else [*launch.states]
    if launch.engine == "llamacpp":
        slots = launch.parallel or LLAMACPP_SLOTS
        sizes = ["--ctx-size", str((launch.context or LLAMACPP_CONTEXT) * slots), "--parallel", str(slots)]
        return [*words, *sizes, "--metrics", "--jinja", *_address(launch)]
    context, parallel = ("--max-model-len", "--max-num-seqs")
    if launch.engine == "sglang":
        context, parallel = ("--context-length", "--max-running-requests")
    for flag, value in (("--dtype", launch.dtype), (context, launch.context), (parallel, launch.parallel)):
        words += [flag, str(value)] if value is not None else []
    if launch.engine == "sglang":
        words.append("--enable-metrics")
    return [*words, *_address(launch), *launch.extra]


def _address(launch: Launch) -> list[str]:
    return ["--host", launch.host, "--port", str(launch.port)]


def _engine(run: Path, settings: ServeSettings) -> Engine:
    if settings.hidden_states:
        if settings.baseline:
            raise UserError("--hidden-states: expected no --baseline beside it, found both; it serves no draft anyway")
        if settings.engine not in (None, "vllm"):
            raise UserError(
                f"--hidden-states: expected --engine vllm, found {settings.engine}; only vLLM hands them out"
            )
        return "vllm"
    if settings.engine is not None:
        return settings.engine
    there = [engine for engine in PREFERRED if (run / "export" / engine).is_dir()]
    if not there:
        raise UserError(
            f"{run / 'export'}: nothing is exported yet; `draftsmith export --run {run} --engine "
            f"{'|'.join(get_args(Engine))}` does it (for --baseline alone, name the --engine)"
        )
    return there[0]


def _refuse_for_llamacpp(settings: ServeSettings) -> None:
    """What its GGUF file decides, and a file that is not there."""
    if settings.dtype != "auto":
        raise UserError(
            f"--dtype {settings.dtype}: llama.cpp computes in the type of the target's GGUF file; export with "
            f"--target-gguf {settings.dtype} (and serve with -- --exact for equal outputs)"
        )
    if settings.target is not None and not Path(settings.target).is_file():
        raise UserError(f"--target {settings.target}: expected a GGUF file, found none")


def _exported(run: Path, engine: Engine) -> str:
    manifest(run, "export")
    folder = run / "export" / engine
    if not folder.is_dir():
        raise UserError(f"{folder}: not exported; `draftsmith export --run {run} --engine {engine}` does it")
    return str(folder)


def _states(run: Path, engine: Engine, folder: str) -> tuple[str, ...]:
    layers = read_json(Path(_exported(run, engine)) / "config.json")["eagle_aux_hidden_state_layer_ids"]
    return tuple(states_flags(str(Path(folder).absolute()), layers))


def _target(run: Path, engine: Engine, name: str) -> str:
    if engine != "llamacpp":
        return name
    file = run / "export" / engine / GGUF_TARGET
    if not file.is_file():
        raise UserError(
            f"{file}: expected the target as a GGUF file, found none; export with --target-gguf bfloat16, or give "
            "--target FILE.gguf"
        )
    return str(file)


def _context(asked: int | None, engine: Engine, longest: int) -> int:
    if asked is not None and asked > longest:
        raise UserError(f"--context {asked}: target and draft were made for {longest} ids at most; ask for no more")
    return asked or (min(longest, LLAMACPP_CONTEXT) if engine == "llamacpp" else longest)


def _measured_tokens(run: Path) -> int:
    """As the run was measured, so that the numbers can be compared."""
    if not (run / "measure" / MANIFEST).exists():
        return DRAFT_TOKENS
    result: dict[str, Any] = read_json(run / "measure" / "result.json")
    return int(result["draft_tokens"])


def _python(engine: Engine, environment: Mapping[str, str]) -> str:
    if engine in ("vllm", "speculators") and environment.get(VLLM_PYTHON):
        return environment[VLLM_PYTHON]
    return sys.executable
