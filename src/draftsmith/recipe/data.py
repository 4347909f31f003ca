"""Settings of the stages that make data: capture, import, and what is done with traces."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_serializer, field_validator

from draftsmith.recipe.values import (
    DatasetFormat,
    Dtype,
    Family,
    Settings,
    TemplateOptions,
    runtime,
    seconds_of,
    without_credentials,
)


class Message(Settings):
    """One turn put before every question."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str


class QuestionSettings(Settings):
    """Where questions come from, how they are rendered and split."""

    questions: Annotated[
        str, Field(description="JSONL or Parquet file, folder, HF dataset name, or builtin:arithmetic.")
    ] = "builtin:arithmetic"
    split: Annotated[str, Field(description="Split of an HF dataset.")] = "train"
    limit: Annotated[int | None, Field(ge=1, description="Use only the first N questions.")] = None
    held_out: Annotated[
        float, Field(ge=0.0, lt=1.0, description="Share of questions kept out of vocab and train, by question.")
    ] = 0.1
    tokenizer: Annotated[str | None, Field(description="Tokenizer folder or hub id; default: the target's.")] = None
    template_options: Annotated[
        TemplateOptions, Field(description="Chat template options, e.g. --template-options.thinking true.")
    ] = {}
    preamble: Annotated[
        list[Message],
        Field(description="Turns before every question (system text, worked examples); as a flag, each in JSON."),
    ] = []
    thinking: Annotated[
        Family, Field(description="Family of think delimiters; auto reads it off tokenizer and template.")
    ] = "auto"
    think_open: Annotated[str, Field(description="Opening delimiter for --thinking custom.")] = ""
    think_close: Annotated[str, Field(description="Closing delimiter for --thinking custom.")] = ""
    trust_remote_code: Annotated[
        bool, Field(description="Run code that comes with a tokenizer or model. Only for sources you trust.")
    ] = False


class GateLimits(Settings):
    """Shares of the replies looked at (the first ones, then a sliding window) above which the quality gate acts."""

    first: Annotated[int, Field(ge=8, le=64, description="Replies before its first verdict on shares.")] = 32
    window: Annotated[int, Field(ge=32, description="Latest replies that every later verdict is about.")] = 512
    without_reasoning: Annotated[
        float, Field(ge=0, le=1, description="Reasoning missing, or there though switched off.")
    ] = 0.5
    cut: Annotated[float, Field(ge=0, le=1, description="Cut off, in reasoning or answer.")] = 0.8
    empty: Annotated[float, Field(ge=0, le=1, description="Ended with an empty answer.")] = 0.3
    loops: Annotated[float, Field(ge=0, le=1, description="Repeating themselves.")] = 0.4
    delimiters: Annotated[float, Field(ge=0, le=1, description="Think delimiters missing, doubled or nested.")] = 0.7
    duplicates: Annotated[float, Field(ge=0, le=1, description="Equal to the reply to another question.")] = 0.3
    rejected: Annotated[float, Field(ge=0, le=1, description="Not fit to train on, for whatever reason.")] = 0.5
    failed: Annotated[float, Field(ge=0, le=1, description="Requests that got no reply.")] = 0.5


class CaptureSettings(QuestionSettings):
    """Questions in, traces out."""

    server: Annotated[list[str], runtime("Base URL of an OpenAI-compatible server; repeat for several.")] = []
    model: Annotated[str | None, Field(description="Model name the server knows.")] = None
    local: Annotated[
        str | None, Field(description="Model folder, hub id or smollm2 (embedded): run it in this process.")
    ] = None
    max_tokens: Annotated[int, Field(ge=1, description="Budget of generated tokens per reply.")] = 8192
    temperature: Annotated[float, Field(ge=0.0, description="0 is greedy.")] = 0.0
    top_p: Annotated[float, Field(gt=0.0, le=1.0, description="Nucleus share.")] = 1.0
    top_k: Annotated[int, Field(ge=0, description="0 keeps every token.")] = 0
    seed: Annotated[int, Field(ge=0, description="Seed of sampled replies; each sample adds its number.")] = 0
    samples: Annotated[int, Field(ge=1, description="Replies per question.")] = 1
    exact: Annotated[
        Literal["engine", "verified", "any"],
        Field(description="Least exactness of token ids: engine's own, rendered and verified, or any."),
    ] = "verified"
    concurrency: Annotated[
        Annotated[int, Field(ge=1)] | Literal["auto"],
        runtime("Requests in flight at most; auto finds what the servers can use."),
    ] = 128
    deadline: Annotated[
        float | None,
        runtime("Seconds one request may take, waiting in our queue aside; default: derived from --max-tokens.", gt=0),
    ] = None
    retries: Annotated[int, runtime("Times a request is sent again after a passing fault.", ge=0)] = 5
    wait: Annotated[str, runtime("How long to wait for a server that is still loading, e.g. 90s, 30m, 2h.")] = "0s"
    probe: Annotated[bool, runtime("Ask the servers some test questions before the first real one.")] = True
    on_gate: Annotated[
        Literal["stop", "warn"], runtime("What the quality gate does: stop the run (exit code 3), or only say so.")
    ] = "stop"
    gate: Annotated[GateLimits, runtime("Limits of the quality gate.")] = GateLimits()
    drain_seconds: Annotated[
        float, runtime("After SIGTERM or Ctrl-C: seconds to wait for replies in flight before abandoning them.", ge=0)
    ] = 60.0
    price_per_hour: Annotated[
        float | None, runtime("What all servers together cost per hour, to show the cost so far.", ge=0)
    ] = None
    api_key_env: Annotated[str, runtime("Environment variable that holds the API key.")] = "OPENAI_API_KEY"
    batch_size: Annotated[int, runtime("Replies generated together by --local.", ge=1)] = 64
    dtype: Annotated[Dtype, Field(description="Compute type of --local; auto: bfloat16 where it is native.")] = "auto"
    device: Annotated[str, runtime("Torch device of --local; auto: cuda where there is one.")] = "auto"

    @field_validator("wait")
    @classmethod
    def _a_time(cls, wait: str) -> str:
        seconds_of(wait)
        return wait

    @field_serializer("server", when_used="json")
    def _shown_servers(self, urls: list[str]) -> list[str]:
        return [without_credentials(url) for url in urls]


class ImportSettings(QuestionSettings):
    """A dataset's own answers as traces: static text, for comparison."""


class InspectSettings(Settings):
    """What `inspect` shows, and what it is told about the target."""

    tokenizer: Annotated[
        str | None, Field(description="The target's tokenizer: folder or hub id; default: the one the traces name.")
    ] = None
    thinking: Annotated[Family, Field(description="Family of think delimiters of another tool's data.")] = "auto"
    think_open: Annotated[str, Field(description="Opening delimiter for --thinking custom.")] = ""
    think_close: Annotated[str, Field(description="Closing delimiter for --thinking custom.")] = ""
    longest: Annotated[int, Field(ge=0, description="Name the N longest replies.")] = 5
    examples: Annotated[int, Field(ge=0, description="Show N replies, coloured by what the draft learns.")] = 3
    seed: Annotated[int, Field(ge=0, description="Chooses the examples.")] = 0
    trust_remote_code: Annotated[bool, Field(description="Run code that comes with the tokenizer.")] = False


class DatasetSettings(Settings):
    """Traces as other tools' training data."""

    format: Annotated[DatasetFormat, Field(description="Whose format to write.")] = "hf"
    tokenizer: Annotated[
        str | None, Field(description="The target's tokenizer, for text columns; default: the one the traces name.")
    ] = None
    trust_remote_code: Annotated[bool, Field(description="Run code that comes with the tokenizer.")] = False
