"""The wire formats of a mock engine: what each kind of server takes and gives, as its released versions do."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from mock_replies import Block, MockConfig, Said, Vocabulary, json_text

OWNERS = {"vllm": "vllm", "sglang": "sglang", "trtllm": "tensorrt_llm", "llamacpp": "llamacpp"}
VERSIONS = {"vllm": "0.32.0", "sglang": "0.5.23", "trtllm": "1.2.0", "llamacpp": "b6900-mock"}
FIELDS = {"vllm": "reasoning", "sglang": "reasoning_content", "trtllm": "reasoning", "llamacpp": "reasoning_content"}
HUGE_BYTES = 10_000_000


class _Sent(msgspec.Struct):
    """Fields of a request for a generation, of whatever kind."""

    messages: list[dict[str, Any]] = []
    prompt: str | list[int] = ""
    input_ids: list[int] = []
    text: str = ""
    sampling_params: dict[str, Any] = {}
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] = {}
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n_predict: int | None = None
    temperature: float | None = None
    seed: int | None = None
    return_token_ids: bool = False
    return_tokens: bool = False
    verbose: bool = False
    logprobs: bool | int | None = None
    return_tokens_as_token_ids: bool = False
    stream: bool = False


@dataclass(frozen=True, slots=True)
class Asked:
    """One request for a generation as the engine understands it."""

    question: str
    prompt_text: str
    prompt_ids: list[int]
    max_tokens: int
    sample: int
    sent: _Sent

    def thinking_off(self, config: MockConfig) -> bool:
        """The template closed the thinking in the prompt."""
        return self.prompt_text.rstrip().endswith(config.think_close.rstrip())


def read_asked(path: str, body: bytes, words: Vocabulary) -> Asked:
    """The request in `body`.

    Raises:
        ValueError, msgspec.DecodeError, TemplateError: it is none.
    """
    sent = msgspec.json.decode(body, type=_Sent)
    if sent.stream:
        raise ValueError("the mock engine does not stream")
    values = sent.sampling_params
    limit = sent.max_completion_tokens or sent.max_tokens or sent.n_predict or values.get("max_new_tokens")
    temperature = values.get("temperature", sent.temperature)
    seed = values.get("sampling_seed", sent.seed)
    sample = seed if seed and temperature else 0
    if sent.messages:
        question = next((m["content"] for m in reversed(sent.messages) if m["role"] == "user"), "")
        if not isinstance(question, str):
            question = "".join(part.get("text", "") for part in question)
        text = words.text(sent.messages, sent.tools, sent.chat_template_kwargs)
        return Asked(question, text, words.encode(text), limit or 1 << 30, sample, sent)
    ids = sent.input_ids or (sent.prompt if isinstance(sent.prompt, list) else words.encode(sent.prompt or sent.text))
    text = words.decode(ids)
    return Asked(words.questions.get(text, text), text, ids, limit or 16, sample, sent)


def too_long(asked: Asked, config: MockConfig, *, always: bool) -> bytes:
    """The engine's refusal of a prompt that does not fit, or b""."""
    have, limit = len(asked.prompt_ids), config.max_model_len
    wanted = have + (0 if config.engine == "llamacpp" else min(asked.max_tokens, limit))
    if not always and (not limit or wanted <= limit):
        return b""
    if config.engine == "llamacpp":
        message = "the request exceeds the available context size, try increasing it"
        numbers = {"n_prompt_tokens": have, "n_ctx": limit}
        return _json({"error": {"code": 400, "message": message, "type": "exceed_context_size_error", **numbers}})
    message = (
        f"This model's maximum context length is {limit} tokens. However, you requested {wanted} tokens ({have} in the "
        f"messages, {wanted - have} in the completion). Please reduce the length of the messages or completion."
    )
    return error_body(config, 400, message)


def error_body(config: MockConfig, status: int, message: str) -> bytes:
    """An error as the engine words it."""
    if config.engine == "sglang":
        return _json({"object": "error", "message": message, "type": "BadRequest", "param": None, "code": status})
    return _json({"error": {"message": message, "type": "Error", "param": None, "code": status}})


def chat_body(asked: Asked, said: Said, config: MockConfig, words: Vocabulary, fault: str) -> bytes:
    """A chat completion."""
    said = _twisted(said, fault)
    finish = _finish(said, fault)
    reasoning, answer = _texts(said, config, fault, opened_by_prompt=not said.opening)
    name = config.reasoning_field or FIELDS[config.engine]
    name = "thoughts" if fault == "renamed_field" else name
    quoted = b"null" if reasoning is None else b'"%b"' % reasoning
    fields = b', "%b": %b' % (name.encode(), quoted)
    if fault == "both_fields":
        fields = b', "reasoning": %b, "reasoning_content": %b' % (quoted, quoted)
    if fault == "neither_field":
        fields = b""
    content = b"null" if answer is None or fault == "content_null" else b'"%b"' % answer
    count = said.count() + (fault == "usage_wrong")
    root, choice = _ids(asked, said, config, words, fault)
    if asked.sent.logprobs:
        choice += b', "logprobs": %b' % _logprobs(said, words, asked.sent.return_tokens_as_token_ids)
    usage = b""
    if config.usage:
        have = len(asked.prompt_ids)
        usage = b', "usage": {"prompt_tokens": %d, "completion_tokens": %d, "total_tokens": %d}' % (
            have,
            count,
            have + count,
        )
    return (
        b'{"id": "chatcmpl-mock", "object": "chat.completion", "created": 1, "model": "%b", "choices": [{"index": 0, '
        b'"message": {"role": "assistant", "content": %b%b, "tool_calls": []}, "finish_reason": "%b"%b}]%b%b}'
    ) % (config.model.encode(), content, fields, finish, choice, root, usage)


def native_body(asked: Asked, said: Said, config: MockConfig, words: Vocabulary, fault: str) -> bytes:
    """A reply to ids: SGLang's `/generate`, llama.cpp's `/completion`, or `/v1/completions`."""
    said = _twisted(said, fault)
    ids = _counted(said.ids(words.stop), fault)
    text = words.decode([index for index in ids if index != words.stop])
    usage = {"prompt_tokens": len(asked.prompt_ids), "completion_tokens": said.count()}
    stopped = said.ended
    if asked.sent.input_ids or asked.sent.sampling_params:
        reason: dict[str, Any] = {"type": "stop", "matched": words.stop} if stopped else {"type": "length"}
        meta = {"id": "mock", "finish_reason": reason, **usage, "cached_tokens": 0, "weight_version": "default"}
        return _json({"text": text, "output_ids": [] if fault == "no_ids" else ids, "meta_info": meta})
    if config.engine == "llamacpp" and asked.sent.n_predict is not None:
        numbers = {"tokens_predicted": said.count(), "tokens_evaluated": len(asked.prompt_ids)}
        kind = "eos" if stopped else "limit"
        tokens = ids if asked.sent.return_tokens and fault != "no_ids" else []
        timings = _timings(asked, said)
        body = {"content": text, "tokens": tokens, "stop": True, "stop_type": kind, **numbers, "truncated": False}
        return _json({**body, "timings": timings})
    choice: dict[str, Any] = {"index": 0, "text": text, "finish_reason": "stop" if stopped else "length"}
    if asked.sent.return_token_ids and config.ids and config.engine == "vllm" and fault != "no_ids":
        choice |= {"token_ids": ids, "prompt_token_ids": asked.prompt_ids}
    return _json({"id": "cmpl-mock", "object": "text_completion", "choices": [choice], "usage": usage})


def _twisted(said: Said, fault: str) -> Said:
    if fault == "no_delimiters":
        return replace(said, opening=[], closing=[])
    if fault == "empty_answer":
        return replace(said, answer=[])
    if fault == "loop" and said.answer:
        return replace(said, answer=[said.answer[0]] * len(said.answer))
    return said


def _finish(said: Said, fault: str) -> bytes:
    if fault == "aborted":
        return b"abort"
    return b"stop" if said.ended else b"length"


def _texts(said: Said, config: MockConfig, fault: str, *, opened_by_prompt: bool) -> tuple[bytes | None, bytes | None]:
    """Reasoning and content as the engine's parser splits them, as the insides of JSON strings; None is null."""
    thought, answer = _join(said.reasoning), _join(said.answer)
    if fault == "lone_surrogate":
        answer += b"\\ud83d"
    if fault == "line_separators":
        answer += json_text("\u2028\u0085\u2029")
    if fault == "huge":
        answer += b"x" * HUGE_BYTES
    if not said.reasoning:
        return None, answer
    closed = bool(said.closing)
    if not config.parser or fault in ("cut_in_content", "no_delimiters"):
        opening = json_text(config.think_open) if said.opening else b""
        return None, opening + thought + (json_text(config.think_close) if closed else b"") + answer
    return thought, answer if closed else None


def _join(blocks: Sequence[Block]) -> bytes:
    return b"".join([block.text_json for block in blocks])


def _counted(ids: list[int], fault: str) -> list[int]:
    return ids[:-1] if fault == "ids_short" else [*ids, ids[0]] if fault == "ids_long" else ids


def _ids(asked: Asked, said: Said, config: MockConfig, words: Vocabulary, fault: str) -> tuple[bytes, bytes]:
    """What stands at the root and in the choice about ids, each with a leading comma."""
    sent = asked.sent
    if not config.ids or fault == "no_ids":
        return b"", b""
    ids = said.ids_json(words.stop)
    if fault in ("ids_short", "ids_long"):
        ids = ",".join(map(str, _counted(said.ids(words.stop), fault))).encode()
    if config.engine == "llamacpp":
        root = b', "timings": %b' % _json(_timings(asked, said))
        if sent.verbose:
            tokens = ids if sent.return_tokens else b""
            numbers = b'"tokens_predicted": %d, "tokens_evaluated": %d' % (said.count(), len(asked.prompt_ids))
            root += b', "__verbose": {"tokens": [%b], "prompt": %b, "stop_type": "%b", %b}' % (
                tokens,
                _json(asked.prompt_text),
                b"eos" if said.ended else b"limit",
                numbers,
            )
        return root, b""
    if not sent.return_token_ids or config.engine == "trtllm":
        return b"", b""
    prompt = b'"prompt_token_ids": [%b]' % ",".join(map(str, asked.prompt_ids)).encode()
    if config.engine == "sglang":
        return b"", b', %b, "response_token_ids": [%b]' % (prompt, ids)
    return b", " + prompt, b', "token_ids": [%b]' % ids


def _logprobs(said: Said, words: Vocabulary, as_ids: bool) -> bytes:
    content = []
    for index in said.ids(words.stop):
        text = words.decode([index])
        token = f"token_id:{index}" if as_ids else text
        content.append({"token": token, "logprob": -0.1, "bytes": list(text.encode()), "top_logprobs": []})
    return _json({"content": content})


def _timings(asked: Asked, said: Said) -> dict[str, Any]:
    return {"prompt_n": len(asked.prompt_ids), "predicted_n": said.count(), "predicted_per_second": 100.0}


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")


# Endpoints beside the generating ones: (server, body) -> body of a 200.


def _models(server: Any, body: bytes) -> bytes:
    config: MockConfig = server.config
    card: dict[str, Any] = {"id": config.model, "object": "model", "created": 1, "owned_by": OWNERS[config.engine]}
    if config.engine == "llamacpp":
        card["meta"] = {"n_vocab": len(server.words.words), "n_ctx_train": config.max_model_len or 8192}
    elif config.engine != "trtllm":
        card |= {"root": config.tokenizer, "max_model_len": config.max_model_len or None}
    return _json({"object": "list", "data": [card]})


def _version(server: Any, body: bytes) -> bytes:
    return _json({"version": _version_of(server.config)})


def _version_of(config: MockConfig) -> str:
    return config.version or VERSIONS[config.engine]


def _empty(server: Any, body: bytes) -> bytes:
    return b""


def _server_info(server: Any, body: bytes) -> bytes:
    config: MockConfig = server.config
    numbers = {"max_total_num_tokens": 1_000_000, "context_length": config.max_model_len or None}
    return _json({"version": _version_of(config), "model_path": config.tokenizer, "internal_states": [{}], **numbers})


def _props(server: Any, body: bytes) -> bytes:
    config: MockConfig = server.config
    return _json(
        {
            "default_generation_settings": {"n_ctx": config.max_model_len or 8192},
            "total_slots": config.slots or 1,
            "model_path": config.tokenizer,
            "chat_template": server.words.source,
            "build_info": _version_of(config),
        }
    )


def _apply_template(server: Any, body: bytes) -> bytes:
    sent = msgspec.json.decode(body, type=_Sent)
    text = server.words.text(sent.messages, sent.tools, sent.chat_template_kwargs)
    question = next((m["content"] for m in reversed(sent.messages) if m["role"] == "user"), "")
    server.words.questions[text] = question
    return _json({"prompt": text})


def _tokenize(server: Any, body: bytes) -> bytes:
    sent, words, config = json.loads(body), server.words, server.config
    text = sent.get("content", sent.get("prompt", ""))
    if "messages" in sent:
        text = words.text(sent["messages"], sent.get("tools"), sent.get("chat_template_kwargs"))
    ids = words.encode(text)
    if config.engine == "llamacpp":
        return _json({"tokens": ids})
    return _json({"count": len(ids), "max_model_len": config.max_model_len, "tokens": ids, "token_strs": None})


def _detokenize(server: Any, body: bytes) -> bytes:
    text = server.words.decode(json.loads(body)["tokens"])
    return _json({"content": text} if server.config.engine == "llamacpp" else {"prompt": text})


def _metrics(server: Any, body: bytes) -> bytes:
    config, pace = server.config, server.pace
    running, waiting = len(pace.running), len(pace.waiting)
    names = {
        "vllm": ("vllm:num_requests_running", "vllm:num_requests_waiting"),
        "sglang": ("sglang:num_running_reqs", "sglang:num_queue_reqs"),
        "llamacpp": ("llamacpp:requests_processing", "llamacpp:requests_deferred"),
        "trtllm": ("trtllm:num_requests_running", "trtllm:num_requests_waiting"),
    }[config.engine]
    labels = f'{{model_name="{config.model}"}}'
    lines = []
    for name, value in zip(names, (running, waiting), strict=True):
        lines += [f"# HELP {name} Number of requests.", f"# TYPE {name} gauge", f"{name}{labels} {float(value)}"]
    return "\n".join([*lines, ""]).encode()


GENERATES = object()
"""Marks an endpoint that makes a reply."""
Endpoint = Callable[[Any, bytes], bytes]
_COMMON: Mapping[tuple[str, str], Any] = {
    ("GET", "/v1/models"): _models,
    ("GET", "/health"): _empty,
    ("GET", "/metrics"): _metrics,
    ("POST", "/v1/chat/completions"): GENERATES,
    ("POST", "/v1/completions"): GENERATES,
}
_TOKENS: Mapping[tuple[str, str], Any] = {("POST", "/tokenize"): _tokenize, ("POST", "/detokenize"): _detokenize}
ENDPOINTS: Mapping[str, Mapping[tuple[str, str], Any]] = {
    "vllm": {**_COMMON, **_TOKENS, ("GET", "/version"): _version},
    "sglang": {
        **_COMMON,
        **_TOKENS,
        ("GET", "/server_info"): _server_info,
        ("GET", "/get_server_info"): _server_info,
        ("POST", "/generate"): GENERATES,
    },
    "trtllm": {**_COMMON, ("GET", "/version"): _version},
    "llamacpp": {
        **_COMMON,
        **_TOKENS,
        ("GET", "/props"): _props,
        ("POST", "/apply-template"): _apply_template,
        ("POST", "/completion"): GENERATES,
    },
}
