"""The probe before a bulk run, and as a command: asks the servers, says what it means, stops what is hopeless.

Every run asks again, a resumed one too: servers are restarted with other flags between runs. That costs a dozen short
requests to the first server and two to each further one, and two to one that comes back in mid-run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from draftsmith.capture.attempt import Attempt
from draftsmith.capture.exactness import LEAST, RANK, Exactness, problem, with_ids
from draftsmith.errors import GateStop, UserError
from draftsmith.progress import Progress
from draftsmith.recipe import CaptureSettings, seconds_of
from draftsmith.target.endpoints import Endpoint
from draftsmith.target.findings import Finding, Intent
from draftsmith.target.probe import EASY, OPEN, PROBE_SECONDS, Line, Verdict, compare_server, probe_server
from draftsmith.target.reply import Reply, Sampling
from draftsmith.target.server import ServerInfo, ServerTarget
from draftsmith.target.template import Template, load_template
from draftsmith.target.thinking import Delimiters, find_delimiters
from draftsmith.target.wire import ChatFailed

SAID = 6
"""Lines at most that a probe before a capture prints; `draftsmith probe` prints all."""


async def probed(
    attempt: Attempt, target: ServerTarget, info: ServerInfo, template: Template, delimiters: Delimiters | None
) -> Verdict:
    """Sets `target.dialect` to what the first server speaks and says what the probe found.

    Raises:
        GateStop: everything captured would be worthless, or something that was asked for has no effect.
    """
    progress, settings = attempt.progress, attempt.settings
    known: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
    target.fits = partial(_fits, target, intent_of(settings, template, delimiters), known)
    try:
        verdict = await examine(settings, target, info, template, delimiters)
    except ChatFailed as failure:
        raise GateStop(
            f"probe: the server answers no plain question ({failure.reason}); nothing was asked yet"
        ) from None
    known.set_result(verdict)
    target.dialect = verdict.dialect
    progress.event("probe", **verdict.as_json())
    for line in short(verdict):
        progress.say(line)
    if verdict.fatal:
        more = f" (and {len(verdict.fatal) - 1} more)" if len(verdict.fatal) > 1 else ""
        first = verdict.fatal[0]
        raise GateStop(f"probe: {first.about}: {first.text}{more}; nothing was asked yet; --no-probe skips this")
    return verdict


async def examine(
    settings: CaptureSettings,
    target: ServerTarget,
    info: ServerInfo,
    template: Template,
    delimiters: Delimiters | None,
) -> Verdict:
    """The first server's verdict, with what the further ones that are up and the wanted exactness add to it.

    Raises:
        ChatFailed: a server refuses a plain question.
    """
    intent = intent_of(settings, template, delimiters)
    lines = [Line(target, endpoint) for endpoint in target.endpoints if not endpoint.reason]
    verdict = await probe_server(lines[0], intent, info.max_model_len, info.engine)
    further = await asyncio.gather(*(compare_server(line, intent, verdict) for line in lines[1:]))
    added = [finding for findings in further for finding in findings]
    added += _exactness(verdict, intent, settings.exact)
    return replace(verdict, findings=(*verdict.findings, *added))


def intent_of(settings: CaptureSettings, template: Template, delimiters: Delimiters | None) -> Intent:
    """What a capture with these settings asks for."""
    return Intent(
        template=template,
        delimiters=delimiters,
        sampling=Sampling(
            max_tokens=settings.max_tokens,
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            seed=settings.seed,
        ),
        preamble=[message.model_dump() for message in settings.preamble],
    )


def probe_command(settings: CaptureSettings, progress: Progress) -> Verdict:
    """`draftsmith probe`: connects (waiting as long as `settings.wait` says), and examines.

    Raises:
        UserError: the server cannot be probed.
    """

    async def run() -> Verdict:
        async with ServerTarget(
            settings.server, settings.model, api_key_env=settings.api_key_env, deadline=PROBE_SECONDS, retries=0
        ) as target:
            info = await target.connect(seconds_of(settings.wait), progress.say)
            template = server_template(settings, info)
            delimiters = find_delimiters(template, settings.thinking, settings.think_open, settings.think_close)
            try:
                return await examine(settings, target, info, template, delimiters)
            except ChatFailed as failure:
                raise UserError(
                    f"{info.urls[0]}: expected an answer to a plain question, found {failure.reason}; "
                    "look at the server's log"
                ) from None

    return asyncio.run(run())


def server_template(settings: CaptureSettings, info: ServerInfo) -> Template:
    """The user's tokenizer; else whatever the server loaded the model from, where that can be had here too.

    Raises:
        UserError: neither can be loaded.
    """
    name = settings.tokenizer or info.root
    try:
        return load_template(name, settings.template_options, settings.trust_remote_code)
    except UserError as error:
        if settings.tokenizer:
            raise
        raise UserError(f"{error}; give the target's tokenizer with --tokenizer DIR") from None


def short(verdict: Verdict) -> list[str]:
    """A verdict in at most `SAID` lines: what is well in one, then the worst of the rest."""
    good = sum(finding.level == "ok" for finding in verdict.findings)
    ids = {"engine": "exact ids", "rendered_verified": "ids rendered and verified", "rendered": "ids rendered"}
    head = f"probe: {verdict.engine} {verdict.version}".rstrip() + f" at {verdict.url}: {ids[verdict.ids_source]} by "
    order = ("fatal", "warning", "note")
    rest = sorted((f for f in verdict.findings if f.level != "ok"), key=lambda finding: order.index(finding.level))
    lines = [f"{head}{verdict.dialect.name}; {good} of {len(verdict.findings)} checks are well"]
    return lines + [f"probe: {f.level}: {f.about}: {f.text}" for f in rest[: SAID - 1]]


def screen(verdict: Verdict) -> str:
    """A verdict for a person's terminal: every finding, and what follows from them."""
    width = max(len(finding.about) for finding in verdict.findings)
    lines = [f"{verdict.model} at {verdict.url}"]
    lines += [f"  {f.level:<8} {f.about:<{width}}  {f.text}" for f in verdict.findings]
    worst = "not fit for a capture" if verdict.fatal else "fit for a capture"
    return "\n".join([*lines, f"{worst}: {_count(verdict.findings)}"])


async def _fits(target: ServerTarget, intent: Intent, known: asyncio.Future[Verdict], endpoint: Endpoint) -> None:
    """Two requests to a server that comes back: it may have been started with other flags, or never been probed.

    Raises:
        UserError: it does not answer as the first server did.
    """
    first = await known
    try:
        found = await compare_server(Line(target, endpoint), intent, first)
    except ChatFailed as failure:
        raise UserError(f"it answers no plain question ({failure.reason})") from None
    fatal = [finding.text for finding in found if finding.level == "fatal"]
    if fatal:
        raise UserError(fatal[0])


def _count(findings: Sequence[Finding]) -> str:
    levels = [finding.level for finding in findings]
    return ", ".join(
        f"{levels.count(level)} {level}" for level in ("fatal", "warning", "note", "ok") if level in levels
    )


def _exactness(verdict: Verdict, intent: Intent, exact: Exactness) -> list[Finding]:
    """Whether ids as exact as the user wants can be had: true if only one of the probe's replies shows it."""
    if RANK[verdict.ids_source] == RANK["engine"]:
        return []
    template, delimiters = intent.template, intent.delimiters

    def rendered(reply: Reply, question: str) -> Reply:
        messages = [*intent.preamble, {"role": "user", "content": question}]
        return with_ids(reply, lambda: template.render(messages), template, delimiters)

    replies = [rendered(verdict.easy, EASY), rendered(verdict.greedy, OPEN)]
    if any(RANK[reply.ids_source] >= LEAST[exact] for reply in replies):
        return []
    reason = problem(replies[0], template, exact, delimiters, opened=False)
    cure = "serve with an engine that returns token ids (vLLM >= 0.10.2), or accept less with --exact any"
    return [Finding("fatal", "token ids", f"{reason}; {cure}")]
