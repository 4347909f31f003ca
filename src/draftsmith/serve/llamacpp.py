"""llama.cpp's own HTTP server in this process, out of the package xllamacpp: `python -m draftsmith.serve.llamacpp`.

For machines without a `llama-server` of their own. It prints one line when it answers, and ends on SIGTERM or SIGINT.
The draft's candidates are chosen on the CPU unless asked otherwise: with llama.cpp's default, backend sampling,
acceptance halves as soon as two requests run together.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

PACKAGE = "xllamacpp"
SHOWS_CANDIDATES = 5
"""The log level at which llama.cpp prints what the draft proposes."""


def arguments(words: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m draftsmith.serve.llamacpp", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="the target, a GGUF file")
    parser.add_argument("--draft", type=Path, help="an EAGLE-3 draft, a GGUF file")
    parser.add_argument("--draft-tokens", type=int, default=3, help="tokens proposed per step at most")
    parser.add_argument(
        "--backend-sampling",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="choose the draft's candidates on the backend, which halves acceptance under parallel requests",
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--slots", type=int, default=1, help="requests at a time")
    parser.add_argument("--context", type=int, default=4096, help="ids over all slots together")
    parser.add_argument(
        "--exact",
        action="store_true",
        help="float32 keys and values and plain attention: slower, and without the float16 inside flash attention",
    )
    parser.add_argument("--chat-template", type=Path, help="a Jinja file to use instead of the model's own template")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--log-level", type=int, default=1, help=f"llama.cpp's own; {SHOWS_CANDIDATES} shows candidates"
    )
    return parser.parse_args(words)


def parameters(xllamacpp: Any, asked: argparse.Namespace) -> Any:
    """llama.cpp's parameters (`common_params`) for what was asked."""
    found = xllamacpp.CommonParams()
    found.model.path = str(asked.model)
    found.hostnames, found.port = [asked.host], asked.port
    found.n_parallel, found.n_ctx = asked.slots, asked.context
    found.cpuparams.n_threads = found.cpuparams_batch.n_threads = asked.threads
    cache_type = xllamacpp.ggml_type.GGML_TYPE_F32 if asked.exact else found.cache_type_k
    found.cache_type_k = found.cache_type_v = cache_type
    if asked.exact:
        found.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    found.endpoint_metrics = True
    found.fit_params = False  # else it would shrink the context to what it thinks fits
    found.verbosity = asked.log_level
    if asked.chat_template:
        found.chat_template = asked.chat_template.read_text("utf-8")
    if asked.draft:
        # Without the type it would load the draft and draft nothing, without a word.
        found.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_EAGLE3]
        draft = found.speculative.draft
        draft.mparams.path, draft.n_max = str(asked.draft), asked.draft_tokens
        draft.backend_sampling = asked.backend_sampling
        draft.cache_type_k = draft.cache_type_v = cache_type
        draft.cpuparams.n_threads = draft.cpuparams_batch.n_threads = asked.threads
    return found


def main() -> int:
    """Serves until a signal; returns the exit code."""
    asked = arguments(sys.argv[1:])
    try:
        xllamacpp = importlib.import_module(PACKAGE)
    except ImportError:
        print(f"expected the package {PACKAGE}, found none; pip install 'draftsmith[llamacpp]'", file=sys.stderr)
        return 2
    for file in filter(None, (asked.model, asked.draft)):
        if not file.is_file():
            print(f"{file}: expected a GGUF file, found none", file=sys.stderr)
            return 2
    if asked.chat_template and not asked.chat_template.is_file():
        print(f"{asked.chat_template}: expected a Jinja file, found none", file=sys.stderr)
        return 2
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    server = xllamacpp.Server(parameters(xllamacpp, asked))
    print(f"ready: {server.listening_address}", flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    del server
    return 0


if __name__ == "__main__":
    sys.exit(main())
