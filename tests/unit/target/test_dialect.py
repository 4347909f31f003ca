from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pytest

from draftsmith.target.dialect import LOGGED, LOGGED_IDS, PLAIN, Asked, Chat, Dialect, Generate, LlamaCpp
from draftsmith.target.reply import Reply, Sampling
from draftsmith.target.wire import NEUTRAL, ChatFailed, PassingFault

PROMPT = [1, 2, 3]
ASKED = Asked(
    messages=[{"role": "user", "content": "hi"}],
    tools=(),
    sampling=Sampling(max_tokens=9, temperature=0.5, top_p=0.9, seed=4),
    template_options={"thinking": True},
    prompt_ids=lambda: PROMPT,
)


@dataclass
class Wire:
    """Answers each path with the given bodies in turn, and keeps what was sent."""

    answers: dict[str, list[Any]]
    sent: list[tuple[str, Any]] = field(default_factory=list)

    async def __call__(self, path: str, body: bytes) -> bytes:
        self.sent.append((path, json.loads(body)))
        return json.dumps(self.answers[path].pop(0)).encode()

    async def ask(self, dialect: Dialect) -> Reply:
        return await dialect.ask(self, "m", ASKED)


def completion(message: dict[str, Any], choice: dict[str, Any] | None = None, **root: Any) -> dict[str, Any]:
    return {"choices": [{"message": message, "finish_reason": "stop", **(choice or {})}], **root}


def verbose(tokens: list[int], prompt: str, evaluated: int) -> dict[str, Any]:
    """As llama.cpp b6900 gives it, less what nobody reads."""
    seen = {"content": "x", "tokens": tokens, "prompt": prompt, "tokens_evaluated": evaluated, "stop_type": "eos"}
    return completion({"content": "x", "reasoning_content": "t"}, __verbose=seen)


def generation(ids: list[int], prompt: int, count: int, reason: dict[str, Any]) -> dict[str, Any]:
    meta = {"id": "r", "finish_reason": reason, "prompt_tokens": prompt, "completion_tokens": count, "e2e_latency": 1.0}
    return {"text": "x", "output_ids": ids, "meta_info": meta}


async def test_llamacpp_is_asked_for_tokens_and_verbosity_and_tokenises_its_own_prompt() -> None:
    wire = Wire({"/chat/completions": [verbose([7, 2], "<s>hi", 3)], "//tokenize": [{"tokens": PROMPT}]})
    reply = await wire.ask(LlamaCpp())
    assert (reply.prompt_ids, reply.generated_ids, reply.ids_source) == (PROMPT, [7, 2], "engine")
    assert (reply.reasoning_text, reply.answer_text) == ("t", "x")
    (_, chat), (_, tokenize) = wire.sent
    assert (chat["return_tokens"], chat["verbose"], chat["chat_template_kwargs"]) == (True, True, {"thinking": True})
    assert tokenize == {"content": "<s>hi", "add_special": True, "parse_special": True}


async def test_the_way_of_adding_special_tokens_is_the_one_of_the_length_that_was_evaluated() -> None:  # P09
    both = [{"tokens": [1, *PROMPT]}, {"tokens": PROMPT}]
    wire = Wire({"/chat/completions": [verbose([7, 2], "<s>hi", 3)], "//tokenize": both})
    assert (await wire.ask(LlamaCpp())).prompt_ids == PROMPT
    assert [body["add_special"] for _, body in wire.sent[1:]] == [True, False]


async def test_prompt_ids_of_another_length_than_was_evaluated_are_none() -> None:
    both = [{"tokens": [1, *PROMPT]}, {"tokens": PROMPT}]
    wire = Wire({"/chat/completions": [verbose([7, 2], "<s>hi", 5)], "//tokenize": both})
    reply = await wire.ask(LlamaCpp())
    assert (reply.prompt_ids, reply.generated_ids) == ((), [7, 2])


async def test_a_llamacpp_that_gives_no_verbose_part_gives_no_ids() -> None:
    reply = await Wire({"/chat/completions": [completion({"content": "x"})]}).ask(LlamaCpp())
    assert (reply.prompt_ids, reply.generated_ids, reply.answer_text) == ((), (), "x")


async def test_generate_sends_our_own_prompt_ids_and_every_sampling_value() -> None:
    wire = Wire({"//generate": [generation([7, 2], 3, 2, {"type": "stop", "matched": 2})]})
    reply = await wire.ask(Generate())
    assert (reply.prompt_ids, reply.generated_ids, reply.finish_reason) == (PROMPT, [7, 2], "stop")
    ((_, body),) = wire.sent
    assert body["input_ids"] == PROMPT
    values = {"max_new_tokens": 9, "temperature": 0.5, "top_p": 0.9, "top_k": -1, "sampling_seed": 4}
    assert body["sampling_params"] == {**NEUTRAL, **values}


async def test_a_stop_id_that_the_server_trims_off_is_put_back() -> None:
    wire = Wire({"//generate": [generation([7], 3, 2, {"type": "stop", "matched": 2})]})
    assert (await wire.ask(Generate())).generated_ids == [7, 2]


async def test_a_reply_cut_by_its_budget_has_no_stop_id() -> None:
    wire = Wire({"//generate": [generation([7, 8], 3, 2, {"type": "length", "length": 2})]})
    reply = await wire.ask(Generate())
    assert (reply.generated_ids, reply.finish_reason) == ([7, 8], "length")


async def test_a_prompt_that_the_server_truncated_is_refused() -> None:
    wire = Wire({"//generate": [generation([7], 2, 1, {"type": "length"})]})
    with pytest.raises(ChatFailed, match="prompt_truncated: sent 3 prompt ids, the server used 2"):
        await wire.ask(Generate())


async def test_an_aborted_generation_is_worth_another_try() -> None:
    wire = Wire({"//generate": [generation([7], 3, 1, {"type": "abort", "message": "overloaded"})]})
    with pytest.raises(PassingFault, match="aborted"):
        await wire.ask(Generate())


async def test_ids_written_into_logprobs_are_read() -> None:  # vLLM before 0.10.2
    logged = {"content": [{"token": f"token_id:{index}", "logprob": -1.0, "bytes": [104]} for index in (7, 2)]}
    wire = Wire({"/chat/completions": [completion({"content": "x"}, {"logprobs": logged})]})
    reply = await wire.ask(LOGGED_IDS)
    assert (reply.generated_ids, reply.spelled, reply.prompt_ids) == ([7, 2], [], ())
    assert wire.sent[0][1]["return_tokens_as_token_ids"] is True


async def test_tokens_in_logprobs_are_kept_as_texts() -> None:  # TRT-LLM
    logged = {"content": [{"token": text, "logprob": -1.0, "bytes": None} for text in ("he", "llo")]}
    wire = Wire({"/chat/completions": [completion({"content": "hello"}, {"logprobs": logged})]})
    reply = await wire.ask(LOGGED)
    assert (reply.generated_ids, reply.spelled) == ((), ["he", "llo"])


@pytest.mark.parametrize("dialect", [LOGGED, PLAIN])
async def test_a_server_that_refuses_unknown_fields_is_sent_none(dialect: Dialect) -> None:  # TRT-LLM
    wire = Wire({"/chat/completions": [completion({"content": "x"})]})
    await wire.ask(dialect)
    body = wire.sent[0][1]
    assert not {"return_token_ids", "return_tokens", "verbose", "return_tokens_as_token_ids"} & body.keys()
    assert body["top_k"] == 0  # its way of saying: every token


async def test_chat_asks_for_ids_and_keeps_every_token_as_vllm_and_sglang_say_it() -> None:
    wire = Wire({"/chat/completions": [completion({"content": "x"})]})
    await wire.ask(Chat())
    assert (wire.sent[0][1]["return_token_ids"], wire.sent[0][1]["top_k"]) == (True, -1)


@pytest.mark.parametrize("ids", [[7, 2], list(range(9000)), [0], [2**31 - 1, 0]])
@pytest.mark.parametrize("field", ["token_ids", "response_token_ids"])
async def test_ids_come_as_the_server_sent_them(field: str, ids: list[int]) -> None:
    body = completion({"content": "x"}, {field: ids, "prompt_token_ids": PROMPT})
    reply = await Wire({"/chat/completions": [body]}).ask(Chat())
    assert (reply.prompt_ids, list(reply.generated_ids)) == (PROMPT, ids)


@pytest.mark.parametrize("ids", [None, []])
async def test_no_ids_are_none(ids: Any) -> None:
    body = completion({"content": "x"}, {"token_ids": ids})
    assert len((await Wire({"/chat/completions": [body]}).ask(Chat())).generated_ids) == 0


@pytest.mark.parametrize(
    "ids",
    [
        [7, -2],
        [7, -1],
        [7, -1.5],
        [7, -1, "x"],
        [2**31],
        [10**30, 1],
        [7, 2.5],
        [2.0],
        [7, "2"],
        "7,2",
        [[7], [2]],
        [7, None],
        [True],
        7,
        {"a": 7},
    ],
)
@pytest.mark.parametrize("place", ["token_ids", "prompt_token_ids"])
async def test_what_is_no_token_id_is_refused_when_it_arrives(place: str, ids: Any) -> None:
    body = completion({"content": "x"}, {"token_ids": [7, 2], "prompt_token_ids": PROMPT} | {place: ids})
    with pytest.raises(PassingFault, match="not a chat completion"):
        await Wire({"/chat/completions": [body]}).ask(Chat())


@pytest.mark.parametrize("token", ["-1", "2147483648", "x", ""])
async def test_a_logged_id_that_is_none_is_refused(token: str) -> None:
    logged = {"content": [{"token": "token_id:7"}, {"token": f"token_id:{token}"}]}
    body = completion({"content": "x"}, {"logprobs": logged})
    with pytest.raises(PassingFault, match="not a chat completion"):
        await Wire({"/chat/completions": [body]}).ask(Chat())
