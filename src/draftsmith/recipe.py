"""The typed settings of every stage: one definition feeds CLI flags, YAML, docs and manifests.

A field made with `_runtime` changes how a stage runs (speed, patience), not what it makes: it stays out of the plan, so
changing it never invalidates a finished folder. Unknown keys are errors that suggest the nearest key.
"""

from __future__ import annotations

import difflib
import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import urlsplit, urlunsplit

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_serializer, field_validator

from draftsmith.errors import UserError

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Family = Literal["auto", "none", "think", "kimi", "gpt-oss", "custom"]
Engine = Literal["vllm", "speculators", "sglang", "llamacpp"]
DatasetFormat = Literal["speculators", "specforge", "hf"]
S = TypeVar("S", bound=BaseModel)
EXTRA = "extra_forbidden"
"""pydantic's name for an unknown key."""
UNION_MEMBER = re.compile(r"(constrained-)?(int|float|str|bool)|function-.*|.*[\[(].*")
"""What pydantic adds to the path of a wrong value for each type that it might have had."""
UNIT_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def _runtime(description: str, **constraints: Any) -> Any:
    return Field(description=description, json_schema_extra={"runtime": True}, **constraints)


class Settings(BaseModel):
    """Base of a stage's settings: frozen, and strict about unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True, allow_inf_nan=False)

    def shaping(self) -> dict[str, Any]:
        """The values that shape the stage's result, as JSON types, for its plan and manifest."""
        values = self.model_dump(mode="json", by_alias=True)
        for name, info in type(self).model_fields.items():
            if isinstance(info.json_schema_extra, dict) and info.json_schema_extra.get("runtime"):
                del values[info.alias or name]
        return values


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
        dict[str, Any], Field(description="Chat template options, e.g. --template-options.thinking true.")
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

    @field_validator("template_options")
    @classmethod
    def _typed_options(cls, options: dict[str, Any]) -> dict[str, Any]:
        """The command line gives text, and to a template the text "false" is true."""
        return {name: _number(value) for name, value in options.items()}


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

    server: Annotated[list[str], _runtime("Base URL of an OpenAI-compatible server; repeat for several.")] = []
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
        _runtime("Requests in flight at most; auto finds what the servers can use."),
    ] = 128
    deadline: Annotated[
        float | None,
        _runtime("Seconds one request may take, waiting in our queue aside; default: derived from --max-tokens.", gt=0),
    ] = None
    retries: Annotated[int, _runtime("Times a request is sent again after a passing fault.", ge=0)] = 5
    wait: Annotated[str, _runtime("How long to wait for a server that is still loading, e.g. 90s, 30m, 2h.")] = "0s"
    probe: Annotated[bool, _runtime("Ask the servers some test questions before the first real one.")] = True
    on_gate: Annotated[
        Literal["stop", "warn"], _runtime("What the quality gate does: stop the run (exit code 3), or only say so.")
    ] = "stop"
    gate: Annotated[GateLimits, _runtime("Limits of the quality gate.")] = GateLimits()
    drain_seconds: Annotated[
        float, _runtime("After SIGTERM or Ctrl-C: seconds to wait for replies in flight before abandoning them.", ge=0)
    ] = 60.0
    price_per_hour: Annotated[
        float | None, _runtime("What all servers together cost per hour, to show the cost so far.", ge=0)
    ] = None
    api_key_env: Annotated[str, _runtime("Environment variable that holds the API key.")] = "OPENAI_API_KEY"
    batch_size: Annotated[int, _runtime("Replies generated together by --local.", ge=1)] = 64
    dtype: Annotated[Dtype, Field(description="Compute type of --local; auto: bfloat16 where it is native.")] = "auto"
    device: Annotated[str, _runtime("Torch device of --local; auto: cuda where there is one.")] = "auto"

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


class VocabSettings(Settings):
    """The draft vocabulary."""

    size: Annotated[int, Field(description="Ids in the draft vocabulary; the target's own size needs no map.")] = 8192


class ExtractSettings(Settings):
    """Hidden states of the target over the traces."""

    target: Annotated[str | None, Field(description="Model folder, hub id or smollm2; default: --local's.")] = None
    layers: Annotated[
        list[int] | None, Field(description="Output of which layers (0-based, three); default 1, n//2-1, n-4.")
    ] = None
    dtype: Annotated[Dtype, Field(description="Compute type; states are stored in bfloat16.")] = "auto"
    device: Annotated[str, _runtime("Torch device; auto: cuda where there is one.")] = "auto"
    batch_tokens: Annotated[int, _runtime("Tokens per forward pass at most.", ge=1)] = 16384
    shard_mib: Annotated[int, Field(ge=1, description="Size of a shard.")] = 1024
    min_agreement: Annotated[
        float, _runtime("Least share of greedy ids that the teacher's argmax must reproduce.", ge=0, le=1)
    ] = 0.9
    trust_remote_code: Annotated[bool, Field(description="Run code that comes with the model.")] = False


class TrainSettings(Settings):
    """The EAGLE-3 draft and how it is trained."""

    from_: Annotated[
        str | None, Field(alias="from", description="Start from this draft (any export format); keeps its vocabulary.")
    ] = None
    epochs: Annotated[int, Field(ge=1, description="Passes over the training traces.")] = 2
    token_budget: Annotated[
        int | None, Field(ge=1, description="Stop after this many supervised tokens, however many epochs it takes.")
    ] = None
    lr: Annotated[float, Field(gt=0, description="Peak learning rate (AdamW, cosine).")] = 1e-4
    warmup: Annotated[float, Field(ge=0, lt=1, description="Share of the steps spent warming up.")] = 0.05
    weight_decay: Annotated[float, Field(ge=0, description="AdamW weight decay.")] = 0.0
    clip: Annotated[float, Field(gt=0, description="Gradient norm limit.")] = 0.5
    ttt_steps: Annotated[int, Field(ge=1, le=16, description="Draft steps unrolled while training.")] = 5
    ttt_decay: Annotated[float, Field(gt=0, le=1, description="Weight of step k is this to the power k.")] = 0.8
    batch_tokens: Annotated[int, Field(ge=1, description="Supervised tokens per optimizer step.")] = 4096
    max_length: Annotated[int, Field(ge=8, description="Ids of a trace at most; longer ones are cut at the end.")] = (
        32768
    )
    intermediate: Annotated[int | None, Field(ge=1, description="MLP width; default: the target's.")] = None
    heads: Annotated[int | None, Field(ge=1, description="Attention heads; default: the target's.")] = None
    kv_heads: Annotated[int | None, Field(ge=1, description="Key/value heads; default: the target's.")] = None
    norm_before_residual: Annotated[bool, Field(description="Residual taken after hidden_norm (SGLang: no).")] = False
    evals: Annotated[int, Field(ge=1, description="Held-out evaluations over the whole training.")] = 8
    eval_traces: Annotated[int, Field(ge=1, description="Held-out traces per evaluation at most.")] = 256
    draft_tokens: Annotated[int, Field(ge=1, le=16, description="Chain length of the held-out simulation.")] = 4
    seed: Annotated[int, Field(ge=0, description="Seed of initialisation and order.")] = 0
    dtype: Annotated[Dtype, Field(description="Compute type; master weights are float32 always.")] = "auto"
    device: Annotated[str, _runtime("Torch device; auto: cuda where there is one.")] = "auto"
    checkpoint_minutes: Annotated[float, _runtime("Minutes between checkpoints.", gt=0)] = 2.0
    new_vocab: Annotated[bool, Field(description="With --from: rebuild the head rows for this run's vocabulary.")] = (
        False
    )


class ExportSettings(Settings):
    """What the serving engine loads."""

    engine: Annotated[list[Engine], Field(description="Format to write; repeat for several.")] = ["vllm"]
    dtype: Annotated[Literal["bfloat16", "float16", "float32"], Field(description="Type of the exported weights.")] = (
        "bfloat16"
    )
    embeddings: Annotated[bool, Field(description="Include the target's embedding in the export.")] = True
    target_gguf: Annotated[
        Literal["bfloat16", "float16", "float32"] | None,
        Field(description="llamacpp: write the target as GGUF too, in this type (Llama targets)."),
    ] = None
    gguf_tokenizer: Annotated[
        str | None,
        Field(description="llamacpp: a GGUF file of the target to copy the tokenizer from; default: the target's own."),
    ] = None


class MeasureSettings(Settings):
    """Held-out questions through the reference speculative decoder."""

    questions: Annotated[
        str | None, Field(description="Questions to measure on; default: the run's own held-out split.")
    ] = None
    limit: Annotated[int, Field(ge=1, description="Questions at most.")] = 32
    max_tokens: Annotated[int | None, Field(ge=1, description="Generated tokens at most; default: capture's.")] = None
    draft_tokens: Annotated[int, Field(ge=1, le=16, description="Tokens the draft proposes per step.")] = 4
    temperature: Annotated[float, Field(ge=0, description="0 is greedy.")] = 0.0
    top_p: Annotated[float, Field(gt=0, le=1, description="Nucleus share.")] = 1.0
    top_k: Annotated[int, Field(ge=0, description="0 keeps every token.")] = 0
    seed: Annotated[int, Field(ge=0, description="Seed of sampled decoding.")] = 0
    rounds: Annotated[int, Field(ge=1, description="Paired timing rounds, draft and baseline in turn.")] = 3
    timing_questions: Annotated[int, Field(ge=1, description="Questions per timing round.")] = 8
    target: Annotated[str | None, Field(description="Model folder, hub id or smollm2; default: extract's.")] = None
    dtype: Annotated[Dtype, Field(description="Compute type of the timing; losslessness is proved in float32.")] = (
        "auto"
    )
    device: Annotated[str, Field(description="Torch device; auto: cuda where there is one.")] = "auto"
    trust_remote_code: Annotated[bool, Field(description="Run code that comes with the model.")] = False


class ServedSettings(Settings):
    """Served engines to measure: the same prompts to one with the draft and one without."""

    server: Annotated[str | None, Field(description="Base URL of the engine that serves the draft.")] = None
    baseline_server: Annotated[str | None, Field(description="Base URL of an engine that serves the target alone.")] = (
        None
    )
    concurrency: Annotated[
        list[Annotated[int, Field(ge=1)]], Field(min_length=1, description="Requests at a time; repeat for several.")
    ] = [1]
    model: Annotated[str | None, Field(description="Model name the servers know; default: the one they serve.")] = None
    api_key_env: Annotated[str, _runtime("Environment variable that holds the API key.")] = "OPENAI_API_KEY"


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
    server: Annotated[str | None, Field(description="Base URL of an engine that serves the draft: steps with it.")] = (
        None
    )
    baseline_server: Annotated[
        str | None, Field(description="Base URL of an engine that serves the target alone: plain steps.")
    ] = None
    concurrency: Annotated[
        list[Annotated[int, Field(ge=1)]], Field(min_length=1, description="Requests at a time; repeat for several.")
    ] = [1]
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
    max_tokens: Annotated[int, Field(ge=8, description="Generated tokens of a timed reply at most.")] = 64
    rounds: Annotated[int, Field(ge=1, description="Timed rounds per concurrency, after a warm-up.")] = 3
    model: Annotated[str | None, Field(description="Model name the servers know; default: the one they serve.")] = None
    api_key_env: Annotated[str, _runtime("Environment variable that holds the API key.")] = "OPENAI_API_KEY"


class DiagnoseSettings(Settings):
    """Which link of the chain makes acceptance low."""

    server: Annotated[str | None, Field(description="Base URL of the engine that serves the draft.")] = None
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
        dict[str, Any], Field(description="Chat template options of the serving, e.g. thinking, for --questions.")
    ] = {}
    limit: Annotated[int, Field(ge=1, description="Held-out questions (and training ones) to look at, at most.")] = 24
    draft_tokens: Annotated[int, Field(ge=1, le=16, description="Tokens the draft proposes per step.")] = 4
    target: Annotated[str | None, Field(description="Model folder, hub id or smollm2; default: extract's.")] = None
    device: Annotated[str, Field(description="Torch device; auto: cuda where there is one.")] = "auto"
    trust_remote_code: Annotated[bool, Field(description="Run code that comes with the model.")] = False

    @field_validator("template_options")
    @classmethod
    def _typed_options(cls, options: dict[str, Any]) -> dict[str, Any]:
        """As in `QuestionSettings`."""
        return {name: _number(value) for name, value in options.items()}


class ServeSettings(Settings):
    """An engine with this run's target and draft."""

    engine: Annotated[Engine | None, Field(description="Exported format to serve; default: what was exported.")] = None
    baseline: Annotated[bool, Field(description="Without the draft.")] = False
    hidden_states: Annotated[
        str | None,
        Field(description="Folder for vLLM to write the states that the draft reads to, for `diagnose`; no draft."),
    ] = None
    host: Annotated[str, Field(description="Address to listen on.")] = "127.0.0.1"
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
        str | None, Field(description="Model folder, hub id or (llama.cpp) GGUF file; default: the run's own.")
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
    python: Annotated[str | None, _runtime("Interpreter of the engine's environment; default: as for `serve`.")] = None
    concurrency: Annotated[
        list[Annotated[int, Field(ge=1)]], Field(min_length=1, description="Requests at a time.")
    ] = [1]
    limit: Annotated[int, Field(ge=1, description="Prompts of a timed round.")] = 16
    rounds: Annotated[int, Field(ge=1, description="Timed rounds, draft and baseline in turn.")] = 3
    context: Annotated[int | None, Field(ge=16, description="Ids of a request at most.")] = 1024
    dtype: Annotated[Dtype, Field(description="Type the engine computes in; auto: the target's own.")] = "auto"
    extra: Annotated[list[str], Field(description="Further arguments for the engine.")] = []


class ReportSettings(Settings):
    """The report shows what is there; it has no settings."""


class Recipe(Settings):
    """A whole chain. With `arms`, each arm is this recipe with its own overrides, run in `RUN/<arm>`, and compared."""

    description: str = ""
    run: Annotated[str, Field(description="Run folder when --run is not given.")]
    capture: CaptureSettings | None = None
    import_: ImportSettings | None = Field(default=None, alias="import")
    vocab: VocabSettings = VocabSettings()
    extract: ExtractSettings = ExtractSettings()
    train: TrainSettings = TrainSettings()
    export: ExportSettings = ExportSettings()
    measure: MeasureSettings = MeasureSettings()
    serving: ServingSettings | None = None
    arms: dict[str, dict[str, Any]] = {}


def load_recipe(path: Path, overrides: list[str] | None = None) -> Recipe:
    """Reads a YAML recipe and applies `stage.key=value` overrides (values are YAML).

    Raises:
        UserError: file missing, not YAML, an unknown key (with the nearest known one), or a value out of range.
    """
    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: expected a recipe, found no such file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: expected YAML, found {' '.join(str(error).split())}") from None
    if not isinstance(loaded, dict):
        raise UserError(f"{path}: expected a mapping of stages, found {type(loaded).__name__}")
    for override in overrides or []:
        _override(loaded, override)
    return parse_recipe(loaded, str(path))


def parse_recipe(values: dict[str, Any], name: str) -> Recipe:
    """Validates a recipe.

    Raises:
        UserError: as `load_recipe`; `name` says where the values come from.
    """
    recipe = validated(Recipe, values, name)
    if recipe.arms:
        for arm in recipe.arms:
            arm_recipe(recipe, arm)
    elif (recipe.capture is None) == (recipe.import_ is None):
        raise UserError(
            f"{name}: expected either `capture` or `import`, found {'both' if recipe.capture else 'neither'}"
        )
    return recipe


def arm_recipe(recipe: Recipe, arm: str) -> Recipe:
    """The recipe of one arm: the shared values with the arm's own laid over them, without arms."""
    values = recipe.model_dump(by_alias=True, exclude_none=True, exclude_unset=True)
    del values["arms"]
    values["run"] = str(Path(recipe.run) / arm)
    return parse_recipe(_merged(values, recipe.arms[arm]), f"arms.{arm}")


def without_credentials(url: str) -> str:
    """A URL as it may be shown and stored: no user, password or query; text that is no URL as it is."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
    except ValueError:
        return url.rpartition("@")[2]
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def seconds_of(wait: str) -> float:
    """Seconds of a `--wait`: `90s`, `30m`, `2h`, or a plain number of seconds.

    Raises:
        UserError: it is none of these.
    """
    number, unit = (wait[:-1], wait[-1:]) if wait[-1:] in UNIT_SECONDS else (wait, "s")
    try:
        seconds = float(number) * UNIT_SECONDS[unit]
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise UserError(f"--wait: expected a time such as 90s, 30m or 2h, found {wait!r}")
    return seconds


def validated(kind: type[S], values: dict[str, Any], name: str) -> S:
    """`kind(**values)` with pydantic's findings turned into one line each."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        unknown = [_unknown_key(kind, found["loc"]) for found in error.errors() if found["type"] == EXTRA]
        wrong = [f"{where}: {wanted}, found {found!r}" for where, wanted, found in problems_of(error)]
        raise UserError("; ".join(f"{name}: {line}" for line in unknown + wrong)) from None


def problems_of(error: ValidationError) -> list[tuple[str, str, Any]]:
    """Each wrong value once: its path of keys, what was wanted (all members of a union), and what was found."""
    wanted: dict[str, list[str]] = {}
    found: dict[str, Any] = {}
    for problem in error.errors():
        if problem["type"] != EXTRA:
            where = ".".join(str(part) for part in problem["loc"] if not UNION_MEMBER.fullmatch(str(part)))
            wanted.setdefault(where, []).append(problem["msg"].lower())
            found[where] = problem["input"]
    same = "input should be "
    return [
        (where, " or ".join([words[0], *(word.removeprefix(same) for word in words[1:])]), found[where])
        for where, words in wanted.items()
    ]


def _unknown_key(kind: type[BaseModel], location: tuple[Any, ...]) -> str:
    known = _keys_at(kind, location[:-1])
    near = difflib.get_close_matches(str(location[-1]), known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(known)}"
    return f"unknown key {'.'.join(map(str, location))}; {hint}"


def _keys_at(kind: Any, location: tuple[Any, ...]) -> list[str]:
    """The field names of the settings model that `location` leads to."""
    for part in location:
        for name, info in kind.model_fields.items():
            if part in (name, info.alias):
                inner = [info.annotation, *getattr(info.annotation, "__args__", ())]
                kind = next((a for a in inner if isinstance(a, type) and issubclass(a, BaseModel)), kind)
    return [info.alias or name for name, info in kind.model_fields.items()]


def _override(values: dict[str, Any], text: str) -> None:
    path, equals, value = text.partition("=")
    if not equals or not path:
        raise UserError(f"--set {text}: expected stage.key=value, e.g. --set train.lr=4e-4")
    *parents, last = path.split(".")
    for part in parents:
        inner = values.setdefault(part, {})
        if not isinstance(inner, dict):
            raise UserError(f"--set {text}: {part} is a value in this recipe, not a group of settings")
        values = inner
    try:
        values[last] = _number(yaml.safe_load(value))
    except yaml.YAMLError:
        raise UserError(f"--set {text}: the value is not YAML; quote it") from None


def _number(value: Any) -> Any:
    """YAML 1.1 reads 4e-4 as text; people mean a number."""
    if isinstance(value, str):
        try:
            return json.loads(value, parse_constant=lambda constant: constant)
        except ValueError:
            return value
    return value


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = _merged(result[key], value) if both else value
    return {key: value for key, value in result.items() if value is not None}
