"""Runs the command line and turns every expected stop into a line on standard error and an exit code."""

from __future__ import annotations

import io
import os
import sys

from cyclopts import CycloptsError
from pydantic import ValidationError

from draftsmith.cli import app
from draftsmith.errors import DraftsmithError
from draftsmith.progress import harmless
from draftsmith.recipe import problems_of


def main(arguments: list[str] | None = None) -> int:
    """The process's exit code for these arguments (default: the command line's)."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Worker threads that spin while they wait take the core from the one they wait for: on a busy machine of few cores
    # that was seen to cost a factor of ten. Read by OpenMP when torch loads it, later.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if isinstance(sys.stdout, io.TextIOWrapper):  # as standard error does by itself, where the encoding is a poor one
        sys.stdout.reconfigure(errors="backslashreplace")
    if not sys.stderr.isatty():  # the bars of libraries would fill a log; read by tqdm when it is loaded, later
        os.environ.setdefault("TQDM_DISABLE", "1")
    try:
        app(arguments, exit_on_error=False, print_error=False, result_action="return_value")
    except DraftsmithError as error:
        return _stop(str(error), error.exit_code, error.details)
    except CycloptsError as error:
        return _stop(_usage(error), 2)
    except PermissionError as error:
        return _stop(f"{error.filename}: expected access to it, found {error.strerror}; change its permissions", 2)
    except KeyboardInterrupt:
        return _stop("interrupted; run the same command again to go on", 130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


def _usage(error: CycloptsError) -> str:
    """A wrong flag or value in one line, with pydantic's own finding where a setting is out of range."""
    cause = error.__cause__
    if isinstance(cause, ValidationError):
        where, wanted, found = problems_of(cause)[0]
        return f"--{where.rstrip('_').replace('_', '-')}: {wanted}, found {found!r}"
    return " ".join(str(error).split()) + "; see --help"


def _stop(message: str, code: int, details: tuple[str, ...] = ()) -> int:
    lines = [f"draftsmith: {' '.join(message.splitlines())}", *(" ".join(line.splitlines()) for line in details)]
    print(harmless("\n".join(lines)), file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
