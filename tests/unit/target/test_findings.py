from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from draftsmith.target.findings import Finding, Intent, Prompt, Seen, prompt_findings, where_ids_part
from draftsmith.target.reply import Reply, Sampling
from draftsmith.target.template import Template, load_template
from draftsmith.target.thinking import find_delimiters
from toy_chat import save_toy_tokenizer

HI = [{"role": "user", "content": "hi"}]


def found(template: Template, theirs: Sequence[int], tokenized: Sequence[int] | None = None) -> Finding:
    """What is said of a server that renders `theirs` for what we render as `template` does."""
    ours = template.render(HI)
    reply = Reply(prompt_ids=theirs, generated_ids=[1, 2])
    seen = Seen(easy=reply, cut=reply, hard=reply, calm=reply, drawn=[reply] * 3, narrow=reply, tokenized=tokenized)
    intent = Intent(template=template, delimiters=find_delimiters(template, "auto"), sampling=Sampling(max_tokens=8))
    (finding,) = prompt_findings(seen, intent, Prompt(ids=ours, otherwise=ours), Prompt(ids=ours, otherwise=ours))
    return finding


def test_a_bos_that_the_server_doubles_is_fatal(make_template: Callable[..., Template]) -> None:  # P09
    template = make_template(template="<s>" + "{% for m in messages %}{{ m.content }}{% endfor %}", adds_bos=True)
    ours = template.render(HI)
    bos = template.tokenizer.bos_token_id
    assert [ours.count(bos), found(template, ours).level] == [1, "ok"]
    doubled = found(template, [bos, *ours])
    assert doubled.level == "fatal" and "two BOS ids" in doubled.text


@pytest.mark.parametrize("marks", [(), ("<think>", "</think>")])
def test_an_opening_that_the_server_loses_from_the_prompt_is_fatal_and_named(
    make_template: Callable[..., Template], marks: Sequence[str]
) -> None:
    template = make_template(template="{% for m in messages %}{{ m.content }}{% endfor %}<think>\n", marks=marks)
    finding = found(template, template.encode("hi"))
    assert finding.level == "fatal"
    assert "the server's prompt lacks the <think> that the template ends in" in finding.text
    assert "mention message.reasoning_content" in finding.text


def test_a_tokenize_endpoint_that_says_otherwise_means_another_tokenizer(
    make_template: Callable[..., Template],
) -> None:
    template = make_template()
    ours = template.render(HI)
    assert found(template, ours, tokenized=ours).level == "ok"
    assert "another tokenizer" in found(template, ours, tokenized=[*ours[:-1], 0]).text


def test_ids_that_part_are_shown_with_index_ids_texts_and_what_stands_before(tmp_path: Path) -> None:
    template = load_template(save_toy_tokenizer(tmp_path), {}, False)
    ours = template.encode("hello")
    he, llo = template.token_id("he"), template.token_id("llo")
    assert he is not None and llo is not None
    assert where_ids_part(template, ours, ours) == ""
    assert where_ids_part(template, [*ours[:2], llo], ours) == (
        f"at token 2, after 'he': the server has {llo} 'llo', we have {ours[2]} 'l'"
    )
    assert where_ids_part(template, ours[:4], ours).endswith(f"the server has nothing more, we have {ours[4]} 'o'")
