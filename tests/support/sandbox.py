"""System calls that the kernel denies to this process and its children, as in a container or gVisor.

As a program, `sandbox.py CALL,... ARGUMENTS...` denies calls and runs `python ARGUMENTS...`.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import struct
import sys

# Numbers of the calls, and the only value of their second argument with which they are denied.
CALLS = {
    "x86_64": {"memfd_create": 319, "fallocate": 285, "sched_getaffinity": 204, "sched_setaffinity": 203},
    "aarch64": {"memfd_create": 279, "fallocate": 47, "sched_getaffinity": 123, "sched_setaffinity": 122},
}.get(platform.machine(), {})
CALLS |= {"pidfd_open": 434}
_FCNTL = {"x86_64": 72, "aarch64": 25}.get(platform.machine(), -1)
_COMMANDS = {"F_ADD_SEALS": 1033, "F_SETSIG": 10}

_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _MODE_FILTER = 22, 38, 2
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06


def deny(calls: list[str], number: int = errno.EPERM) -> None:
    """Denies calls with an error number from now on."""
    program = []
    for call in calls:
        command = _COMMANDS.get(call)
        # Where a field differs, skip the rest of this call's instructions.
        fields = [(0, CALLS[call])] if command is None else [(0, _FCNTL), (24, command)]
        for place, (offset, value) in enumerate(fields):
            rest = 2 * (len(fields) - place - 1) + 1
            program += [(_LOAD, 0, 0, offset), (_JUMP_IF_EQUAL, 0, rest, value)]
        program.append((_RETURN, 0, 0, _ERRNO | number))
    program.append((_RETURN, 0, 0, _ALLOW))
    content = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in program))
    filter_ = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program), ctypes.addressof(content)))
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in (_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), (_PR_SET_SECCOMP, _MODE_FILTER, filter_, 0, 0):
        if libc.prctl(*arguments) != 0:
            raise OSError(ctypes.get_errno(), "this system has no filters of system calls")


if __name__ == "__main__":
    assert _COMMANDS["F_SETSIG"] == fcntl.F_SETSIG
    deny(sys.argv[1].split(","), getattr(errno, sys.argv[2]))
    os.execv(sys.executable, [sys.executable, *sys.argv[3:]])
