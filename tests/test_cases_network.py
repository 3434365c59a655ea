"""Cases of kind 5, API and network: what servers answer, and what becomes of it. At the end: one test for
each row of the table "every ending has one meaning"."""

import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from types import SimpleNamespace

import pexpect
import pytest
from harness import ROOT, ask, environment, results, run, said, session, terminal, texts
from messages_api import Fault, Reply, block_events, call, is_summary, sse, text, thinking

import agent

KEY = "sk-test-0123456789"
PAGE = "<html><head><title>Bad gateway</title><style>p {}</style></head><body><p>PAGEMARK</p></body></html>"
HTML = Fault(502, body=PAGE, content_type="text/html")
LOST = Fault(0)  # the connection is closed without a word


def bash(command, **how):
    return call("bash", {"command": command}, **how)


def unanswered(s, prompt):
    """One prompt to which there is no answer: the line that says why."""
    with pytest.raises(agent.Stopped) as stopped:
        ask(s, prompt)
    return str(stopped.value)


def alive(api, s):
    """One more prompt is sent as the last thing, and answered. Returns that request's messages."""
    before = len(api.requests)
    assert ask(s, "Are you still there?") == "ok"
    assert len(api.requests) == before + 1
    last = api.requests[-1].messages[-1]
    assert last["role"] == "user"
    assert texts([last]).endswith("Are you still there?")
    return api.requests[-1].messages


def retries(s):
    """The lines on screen that announce another try."""
    return [line for line in said(s).splitlines() if "again in" in line]


def after(count, then, *first):
    """A script: some replies, then the same one `count` times, then "ok" for ever."""
    return [*first, *[then] * count]


def one_line_at_most(line, *parts):
    assert len(line) <= 300
    assert "\n" not in line.strip()
    for part in parts:
        assert part in line
    for unwanted in ("Traceback", "<html", "<p>", "p {}", KEY):
        assert unwanted not in line


def raw_reply(*events, stop="end_turn", **start):
    """A reply that is streamed event by event, for what a Reply cannot say: `start` changes fields of the
    message (a value `...` takes one out), `stop` is a stop reason, the whole event, or None for none."""
    message = {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": 9, "output_tokens": 1},
    }
    message = {key: value for key, value in {**message, **start}.items() if value is not ...}
    delta = (
        {
            "type": "message_delta",
            "delta": {"stop_reason": stop, "stop_sequence": None},
            "usage": {"output_tokens": 5},
        }
        if isinstance(stop, str)
        else stop
    )
    all_events = [
        {"type": "message_start", "message": message},
        *events,
        *([delta] if delta else []),
        {"type": "message_stop"},
    ]
    return Fault(200, body=b"".join(map(sse, all_events)), content_type="text/event-stream")


def block(part, index=0):
    return block_events(index, text(part) if isinstance(part, str) else part, Reply())


@pytest.fixture
def start(tmp_path, monkeypatch, capsys):
    """start(api, *args, stdin=, dotenv=, **env) runs a copy of agent.py that has a .env of its own, in the
    folder tmp_path/work. Returns the exit status, stdout and stderr."""
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    shutil.copy(ROOT / "agent.py", home)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}

    def start_copy(api, *args, stdin="", dotenv=None, **env):
        if dotenv is not None:
            (home / ".env").write_bytes(dotenv)
        (tmp_path / "stdin").write_text(stdin)
        spec = importlib.util.spec_from_file_location("agent_copy", home / "agent.py")
        copy = importlib.util.module_from_spec(spec)
        with monkeypatch.context() as patch, open(tmp_path / "stdin") as typed:
            patch.setitem(sys.modules, "agent_copy", copy)
            spec.loader.exec_module(copy)
            copy.WAITS = (0, 0, 0)
            for name in os.environ.keys() - environment(None).keys():
                patch.delenv(name)
            for name, value in {
                **({"ANTHROPIC_BASE_URL": api.url, "ANTHROPIC_API_KEY": KEY} if api else {}),
                **env,
            }.items():
                patch.setenv(name, value)
            patch.chdir(work)
            patch.setattr(sys, "argv", ["agent.py", *args])
            patch.setattr(sys, "stdin", typed)
            capsys.readouterr()
            try:
                status = copy.main()
            except SystemExit as leaving:
                status = leaving.code
        shown = capsys.readouterr()
        return SimpleNamespace(status=status, out=shown.out, err=shown.err)

    yield start_copy
    for number, handler in handlers.items():
        signal.signal(number, handler)


def unused_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def stated(lines, *parts):
    """One or two plain lines that name all this."""
    assert 1 <= len(lines.strip().splitlines()) <= 2, lines
    for part in parts:
        assert part in lines
    assert "Traceback" not in lines
    assert KEY not in lines


# ============================ 5-1, 5-2: overload and rate limits ============================


@pytest.mark.parametrize("fault", [Fault(529), Fault(500), HTML, LOST], ids=["529", "500", "502", "closed"])
def test_one_failure_in_the_middle_of_the_work_is_announced_and_tried_again(serve, tmp_path, fault):
    """Case 5-1 (a)."""
    api = serve([Reply(bash("echo one")), Reply(bash("echo two")), fault, "done"])
    s = session(api, tmp_path)
    assert ask(s, "work") == "done"
    assert len(api.requests) == 4
    assert api.requests[2].body == api.requests[3].body
    assert len(retries(s)) == 1
    one_line_at_most(retries(s)[0], api.url)


@pytest.mark.parametrize("fault", [Fault(529), Fault(500), HTML, LOST], ids=["529", "500", "502", "closed"])
def test_a_server_that_stays_down_costs_four_requests_and_no_work(serve, tmp_path, fault):
    """Case 5-1 (b)."""
    down = True

    def answer(request):
        done = len(results(request.messages))
        if done < 2:
            return Reply(bash(f"echo result{done}"))
        return fault if down else "ok"

    api = serve(answer)
    s = session(api, tmp_path)
    one_line_at_most(unanswered(s, "PROMPTMARK work"), api.url)
    assert len(api.requests) == 2 + 4
    assert len(retries(s)) == 3
    down = False
    messages = alive(api, s)
    assert [result["content"].split("\n")[0] for result in results(messages)] == ["result0", "result1"]
    assert texts(messages).count("PROMPTMARK") == 1


def test_the_wait_that_the_server_asks_for_is_kept_and_shown(serve, tmp_path):
    """Case 5-2: 429 with retry-after."""
    api = serve([Fault(429, headers={"retry-after": "3"}), "done"])
    s = session(api, tmp_path)
    assert ask(s, "work") == "done"
    assert len(api.requests) == 2
    assert api.requests[1].time - api.requests[0].time >= 3
    assert len(retries(s)) == 1
    assert re.search(r"429.*\b3 s", retries(s)[0])


def test_without_a_wait_from_the_server_our_own_is_kept_and_shown(serve, tmp_path, monkeypatch):
    """Case 5-2: 429 without the header."""
    api = serve([Fault(429), "done"])
    s = session(api, tmp_path)
    monkeypatch.setattr(agent, "WAITS", (0.7, 0, 0))
    assert ask(s, "work") == "done"
    assert api.requests[1].time - api.requests[0].time >= 0.7
    assert len(retries(s)) == 1
    assert re.search(r"429.*\b0\.7 s", retries(s)[0])


def test_ctrl_c_ends_the_wait_at_once(serve, tmp_path):
    """Case 5-2: Ctrl-C during the wait."""
    api = serve([Fault(429, headers={"retry-after": "50"})])
    child = terminal(api, tmp_path, NO_COLOR="1")
    child.sendline("WAITMARK work")
    child.expect_exact("50 s")
    child.sendintr()
    child.expect_exact("interrupted", timeout=10)
    child.expect_exact("agent >> ", timeout=10)
    child.sendline("hello")
    child.expect_exact("ok")
    child.expect_exact("agent >> ")
    child.sendline("exit")
    child.expect(pexpect.EOF)
    assert len(api.requests) == 2
    assert texts(api.requests[1].messages).endswith("hello")


def test_a_wait_of_more_than_a_minute_is_told_and_not_waited_for(serve, tmp_path):
    """Case 5-2 (DESIGN 8): a server that wants a day gets one request."""
    api = serve([Fault(429, headers={"retry-after": "86400"})])
    s = session(api, tmp_path)
    why = unanswered(s, "work")
    one_line_at_most(why, api.url, "429")
    assert re.search(r"\d\d:\d\d", why)  # when it will be back
    assert len(api.requests) == 1
    alive(api, s)


@pytest.mark.parametrize("wait", ["nan", "inf", "1e30", "-1", "soon", "", "Wed, 21 Oct 2015 07:28:00 GMT"])
def test_a_retry_after_that_makes_no_sense_is_no_crash(serve, tmp_path, wait):
    """Case 5-2: the header is whatever a server sends."""
    api = serve(after(5, Fault(529, headers={"retry-after": wait})))
    s = session(api, tmp_path)
    one_line_at_most(unanswered(s, "work"), api.url, "529")
    assert 1 <= len(api.requests) <= 4


# ============================ 5-4, 5-8, 5-9, 5-15: what is set at the start ============================


@pytest.mark.parametrize(
    "env",
    [{}, {"ANTHROPIC_API_KEY": ""}, {"ANTHROPIC_API_KEY": "  "}, {"ANTHROPIC_BASE_URL": ""}],
    ids=["nothing", "empty", "blank", "no-url"],
)
@pytest.mark.parametrize("args", [(), ("-p", "hi")], ids=["repl", "one-shot"])
def test_without_a_key_the_start_says_what_to_set_and_where(start, env, args):
    """Case 5-4 (and 5-8: an empty base URL counts as unset)."""
    done = start(None, *args, stdin="hi\n", **env)
    assert done.status == 2
    assert done.out == ""
    stated(done.err, "ANTHROPIC_API_KEY", ".env")


def test_the_program_itself_says_so_too(tmp_path):
    """Case 5-4, as a process: no trace, not even when it ends."""
    shutil.copy(ROOT / "agent.py", tmp_path)
    done = subprocess.run(
        [sys.executable, "agent.py", "-p", "hi"],
        cwd=tmp_path,
        env=environment(None),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    stated(done.stderr, "ANTHROPIC_API_KEY", ".env")
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__") == ["agent.py"]


@pytest.mark.parametrize("env", [{}, {"MODEL_ID": ""}], ids=["unset", "empty"])
def test_without_a_model_id_the_default_is_used(serve, start, env):
    """Case 5-4."""
    api = serve(["hello"])
    assert start(api, "-p", "hi", **env).out == "hello\n"
    assert api.requests[0].body["model"] == "claude-sonnet-5-5"


@pytest.mark.parametrize(
    "form",
    [
        b"ANTHROPIC_API_KEY=sk-from-file-12345\r\nMODEL_ID=model-of-file\r\n",
        b"ANTHROPIC_API_KEY='sk-from-file-12345'\nMODEL_ID=\"model-of-file\"\n",
        b"export ANTHROPIC_API_KEY=sk-from-file-12345\nexport MODEL_ID=model-of-file\n",
        b"\xef\xbb\xbfANTHROPIC_API_KEY=sk-from-file-12345\nMODEL_ID=model-of-file",
    ],
    ids=["windows", "quotes", "export", "bom"],
)
@pytest.mark.parametrize("env", [{}, {"ANTHROPIC_API_KEY": "", "MODEL_ID": ""}], ids=["unset", "empty"])
def test_what_the_environment_lacks_comes_from_the_env_file(serve, start, form, env):
    """Case 5-4: a variable that is empty counts as unset."""
    api = serve(["hello"])
    done = start(None, "-p", "hi", dotenv=form, ANTHROPIC_BASE_URL=api.url, **env)
    assert (done.status, done.out) == (0, "hello\n")
    assert credentials(api.requests[0]) == {"sk-from-file-12345"}
    assert api.requests[0].body["model"] == "model-of-file"
    assert "sk-from-file-12345" not in done.err


def test_the_environment_wins_over_the_env_file(serve, start):
    """Case 5-4."""
    api = serve(["hello"])
    start(
        api,
        "-p",
        "hi",
        dotenv=b"ANTHROPIC_API_KEY=sk-from-file-12345\nMODEL_ID=model-of-file\n",
        MODEL_ID="mine",
    )
    assert credentials(api.requests[0]) == {KEY}
    assert api.requests[0].body["model"] == "mine"


def test_the_env_file_of_the_working_directory_is_never_read(serve, start, tmp_path):
    """Case 5-4 (DESIGN 3): a cloned project cannot send the user's key to another host."""
    api, theirs = serve(["hello"]), serve()
    (tmp_path / "work" / ".env").write_text(
        f"ANTHROPIC_BASE_URL={theirs.url}\nMODEL_ID=theirs\nAGENT_MAX_TOKENS=77\nANTHROPIC_AUTH_TOKEN=x1234567\n"
    )
    assert start(api, "-p", "hi").out == "hello\n"
    assert theirs.requests == []
    assert credentials(api.requests[0]) == {KEY}
    assert (api.requests[0].body["model"], api.requests[0].body["max_tokens"]) == ("claude-sonnet-5-5", 16000)
    done = start(None, "-p", "hi")
    assert done.status == 2
    assert theirs.requests == []


@pytest.mark.parametrize("name", ["AGENT_THRESHOLD", "AGENT_MAX_TOKENS"])
@pytest.mark.parametrize("value", ["many", "-5", "1e5", "10.5"])
def test_a_bad_number_is_named_before_the_first_prompt(serve, start, name, value):
    """Case 5-4 (DESIGN 3)."""
    api = serve()
    done = start(api, stdin="hi\n", **{name: value})
    assert done.status == 2
    stated(done.err, name, value, ".env")
    assert api.requests == []


@pytest.mark.parametrize(
    ("status", "names"), [(401, ["ANTHROPIC_API_KEY"]), (403, ["ANTHROPIC_API_KEY"]), (404, ["MODEL_ID"])]
)
def test_a_rejected_key_or_model_is_one_line_and_the_prompt_is_back(serve, start, status, names):
    """Case 5-4: the body repeats the key, the screen does not."""
    api = serve([Fault(status, f"no such thing for {KEY}"), "hello"])
    done = start(api, stdin="REJECTED\nagain\n")
    assert done.status == 0
    assert "hello" in done.out
    assert KEY not in done.out + done.err
    [line] = [
        line for line in (done.out + done.err).splitlines() if str(status) in line and "no such thing" in line
    ]
    one_line_at_most(line, api.url, ".env", *names)  # the thing that was rejected, and where it is set
    assert len(api.requests) == 2
    assert "REJECTED" not in json.dumps(api.requests[1].body)


def test_a_rejected_token_is_not_called_a_key(serve, start):
    """Case 5-4: the line names what was rejected."""
    api = serve([Fault(401)])
    done = start(api, "-p", "hi", ANTHROPIC_API_KEY="", ANTHROPIC_AUTH_TOKEN="tok-0123456789")
    assert done.status == 1
    assert done.out == ""
    assert "ANTHROPIC_AUTH_TOKEN" in done.err


@pytest.mark.parametrize(
    ("end", "path"),
    [
        ("", "/v1/messages"),
        ("/", "/v1/messages"),
        ("/v1", "/v1/messages"),
        ("/v1/", "/v1/messages"),
        ("/anthropic", "/anthropic/v1/messages"),
        ("/anthropic/v1", "/anthropic/v1/messages"),
        ("/anthropic/v1/", "/anthropic/v1/messages"),
        (" ", "/v1/messages"),
        ("/v1 ", "/v1/messages"),
        ("//", "/v1/messages"),
    ],
)
def test_the_version_is_never_doubled_in_the_path(serve, start, end, path):
    """Case 5-8."""
    api = serve(["hello"])
    done = start(None, "-p", "hi", ANTHROPIC_BASE_URL=api.url + end)
    assert (done.status, done.out) == (0, "hello\n")
    assert [request.path.partition("?")[0] for request in api.requests] == [path]
    assert api.other_paths == []


@pytest.mark.parametrize("url", ["127.0.0.1:8080", "localhost", "ftp://127.0.0.1", "http://", "file:///etc"])
def test_a_base_url_that_is_none_is_named_before_the_first_prompt(start, url):
    """Case 5-8: without a scheme, for one."""
    done = start(None, stdin="hi\n", ANTHROPIC_BASE_URL=url, ANTHROPIC_API_KEY=KEY)
    assert done.status == 2
    assert done.out == ""
    stated(done.err, "ANTHROPIC_BASE_URL", url.rstrip("/"), ".env")


@pytest.mark.parametrize("url", ["http://127.0.0.1:99999", "http://[::1", "http://a b"])
def test_a_base_url_that_cannot_be_used_is_one_line(start, url):
    """Case 5-8: something that begins like a URL and is none; one line, no trace."""
    done = start(None, "-p", "hi", ANTHROPIC_BASE_URL=url, ANTHROPIC_API_KEY=KEY)
    assert done.status in (1, 2)
    assert done.out == ""
    assert url in done.err


def test_where_nobody_listens_one_line_names_the_url(start):
    """Case 5-8: a wrong port."""
    url = f"http://127.0.0.1:{unused_port()}"
    done = start(None, "-p", "hi", ANTHROPIC_BASE_URL=url)
    assert done.status == 1
    assert done.out == ""
    lines = [line for line in done.err.splitlines() if url in line]
    assert len([line for line in lines if "again in" in line]) == 3
    assert len(lines) == 4
    one_line_at_most(lines[-1], url)


def credentials(request):
    """All that a request carries as a credential."""
    sent = {
        request.headers.get("x-api-key"),
        request.headers.get("authorization", "").removeprefix("Bearer "),
    }
    return sent - {None, ""}


TOKEN = "tok-0123456789"


@pytest.mark.parametrize(
    ("env", "dotenv", "sent"),
    [
        ({"ANTHROPIC_API_KEY": KEY}, "", KEY),
        ({"ANTHROPIC_AUTH_TOKEN": TOKEN}, "", TOKEN),
        ({"ANTHROPIC_API_KEY": "", "ANTHROPIC_AUTH_TOKEN": TOKEN}, "", TOKEN),
        ({"ANTHROPIC_API_KEY": KEY, "ANTHROPIC_AUTH_TOKEN": TOKEN}, "", KEY),
        ({"ANTHROPIC_API_KEY": KEY}, f"ANTHROPIC_AUTH_TOKEN={TOKEN}", KEY),
        ({"ANTHROPIC_AUTH_TOKEN": TOKEN}, f"ANTHROPIC_API_KEY={KEY}", KEY),
        ({}, f"ANTHROPIC_AUTH_TOKEN={TOKEN}", TOKEN),
    ],
    ids=["key", "token", "empty-key", "both", "token-in-file", "key-in-file", "only-in-file"],
)
def test_one_credential_is_sent_and_the_key_goes_first(serve, start, env, dotenv, sent):
    """Case 5-9."""
    api = serve(["hello"])
    done = start(None, "-p", "hi", dotenv=dotenv.encode(), ANTHROPIC_BASE_URL=api.url, **env)
    assert (done.status, done.out) == (0, "hello\n")
    assert credentials(api.requests[0]) == {sent}
    assert KEY not in done.err
    assert TOKEN not in done.err


def test_with_key_and_token_one_line_says_which_is_used(serve, start):
    """Case 5-9."""
    api = serve(["hello"])
    done = start(api, "-p", "hi", ANTHROPIC_AUTH_TOKEN=TOKEN)
    lines = [line for line in done.err.splitlines() if "ANTHROPIC_API_KEY" in line]
    assert len(lines) == 1
    assert "ANTHROPIC_AUTH_TOKEN" in lines[0]


def test_a_server_of_your_own_needs_no_credential(serve, start):
    """Case 5-9 (DESIGN 3)."""
    api = serve(["hello"])
    done = start(None, "-p", "hi", ANTHROPIC_BASE_URL=api.url)
    assert (done.status, done.out) == (0, "hello\n")


@pytest.mark.parametrize("env", [{}, {"NO_PROXY": "127.0.0.1"}], ids=["plain", "no-proxy"])
def test_a_socks_proxy_without_its_package_is_one_line(serve, tmp_path, env):
    """Case 5-15: no traceback either when the program ends."""
    if importlib.util.find_spec("socksio"):
        pytest.skip("socksio is installed here, so a SOCKS proxy works")
    api = serve()
    done = run(api, tmp_path, "-p", "hi", ALL_PROXY="socks5://127.0.0.1:9", **env)
    assert done.returncode in (1, 2)
    lines = [line for line in done.stderr.splitlines() if "socks" in line.lower()]
    assert len(lines) == 1  # it does not pass by itself, so there is no other try
    one_line_at_most(lines[0], "ALL_PROXY")
    assert "Traceback" not in done.stderr
    assert "ignored" not in done.stderr
    assert done.stdout == ""
    assert api.requests == []


@pytest.mark.parametrize("name", ["HTTP_PROXY", "http_proxy", "ALL_PROXY"])
def test_a_connection_error_names_the_proxy(serve, start, name):
    """Case 5-15."""
    api = serve()
    done = start(api, "-p", "hi", **{name: f"http://127.0.0.1:{unused_port()}"})
    assert done.status == 1
    lines = [line for line in done.err.splitlines() if api.url in line]
    one_line_at_most(lines[-1], name)
    assert len(lines) == 4
    assert api.requests == []


# ============================ 5-5 to 5-7: requests and odd replies ============================


@pytest.mark.parametrize("room", [32_000, 64_000])
def test_a_large_output_limit_reaches_the_server(serve, tmp_path, room):
    """Case 5-5: in the request, and in the one for a summary."""
    api = serve(lambda request: "SUMMARY" if is_summary(request) else "done")
    s = session(api, tmp_path, max_tokens=room, threshold=4000)
    assert ask(s, "short") == "done"
    assert ask(s, "word " * 5000) == "done"
    assert [is_summary(request) for request in api.requests] == [False, True, False]
    assert [request.body["max_tokens"] for request in api.requests] == [room] * 3
    assert "ValueError" not in said(s)


NO_REASON = {"type": "message_delta", "delta": {}, "usage": {"output_tokens": 5}}


@pytest.mark.parametrize(
    "reason", ["end_turn", "stop", "tool_calls", None, "missing", "no-delta", "stop_sequence", "pause_turn"]
)
def test_a_call_runs_whatever_the_stop_reason_says(serve, tmp_path, reason):
    """Case 5-6."""
    the_call = bash("echo ran >> ran.txt; cat ran.txt", id="toolu_1")
    odd = {
        "missing": raw_reply(*block(the_call), stop=NO_REASON),
        "no-delta": raw_reply(*block(the_call), stop=None),
    }
    api = serve([odd.get(reason) or Reply(the_call, stop_reason=reason), "done"])
    s = session(api, tmp_path)
    assert ask(s, "work") == "done"
    assert (tmp_path / "ran.txt").read_text() == "ran\n"
    assert len(api.requests) == 2
    [result] = results(api.requests[1].messages)
    assert result["content"].startswith("ran\n")
    assert not result.get("is_error")
    alive(api, s)


HELLO = block("hello")
BARE_DELTA = {"type": "message_delta", "delta": {"stop_reason": "end_turn", "stop_sequence": None}}
EXTRA = {
    "type": "content_block_start",
    "index": 0,
    "content_block": {"type": "text", "text": "", "mood": "fine"},
}


@pytest.mark.parametrize(
    "reply",
    [
        raw_reply(content="hello"),
        raw_reply(*HELLO, usage=..., stop=BARE_DELTA),
        raw_reply(*HELLO, usage=None, stop={**BARE_DELTA, "usage": None}),
        raw_reply(*HELLO, usage={"input_tokens": None, "output_tokens": None}),
        raw_reply(*HELLO, usage={}, stop={**BARE_DELTA, "usage": {}}),
        raw_reply(
            EXTRA, *HELLO[1:], mood="fine", container=None, stop={**BARE_DELTA, "usage": {"x": 1}, "y": 2}
        ),
        raw_reply(*HELLO, id=..., model=..., role=...),
        raw_reply(*HELLO, id=None, model=None, type=..., stop_reason=..., stop_sequence=...),
        raw_reply({"type": "news", "of": "tomorrow"}, *HELLO),
    ],
    ids=[
        "string",
        "no-usage",
        "null-usage",
        "null-input",
        "empty-usage",
        "extra",
        "bare",
        "nulls",
        "unknown-event",
    ],
)
def test_a_text_is_shown_however_little_comes_with_it(serve, tmp_path, reply):
    """Case 5-7: in the form in which the agent asks for it, a stream."""
    api = serve([Reply(bash("echo one")), reply])
    s = session(api, tmp_path)
    assert ask(s, "work") == "hello"
    assert "hello" in said(s)
    assert len(api.requests) == 2
    assert "hello" in texts(alive(api, s), "assistant")


@pytest.mark.parametrize(
    "reply",
    [raw_reply(content=None), raw_reply(content=...), raw_reply(content="")],
    ids=["null", "missing", "empty-string"],
)
def test_null_is_an_empty_reply(serve, tmp_path, reply):
    """Case 5-7: it counts as one that says nothing, so the model is asked once more."""
    api = serve([Reply(bash("echo one")), reply, "done"])
    s = session(api, tmp_path)
    assert ask(s, "work") == "done"
    assert len(api.requests) == 3
    assert len(results(alive(api, s))) == 1


def test_a_block_without_a_type_is_no_crash(serve, tmp_path):
    """Case 5-7: it is dropped, or the whole reply is tried again."""
    odd = {"type": "content_block_start", "index": 0, "content_block": {"text": "odd"}}
    reply = raw_reply(odd, {"type": "content_block_stop", "index": 0}, *block("hello", 1))
    api = serve(lambda request: "ok" if len(api.requests) > 1 else reply)
    s = session(api, tmp_path)
    assert ask(s, "work") == ("hello" if len(api.requests) == 1 else "ok")
    assert len(api.requests) <= 2
    alive(api, s)


def test_a_call_without_input_has_no_arguments(serve, tmp_path):
    """Case 5-7: an error result that says what is missing."""
    bare = {"type": "tool_use", "id": "toolu_1", "name": "bash"}
    api = serve(
        [
            raw_reply(
                {"type": "content_block_start", "index": 0, "content_block": bare},
                {"type": "content_block_stop", "index": 0},
                stop="tool_use",
            ),
            "done",
        ]
    )
    s = session(api, tmp_path)
    assert ask(s, "work") == "done"
    [result] = results(api.requests[1].messages)
    assert result["is_error"] is True
    assert "command" in result["content"]
    alive(api, s)


def test_without_usage_the_estimate_decides(serve, tmp_path):
    """Case 5-7: a conversation on a server that counts nothing is compacted all the same."""
    api = serve(
        lambda request: (
            "SUMMARY"
            if is_summary(request)
            else Reply("word " * 800, bash("seq 1 900"))
            if len(api.requests) < 12
            else "done"
        ),
        usage=False,
    )
    s = session(api, tmp_path, threshold=4000)
    assert ask(s, "work") == "done"
    assert any(is_summary(request) for request in api.requests)
    assert len(api.requests) < 30


# ============================ 5-10: refusals ============================

REFUSALS = {
    "empty": Reply(stop_reason="refusal", thinks=False),
    "text": Reply("I would rather", stop_reason="refusal"),
    "category": raw_reply(
        stop={
            "type": "message_delta",
            "usage": {"output_tokens": 1},
            "delta": {
                "stop_reason": "refusal",
                "stop_sequence": None,
                "stop_details": {"type": "refusal", "category": "cyber", "explanation": None},
            },
        }
    ),
}


@pytest.mark.parametrize("refusal", REFUSALS.values(), ids=REFUSALS)
def test_a_refused_prompt_leaves_so_that_the_next_gets_through(serve, tmp_path, refusal):
    """Case 5-10: the server refuses as long as the sentinel is in what it gets."""
    api = serve(lambda request: refusal if "SENTINEL" in json.dumps(request.body) else "ok")
    s = session(api, tmp_path)
    assert ask(s, "EARLIER words") == "ok"
    assert re.search("declin|refus", unanswered(s, "please SENTINEL"))
    assert len(api.requests) == 2
    messages = alive(api, s)
    assert "EARLIER words" in texts(messages, "user")
    assert "SENTINEL" in "".join(file.read_text() for file in (tmp_path / ".transcripts").glob("*.jsonl"))


def test_a_refusal_because_of_a_result_takes_the_result_along(serve, tmp_path):
    """Case 5-10: the view goes back to before the prompt."""
    api = serve(
        lambda request: (
            Reply(stop_reason="refusal")
            if "SENTINEL" in texts(request.messages)
            else Reply(bash("echo SENT''INEL"))
            if "look" in texts(request.messages[-1:])
            else "ok"
        )
    )
    s = session(api, tmp_path)
    assert ask(s, "EARLIER words") == "ok"
    unanswered(s, "look at it")
    assert len(api.requests) == 3
    assert "EARLIER words" in texts(alive(api, s))


def test_a_refusal_after_a_compaction_leaves_the_summary(serve, tmp_path):
    """Case 5-10 (DESIGN 8): the prompt is compacted away, so its request goes from the compaction message."""

    def answer(request):
        seen = texts(request.messages)
        if is_summary(request):
            return "SUMMARYMARK"
        if "SENTINEL" in seen:
            return Reply(stop_reason="refusal")
        if "Are you still there?" in seen:
            return "ok"
        return Reply(bash("echo SENT''INEL" if "SUMMARYMARK" in seen else "seq 1 900"))

    api = serve(answer)
    s = session(api, tmp_path, threshold=4000)
    unanswered(s, "OPENREQUEST count and look")
    assert any(is_summary(request) for request in api.requests)
    assert len(api.requests) < 20
    messages = alive(api, s)
    assert "SUMMARYMARK" in texts(messages)
    assert "OPENREQUEST" not in texts(messages)


# ============================ 5-12, 5-13: bad calls ============================

GOOD = {
    "bash": {"command": "echo fine"},
    "read_file": {"path": "a.txt"},
    "write_file": {"path": "b.txt", "content": "b"},
    "edit_file": {"path": "a.txt", "old_text": "alpha", "new_text": "beta"},
    "compact": {},
}
WRONG = {
    "string": (5, ["x"], {"x": 1}, True),
    "integer": ("10", [1], {}, True, 1.5),
    "number": ("10", [1], {}, True),
    "boolean": ("yes", 1, [True], {}),
}


@pytest.mark.parametrize("tool", agent.TOOLS, ids=lambda tool: tool["name"])
def test_wrong_arguments_are_an_error_that_names_them(serve, tmp_path, tool):
    """Case 5-12: every parameter of every tool, missing and of the wrong type, all in one reply."""
    (tmp_path / "a.txt").write_text("alpha\n")
    name, schema = tool["name"], tool["input_schema"]
    calls, named = [], []
    for parameter in schema["required"]:
        calls.append(call(name, {key: value for key, value in GOOD[name].items() if key != parameter}))
        named.append((parameter, schema["properties"][parameter]["type"]))
        calls.append(call(name, {**GOOD[name], parameter: None}))
        named.append(named[-1])
    for parameter, description in schema["properties"].items():
        for value in WRONG[description["type"]]:
            calls.append(call(name, {**GOOD[name], parameter: value}))
            named.append((parameter, description["type"]))
    api = serve([Reply(*calls), "done"])
    s = session(api, tmp_path)
    assert ask(s, "work") == "done"
    assert len(api.requests) == 2
    answers = results(api.requests[1].messages)
    assert len(answers) == len(calls)
    for answer, parts in zip(answers, named, strict=True):
        assert answer["is_error"] is True
        for part in parts:
            assert part in answer["content"]
    assert (tmp_path / "a.txt").read_text() == "alpha\n"
    assert not (tmp_path / "b.txt").exists()
    alive(api, s)


@pytest.mark.parametrize(
    "raw",
    ["", "null", "[]", "7", json.dumps(json.dumps({"command": "touch ran"}))],
    ids=["nothing", "null", "list", "number", "json-in-a-string"],
)
def test_arguments_that_are_no_object_are_an_error_too(serve, tmp_path, raw):
    """Case 5-12: what came is complete JSON, so the model is told what is wrong with it."""
    api = serve([Reply(call("bash", raw=raw), bash("echo fine")), "done"])
    s = session(api, tmp_path)
    assert ask(s, "work") == "done"
    assert len(api.requests) == 2
    bad, good = results(api.requests[1].messages)
    assert bad["is_error"] is True
    assert "command" in bad["content"]
    assert "string" in bad["content"]
    assert good["content"].startswith("fine")
    assert not (tmp_path / "ran").exists()
    alive(api, s)


@pytest.mark.parametrize("number", ["1e999", "-1e999", "NaN"])
def test_a_number_that_json_cannot_hold_does_not_stay_in_the_way(serve, tmp_path, number):
    """Case 5-12: sent back as it came, it would make every later request impossible."""
    api = serve([Reply(call("bash", raw=f'{{"command": "echo fine", "timeout": {number}}}')), "done"])
    s = session(api, tmp_path)
    assert ask(s, "work") == "done"
    alive(api, s)


@pytest.mark.parametrize("name", GOOD)
def test_an_unknown_argument_does_no_harm(serve, tmp_path, name):
    """Case 5-12: it is ignored, or named."""
    (tmp_path / "a.txt").write_text("alpha\n")
    api = serve([Reply(call(name, {**GOOD[name], "mood": "fine"})), "done"])
    s = session(api, tmp_path)
    assert ask(s, "work") == "done"
    [result] = results(api.requests[1].messages)
    assert not result.get("is_error") or "mood" in result["content"]
    alive(api, s)


def test_ten_point_zero_is_ten_or_an_error(serve, tmp_path):
    """Case 5-12: JSON knows one kind of number."""
    (tmp_path / "a.txt").write_text("\n".join(f"line{i}" for i in range(1, 40)))
    api = serve([Reply(call("read_file", raw='{"path": "a.txt", "limit": 10.0}')), "done"])
    assert ask(session(api, tmp_path), "work") == "done"
    [result] = results(api.requests[1].messages)
    if result.get("is_error"):
        assert "limit" in result["content"]
        assert "integer" in result["content"]
    else:
        assert "line10" in result["content"]
        assert "line11" not in result["content"]


@pytest.mark.parametrize(
    ("name", "rest"),
    [("read_file", {}), ("write_file", {"content": "x"}), ("edit_file", {"old_text": "a", "new_text": "b"})],
)
def test_a_path_of_a_megabyte_is_a_short_error(serve, tmp_path, name, rest):
    """Case 5-12."""
    api = serve([Reply(call(name, {"path": "p" * 1_000_000, **rest}), chunk=100_000), "done"])
    s = session(api, tmp_path, threshold=0)
    assert ask(s, "work") == "done"
    [result] = results(api.requests[1].messages)
    assert result["is_error"] is True
    assert len(result["content"]) < 2000
    assert len(said(s)) < 4000
    alive(api, s)


def test_an_argument_larger_than_the_context_is_no_dead_end(serve, tmp_path):
    """Case 5-12: with a threshold, the conversation goes on in a bounded number of requests and tokens."""
    api = serve(
        lambda request: (
            "SUMMARY"
            if is_summary(request)
            else "done"
            if results(request.messages) or "SUMMARY" in texts(request.messages)
            else Reply(call("read_file", {"path": "p" * 400_000}), chunk=100_000)
        )
    )
    s = session(api, tmp_path, threshold=20_000)
    assert ask(s, "work") == "done"
    assert ask(s, "more") == "done"
    assert len(api.requests) <= 8
    assert len(json.dumps(api.requests[-1].body)) < 1.2 * 20_000 * 4


@pytest.mark.parametrize("name", ["Bash", "run_bash", "str_replace_editor", "", "no such tool", "b" * 300])
def test_an_unknown_tool_is_answered_with_the_names_of_the_real_ones(serve, tmp_path, name):
    """Case 5-13: and the good call in the same reply ran."""
    api = serve(
        [Reply(call(name, {"command": "touch bad"}), bash("touch good; echo fine"), call(name, {})), "done"]
    )
    s = session(api, tmp_path)
    assert ask(s, "work") == "done"
    assert len(api.requests) == 2
    bad, good, worse = results(api.requests[1].messages)
    for result in (bad, worse):
        assert result["is_error"] is True
        for tool in agent.TOOLS:
            assert tool["name"] in result["content"]
    assert good["content"].startswith("fine")
    assert (tmp_path / "good").exists()
    assert not (tmp_path / "bad").exists()
    alive(api, s)


# ============================ DESIGN 8: every ending has one meaning ============================


def test_ending_tool_calls(serve, tmp_path):
    """DESIGN 8, row 1: run in order, each answered, go on."""
    api = serve([Reply("Let me see.", *(bash(f"echo {i} >> order; cat order") for i in (1, 2, 3))), "done"])
    s = session(api, tmp_path)
    assert ask(s, "work") == "done"
    assert (tmp_path / "order").read_text() == "1\n2\n3\n"
    answers = [result["content"].split("\n[")[0] for result in results(api.requests[1].messages)]
    assert answers == ["1", "1\n2", "1\n2\n3"]
    alive(api, s)


def test_ending_tool_calls_interrupted(serve, tmp_path):
    """DESIGN 8, row 1: on Ctrl-C the running call keeps its output, the rest is answered "not run"."""
    api = serve(
        [
            Reply(
                bash("echo one"),
                bash("echo half; sleep 1; kill -INT $PPID; sleep 60"),
                bash("touch third"),
                bash("touch fourth"),
            )
        ]
    )
    s = session(api, tmp_path)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            ask(s, "work")
    finally:
        signal.signal(signal.SIGINT, before)
    assert not (tmp_path / "third").exists()
    first, second, *rest = results(alive(api, s))
    assert first["content"].startswith("one")
    assert second["content"].startswith("half")
    assert "interrupted" in second["content"]
    assert [("not run" in result["content"].lower()) for result in rest] == [True, True]
    assert not (tmp_path / "fourth").exists()


@pytest.mark.parametrize(
    "cut",
    [
        bash("touch ran"),
        call("bash", raw='{"command": "touch ran'),
        call("bash", raw='{"comm'),
        call("bash", raw=""),
    ],
    ids=["complete", "cut-value", "cut-key", "nothing"],
)
def test_ending_max_tokens_with_a_call(serve, tmp_path, cut):
    """DESIGN 8, row 2: the call is not run, its result says why, and the work goes on."""
    api = serve([Reply("Now", cut, stop_reason="max_tokens"), "done"])
    s = session(api, tmp_path)
    assert ask(s, "work").endswith("done")
    assert not (tmp_path / "ran").exists()
    [result] = results(api.requests[1].messages)
    assert re.search("cut|limit", result["content"])
    assert "othing was done" in result["content"]
    alive(api, s)


def test_ending_max_tokens_with_a_call_is_bounded(serve, tmp_path):
    """DESIGN 8, row 2: the model is asked to go on three times; after a call that ran, it counts anew."""
    cut = Reply(bash("touch ran"), stop_reason="max_tokens")
    api = serve([cut, cut, Reply(bash("echo fine")), *[cut] * 20])
    s = session(api, tmp_path)
    unanswered(s, "work")
    assert len(api.requests) == 3 + 4
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("reason", ["max_tokens", "pause_turn"])
def test_ending_max_tokens_without_a_call(serve, start, reason):
    """DESIGN 8, row 3: what came is kept, the model is asked to go on, and `-p` prints all the parts."""
    api = serve([Reply("part one, ", stop_reason=reason), Reply("part two, ", stop_reason=reason), "the end"])
    done = start(api, "-p", "work")
    assert (done.status, done.out) == (0, "part one, part two, the end\n")
    assert [message["role"] for message in api.requests[2].messages] == ["user", "assistant"] * 2 + ["user"]
    assert texts(api.requests[2].messages, "assistant").split() == ["part", "one,", "part", "two,"]
    assert "go on" in texts(api.requests[1].messages[-1:]).lower()


@pytest.mark.parametrize("reason", ["max_tokens", "pause_turn"])
def test_ending_max_tokens_is_bounded(serve, tmp_path, reason):
    """DESIGN 8, row 3: at most three times; the parts are the answer."""
    api = serve(after(20, Reply("more ", stop_reason=reason)))
    assert ask(session(api, tmp_path), "work") == "more " * 4
    assert len(api.requests) == 4


def test_ending_max_tokens_with_thinking_only(serve, tmp_path):
    """DESIGN 8, row 3."""
    api = serve([Reply(bash("echo one")), Reply(thinking("hm"), stop_reason="max_tokens"), "done"])
    s = session(api, tmp_path)
    assert ask(s, "work") == "done"
    assert "go on" in texts(api.requests[2].messages[-1:]).lower()
    assert len(results(alive(api, s))) == 1


def test_ending_refusal(serve, tmp_path):
    """DESIGN 8, row 4: said, its calls are not run, the view goes back to before the prompt."""
    api = serve(["hello", Reply("Well,", bash("touch ran"), stop_reason="refusal")])
    s = session(api, tmp_path)
    ask(s, "EARLIER")
    assert re.search("declin|refus", unanswered(s, "REFUSED"))
    assert len(api.requests) == 2
    assert not (tmp_path / "ran").exists()
    messages = alive(api, s)
    assert [texts([message]) for message in messages if message["role"] == "user"] == [
        "EARLIER",
        "Are you still there?",
    ]
    assert "Well," not in texts(messages)


OVERFLOWS = {
    "stop": Reply("PARTIAL", stop_reason="model_context_window_exceeded"),
    "too-long": Fault(400, "prompt is too long: 210000 tokens > 200000 maximum"),
    "older": Fault(400, "input length and `max_tokens` exceed context limit: 190000 + 16000 > 200000"),
    "413": Fault(413, body="<html>Request Entity Too Large</html>", content_type="text/html"),
    "llama": Fault(
        400,
        body=json.dumps(
            {
                "error": {
                    "code": 400,
                    "message": "the request exceeds the available context size, try increasing it",
                    "type": "exceed_context_size_error",
                    "n_prompt_tokens": 9000,
                    "n_ctx": 8192,
                }
            }
        ),
    ),
    "litellm": Fault(
        400, "litellm.ContextWindowExceededError: This model's maximum context length is 8192 tokens"
    ),
}


@pytest.mark.parametrize("overflow", OVERFLOWS.values(), ids=OVERFLOWS)
def test_ending_context_window_exceeded(serve, tmp_path, overflow):
    """DESIGN 8, row 5: compacted once and sent again; the partial text is dropped."""
    fresh = iter([Reply(bash("seq 1 3000")), Reply(bash("seq 1 3000")), overflow, "done"])
    api = serve(lambda request: "SUMMARYMARK" if is_summary(request) else next(fresh, "ok"))
    s = session(api, tmp_path)
    assert ask(s, "OPENREQUEST work") == "done"
    summaries = [request for request in api.requests if is_summary(request)]
    assert 1 <= len(summaries) <= 4
    assert len(api.requests) == 4 + len(summaries)
    after_it = api.requests[-1].messages
    assert "SUMMARYMARK" in texts(after_it)
    assert "OPENREQUEST" in texts(after_it)
    assert "PARTIAL" not in json.dumps(api.requests[-1].body)
    assert len(json.dumps(after_it)) < 0.8 * len(json.dumps(api.requests[2].messages))
    alive(api, s)


@pytest.mark.parametrize("overflow", OVERFLOWS.values(), ids=OVERFLOWS)
def test_ending_context_window_exceeded_again(serve, tmp_path, overflow):
    """DESIGN 8, row 5: the second time in a row it is a clear line, and no third."""
    api = serve(
        lambda request: (
            "SUMMARYMARK"
            if is_summary(request)
            else Reply(bash("seq 1 3000"))
            if len(results(request.messages)) < 2 and len(api.requests) < 3
            else overflow
        )
    )
    s = session(api, tmp_path)
    why = unanswered(s, "work")
    assert re.search("fit|long|context", why)
    assert len(why) <= 300
    assert len([request for request in api.requests if not is_summary(request)]) == 4
    assert len(api.requests) <= 8


BROKEN = {
    "no-stop": Reply("HALF", bash("touch ran"), end="no_stop"),
    "no-reason": Reply("HALF", bash("touch ran"), end="no_reason"),
    "reset": Reply("HALF", bash("touch ran"), end="reset"),
    "error": Reply("HALF", bash("touch ran"), end="error"),
    "garbage": Reply("HALF", bash("touch ran"), end="garbage"),
    "half-json": Reply("HALF", call("bash", raw='{"command": "touch ran"')),
    "no-json": Reply("HALF", call("bash", raw='{"command": touch ran}')),
    "two-json": Reply("HALF", call("bash", raw='{"command": "touch ran"}{"command": "touch ran"}')),
    "half-json-end": Reply("HALF", call("bash", raw='{"command": "touch ran'), stop_reason="end_turn"),
    "closed": LOST,
}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
def test_ending_broken_stream(serve, tmp_path, broken):
    """DESIGN 8, row 6: the half reply is dropped, one line on screen, tried again."""
    api = serve([Reply(bash("echo one")), broken, "done"])
    s = session(api, tmp_path)
    assert ask(s, "work") == "done"
    assert not (tmp_path / "ran").exists()
    assert api.requests[1].body == api.requests[2].body
    assert len(retries(s)) == 1
    one_line_at_most(retries(s)[0])
    messages = alive(api, s)
    assert "HALF" not in texts(messages)
    assert len(results(messages)) == 1


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
def test_ending_broken_stream_is_bounded(serve, tmp_path, broken):
    """DESIGN 8, row 6: at most three times; then the prompt is back, and the work is kept."""
    bad = True
    api = serve(
        lambda request: Reply(bash("echo one")) if not results(request.messages) else broken if bad else "ok"
    )
    s = session(api, tmp_path)
    one_line_at_most(unanswered(s, "PROMPTMARK"))
    assert len(api.requests) == 1 + 4
    assert not (tmp_path / "ran").exists()
    bad = False
    messages = alive(api, s)
    assert texts(messages).count("PROMPTMARK") == 1
    assert len(results(messages)) == 1


@pytest.mark.parametrize("status", [408, 409, 429, 500, 502, 503, 504, 529])
def test_ending_passing_error(serve, tmp_path, status):
    """DESIGN 8, row 7: announced and tried again, at most three times. The prompt stays, once."""
    api = serve([*[Fault(status)] * 3, "done", *[Fault(status)] * 4])
    s = session(api, tmp_path)
    assert ask(s, "work") == "done"
    assert len(api.requests) == 4
    assert len(retries(s)) == 3
    for line in retries(s):
        one_line_at_most(line, str(status))
    one_line_at_most(unanswered(s, "PROMPTMARK"), str(status), api.url)
    assert len(api.requests) == 8
    assert texts(alive(api, s)).count("PROMPTMARK") == 1


@pytest.mark.parametrize(
    "message",
    [
        "messages.1.content.0: Invalid `signature` in `thinking` block",
        "messages.1.content.0: Invalid `signature` in `thinking` block. Bound to a different conversation.",
        "messages.1.content.0.type: Expected `thinking` or `redacted_thinking`, but found `tool_use`.",
    ],
)
def test_ending_invalid_thinking(serve, tmp_path, message):
    """DESIGN 8, row 8: all thinking is taken out, and the request is sent once more."""
    api = serve([Reply(bash("echo one")), Fault(400, message), "done"])
    s = session(api, tmp_path)
    assert ask(s, "work") == "done"
    assert len(api.requests) == 3
    assert "signature" in json.dumps(api.requests[1].messages)
    assert "signature" not in json.dumps(api.requests[2].messages)
    assert len(results(api.requests[2].messages)) == 1
    alive(api, s)


def test_ending_invalid_thinking_is_bounded(serve, tmp_path):
    """DESIGN 8, row 8: once, not for ever."""
    api = serve([Reply(bash("echo one")), *[Fault(400, "Invalid `signature` in `thinking` block")] * 9])
    s = session(api, tmp_path)
    one_line_at_most(unanswered(s, "work"), "400", api.url)
    assert len(api.requests) == 3


@pytest.mark.parametrize(
    "fault",
    [
        Fault(400, "messages: something is wrong with it " + "and more " * 200),
        Fault(401),
        Fault(402, "no credit left"),
        Fault(403, body=PAGE, content_type="text/html"),
        Fault(404, body=json.dumps({"detail": "Not Found"})),
        Fault(400, body=""),
        Fault(404, body="[]"),
        Fault(401, f"bad key {KEY}"),
    ],
    ids=["400", "401", "402", "403-page", "404-detail", "400-empty", "404-list", "401-echo"],
)
def test_ending_client_error(serve, tmp_path, fault):
    """DESIGN 8, row 9: one line, one request, no compaction; a prompt that was refused at once leaves."""
    api = serve(["hello", fault])
    s = session(api, tmp_path)
    ask(s, "EARLIER")
    one_line_at_most(unanswered(s, "REFUSED"), str(fault.status), api.url)
    assert KEY not in said(s)
    assert len(api.requests) == 2
    messages = alive(api, s)
    assert "EARLIER" in texts(messages)
    assert "REFUSED" not in texts(messages)


def test_ending_client_error_in_the_middle_of_the_work(serve, tmp_path):
    """DESIGN 8, row 9: something happened since the prompt, so it stays, and the results too."""
    api = serve([Reply(bash("echo one")), Fault(400, "no")])
    s = session(api, tmp_path)
    one_line_at_most(unanswered(s, "PROMPTMARK"), "400")
    messages = alive(api, s)
    assert texts(messages).count("PROMPTMARK") == 1
    assert len(results(messages)) == 1


@pytest.mark.parametrize(
    "answer",
    [
        Fault(200, body=PAGE, content_type="text/html"),
        Fault(200, body=""),
        Fault(200, body="[1, 2]"),
        Fault(200, body='{"message": "welcome"}'),
        Fault(200, body="data: [1, 2]\n\n", content_type="text/event-stream"),
        Fault(200, body="", content_type="text/event-stream"),
        Fault(
            200,
            body='event: message_start\ndata: {"type": "message_start", "message": [1]}\n\n',
            content_type="text/event-stream",
        ),
        Fault(200, body=sse({"type": "message_start"}), content_type="text/event-stream"),
    ],
    ids=["html", "empty", "list", "json", "event-list", "no-event", "message-list", "no-message"],
)
def test_ending_no_api_reply(serve, tmp_path, answer):
    """DESIGN 8, row 9: an answer that is none of the Messages API."""
    api = serve(["hello", *[answer] * 4])
    s = session(api, tmp_path)
    ask(s, "EARLIER")
    why = unanswered(s, "PROMPTMARK")
    one_line_at_most(why, api.url)
    assert len(why) > len(api.url) + 20  # not only a class name
    assert not re.search(r"\w+(Error|Exception)\b", why)
    assert 2 <= len(api.requests) <= 5
    while len(api.requests) < 5:  # the rest of the script
        unanswered(s, "again")
    assert texts(alive(api, s)).count("PROMPTMARK") <= 1


def test_ending_text(serve, start):
    """DESIGN 8, row 10: the answer, on stdout alone."""
    api = serve([Reply("Two files.\nNo more.")])
    done = start(api, "-p", "work")
    assert (done.status, done.out) == (0, "Two files.\nNo more.\n")
    assert len(api.requests) == 1


EMPTY = {
    "nothing": Reply(thinks=False),
    "thinking": Reply(thinking("hm")),
    "blank": Reply(" \n", thinks=False),
    "null-reason": Reply(thinks=False, stop_reason=None),
}


@pytest.mark.parametrize("nothing", EMPTY.values(), ids=EMPTY)
def test_ending_nothing(serve, tmp_path, nothing):
    """DESIGN 8, row 11: one line, the results stay, once more with a text that asks to go on."""
    api = serve([Reply(bash("echo one")), nothing, "done", nothing, nothing])
    s = session(api, tmp_path)
    assert ask(s, "work") == "done"
    assert len(api.requests) == 3
    assert "go on" in texts(api.requests[2].messages[-1:]).lower()
    assert len(results(api.requests[2].messages)) == 1
    assert len(unanswered(s, "more")) > 20
    assert len(api.requests) == 5
    assert len(results(alive(api, s))) == 1


def test_a_server_without_cache_control_is_asked_without_it_from_then_on(serve, tmp_path):
    """DESIGN 8, below the table."""
    api = serve(
        lambda request: (
            Fault(400, "cache_control: Extra inputs are not permitted")
            if "cache_control" in request.body
            else "ok"
        )
    )
    s = session(api, tmp_path)
    assert ask(s, "work") == "ok"
    alive(api, s)
    assert ["cache_control" in request.body for request in api.requests] == [True, False, False]


def test_foreign_ids_unknown_blocks_and_lone_surrogates_do_no_harm(serve, tmp_path):
    """DESIGN 8, below the table: the stand-in would refuse them if they came back."""
    news = {"type": "content_block_start", "index": 0, "content_block": {"type": "news", "of": "tomorrow"}}
    same = [
        bash("echo one", id="call:1/é"),
        bash("echo two", id="call:1/é"),
        bash("echo three", id="x" * 900),
    ]
    api = serve(
        [
            Reply(*same),
            Reply("odd \ud83d words", bash("echo 'a\ud800b'", id="call:1/é")),
            raw_reply(news, {"type": "content_block_stop", "index": 0}, *block("done", 1)),
        ]
    )
    s = session(api, tmp_path)
    assert ask(s, "work \udcff") == "done"
    answers = [result["content"].split("\n")[0] for result in results(alive(api, s))]
    assert answers == ["one", "two", "three", "a?b"]
