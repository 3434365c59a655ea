"""What the tests share: the agent in this process, as a process, and on a pseudo-terminal.

a = make_agent(api, tmp_path, threshold=3000)   # talks to the stand-in and allows everything
a.run("...")                                    # said(a) is what its screen shows
done = run(api, tmp_path, "-y", "-p", "...")    # a CompletedProcess, both streams as text
child = terminal(api, tmp_path, "-y")           # pexpect, already at the first prompt
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pexpect
from messages_api import MessagesAPI

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import agent  # noqa: E402

PROMPT = "agent >> "
KEY = "sk-test-0123456789"
# All is plain HTTP on loopback: reading the certificates would take 40 ms for each agent.
os.environ.setdefault("SSL_CERT_DIR", str(ROOT / "tests"))
# The real program; only the pauses between tries are left out.
PROGRAM = """import sys
import agent
agent.WAITS = (0, 0, 0)
sys.exit(agent.main())"""


def allow_all(call: agent.Block) -> agent.Verdict:
    return agent.Verdict(True)


def make_agent(api: MessagesAPI, cwd: Path, allow: Any = allow_all, **settings: Any) -> agent.Agent:
    """An agent that allows everything; what it shows is `said(agent)`."""
    agent.WAITS = (0, 0, 0)
    agent.interrupts.install()
    out = io.StringIO()
    made = agent.Settings(**{"api_key": KEY, "base_url": api.url, **settings})
    return agent.Agent(made, cwd, allow, agent.Screen(out, out))


def said(a: agent.Agent) -> str:
    """Everything that an agent has shown: what the model said, and its own lines."""
    assert isinstance(a.screen.out, io.StringIO)
    return a.screen.out.getvalue()


def environment(api: MessagesAPI | None, **extra: str) -> dict[str, str]:
    """The environment for a process: the stand-in as its server, no setting from outside."""
    own = ("ANTHROPIC_", "AGENT_", "MODEL_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    if api:
        env |= {"ANTHROPIC_BASE_URL": api.url, "ANTHROPIC_API_KEY": KEY}
    # Not in the program's text: some locales could not read a path with an umlaut there.
    paths = [str(ROOT), *filter(None, [extra.pop("PYTHONPATH", "")])]
    env |= {"TERM": "xterm", "PYTHONUTF8": "1", "PYTHONPATH": os.pathsep.join(reversed(paths))}
    return {**env, **extra}


def command(*args: str) -> list[str]:
    return [sys.executable, "-c", PROGRAM, *args]


def run(
    api: MessagesAPI | None,
    cwd: Path,
    *args: str,
    stdin: str | bytes = "",
    timeout: float = 120,
    **env: str,
) -> subprocess.CompletedProcess[str]:
    """The agent as a process on pipes, to its end."""
    done = subprocess.run(
        command(*args),
        cwd=cwd,
        env=environment(api, **env),
        input=stdin.encode() if isinstance(stdin, str) else stdin,
        capture_output=True,
        timeout=timeout,
        check=False,
    )
    out, err = (stream.decode("utf-8", "replace") for stream in (done.stdout, done.stderr))
    return subprocess.CompletedProcess(done.args, done.returncode, out, err)


def spawn(api: MessagesAPI, cwd: Path, *args: str, **env: str) -> subprocess.Popen[str]:
    """The agent as a process on pipes, while it runs."""
    return subprocess.Popen(
        command(*args),
        cwd=cwd,
        env=environment(api, **env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def terminal(
    api: MessagesAPI, cwd: Path, *args: str, size: tuple[int, int] = (40, 100), **env: str
) -> Any:
    """The agent on a pseudo-terminal, at its first prompt."""
    child = pexpect.spawn(
        sys.executable,
        ["-c", PROGRAM, *args],
        cwd=str(cwd),
        env=environment(api, **env),
        encoding="utf-8",
        codec_errors="replace",
        timeout=60,
        dimensions=size,
    )
    child.expect_exact(PROMPT)
    return child


def texts(messages: list[dict[str, Any]], role: str = "") -> str:
    """All text that a request holds, tool results included (of one role if one is given)."""
    found: list[str] = []
    for message in messages:
        if role in ("", message["role"]):
            for block in message["content"]:
                inner = block.get("content", block.get("text", ""))
                parts = inner if isinstance(inner, list) else [{"text": inner}]
                found += [part.get("text", "") for part in parts]
    return "\n".join(found)


def results(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All tool_result blocks of a request, in order."""
    blocks = [block for message in messages for block in message["content"]]
    return [block for block in blocks if block["type"] == "tool_result"]


def processes(mark: str) -> list[int]:
    """Ids of processes whose command line holds `mark`, such as a sleep of unique length."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = entry.read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
        except OSError:
            continue
        if mark in line and int(entry.parent.name) != os.getpid():
            found.append(int(entry.parent.name))
    return found
