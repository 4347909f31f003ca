"""The quality gate: stops a capture whose first replies show that the rest would be worthless, before it is paid for.

It looks at the first replies of this process and at runs of faults; a later look at distributions belongs here too.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any, NoReturn

from draftsmith.capture.replies import NOT_EXACT, REASONING_LOST
from draftsmith.errors import GateStop
from draftsmith.trace import TRAINABLE, Trace

FIRST = 8
THINKING_OPTIONS = ("thinking", "enable_thinking")
"""Template options that switch thinking: Kimi's, and Qwen's, GLM's and DeepSeek's."""


class Gate:
    """Sees every trace that came from the target.

    `first` holds those its verdict is about. When that stops the run they are `withdrawn`: the next run asks for them
    again, because it may find the cause mended.
    """

    def __init__(self, template_options: Mapping[str, Any], *, thinks: bool) -> None:
        asked = [bool(template_options[name]) for name in THINKING_OPTIONS if name in template_options]
        self.asked_to_think = asked[0] if asked else None
        self.thinks = thinks
        self.first: list[Trace] = []
        self.withdrawn: list[Trace] = []
        self.faults_in_a_row = 0

    def look(self, trace: Trace, *, passing_fault: bool) -> None:
        """One more trace.

        Raises:
            GateStop: the first replies are unusable or contradict the thinking mode, or the server stopped answering.
        """
        self.faults_in_a_row = self.faults_in_a_row + 1 if passing_fault else 0
        if self.faults_in_a_row == FIRST:
            raise GateStop(
                f"the last {FIRST} requests failed ({trace.error}); what was captured is kept: "
                "look at the server, then run the same command to go on"
            )
        if len(self.first) < FIRST:
            self.first.append(trace)
            if len(self.first) == FIRST:
                self._judge()

    def end(self) -> None:
        """The verdict on a run that was too small to reach the first one.

        Raises:
            GateStop: as `look`, for the thinking mode.
        """
        if 0 < len(self.first) < FIRST:
            self._judge_thinking()

    def _judge(self) -> None:
        self._judge_thinking()
        if any(trace.state in TRAINABLE for trace in self.first):
            return
        reason = Counter(trace.error for trace in self.first).most_common(1)[0][0]
        cure = "correct this and run again"
        if reason.startswith(NOT_EXACT):
            cure = "serve with an engine that returns token ids (vLLM >= 0.10.2), or accept less with --exact any"
        self._stop(f"none of the first {FIRST} replies is usable ({reason}); {cure}")

    def _judge_thinking(self) -> None:
        usable = [trace for trace in self.first if trace.state in TRAINABLE or trace.error.startswith(REASONING_LOST)]
        thought = sum(trace.reasoning_span is not None and trace.state in TRAINABLE for trace in usable)
        wanted = self.asked_to_think
        if wanted is None and any(json.loads(trace.sampling)["prompt_opened_thinking"] for trace in usable):
            wanted = True
        if not usable or not self.thinks:
            return
        if wanted and thought == 0:
            self._stop(
                f"no reasoning seen in the first {len(usable)} replies although thinking was asked for; look at the "
                "server's reasoning parser and template options"
            )
        if wanted is False and thought == len(usable):
            self._stop(
                f"all of the first {len(usable)} replies hold reasoning although the template options switch it off; "
                "the server ignores them, or the preamble's examples show reasoning all the same"
            )

    def _stop(self, message: str) -> NoReturn:
        self.withdrawn = self.first
        raise GateStop(message)
