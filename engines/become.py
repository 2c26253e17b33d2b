"""Between fork and exec: `python become.py PARENT USER PROGRAM …` becomes that program.

Not a `preexec_fn`: a fork of a process in which gRPC runs may crash before it is called. It
runs as the user, and is killed when the parent is, also if that happened meanwhile.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(parent: int, user: str, argv: list[str]) -> None:
    """Never returns."""
    if user:
        import pwd

        entry = pwd.getpwnam(user)
        os.setgroups([])
        os.setgid(entry.pw_gid)
        os.setuid(entry.pw_uid)
    # After the change of the user, which clears it.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)
    os.execv(argv[0], argv)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
