"""The GGUF of a target as the real llama.cpp understands it: same template, same ids, same greedy choices."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import pytest
import torch

from draftsmith.target.loading import load_model
from draftsmith.target.template import Template, load_template

pytestmark = pytest.mark.slow

TEXTS = (
    "What is 12 * 13? Say it's 1234567.",
    "héllo  wörld\n\n\tdef f(x): return x**2  # 日本語 😀\u00a0end   ",
    "don't WE'LL <think>\n7, 8</think> <|im_end|> x<|im_start|>y",
)


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as reply:
        answer: dict[str, Any] = json.load(reply)
        return answer


@pytest.fixture(scope="module")
def template(smollm2: str) -> Template:
    return load_template(smollm2, {}, trust_remote_code=False)


def test_it_renders_and_tokenises_as_the_target_does(llamacpp_server: str, template: Template) -> None:
    for text in TEXTS:
        messages = [{"role": "user", "content": text}]
        prompt = post(f"{llamacpp_server}/apply-template", {"messages": messages})["prompt"]
        assert prompt == template.text(messages)
        body = {"content": prompt, "add_special": True, "parse_special": True}
        assert post(f"{llamacpp_server}/tokenize", body)["tokens"] == template.render(messages)


def test_it_chooses_the_tokens_that_the_target_chooses(llamacpp_server: str, template: Template, smollm2: str) -> None:
    prompt = template.render([{"role": "user", "content": "Tell me about the sea."}])
    body = {"prompt": prompt, "n_predict": 48, "temperature": 0, "return_tokens": True}
    served = post(f"{llamacpp_server}/completion", body)["tokens"]
    model = load_model(smollm2, torch.float32, torch.device("cpu"))
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *served[:-1]]])).logits[0, len(prompt) - 1 :]
    assert len(served) == 48
    assert logits.argmax(-1).tolist() == served
