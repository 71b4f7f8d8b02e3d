"""Counts the instructions that a child process executes in one of its libraries, with ptrace.

Hardware counters are missing in many virtual machines. Single steps are not, but a second has only
some ten thousand of them, so Python and torch must run at full speed: between the marks the
library's text is not executable. A call into it stops the child, which is then stepped until it
leaves the library again.
"""

from __future__ import annotations

import ctypes
import os
import platform
import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.support import ROOT

TRACEME, PEEKUSER, CONT, SINGLESTEP, GETREGS, SETREGS = 0, 3, 7, 9, 12, 13
RAX, RDX, RSI, RDI, ORIG_RAX, RIP = 10, 12, 13, 14, 15, 16  # in user_regs_struct
REGISTERS = ctypes.c_ulonglong * 27
MPROTECT, READ, READ_AND_EXECUTE = 10, 1, 5
BEGIN, END = signal.SIGUSR1, signal.SIGUSR2  # the child sends them to itself around a measurement

_ptrace = ctypes.CDLL(None, use_errno=True).ptrace
_ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_ptrace.restype = ctypes.c_long


def unsupported() -> str | None:
    """Return the reason why instructions cannot be counted here, or None."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return "the tracer knows the registers and system calls of x86-64 Linux alone"
    if "avx2" not in Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").split():
        return "the recorded instructions are AVX2's, which this processor lacks"
    trial = [sys.executable, "-c", "from tests.costs import tracer; tracer.allow_tracing()"]
    child = subprocess.Popen(trial, cwd=ROOT, stderr=subprocess.DEVNULL)
    _, status = os.waitpid(child.pid, os.WUNTRACED)
    child.returncode = status
    if os.WIFSTOPPED(status):
        os.kill(child.pid, signal.SIGKILL)
        os.waitpid(child.pid, 0)
        return None
    return "this system does not permit ptrace"


def allow_tracing() -> None:
    """In the child: let the parent trace this process."""
    if _ptrace(TRACEME, 0, None, None) != 0:
        raise PermissionError(ctypes.get_errno(), "ptrace is not permitted")
    os.kill(os.getpid(), signal.SIGSTOP)


@contextmanager
def one_processor(which: set[int] | None = None) -> Iterator[None]:
    """Stay on one processor, any if `which` is None."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, which or {random.choice(sorted(allowed))})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


class Tracer:
    """A child process that called `allow_tracing`, and the text of its library."""

    def __init__(self, command: Sequence[str], library: str, env: dict[str, str]) -> None:
        self.library = library
        with one_processor():  # a step wakes the other process, which is slow across processors
            self.child = subprocess.Popen(command, env=env)

    def counts(self) -> list[int]:
        """Run the child to its end; return the instructions between each BEGIN and END."""
        with one_processor(os.sched_getaffinity(self.child.pid)):
            return self._counts()

    def _counts(self) -> list[int]:
        counted = []
        try:
            while (stop := self._wait()) is not None:
                if stop == BEGIN:
                    counted.append(self._count())
                self._resume(CONT, 0 if stop in (BEGIN, signal.SIGSTOP) else stop)
        finally:
            if self.child.returncode is None:
                self.child.kill()
                self.child.wait()
        if self.child.returncode != 0:
            raise RuntimeError(f"the traced process ended with status {self.child.returncode}")
        return counted

    def _wait(self) -> int | None:
        """Return the signal that stopped the child, None if it ended."""
        _, status = os.waitpid(self.child.pid, 0)
        if os.WIFSTOPPED(status):
            return os.WSTOPSIG(status)
        self.child.returncode = os.waitstatus_to_exitcode(status)
        return None

    def _resume(self, how: int, signum: int = 0) -> None:
        if _ptrace(how, self.child.pid, None, signum) != 0:
            raise OSError(ctypes.get_errno(), "the traced process cannot be resumed")

    def _count(self) -> int:
        """Return how many instructions of the library run until END."""
        text = self._mapping(self.library)
        self._protect(text, READ)
        count = 0
        self._resume(CONT)
        while (stop := self._wait()) != END:
            if stop == signal.SIGSEGV and self._at() in text:
                self._protect(text, READ_AND_EXECUTE)
                count += self._steps_in(text)
                self._protect(text, READ)
                self._resume(CONT)
            elif stop is None or stop == signal.SIGSEGV:
                raise RuntimeError(f"the traced process stopped with {stop} at {self._at():#x}")
            else:
                self._resume(CONT, stop)
        self._protect(text, READ_AND_EXECUTE)
        return count

    def _steps_in(self, text: range) -> int:
        count = 0
        while self._at() in text:
            self._resume(SINGLESTEP)
            if (stop := self._wait()) != signal.SIGTRAP:
                raise RuntimeError(f"signal {stop} instead of a single step")
            count += 1
        return count

    def _at(self) -> int:
        return _ptrace(PEEKUSER, self.child.pid, 8 * RIP, None) & 2**64 - 1

    def _mapping(self, name: str) -> range:
        """Return the addresses of the executable part of a library."""
        maps = Path(f"/proc/{self.child.pid}/maps").read_text(encoding="utf-8")
        found = re.search(rf"^(\w+)-(\w+) r-xp .*/{name}[^/]*$", maps, flags=re.MULTILINE)
        if not found:
            raise RuntimeError(f"the traced process has not loaded {name}")
        return range(int(found[1], 16), int(found[2], 16))

    def _protect(self, text: range, protection: int) -> None:
        """Make the child call mprotect, from wherever it is."""
        pid, registers = self.child.pid, REGISTERS()
        _ptrace(GETREGS, pid, None, ctypes.byref(registers))
        call = REGISTERS(*registers)
        call[RIP], call[RAX], call[ORIG_RAX] = self._system_call(), MPROTECT, 2**64 - 1
        call[RDI], call[RSI], call[RDX] = text.start, len(text), protection
        _ptrace(SETREGS, pid, None, ctypes.byref(call))
        self._resume(SINGLESTEP)
        self._wait()
        _ptrace(GETREGS, pid, None, ctypes.byref(call))
        if call[RAX] != 0:
            raise OSError(2**64 - call[RAX], "the traced process could not call mprotect")
        _ptrace(SETREGS, pid, None, ctypes.byref(registers))

    def _system_call(self) -> int:
        """Return the address of a `syscall` instruction in the child's C library."""
        if not hasattr(self, "_found"):
            libc = self._mapping("libc.so")
            with open(f"/proc/{self.child.pid}/mem", "rb") as memory:
                memory.seek(libc.start)
                self._found = libc.start + memory.read(len(libc)).index(b"\x0f\x05")
        return self._found
