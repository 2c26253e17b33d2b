"""Secrets of hostile characters, and whether a text shows one."""

from __future__ import annotations

import random
import string
import traceback
from collections.abc import Iterator
from functools import cache
from urllib.parse import quote, unquote, unquote_plus

from pxrs.core.error_text import describe
from pxrs.errors import PxrsError

HOSTILE = "/?%#@:&=+ ;,[]{}<>|\\^`~!$'\"()*\té€"


def secrets(count: int, seed: int | str = 0) -> Iterator[str]:
    chance = random.Random(seed)
    letters = string.ascii_letters + string.digits
    for _ in range(count):
        # Sometimes one letter in two is hostile, sometimes one in ten.
        alphabet = letters * chance.choice([0, 1, 4]) + HOSTILE * 2 or letters
        yield "".join(chance.choices(alphabet + letters, k=chance.randint(8, 24)))


def shown_of(secret: str, text: str) -> str | None:
    """The part of the secret that the text shows, of six characters or more."""
    return next((part for part in _parts(secret) if part in text), None)


@cache
def _parts(secret: str) -> set[str]:
    written = {secret, unquote(secret), unquote_plus(secret), secret.strip()}
    written |= {quote(each, safe=safe) for each in written for safe in ("", "/")}
    written |= {repr(each)[1:-1] for each in written}
    return {form[at : at + 6] for form in written for at in range(len(form) - 5)}


def words(error: BaseException) -> str:
    """All that a program could print of an error and its causes."""
    said = ["".join(traceback.format_exception(error)), describe(error)]
    chain: BaseException | None = error
    while chain is not None:
        said += [str(chain), repr(chain), *getattr(chain, "__notes__", ())]
        if isinstance(chain, PxrsError):
            said.append(repr(vars(chain)))
        chain = chain.__cause__ or chain.__context__
    # The lines of code that a traceback shows are not about this secret.
    return "\n".join(said)
