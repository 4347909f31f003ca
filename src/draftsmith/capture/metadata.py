"""What every traces folder says about itself in its Parquet file metadata, captured or imported; values are text."""

from __future__ import annotations

import json

from draftsmith.recipe import QuestionSettings
from draftsmith.target.template import Template
from draftsmith.target.thinking import Delimiters, delimiters_json


def question_metadata(settings: QuestionSettings, template: Template, delimiters: Delimiters | None) -> dict[str, str]:
    """The part that follows from the questions, the template and the tokenizer.

    `vocab_size` is the target's (rows of its embedding), `special_ids` are all that must stay in a draft vocabulary
    besides `stop_ids` and those in `delimiters`.
    """
    return {
        "tokenizer": template.name,
        "tokenizer_fingerprint": template.tokenizer_fingerprint,
        "template_fingerprint": template.fingerprint,
        "template_options": json.dumps(settings.template_options),
        "preamble": json.dumps([message.model_dump() for message in settings.preamble], ensure_ascii=False),
        "delimiters": delimiters_json(delimiters),
        "stop_ids": json.dumps(sorted(template.stop_ids)),
        "special_ids": json.dumps(sorted(template.special_ids())),
        "vocab_size": str(template.vocab_size),
        "held_out": str(settings.held_out),
    }
