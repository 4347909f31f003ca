"""The target's tokenizer and chat template: conversations in, exactly the ids that serving would send out.

Text is rendered by the template and encoded without special tokens, because the template itself prints BOS where the
model wants one (vLLM and SGLang do the same for chat requests). Nothing here renders a finished conversation in order
to train on it: templates strip earlier thinking. Loading costs about a second (transformers is imported on first use).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.artifacts import fingerprint
from draftsmith.errors import UserError
from draftsmith.target.spelling import spelling
from draftsmith.target.windows import Windows

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json", "vocab.txt", "spiece.model")
RESERVED_OPTIONS = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
"""Names that mean something to `apply_chat_template` itself and would change what it returns."""


class TemplateRefusal(UserError):
    """The template cannot render one conversation: that conversation fails, the others go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """A tokenizer with its chat template and the options every conversation is rendered with."""

    name: str
    """Folder or hub id it was loaded from."""
    tokenizer: Any
    """transformers.PreTrainedTokenizerBase"""
    options: dict[str, Any]
    fingerprint: str
    """Over the tokenizer, the template's text and the options."""
    tokenizer_fingerprint: str
    stop_ids: frozenset[int]
    """Ids that end a reply: the tokenizer's EOS and what generation_config.json lists."""
    vocab_size: int
    """Rows of the target's embedding as its config states them, never fewer than the tokenizer's ids."""

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Prompt ids: the conversation so far plus the template's own start of a reply.

        Raises:
            TemplateRefusal: the template cannot render this conversation.
        """
        return self.encode(self.text(messages, tools))

    def text(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """What `render` encodes.

        Raises:
            TemplateRefusal: as `render`.
        """
        return self._apply(messages, tools, generation_prompt=True)

    def transcript(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """The conversation as the template writes it when its last turn is finished: no start of a further reply.

        Raises:
            TemplateRefusal: as `render`.
        """
        return self._apply(messages, tools, generation_prompt=False)

    def encode(self, text: str) -> list[int]:
        """Ids of already rendered text; no BOS or EOS is added, special tokens written out in it are recognised."""
        return spelling(self.tokenizer).encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens and spacing as they are."""
        return spelling(self.tokenizer).decode(ids)

    def windows(self, ids: Sequence[int]) -> Windows:
        """The ids, ready to be searched for texts."""
        return spelling(self.tokenizer).search(ids)

    def readable(self, ids: Sequence[int]) -> str:
        """The text of ids for people: stop ids left out, stripped."""
        return spelling(self.tokenizer, self.stop_ids).decode(ids).strip()

    def token_id(self, token: str) -> int | None:
        """The id of a token that is one entry of the vocabulary, or None."""
        index: int | None = self.tokenizer.convert_tokens_to_ids(token)  # the unknown token's id where it has none
        found = index is not None and self.tokenizer.convert_ids_to_tokens(index) == token
        return index if found else None

    def template_text(self) -> str:
        """The chat template's source."""
        return _template_text(self.tokenizer)

    def special_ids(self) -> frozenset[int]:
        """All ids the tokenizer holds for special (BOS, EOS, role marks, ...) and stop ids."""
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        marked = {index for index, token in added.items() if token.special}
        return frozenset(self.tokenizer.all_special_ids) | marked | self.stop_ids

    def _apply(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], *, generation_prompt: bool
    ) -> str:
        from jinja2 import TemplateError

        turns = [as_template_turn(message) for message in messages]
        try:
            text: str = self.tokenizer.apply_chat_template(
                turns,
                tools=[dict(tool) for tool in tools] or None,
                tokenize=False,
                add_generation_prompt=generation_prompt,
                **self.options,
            )
        except (TemplateError, TypeError, ValueError, KeyError, IndexError) as error:
            roles = ", ".join(str(turn.get("role")) for turn in turns)
            raise TemplateRefusal(
                f"{self.name}: the chat template refuses a conversation of turns [{roles}]: {one_line(error)}"
            ) from None
        return text


def as_template_turn(message: Mapping[str, Any]) -> dict[str, Any]:
    """A turn as templates expect it: content is text (never null), tool arguments are a mapping (P24)."""
    turn = {key: value for key, value in message.items() if value is not None}
    turn.setdefault("content", "")
    if "tool_calls" in turn:
        turn["tool_calls"] = [_as_call(call) for call in turn["tool_calls"]]
    return turn


def tool_arguments(value: Any) -> Any:
    """Tool call arguments as a mapping, from a mapping or its JSON text; text that is neither stays as it is."""
    if isinstance(value, str):
        try:
            loaded = json.loads(value)
        except ValueError:
            return value
        return loaded if isinstance(loaded, dict) else value
    return value


def load_template(name: str, options: Mapping[str, Any], trust_remote_code: bool) -> Template:
    """Loads tokenizer and chat template from a folder or the hub.

    Raises:
        UserError: no such folder or hub name, no tokenizer files, no chat template, or an option that is not the
            template's to take.
    """
    reserved = sorted(RESERVED_OPTIONS & options.keys())
    if reserved:
        raise UserError(f"template option {reserved[0]}: draftsmith sets it itself; remove it from template_options")
    tokenizer = _load_tokenizer(name, trust_remote_code)
    if not _template_text(tokenizer):
        raise UserError(
            f"{name}: the tokenizer has no chat template; add chat_template.jinja to the folder "
            "or give --tokenizer a folder that has one"
        )
    identity = _tokenizer_identity(tokenizer)
    config = _read_config(name, "config.json")
    return Template(
        name=name,
        tokenizer=tokenizer,
        options=dict(options),
        fingerprint=fingerprint([identity, _template_text(tokenizer), dict(options)]),
        tokenizer_fingerprint=identity,
        stop_ids=_stop_ids(tokenizer, _read_config(name, "generation_config.json"), config),
        vocab_size=max(len(tokenizer), _config_vocab_size(config)),
    )


def one_line(error: BaseException) -> str:
    """An exception's first line, for messages of one line."""
    text = str(error).strip()
    return text.splitlines()[0].rstrip(" :") if text else type(error).__name__


def _load_tokenizer(name: str, trust_remote_code: bool) -> Any:
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not any((folder / file).exists() for file in TOKENIZER_FILES):
            raise UserError(
                f"{name}: expected tokenizer files (e.g. {', '.join(TOKENIZER_FILES[:3])}) in this folder, found none; "
                "give --tokenizer the folder that has them"
            )
        name = str(folder)
    elif folder.exists():
        raise UserError(f"{name}: expected a folder with a tokenizer, found a file; give the folder it lies in")
    elif name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise UserError(f"{name}: expected a folder with a tokenizer, found no such folder")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise UserError(f"{name}: no tokenizer could be loaded from this name: {one_line(error)}") from None


def _template_text(tokenizer: Any) -> str:
    template = tokenizer.chat_template
    if isinstance(template, dict):  # several named templates; `default` serves chats without tools
        return json.dumps(template, sort_keys=True)
    return template or ""


def _tokenizer_identity(tokenizer: Any) -> str:
    """Same for the same tokenizer wherever it was loaded from: no paths, no padding or truncation state."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return fingerprint(sorted(tokenizer.get_vocab().items()))
    state = json.loads(backend.to_str())
    state.pop("padding", None)
    state.pop("truncation", None)
    return fingerprint(state)


def _stop_ids(tokenizer: Any, generation: dict[str, Any], config: dict[str, Any]) -> frozenset[int]:
    listed = generation.get("eos_token_id", config.get("eos_token_id"))
    ids = set(listed if isinstance(listed, list) else [listed]) | {tokenizer.eos_token_id}
    return frozenset(ids - {None})


def _config_vocab_size(config: dict[str, Any]) -> int:
    """Multimodal targets keep the language model's numbers under `text_config`."""
    sizes = [part.get("vocab_size") for part in (config, config.get("text_config") or {})]
    return max((size for size in sizes if isinstance(size, int)), default=0)


def _read_config(name: str, file: str) -> dict[str, Any]:
    """A JSON file beside the tokenizer, from the folder or the hub; empty where there is none."""
    path = Path(name).expanduser() / file
    if not path.parent.is_dir():
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError

        try:
            path = Path(hf_hub_download(name, file))
        except EntryNotFoundError:
            return {}
    if not path.exists():
        return {}
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: expected JSON, found something else ({one_line(error)})") from None
    return loaded if isinstance(loaded, dict) else {}


def _as_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """A tool call with its arguments as a mapping, whether nested under `function` or flat."""
    if "function" in call:
        return {**call, "function": _as_call(call["function"])}
    return {**call, "arguments": tool_arguments(call["arguments"])} if "arguments" in call else dict(call)
