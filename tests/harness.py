"""What the tests share: the agent as functions in this process, as a process, and on a pseudo-terminal.

    s = session(api, tmp_path, threshold=3000)      # a Session that talks to the stand-in and allows everything
    s.add("user", "..."); agent.agent_loop(s)
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
# The real program; only the pauses between tries are left out.
NO_WAITS = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import agent; agent.WAITS = (0, 0, 0); sys.exit(agent.main())"


def session(api: MessagesAPI, cwd: Path, **settings: Any) -> agent.Session:
    """A session that allows everything; what it says on its screen is `said(session)`."""
    agent.WAITS = (0, 0, 0)
    known = {field: settings.pop(field) for field in list(settings) if field in agent.Session.__dataclass_fields__}
    made = agent.Settings(api_key="sk-test-0123456789", base_url=api.url, **settings)
    known.setdefault("allow", lambda name, args: "")
    return agent.Session(made, screen=agent.Terminal(io.StringIO()), cwd=cwd, **known)


def said(s: agent.Session) -> str:
    """Everything that a session has written to its screen."""
    assert isinstance(s.screen.out, io.StringIO)
    return s.screen.out.getvalue()


def ask(s: agent.Session, prompt: str) -> str:
    """One prompt through the loop."""
    s.add("user", prompt)
    return agent.agent_loop(s)


def environment(api: MessagesAPI | None, **extra: str) -> dict[str, str]:
    """The environment for an agent process: the stand-in as its server, no setting from outside."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("ANTHROPIC_", "AGENT_", "MODEL_"))}
    env |= {"ANTHROPIC_BASE_URL": api.url, "ANTHROPIC_API_KEY": "sk-test-0123456789"} if api else {}
    return {**env, "TERM": "xterm", "PYTHONUTF8": "1", **extra}


def command(*args: str) -> list[str]:
    return [sys.executable, "-c", NO_WAITS, *args]


def run(api: MessagesAPI | None, cwd: Path, *args: str, stdin: str | bytes = "", timeout: float = 60, **env: str) -> Any:
    """The agent as a process on pipes, to its end."""
    data = stdin.encode() if isinstance(stdin, str) else stdin
    done = subprocess.run(command(*args), cwd=cwd, env=environment(api, **env), input=data, capture_output=True,
                          timeout=timeout)
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode("utf-8", "replace"),
                                       done.stderr.decode("utf-8", "replace"))


def spawn(api: MessagesAPI, cwd: Path, *args: str) -> subprocess.Popen[str]:
    """The agent as a process on pipes, while it runs."""
    return subprocess.Popen(command(*args), cwd=cwd, env=environment(api), stdin=subprocess.DEVNULL,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def terminal(api: MessagesAPI, cwd: Path, *args: str, size: tuple[int, int] = (40, 100), **env: str) -> Any:
    """The agent on a pseudo-terminal, at its first prompt."""
    child = pexpect.spawn(sys.executable, ["-c", NO_WAITS, *args], cwd=str(cwd), env=environment(api, **env),
                          encoding="utf-8", codec_errors="replace", timeout=20, dimensions=size)
    child.expect_exact(PROMPT)
    return child


def texts(messages: list[dict[str, Any]], role: str = "") -> str:
    """All text that a request holds, tool results included (of one role if one is given)."""
    found: list[str] = []
    for message in messages:
        if role in ("", message["role"]):
            content = message["content"]
            for block in [{"type": "text", "text": content}] if isinstance(content, str) else content:
                inner = block.get("content", block.get("text", ""))
                found.append(inner if isinstance(inner, str) else "\n".join(part.get("text", "") for part in inner))
    return "\n".join(found)


def results(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All tool_result blocks of a request, in order, their content as one text."""
    blocks = [block for message in messages if isinstance(message["content"], list) for block in message["content"]]
    return [block | {"content": texts([{"role": "user", "content": [block]}])}
            for block in blocks if block["type"] == "tool_result"]


def processes(mark: str) -> list[int]:
    """Ids of running processes whose command line holds `mark`, such as a sleep of a unique length."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = entry.read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
        except OSError:
            continue
        if mark in line and int(entry.parent.name) != os.getpid():
            found.append(int(entry.parent.name))
    return found
