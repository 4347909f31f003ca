"""Settings of everything that deals with a running engine."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from draftsmith.recipe.values import Dtype, Engine, Levels, Settings, TemplateOptions, runtime


class ServedSettings(Settings):
    """Served engines to measure: the same prompts to one with the draft and one without."""

    server: Annotated[str | None, Field(min_length=1, description="Base URL of the engine that serves the draft.")] = (
        None
    )
    baseline_server: Annotated[
        str | None, Field(min_length=1, description="Base URL of an engine that serves the target alone.")
    ] = None
    concurrency: Levels = [1]
    model: Annotated[str | None, Field(description="Model name the servers know; default: the one they serve.")] = None
    api_key_env: Annotated[str, runtime("Environment variable that holds the API key.")] = "OPENAI_API_KEY"


class PayoffSettings(Settings):
    """Step times and acceptance to work out a draft's payoff from."""

    acceptance: Annotated[
        list[Annotated[float, Field(ge=0, le=1)]],
        Field(description="Assumed acceptance per position, repeat for later ones; default: as measured."),
    ] = []
    draft_tokens_up_to: Annotated[int, Field(ge=1, le=16, description="Draft tokens to work out at most.")] = 8
    draft_tokens: Annotated[
        int, Field(ge=1, le=16, description="Draft tokens that --verify-ms, or an estimate on a plain server, is for.")
    ] = 4
    server: Annotated[
        str | None, Field(min_length=1, description="Base URL of an engine that serves the draft: steps with it.")
    ] = None
    baseline_server: Annotated[
        str | None, Field(min_length=1, description="Base URL of an engine that serves the target alone: plain steps.")
    ] = None
    concurrency: Levels = [1]
    target_ms: Annotated[
        list[str], Field(description="A plain step, as CONCURRENCY:MILLISECONDS; repeat for several.")
    ] = []
    verify_ms: Annotated[list[str], Field(description="A target forward over --draft-tokens + 1 tokens.")] = []
    draft_ms: Annotated[list[str], Field(description="One draft step.")] = []
    draft_share: Annotated[
        float | None, Field(ge=0, description="A draft step as a share of a plain one; default: by their weights.")
    ] = None
    questions: Annotated[
        str | None, Field(description="Questions to time steps on; default: the run's own held-out split.")
    ] = None
    max_tokens: Annotated[int, Field(ge=8, description="Generated tokens of a timed reply at most.")] = 128
    rounds: Annotated[int, Field(ge=1, description="Timed rounds per concurrency, after a warm-up.")] = 3
    model: Annotated[str | None, Field(description="Model name the servers know; default: the one they serve.")] = None
    api_key_env: Annotated[str, runtime("Environment variable that holds the API key.")] = "OPENAI_API_KEY"


class DiagnoseSettings(Settings):
    """Which link of the chain makes acceptance low."""

    server: Annotated[str | None, Field(min_length=1, description="Base URL of the engine that serves the draft.")] = (
        None
    )
    model: Annotated[str | None, Field(description="Model name the server knows; default: the one it serves.")] = None
    draft: Annotated[
        str | None, Field(description="A draft folder of anybody's; default: the run's own, trained and exported.")
    ] = None
    engine: Annotated[
        Engine | None, Field(description="As whose files the draft is read; default: what was exported.")
    ] = None
    questions: Annotated[
        str | None, Field(description="Questions as they are served, to compare with those trained on.")
    ] = None
    template_options: Annotated[
        TemplateOptions, Field(description="Chat template options of the serving, e.g. thinking, for --questions.")
    ] = {}
    limit: Annotated[int, Field(ge=1, description="Held-out questions (and training ones) to look at, at most.")] = 24
    draft_tokens: Annotated[int, Field(ge=1, le=16, description="Tokens the draft proposes per step.")] = 4
    target: Annotated[str | None, Field(description="Model folder, hub id or smollm2; default: extract's.")] = None
    device: Annotated[str, Field(description="Torch device; auto: cuda where there is one.")] = "auto"
    trust_remote_code: Annotated[bool, Field(description="Run code that comes with the model.")] = False
    api_key_env: Annotated[str, runtime("Environment variable that holds the API key.")] = "OPENAI_API_KEY"


class ServeSettings(Settings):
    """An engine with this run's target and draft."""

    engine: Annotated[Engine | None, Field(description="Exported format to serve; default: what was exported.")] = None
    baseline: Annotated[bool, Field(description="Without the draft.")] = False
    hidden_states: Annotated[
        str | None,
        Field(
            min_length=1,
            description="Folder for vLLM to write the states that the draft reads to, for `diagnose`; no draft.",
        ),
    ] = None
    host: Annotated[str, Field(min_length=1, description="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Field(ge=1, le=65535, description="Port to listen on.")] = 8000
    draft_tokens: Annotated[
        int | None, Field(ge=1, le=16, description="Tokens the draft proposes per step; default: as measured, else 3.")
    ] = None
    context: Annotated[
        int | None, Field(ge=16, description="Ids of a request at most; default: the target's (llama.cpp: 8192 of it).")
    ] = None
    parallel: Annotated[int | None, Field(ge=1, description="Requests at a time; default: the engine's own.")] = None
    dtype: Annotated[Dtype, Field(description="Type the engine computes in; auto: the target's own.")] = "auto"
    target: Annotated[
        str | None,
        Field(min_length=1, description="Model folder, hub id or (llama.cpp) GGUF file; default: the run's own."),
    ] = None
    python: Annotated[
        str | None,
        Field(
            description="Interpreter of the engine's environment; default: DRAFTSMITH_VLLM_PYTHON for vLLM, or this."
        ),
    ] = None
    wait: Annotated[float, Field(gt=0, description="Seconds until it must answer.")] = 1800.0


class ServingSettings(Settings):
    """Start the run's engines, with the draft and without, and measure there what the reference decoder measured."""

    engine: Annotated[Engine, Field(description="Exported format to serve.")] = "llamacpp"
    python: Annotated[str | None, runtime("Interpreter of the engine's environment; default: as for `serve`.")] = None
    concurrency: Levels = [1]
    limit: Annotated[
        int, Field(ge=1, description="Prompts of a timed round; at least three for each request at a time.")
    ] = 16
    rounds: Annotated[int, Field(ge=1, description="Timed rounds, draft and baseline in turn.")] = 3
    context: Annotated[int | None, Field(ge=16, description="Ids of a request at most.")] = 1024
    dtype: Annotated[Dtype, Field(description="Type the engine computes in; auto: the target's own.")] = "auto"
    extra: Annotated[list[str], Field(description="Further arguments for the engine.")] = []
