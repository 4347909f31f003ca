"""Settings of the stages from traces to a measured draft."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from draftsmith.errors import UserError
from draftsmith.recipe.values import Dtype, Engine, Settings, runtime


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
    device: Annotated[str, runtime("Torch device; auto: cuda where there is one.")] = "auto"
    batch_tokens: Annotated[int, runtime("Tokens per forward pass at most.", ge=1)] = 16384
    shard_mib: Annotated[int, Field(ge=1, description="Size of a shard.")] = 1024
    min_agreement: Annotated[
        float, runtime("Least share of greedy ids that the teacher's argmax must reproduce.", ge=0, le=1)
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
    device: Annotated[str, runtime("Torch device; auto: cuda where there is one.")] = "auto"
    checkpoint_minutes: Annotated[float, runtime("Minutes between checkpoints.", gt=0)] = 2.0
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
        Field(
            min_length=1,
            description="llamacpp: a GGUF file of the target to copy the tokenizer from; default: the target's own.",
        ),
    ] = None

    @model_validator(mode="after")
    def _gguf_is_llamacpps(self) -> Self:
        for name in ("target_gguf", "gguf_tokenizer"):
            if getattr(self, name) is not None and "llamacpp" not in self.engine:
                raise UserError(
                    f"export: {name}: expected llamacpp among the engines, found {', '.join(self.engine)}; add it, or "
                    f"leave {name} out"
                )
        return self


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


class ReportSettings(Settings):
    """The report shows what is there; it has no settings."""
