"""Keys and znodes.

`claims/billing/7` is the znode `claims/billing/=7`: parts before a slash are folders, the last
one, marked with `=`, is the record. So a record never has children (it could be ephemeral), and `a`
and `a/1` can both be records. Characters that ZooKeeper does not take in a name are
percent-encoded.

The root and the folders in it stay for good. Those further below are removed by the servers when
they are empty, so the *guards* of all folders (see `reading`) are kept in the former, a bounded
number of them: `claims/!/7f` is the guard of several folders in `claims`.
"""

from __future__ import annotations

from functools import lru_cache
from urllib.parse import quote, unquote
from zlib import crc32

from pxrs.errors import InvalidRequest

GUARD = "!"
_MARK = "="
_SAFE = " -_.~@:,;+*()[]{}$&'<>^|"
_LONGEST = 10_000
_GUARDS = 256
# Folders that have so many parts in common have a guard in common, too: so a queue's key orders
# do not make commits of all the other queues fail.
_GUARDED_PARTS = 3


def path_of(root: str, key: str) -> str:
    """The znode of a record."""
    *folders, leaf = key.split("/")
    if len(key) > _LONGEST:
        raise InvalidRequest(
            f"key is {len(key)} characters long; the limit on ZooKeeper is {_LONGEST}"
        )
    return "/".join([root, *map(_encode, folders), _MARK + _encode(leaf, first=False)])


def folder_of(root: str, prefix: str) -> str:
    """The deepest folder that holds all records under a prefix."""
    *folders, _ = prefix.split("/")
    return "/".join([root, *map(_encode, folders)])


def folders_above(root: str, path: str) -> list[str]:
    """The folders on the way from the root to a record, the root first."""
    parts = path[len(root) + 1 :].split("/")[:-1]
    return ["/".join([root, *parts[:depth]]) for depth in range(len(parts) + 1)]


def lasting(root: str, folder: str) -> str:
    """The folder that stays for good, on the way from the root to this one."""
    first = folder[len(root) + 1 :].partition("/")[0]
    return f"{root}/{first}" if first else root


@lru_cache(maxsize=100_000)
def guard_of(root: str, folder: str) -> str:
    """The znode that guards the records of a folder, and maybe those of other folders."""
    parts = folder[len(root) + 1 :].split("/")[:_GUARDED_PARTS]
    number = crc32("/".join(parts).encode()) % _GUARDS
    return f"{lasting(root, folder)}/{GUARD}/{number:02x}"


def is_guard(path: str) -> bool:
    return path.rpartition("/")[0].endswith(f"/{GUARD}")


def is_record(name: str) -> bool:
    """Whether a child of a folder is a record; else it is a folder, or the folder's guard."""
    return name.startswith(_MARK)


def leaf_of(name: str) -> str:
    """The last part of a record's key."""
    return unquote(name[len(_MARK) :]) if "%" in name else name[len(_MARK) :]


def key_of(root: str, path: str) -> str:
    """The key of a record's znode."""
    *folders, leaf = path[len(root) + 1 :].split("/")
    return "/".join([*map(_decode, folders), _decode(leaf[len(_MARK) :])])


def key_prefix_of(root: str, folder: str) -> str:
    """The beginning of the keys of all records in a folder."""
    if folder == root:
        return ""
    return "/".join(map(_decode, folder[len(root) + 1 :].split("/"))) + "/"


def _encode(part: str, *, first: bool = True) -> str:
    """Encode text as a name for ZooKeeper; empty text is "%". Letters of living scripts stay."""
    if not part:
        return "%" if first else ""
    text = "".join(char if _is_taken(char) else quote(char, "") for char in part)
    # ZooKeeper refuses "." and "..".
    return text.replace(".", "%2E") if first and not text.strip(".") else text


def _is_taken(char: str) -> bool:
    """Whether ZooKeeper takes it in a name: no character that Java writes as two."""
    return (char.isalnum() and char <= "\uffef") or char in _SAFE


def _decode(name: str) -> str:
    return "" if name == "%" else unquote(name)
