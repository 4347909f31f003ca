"""What a question sets for itself: its sampling values and template options, laid over those of the run.

Both are exact all the way: the prompt is rendered, the request is sent and the trace is read with the question's own
values, and the trace records them.
"""

from __future__ import annotations

from dataclasses import replace

from draftsmith.capture.conversation import Job
from draftsmith.capture.rows import Question
from draftsmith.recipe import CaptureSettings
from draftsmith.target.reply import Sampling
from draftsmith.target.template import Template


def sampling_of(settings: CaptureSettings, question: Question, sample: int) -> Sampling:
    """The values one sample is asked with; each sample has its own seed, counted from the question's if it has one."""
    own = question.sampling
    return Sampling(
        max_tokens=own.get("max_tokens", settings.max_tokens),
        temperature=own.get("temperature", settings.temperature),
        top_p=own.get("top_p", settings.top_p),
        top_k=own.get("top_k", settings.top_k),
        seed=own.get("seed", settings.seed) + sample,
    )


def template_of(template: Template, question: Question) -> Template:
    """The template with the question's own options."""
    if not question.template_options:
        return template
    return replace(template, options={**template.options, **question.template_options})


def unheard(job: Job) -> str:
    """Why a conversation with a developer turn cannot be asked; empty if it can.

    Engines hand the role to the template as it is (vLLM, SGLang). One that does not know it may refuse it, or leave the
    turn out without a word: the target would never hear it.

    Raises:
        ChatFailed: the template refuses the conversation.
    """
    told = [turn["content"].strip() for turn in job.messages if turn["role"] == "developer"]
    if not told:
        return ""
    job.render()
    text = job.template.text(job.messages, job.question.tools)
    if all(words in text for words in told):
        return ""
    return "template: it leaves out the developer turn; give it as a system turn"
