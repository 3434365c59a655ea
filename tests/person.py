"""A person at a pseudo-terminal, and an emulator that shows what is on the screen.

    person = Person(api, tmp_path, "-y")            # at the first prompt
    person.ask("a prompt", "the answer")            # and at the next prompt
    person.sees("..."), person.rows()               # what is on the screen now
    person.leave()                                  # by `exit`, with status 0

The SDK takes seconds to import. So a nursery imports it once, and each agent is a fork of that
process: the real program, with its own session, terminal, directory and environment.
"""

from __future__ import annotations

import fcntl
import gc
import json
import os
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pexpect
import pyte
from harness import PROMPT, agent, environment
from messages_api import MessagesAPI
from pexpect.fdpexpect import fdspawn

QUESTION = "run it? [y]es / [n]o, with a reason / [a]lways "
CODES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
PATIENCE = 40  # seconds


class Person:
    def __init__(
        self,
        api: MessagesAPI,
        cwd: Path,
        *args: str,
        size: tuple[int, int] = (40, 100),  # rows, columns
        program: list[str] | None = None,  # another than the agent
        at: str = PROMPT,  # what is there first
        **env: str,
    ) -> None:
        self.raw = ""  # all that was written
        self.mark = 0  # how much of it when the last keys were typed
        self.screen = pyte.Screen(size[1], size[0])
        self.stream = pyte.Stream(self.screen)
        variables = environment(api, **{"LC_ALL": "C.UTF-8", **env})
        variables = {name: value for name, value in variables.items() if value}
        options: Any = {"encoding": "utf-8", "codec_errors": "replace", "timeout": PATIENCE}
        if program:
            options |= {"cwd": str(cwd), "env": variables, "dimensions": size}
            self.child = pexpect.spawn(program[0], program[1:], **options)
            self.pid = 0
        else:
            terminal, self.pid = nursery.bear(cwd, args, variables, size)
            self.child = fdspawn(terminal, **options)
        self.child.logfile_read = self
        self.comes(at)

    def write(self, text: str) -> None:
        """All that arrives, as pexpect reads it."""
        self.raw += text
        self.stream.feed(text)

    def flush(self) -> None:
        """pexpect wants one."""

    def read_on(self) -> None:
        """Take what has come already."""
        try:
            while True:
                self.child.read_nonblocking(4096, timeout=0.02)
        except (pexpect.TIMEOUT, pexpect.EOF):
            pass

    def until(self, reached: Callable[[], Any], timeout: float = PATIENCE) -> None:
        """Read on until something holds."""
        end = time.monotonic() + timeout
        while not reached():
            assert time.monotonic() < end, "\n".join(self.rows())
            try:
                self.child.read_nonblocking(4096, timeout=0.05)
            except pexpect.TIMEOUT:
                pass

    def types(self, keys: str) -> None:
        self.mark = len(self.raw)
        self.child.send(keys)

    def comes(self, text: str) -> None:
        """Read on until this was written after the last keys."""
        self.until(lambda: text in self.raw[self.mark :])

    def prompt(self) -> None:
        """Read on until a prompt stands there, empty."""
        self.until(lambda: self.rows()[-1] == PROMPT.rstrip())

    def ask(self, text: str, answer: str = "ok") -> None:
        """Type a prompt; see the answer and the next prompt."""
        self.types(text + "\r")
        self.comes(answer)
        self.prompt()

    def question(self, count: int = 1) -> None:
        """Read on until the question is there for the first, second ... time."""
        self.until(lambda: self.written().count(QUESTION) == count)
        self.read_on()

    def sees(self, text: str) -> None:
        self.until(lambda: text in self.shown())

    def saw(self, pattern: str) -> None:
        """Read on until this was written at some time, even if it is gone by now."""
        self.until(lambda: re.search(pattern, self.written()))

    def rows(self) -> list[str]:
        """The screen up to its last row that is not empty."""
        return "\n".join(line.rstrip() for line in self.screen.display).rstrip().split("\n")

    def shown(self) -> str:
        """The screen as one text: what was wrapped at its edge is whole again."""
        return "".join(self.screen.display)

    def written(self) -> str:
        """All that was ever written, without escape codes."""
        return CODES.sub("", self.raw)

    def status(self) -> str:
        """The newest status line."""
        return [line for line in self.written().splitlines() if " tokens; in " in line][-1]

    def modes(self) -> list[Any]:
        """How the terminal is set."""
        return termios.tcgetattr(self.child.child_fd)

    def resize(self, rows: int, columns: int) -> None:
        set_size(self.child.child_fd, rows, columns)
        self.screen.resize(rows, columns)

    def leave(self, keys: str = "exit\r", status: int = 0) -> None:
        """Out by the door, whatever came before."""
        self.types(keys)
        self.gone(status)

    def gone(self, status: int = 0) -> None:
        """The program ends with that status, and never with a traceback."""
        try:
            self.until(lambda: False)
        except pexpect.EOF:
            self.child.close()
        ended = nursery.wait(self.pid) if self.pid else self.child.exitstatus
        assert ended == status, "\n".join(self.rows())
        assert "Traceback" not in self.raw


def wait_for(reached: Callable[[], Any], timeout: float = PATIENCE) -> None:
    end = time.monotonic() + timeout
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.01)


def set_size(terminal: int, rows: int, columns: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


# ================================ The nursery ================================


class Nursery:
    """A process that has imported everything and forks an agent for each order, a JSON line."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "LC_ALL": "C.UTF-8", "PYTHONUTF8": "1"},
            text=True,
        )

    def order(self, **order: Any) -> int:
        assert self.process.stdin and self.process.stdout
        print(json.dumps(order), file=self.process.stdin, flush=True)
        return int(self.process.stdout.readline())

    def bear(
        self, cwd: Path, args: tuple[str, ...], env: dict[str, str], size: tuple[int, int]
    ) -> tuple[int, int]:
        """Start an agent. Returns our side of its terminal, and its process id."""
        terminal, other_side = os.openpty()
        set_size(terminal, *size)
        pid = self.order(tty=os.ttyname(other_side), cwd=str(cwd), args=args, env=env)
        os.close(other_side)
        return terminal, pid

    def wait(self, pid: int) -> int:
        """The exit status of an agent that has ended; of one that a signal killed, minus that."""
        return self.order(wait=pid)


def serve_orders() -> None:
    import anthropic  # noqa: F401

    gc.freeze()  # else each child tidies up for a second when it ends
    agent.WAITS = (0, 0, 0)
    children: set[int] = set()
    for line in iter(sys.stdin.readline, ""):
        order = json.loads(line)
        if "wait" in order:
            children.discard(order["wait"])
            print(os.waitstatus_to_exitcode(os.waitpid(order["wait"], 0)[1]), flush=True)
            continue
        terminal = os.open(order["tty"], os.O_RDWR | os.O_NOCTTY)
        pid = os.fork()
        if pid == 0:
            sys.exit(live(terminal, **order))
        children.add(pid)
        os.close(terminal)
        print(pid, flush=True)
    for child in children:
        os.kill(child, signal.SIGKILL)


def live(terminal: int, tty: str, cwd: str, args: list[str], env: dict[str, str]) -> int:
    """Be an agent that was started on this terminal."""
    os.setsid()
    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
    for number in range(3):
        os.dup2(terminal, number)
    os.close(terminal)
    sys.stdin = open(0, closefd=False)
    sys.stdout = open(1, "w", closefd=False)
    sys.stderr = open(2, "w", closefd=False, errors="backslashreplace")
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.argv = ["agent.py", *args]
    return agent.main()


if __name__ == "__main__":
    serve_orders()
else:
    nursery = Nursery()
