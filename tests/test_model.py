"""The model: what is set at the start, one request, and each of the ways in which it can end."""

import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from harness import KEY, ROOT, environment, make_agent, results, said, terminal, texts
from messages_api import Fault, Reply, block_events, call, is_summary, sse, text

import agent

TOKEN = "tok-9876543210"
HELLO = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
PAGE = (
    "<html><head><title>Bad gateway</title></head><body><p>PAGEWORDS " + "x " * 5000 + "</p></body>"
)
LOST = Fault(0)  # the connection is closed without a word
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def bash(command, **how):
    return call("bash", {"command": command}, **how)


def unanswered(a, prompt):
    """One prompt to which there is no answer: the line that says why."""
    with pytest.raises(agent.Stopped) as stopped:
        a.run(prompt)
    return str(stopped.value)


def refusal(a):
    """How one request is refused."""
    with pytest.raises(agent.Refused) as refused:
        a.model.request(HELLO, 100, "some-model")
    return refused.value


def lines_of(messages):
    """The text of messages, line by line (thinking has none)."""
    return [line for line in texts(messages).splitlines() if line]


def newest(request):
    """The prompt that a request ends with."""
    return request.messages[-1]["content"][-1]["text"]


def retries(a):
    """The lines on screen that announce another try."""
    return [line for line in said(a).splitlines() if "trying again" in line]


def is_one_line(line, *parts):
    """A line that a person can read, with all these parts, and without a key or a page."""
    missing = [part for part in parts if part not in line]
    unwanted = [part for part in ("Traceback", "<", "PAGEWORDS", KEY) if part in line]
    return len(line) <= 300 and "\n" not in line.strip() and not missing and not unwanted


def credentials(headers):
    """All that a request carries as a credential."""
    key = headers.get("x-api-key", "")
    return {key, headers.get("authorization", "").removeprefix("Bearer ")} - {""}


def unused_url():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


def streamed(*events):
    """A reply that is sent event by event, for what a Reply cannot say."""
    body = b"".join(map(sse, events))
    return Fault(200, body=body, content_type="text/event-stream")


def message_start(**fields):
    """The first event; a field that is `...` is left out."""
    message = {"id": "msg_1", "type": "message", "role": "assistant", "model": "m", "content": []}
    message |= {"stop_reason": None, "stop_sequence": None}
    message |= {"usage": {"input_tokens": 9, "output_tokens": 1}, **fields}
    kept = {name: value for name, value in message.items() if value is not ...}
    return {"type": "message_start", "message": kept}


def message_delta(**fields):
    delta = {"stop_reason": "end_turn", "stop_sequence": None}
    return {"type": "message_delta", "delta": delta, "usage": {"output_tokens": 5}, **fields}


STOP = {"type": "message_stop"}


def events_of(block, index=0):
    return block_events(index, block, Reply())


@pytest.fixture(scope="session")
def home(tmp_path_factory):
    """A copy of agent.py, away from any .env of its own."""
    return Path(shutil.copy(ROOT / "agent.py", tmp_path_factory.mktemp("home"))).parent


@pytest.fixture
def load(home, tmp_path, monkeypatch):
    """load(dotenv, **env): that copy with a .env beside it, in this environment.

    The working directory is tmp_path/work.
    """
    (tmp_path / "work").mkdir()
    for name in os.environ.keys() - environment(None).keys():
        monkeypatch.delenv(name)
    for name in (*agent.PROXIES, "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path / "work")

    def load_copy(dotenv=b"", **env):
        (home / ".env").write_bytes(dotenv)
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        spec = importlib.util.spec_from_file_location("agent_copy", home / "agent.py")
        copy = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "agent_copy", copy)
        spec.loader.exec_module(copy)
        copy.WAITS = (0, 0, 0)
        return copy

    return load_copy


@pytest.fixture
def start(load, monkeypatch, capsys, tmp_path):
    """start(*args, stdin=, dotenv=, **env): the whole program in this process, to its end."""
    handlers = {number: signal.getsignal(number) for number in SIGNALS}

    def start_copy(*args, stdin="", dotenv=b"", **env):
        copy = load(dotenv, **env)
        (tmp_path / "stdin").write_text(stdin)
        with open(tmp_path / "stdin") as typed:
            monkeypatch.setattr(sys, "argv", ["agent.py", *args])
            monkeypatch.setattr(sys, "stdin", typed)
            capsys.readouterr()
            status = copy.main()
        shown = capsys.readouterr()
        return SimpleNamespace(status=status, out=shown.out, err=shown.err)

    yield start_copy
    for number, handler in handlers.items():
        signal.signal(number, handler)


# ================================ Settings ================================


def test_each_setting_is_read_from_its_variable(load):
    numbers = {"THRESHOLD": 5000, "KEEP_RECENT": 4, "CLEAR_AT_LEAST": 0, "MAX_TOKENS": 900}
    numbers |= {"BASH_TIMEOUT": 7, "MAX_TURNS": 8}
    env = {f"AGENT_{name}": str(number) for name, number in numbers.items()}
    env |= {"ANTHROPIC_API_KEY": KEY, "ANTHROPIC_AUTH_TOKEN": TOKEN, "MODEL_ID": "mine"}
    env |= {"ANTHROPIC_BASE_URL": "http://localhost:1", "AGENT_SUMMARY_MODEL": "small"}
    copy = load(**env)
    settings = {name.lower(): number for name, number in numbers.items()}
    assert copy.read_settings() == copy.Settings(
        KEY, TOKEN, "http://localhost:1", "mine", summary_model="small", **settings
    )


@pytest.mark.parametrize(
    "form",
    [
        b"ANTHROPIC_API_KEY=sk-from-file-12345\r\nMODEL_ID=filed\r\n",
        b"ANTHROPIC_API_KEY='sk-from-file-12345'\nMODEL_ID=\"filed\"\n",
        b"export ANTHROPIC_API_KEY=sk-from-file-12345\nexport MODEL_ID=filed # ours\n",
        b"\xef\xbb\xbfANTHROPIC_API_KEY=sk-from-file-12345\nMODEL_ID=filed",
    ],
    ids=["windows", "quotes", "export", "bom"],
)
def test_what_the_environment_lacks_comes_from_the_env_file_beside_the_program(load, form):
    copy = load(form, ANTHROPIC_API_KEY=" ", MODEL_ID="")  # empty counts as not set
    assert copy.read_settings() == copy.Settings("sk-from-file-12345", model="filed")


def test_the_environment_wins_over_the_env_file(load):
    own = b"ANTHROPIC_API_KEY=sk-from-file-12345\nMODEL_ID=filed\nAGENT_MAX_TURNS=5\n"
    copy = load(own, ANTHROPIC_API_KEY=KEY, AGENT_MAX_TURNS="6")
    assert copy.read_settings() == copy.Settings(KEY, model="filed", max_turns=6)


@pytest.mark.parametrize("place", [".", ".."])
def test_the_env_file_of_a_project_sets_nothing(serve, start, tmp_path, place):
    """Not here and not above: neither the address nor the key, nor anything for commands."""
    api, theirs = serve([Reply(bash("env")), "the end"]), serve()
    (tmp_path / "work" / place / ".env").write_text(
        f"ANTHROPIC_BASE_URL={theirs.url}\nHTTP_PROXY={theirs.url}\nANTHROPIC_AUTH_TOKEN=evil\n"
        "MODEL_ID=evil\nAGENT_MAX_TOKENS=77\nLD_PRELOAD=/evil.so\nANTHROPIC_API_KEY=evil\n"
    )
    done = start("-y", "-p", "hi", ANTHROPIC_BASE_URL=api.url, ANTHROPIC_API_KEY=KEY)
    assert (done.status, done.out) == (0, "the end\n")
    assert theirs.requests == [] and theirs.other_paths == []
    assert credentials(api.requests[0].headers) == {KEY}
    assert "evil" not in json.dumps([request.body for request in api.requests])
    assert api.requests[0].body["max_tokens"] == 16_000


def test_an_address_in_the_env_file_of_a_project_gets_no_key(load, tmp_path):
    """With nothing but a key in the shell it goes to Anthropic, or nowhere."""
    (tmp_path / "work" / ".env").write_text("ANTHROPIC_BASE_URL=http://evil.example\n")
    assert load(ANTHROPIC_API_KEY=KEY).read_settings().base_url == "https://api.anthropic.com"


def test_without_a_key_the_program_says_what_to_set_and_where(tmp_path):
    shutil.copy(ROOT / "agent.py", tmp_path)
    done = subprocess.run(
        [sys.executable, "agent.py", "-p", "hi"],
        cwd=tmp_path,
        env=environment(None, ANTHROPIC_API_KEY="", ANTHROPIC_BASE_URL=""),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) <= 3 and "Traceback" not in done.stderr
    for part in ("ANTHROPIC_API_KEY", ".env", "ANTHROPIC_BASE_URL=http://localhost:"):
        assert part in done.stderr
    assert not (tmp_path / ".transcripts").exists()


def test_missing_packages_are_named_with_the_command_that_installs_them(tmp_path):
    """-S: without the packages of this environment."""
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(ROOT / "agent.py"), "-p", "hi"],
        cwd=tmp_path,
        env=environment(None, ANTHROPIC_API_KEY=KEY),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr
    for part in ("anthropic", "dotenv", "pip install", "python-dotenv"):
        assert part in done.stderr


def test_a_bad_number_is_named_before_the_first_prompt(load):
    values = {"AGENT_THRESHOLD": "many", "AGENT_MAX_TOKENS": "-5", "AGENT_BASH_TIMEOUT": "1e5"}
    for name, value in {**values, "AGENT_MAX_TURNS": "10.5"}.items():
        copy = load(f"{name}={value}\n".encode(), ANTHROPIC_API_KEY=KEY)
        with pytest.raises(ValueError) as wrong:
            copy.read_settings()
        assert is_one_line(str(wrong.value), name, value, ".env")


def test_the_version_is_never_doubled_in_the_path(serve, load, tmp_path):
    for end in ("", "//", "/v1", "/v1/ "):
        settings = load(ANTHROPIC_BASE_URL="http://host:1" + end).read_settings()
        assert settings.url == "http://host:1"
    api = serve(["hello"])
    settings = load(ANTHROPIC_BASE_URL=api.url + "/anthropic/v1/").read_settings()
    assert make_agent(api, tmp_path, base_url=settings.base_url).run("hi") == "hello"
    assert [request.path for request in api.requests] == ["/anthropic/v1/messages"]


def test_a_base_url_that_is_none_is_named_before_the_first_prompt(load):
    for url in ("127.0.0.1:8080", "localhost", "ftp://127.0.0.1", "http://"):
        with pytest.raises(ValueError) as wrong:
            load(ANTHROPIC_BASE_URL=url, ANTHROPIC_API_KEY=KEY).read_settings()
        assert is_one_line(str(wrong.value), "ANTHROPIC_BASE_URL", url.rstrip("/"))


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:99999", "http://[::1", "http://a b", "http://x:y"]
)
def test_a_base_url_that_cannot_be_used_is_one_line(start, url):
    done = start("-p", "hi", ANTHROPIC_BASE_URL=url, ANTHROPIC_API_KEY=KEY)
    assert done.status in (1, 2)
    assert done.out == ""
    assert url in done.err


@pytest.mark.parametrize(
    ("env", "dotenv", "sent"),
    [
        ({"ANTHROPIC_API_KEY": KEY}, "", KEY),
        ({"ANTHROPIC_API_KEY": "", "ANTHROPIC_AUTH_TOKEN": TOKEN}, "", TOKEN),
        ({"ANTHROPIC_API_KEY": KEY}, f"ANTHROPIC_AUTH_TOKEN={TOKEN}", KEY),
        ({"ANTHROPIC_AUTH_TOKEN": TOKEN}, f"ANTHROPIC_API_KEY={KEY}", KEY),
        ({}, f"ANTHROPIC_AUTH_TOKEN={TOKEN}", TOKEN),
    ],
    ids=["key", "token", "token-in-file", "key-in-file", "only-in-file"],
)
def test_one_credential_is_sent_and_the_key_goes_first(serve, start, env, dotenv, sent):
    """To the server's list of models, too. Both set: one line says which is used."""
    api = serve(["hello"], models=[{"id": "tiny"}])
    done = start("-p", "hi", dotenv=dotenv.encode(), ANTHROPIC_BASE_URL=api.url, **env)
    assert (done.status, done.out) == (0, "hello\n")
    assert credentials(api.requests[0].headers) == {sent}
    assert credentials(api.listings[0]) == {sent}
    assert KEY not in done.err and TOKEN not in done.err
    both = {*env, *dotenv.split("=")} >= {"ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN"}
    is_said = "ANTHROPIC_API_KEY and ANTHROPIC_AUTH_TOKEN are set: the key is used" in done.err
    assert is_said == (both and bool(env.get("ANTHROPIC_API_KEY", "?")))


def test_a_server_that_reads_only_x_api_key_gets_the_key_there(serve, tmp_path):
    api = serve(["hello"])
    make_agent(api, tmp_path).run("hi")
    assert api.requests[0].headers["x-api-key"] == KEY


def test_a_token_is_not_sent_as_a_key(serve, tmp_path):
    """Some gateways refuse a request whose key is none that they know."""
    api = serve(["hello"])
    make_agent(api, tmp_path, api_key="", auth_token=TOKEN).run("hi")
    assert api.requests[0].headers["authorization"] == f"Bearer {TOKEN}"
    assert "x-api-key" not in api.requests[0].headers


def test_a_server_of_ones_own_needs_no_credential(serve, load, tmp_path):
    api = serve(["hello"])
    copy = load(ANTHROPIC_BASE_URL=api.url)
    assert copy.Agent(copy.read_settings(), tmp_path).run("hi") == "hello"


@pytest.mark.parametrize("name", ["ALL_PROXY", "https_proxy"])
def test_a_socks_proxy_without_its_package_is_one_line(start, name):
    if importlib.util.find_spec("socksio"):
        pytest.skip("socksio is installed here, so a SOCKS proxy works")
    env = {"ANTHROPIC_API_KEY": KEY, name: "socks5h://127.0.0.1:9"}
    done = start("-p", "hi", **env)
    assert (done.status, done.out) == (1, "")
    [line] = [line for line in done.err.splitlines() if "socksio" in line]
    assert is_one_line(line, name)


@pytest.mark.parametrize("name", ["HTTP_PROXY", "all_proxy"])
def test_a_connection_error_names_the_proxy(serve, start, name):
    api = serve()
    proxy = unused_url()
    done = start("-p", "hi", ANTHROPIC_BASE_URL=api.url, **{name: proxy})
    assert done.status == 1
    lines = [line for line in done.err.splitlines() if api.url in line]
    assert len(lines) == 4
    assert is_one_line(lines[-1], name)
    assert api.requests == []


def test_a_key_is_never_shown_nor_written(serve, tmp_path):
    """The server repeats it in its error, and so do the settings when they are printed."""
    api = serve(["hello", Fault(401, f"bad key {KEY} or token {TOKEN}")])
    a = make_agent(api, tmp_path, auth_token=TOKEN)
    a.run("EARLIER")
    why = unanswered(a, "more")
    assert is_one_line(why, "401", api.url, "[key removed]")
    shown = why + said(a) + repr(a.settings)
    written = "".join(path.read_text() for path in (tmp_path / ".transcripts").glob("*.jsonl"))
    assert KEY not in shown + written and TOKEN not in shown + written


def test_a_password_in_the_base_url_is_never_shown(serve, start):
    url = unused_url().replace("//", "//me:pass-word-1@")
    done = start("-p", "hi", ANTHROPIC_BASE_URL=url)
    assert done.status == 1
    assert "No answer from http://127.0.0.1" in done.err
    assert "pass-word-1" not in done.out + done.err


# ================================ Meeting a server of one's own ================================


@pytest.mark.parametrize(
    "facts",
    [
        {"meta": {"n_ctx": 8192, "n_ctx_train": 32768}},
        {"max_model_len": 8192},
        {"context_length": 8192, "meta": None},
        {"max_context_length": 8192, "context_length": None},
    ],
    ids=["llama.cpp", "vLLM", "context_length", "LM Studio"],
)
def test_one_listed_model_gives_its_name_and_its_window(serve, tmp_path, facts):
    api = serve(["hello", "again"], models=[{"id": "tiny", "object": "model", **facts}])
    a = make_agent(api, tmp_path)
    a.run("hi")
    a.run("and again")
    assert len(api.listings) == 1
    assert a.model.window == 8192
    assert {request.body["model"] for request in api.requests} == {"tiny"}


def test_what_is_not_set_fits_the_window(serve, tmp_path):
    """Three quarters for the context, a quarter for the reply; layer 1 frees a fifth at once."""
    api = serve(["hello"], models=[{"id": "tiny", "max_model_len": 8192}])
    a = make_agent(api, tmp_path)
    a.run("hi")
    assert (a.budget.limit, a.budget.max_reply) == (6144, 2048)
    assert a.budget.clear_at_least == 6144 / 5
    assert api.requests[0].body["max_tokens"] == 2048


def test_a_setting_that_was_given_by_hand_wins_over_the_window(serve, tmp_path):
    api = serve(["hello"], models=[{"id": "tiny", "max_model_len": 8192}])
    by_hand = {"threshold": 20_000, "max_tokens": 4000, "clear_at_least": 7, "model": "mine"}
    a = make_agent(api, tmp_path, **by_hand)
    a.run("hi")
    assert (a.budget.limit, a.budget.max_reply, a.budget.clear_at_least) == (20_000, 4000, 7)
    assert api.requests[0].body["model"] == "mine"
    assert a.model.window == 8192


def test_a_large_window_changes_no_default(serve, tmp_path):
    api = serve(["hello"], models=[{"id": "large", "max_model_len": 1_000_000}])
    a = make_agent(api, tmp_path)
    a.run("hi")
    assert (a.budget.limit, a.budget.max_reply) == (100_000, 16_000)


MODELS = [{"id": "small", "max_model_len": 4096}, {"id": "large", "max_model_len": 65536}]


def test_of_several_models_one_must_be_named(serve, start):
    api = serve(models=MODELS)
    done = start("-p", "hi", ANTHROPIC_BASE_URL=api.url)
    assert (done.status, done.out) == (2, "")
    assert is_one_line(done.err, "MODEL_ID", "small", "large", ".env")
    assert api.requests == []


def test_of_several_models_the_named_one_gives_the_window(serve, tmp_path):
    api = serve(["hello"], models=MODELS)
    a = make_agent(api, tmp_path, model="large")
    a.run("hi")
    assert a.model.window == 65536


NO_LISTS = {
    "another status": Fault(401, "who are you?"),
    "a page": Fault(200, body=PAGE, content_type="text/html"),
    "no object": Fault(200, body="[1, 2]"),
    "no UTF-8": Fault(200, body=b'{"data": [{"id": "\xff"}]}'),
    "no answer": LOST,
    "no such path": None,
    "no model": [],
    "a number": 7,
    "only names": ["tiny"],
    "no name": [{"object": "model"}],
    "null for a name": [{"id": None}],
}


def test_a_list_of_models_of_another_form_is_none(serve, tmp_path):
    api = serve()
    found = {}
    for form, api.models in NO_LISTS.items():
        a = make_agent(api, tmp_path)
        a.meet_server()
        found[form] = (a.model.name, a.model.window, said(a))
    assert found == dict.fromkeys(NO_LISTS, (agent.DEFAULT_MODEL, 0, ""))


def test_a_window_of_another_form_is_not_known(serve, tmp_path):
    api = serve()
    for meta in ("8192", [8192], {"n_ctx": "8192"}, {"n_ctx": -1}, {"n_ctx": 0}):
        api.models = [{"id": "tiny", "meta": meta}]
        a = make_agent(api, tmp_path)
        a.meet_server()
        assert (a.model.name, a.model.window, a.budget.limit) == ("tiny", 0, 100_000)


@pytest.mark.parametrize("answer", [b"", b"SSH-2.0-none\r\n"], ids=["silent", "no-http"])
def test_a_list_that_does_not_come_is_not_waited_for(tmp_path, monkeypatch, answer):
    """A server that takes the connection and says nothing, or something else than HTTP."""
    monkeypatch.setattr(agent, "MEETING_TIME", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        taken = []

        def take():
            taken.append(listening.accept()[0])
            taken[0].sendall(answer)

        thread = threading.Thread(target=take, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        assert agent.list_models(agent.Settings(base_url=url)) == []
        thread.join()
        taken[0].close()


@pytest.mark.parametrize("down", [Fault(503, "Loading model"), LOST], ids=["loading", "lost"])
def test_a_server_that_was_not_up_at_the_start_is_met_when_it_is(
    serve, tmp_path, down, monkeypatch
):
    """Else a strict server would refuse the default model's name for good."""
    monkeypatch.setattr(agent, "LOADING_WAITS", (0,))
    api = serve(lambda request: down if api.models is down else "hello", models=down)
    a = make_agent(api, tmp_path)
    unanswered(a, "hi")
    api.models = [{"id": "tiny", "max_model_len": 8192}]
    assert a.run("hi") == "hello"
    assert api.requests[-1].body["model"] == "tiny"
    assert a.budget.limit == 6144


@pytest.mark.parametrize("status", [302, 307])
def test_neither_key_nor_prompt_goes_to_another_server_by_a_redirect(serve, tmp_path, status):
    other = serve()

    def elsewhere(path):
        return Fault(status, body="", headers={"location": other.url + path})

    api = serve(lambda request: elsewhere("/v1/messages"), models=elsewhere("/v1/models"))
    other.models = [{"id": "evil"}]
    why = unanswered(make_agent(api, tmp_path), "SECRETWORDS")
    assert is_one_line(why, str(status), api.url)
    assert other.requests == [] and other.listings == [] and other.other_paths == []


def test_connections_that_a_server_closes_after_each_answer_are_no_trouble(serve, tmp_path):
    """llama-server does it though it announced that they would be kept. Errors are answers, too."""
    steps = [item for i in range(4) for item in (Reply(bash(f"echo {i}")), Fault(529))]
    api = serve([*steps, "done"], closes=True)
    a = make_agent(api, tmp_path)
    assert a.run("work") == "done"
    assert ["529" in line for line in retries(a)] == [True] * 4
    assert len(api.requests) == 9


def test_a_slow_server_of_ones_own_has_no_read_limit(serve, tmp_path):
    """A large prompt on a slow machine may need more than the ten minutes of the SDK."""
    a = make_agent(serve(), tmp_path)
    assert a.model.connect().timeout.read is None
    theirs = make_agent(serve(), tmp_path, base_url=agent.ANTHROPIC)
    assert theirs.model.connect().timeout.read == 600


def test_a_server_that_loads_its_model_is_waited_for_and_shown_once(serve, tmp_path, monkeypatch):
    """Also for longer than the tries that other failures get."""
    assert sum(agent.LOADING_WAITS) >= 180
    monkeypatch.setattr(agent, "LOADING_WAITS", (0,) * 9)
    loading = Fault(503, body='{"error": {"code": 503, "message": "Loading model"}}')
    api = serve([*[loading] * 9, "hello", *[loading] * 10])
    a = make_agent(api, tmp_path)
    assert a.run("hi") == "hello"
    assert [line for line in said(a).splitlines() if "Loading model" in line] == retries(a)
    assert len(retries(a)) == 1
    assert is_one_line(unanswered(a, "more"), "503", "Loading model")


def task_for_a_small_window():
    """Thirty tool calls, one of them compact; each summary names how far the work is."""
    steps = iter(range(30))

    def answer(request):
        if is_summary(request):
            return "SUMMARYMARK the work goes on"
        step = next(steps, None)
        if step is None:
            return "THE-END"
        if step == 20:
            return Reply(call("compact", {"focus": "names"}))
        if step in (5, 25):
            return Reply("Look at a long file.", bash("seq 1 3000"))
        return Reply(f"On step {step}. " * 60, bash(f"echo STEP-{step}-END; seq 1 250"))

    return answer


def test_a_task_of_thirty_calls_works_with_an_8k_window_and_nothing_set_but_the_base_url(
    serve, tmp_path
):
    api = serve(
        task_for_a_small_window(),
        models=[{"id": "tiny", "object": "model", "meta": {"n_ctx": 8192}}],
        window=8192,
        thinks=False,
    )
    child = terminal(api, tmp_path, "-y", size=(40, 200), ANTHROPIC_API_KEY="", NO_COLOR="1")
    first_line = child.before.strip().splitlines()[0]
    for part in ("tiny", api.url, "8,192", "/help"):
        assert part in first_line
    child.sendline("OPENREQUEST do all thirty steps")
    child.expect_exact("THE-END")
    shown = child.before
    child.expect_exact("agent >> ")
    child.sendline("exit")
    child.wait()

    assert "no summary" not in shown and "model's part" not in shown
    assert "[micro_compact:" in shown and "[auto_compact:" in shown
    assert len([request for request in api.requests if is_summary(request)]) >= 2
    assert max(request.body["max_tokens"] for request in api.requests) <= 4096
    assert "OPENREQUEST do all thirty steps" in texts(api.requests[-1].messages)
    record = "".join(path.read_text() for path in (tmp_path / ".transcripts").glob("*.jsonl"))
    for step in set(range(30)) - {5, 20, 25}:
        assert f"STEP-{step}-END\\n" in record
    assert "STEP-29-END" in texts(api.requests[-1].messages)


# ================================ What is too long ================================

WINDOWS = {  # what a server says when a request is too long, and the window that this names
    "prompt is too long: 210000 tokens > 16384 maximum": 16384,
    "input length and `max_tokens` exceed context limit: 19000 + 16000 > 32,768": 32768,
    "request (11765 tokens) exceeds the available context size (8192 tokens), try increasing": 8192,
    "This model's maximum context length is 4096 tokens. However, you sent 9000 tokens.": 4096,
    "Requested token count exceeds the model's maximum context length of 131072 tokens": 131072,
    "Your request exceeded model token limit, which is lower": 0,
    "This model's maximum prompt length is in force": 0,
    "Please reduce the length of the messages or of the completion.": 0,
    "The input token count exceeds the maximum number of tokens allowed.": 0,
    "The input token count (1200345) exceeds the maximum number of tokens allowed.": 0,
}


def test_a_request_that_is_too_long_is_known_by_the_words(serve, tmp_path):
    """It is not tried again; the words may name the window."""
    api = serve([Fault(400, words) for words in WINDOWS])
    a = make_agent(api, tmp_path)
    found = {words: refusal(a) for words in WINDOWS}
    assert {
        words: refused.window for words, refused in found.items() if refused.overflow
    } == WINDOWS
    for words, refused in found.items():
        assert is_one_line(str(refused), words[:80], api.url)


TOO_LONG = {"type": "error", "error": {"type": "invalid_request_error", "message": "too long"}}
LLAMA = {"code": 400, "message": "exceeds the available context size", "n_ctx": 8192}
OVERFLOWS = [  # with the window that each names
    (Fault(422, "too long"), 0),
    (Fault(500, "too long"), 0),
    (streamed(message_start(), TOO_LONG), 0),
    (streamed(message_start(), {"type": "error", "code": 400, "message": "too long"}), 0),
    (Fault(413, body="<html><h1> 413 Too Large</h1>", content_type="text/html"), 0),
    (Fault(400, body=json.dumps({"error": LLAMA})), 8192),
    (Reply("HALF", stop_reason="model_context_window_exceeded"), 0),
]


def test_a_request_that_is_too_long_is_known_in_each_form(serve, tmp_path):
    """By other statuses, as an event in a stream that began well, by a field, by a stop reason."""
    api = serve([fault for fault, _ in OVERFLOWS])
    a = make_agent(api, tmp_path)
    found = [refusal(a) for _ in OVERFLOWS]
    assert [refused.overflow for refused in found] == [True] * len(OVERFLOWS)
    assert [refused.window for refused in found] == [window for _, window in OVERFLOWS]


NO_OVERFLOWS = [
    Fault(400, "max_tokens: 20000 exceeds the limit of 4096 for this model"),
    Fault(400, "max_tokens is too large: 32000. The model supports at most 16384 of them."),
    Fault(400, "the maximum tokens you requested exceeds what the model can write"),
    Fault(400, "messages.3.tool_calls[0].id: string too long, at most 40 characters"),
    Fault(422, "messages: Field required"),
]


def test_what_is_no_overflow_forgets_nothing_and_shows_the_servers_sentence(serve, tmp_path):
    api = serve(["hello", *NO_OVERFLOWS])
    a = make_agent(api, tmp_path)
    a.run("EARLIER")
    for fault in NO_OVERFLOWS:
        why = unanswered(a, "words " * 2000)
        assert is_one_line(why, str(fault.status), api.url, fault.message)
        assert lines_of(a.messages) == ["EARLIER", "hello"]
    assert len(api.requests) == 1 + len(NO_OVERFLOWS)
    assert a.budget.limit == 100_000


def test_a_passing_error_is_no_overflow_whatever_it_says(serve, tmp_path):
    limit = "token limit of this minute reached: the context length is too long"
    faults = [Fault(500, "context deadline exceeded"), Fault(429, limit), Fault(503, limit)]
    api = serve([*faults, "done"])
    a = make_agent(api, tmp_path)
    assert a.run("words " * 2000) == "done"
    assert len(retries(a)) == 3
    for line, fault in zip(retries(a), faults, strict=True):
        assert is_one_line(line, str(fault.status), fault.message)
    assert len(api.requests) == 4


def test_the_window_in_an_overflow_error_sets_the_limits(serve, tmp_path):
    """The conversation is summarised, sent again, and stays below three quarters from then on."""
    window = "request (9999 tokens) exceeds the available context size (8192 tokens)"

    def answer(request):
        if is_summary(request):
            return "SUMMARYMARK"
        if len(json.dumps(request.body)) > 8192 * 4:
            return Fault(400, window)
        return "done" if "SUMMARYMARK" in texts(request.messages) else Reply(bash("seq 1 2500"))

    api = serve(answer)
    a = make_agent(api, tmp_path)
    assert a.run("OPENREQUEST work") == "done"
    assert (a.budget.limit, a.budget.max_reply) == (6144, 2048)
    assert "OPENREQUEST" in texts(api.requests[-1].messages)


# ================================ Tries ================================


@pytest.mark.parametrize(
    "fault", [Fault(529), Fault(502, body=PAGE), LOST], ids=["529", "502", "0"]
)
def test_a_failure_is_tried_again_three_times_and_costs_no_work(serve, tmp_path, fault):
    """Announced each time. Then the prompt is back, and what was done is not done again."""
    faults = iter([fault] * 5)
    api = serve(
        lambda request: (
            next(faults, "ok") if results(request.messages) else Reply(bash("echo one; echo two"))
        )
    )
    a = make_agent(api, tmp_path)
    assert is_one_line(unanswered(a, "PROMPTMARK"), api.url)
    assert [request.body for request in api.requests[1:]] == [api.requests[1].body] * 4
    assert [is_one_line(line, api.url) for line in retries(a)] == [True] * 3
    assert a.run("go on") == "ok"
    assert len(api.requests) == 1 + 4 + 2
    messages = api.requests[-1].messages
    assert [result["content"].split("\n[")[0] for result in results(messages)] == ["one\ntwo"]
    assert texts(messages).count("PROMPTMARK") == 1


def test_the_wait_that_the_server_asks_for_is_kept_and_shown(serve, tmp_path, monkeypatch):
    """Else it is our own."""
    api = serve([Fault(429, headers={"retry-after": "0.7"}), Fault(429), "done"])
    a = make_agent(api, tmp_path)
    monkeypatch.setattr(agent, "WAITS", (0, 0.4, 0))
    assert a.run("work") == "done"
    first, second, third = [request.time for request in api.requests]
    assert second - first >= 0.7 and third - second >= 0.4
    assert [line.split("; ")[-1] for line in retries(a)] == [
        "trying again in 0.7 s]",
        "trying again in 0.4 s]",
    ]


def test_a_wait_of_more_than_a_minute_is_told_and_not_waited_for(serve, tmp_path):
    api = serve([Fault(429, headers={"retry-after": "86400"})])
    a = make_agent(api, tmp_path)
    why = unanswered(a, "work")
    assert is_one_line(why, api.url, "429")
    assert re.search(r"\d\d:\d\d", why)  # when it will be back
    assert len(api.requests) == 1
    assert a.run("more") == "ok"


def test_a_retry_after_that_makes_no_sense_is_no_crash(serve, tmp_path):
    waits = ("nan", "inf", "1e30", "-1", "soon", "", "Wed, 21 Oct 2015 07:28:00 GMT")
    api = serve(lambda request: Fault(529, headers={"retry-after": newest(request)[5:]}))
    a = make_agent(api, tmp_path)
    for wait in waits:
        before = len(api.requests)
        assert is_one_line(unanswered(a, "wait " + wait), api.url, "529")
        assert 1 <= len(api.requests) - before <= 4


def test_ctrl_c_ends_a_wait_at_once(serve, tmp_path):
    api = serve([Fault(429, headers={"retry-after": "50"})])
    a = make_agent(api, tmp_path)

    def interrupt():
        while "again in 50 s" not in said(a):
            time.sleep(0.01)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    started = time.monotonic()
    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        a.run("work")
    assert time.monotonic() - started < 40
    assert a.run("hello") == "ok"
    assert len(api.requests) == 2


# ================================ Requests ================================


def test_a_large_output_limit_reaches_the_server(serve, tmp_path):
    """In a request, and in the one for a summary: the SDK refuses it where it does not stream."""
    api = serve(lambda request: "SUMMARY" if is_summary(request) else "done")
    a = make_agent(api, tmp_path, max_tokens=64_000, threshold=4000)
    assert a.run("short") == "done"
    assert a.run("word " * 5000) == "done"
    assert any(is_summary(request) for request in api.requests)
    assert {request.body["max_tokens"] for request in api.requests} == {64_000}


def test_a_server_without_cache_control_is_asked_without_it_from_then_on(serve, tmp_path):
    wrong = Fault(400, "cache_control: Extra inputs are not permitted")
    api = serve(lambda request: wrong if "cache_control" in request.body else "ok")
    a = make_agent(api, tmp_path)
    assert a.run("work") == "ok"
    assert a.run("more") == "ok"
    assert ["cache_control" in request.body for request in api.requests] == [True, False, False]


def test_foreign_ids_unknown_blocks_and_lone_surrogates_do_no_harm(serve, tmp_path):
    """The stand-in would refuse them if they came back."""
    news = {"type": "content_block_start", "index": 0}
    news["content_block"] = {"type": "news", "of": "tomorrow"}
    end = {"type": "content_block_stop", "index": 0}
    same = [bash("echo one", id="call:1/é"), bash("echo two", id="call:1/é")]
    api = serve(
        [
            Reply(*same, bash("echo three", id="x" * 900)),
            Reply("odd \ud83d words", bash("echo four", id="call:1/é")),
            streamed(
                message_start(), news, end, *events_of(text("done"), 1), message_delta(), STOP
            ),
        ]
    )
    a = make_agent(api, tmp_path)
    assert a.run("work \udcff") == "done"
    a.run("more")
    answers = [result["content"].split("\n")[0] for result in results(api.requests[-1].messages)]
    assert answers == ["one", "two", "three", "four"]


# ================================ Streams ================================


@pytest.mark.parametrize("end", ["llama", "late_error", "late_garbage", "late_stall"])
def test_what_is_whole_is_taken_whatever_the_dialect_and_whatever_follows(serve, tmp_path, end):
    """Blocks may be stopped late, and nothing after message_stop spoils a reply."""
    api = serve([Reply("Look:", bash("echo ran >> ran"), end=end), Reply("done", end=end)])
    a = make_agent(api, tmp_path)
    assert a.run("work") == "done"
    assert len(api.requests) == 2
    assert retries(a) == []
    assert (tmp_path / "ran").read_text() == "ran\n"


def test_blocks_that_arrive_side_by_side_are_put_together(serve, tmp_path):
    one = events_of(bash("echo ONE", id="toolu_1"), 0)
    two = events_of(bash("echo TWO", id="toolu_2"), 1)
    mixed = [one[0], two[0], one[1], two[1], *two[2:-1], *one[2:-1], two[-1], one[-1]]
    delta = message_delta(delta={"stop_reason": "tool_use", "stop_sequence": None})
    api = serve([streamed(message_start(), *mixed, delta, STOP), "done"])
    assert make_agent(api, tmp_path).run("work") == "done"
    answers = [result["content"].split("\n")[0] for result in results(api.requests[1].messages)]
    assert answers == ["ONE", "TWO"]


RUN = bash("touch ran", id="toolu_1")


OUT_OF_ORDER = {
    "swapped": [*events_of(RUN, 1), *events_of(text("HALF"), 0)],
    "gap": [*events_of(text("HALF"), 0), *events_of(RUN, 2)],
    "twice": [*events_of(text("HALF"), 0), *events_of(RUN, 0)],
    "no start": [*events_of(text("HALF"), 0), *events_of(RUN, 1)[1:]],
    "no block": events_of(RUN, 7)[1:],
}


def test_a_reply_with_its_blocks_out_of_order_is_refused_and_asked_for_again(serve, tmp_path):
    """The SDK would mix them up. Nothing of it is run."""
    replies = [
        streamed(message_start(), *events, message_delta(), STOP)
        for events in OUT_OF_ORDER.values()
    ]
    api = serve([item for reply in replies for item in (reply, "done")])
    a = make_agent(api, tmp_path)
    for order in OUT_OF_ORDER:
        assert a.run(order) == "done"
    assert not (tmp_path / "ran").exists()
    assert len(retries(a)) == len(OUT_OF_ORDER)
    assert all(is_one_line(line, api.url) for line in retries(a))
    assert lines_of(a.messages) == [line for order in OUT_OF_ORDER for line in (order, "done")]


def test_without_usage_the_estimate_decides(serve, tmp_path):
    """A conversation on a server that counts nothing is compacted all the same."""
    api = serve(
        lambda request: (
            "SUMMARY"
            if is_summary(request)
            else Reply("word " * 800, bash(f"seq {len(api.requests)} 900"))
            if len(api.requests) < 12
            else "done"
        ),
        usage=False,
    )
    assert make_agent(api, tmp_path, threshold=4000).run("work") == "done"
    assert any(is_summary(request) for request in api.requests)
    assert len(api.requests) < 30


@pytest.mark.parametrize("usage", [True, "late"])
def test_all_input_tokens_count_however_they_were_paid(serve, tmp_path, usage):
    """Those read from the cache and written to it, too; also where they come at the end."""
    api = serve([Reply(bash("echo one")), "done"], usage=usage)
    a = make_agent(api, tmp_path)
    a.run("work")
    sent = [api._request_tokens(request.body) for request in api.requests]
    assert a.model.spent["input"] == sum(sent)
    assert a.model.spent["cached"] == sent[0]
    assert a.model.spent["output"] > 0


# ================================ What a person is told ================================


REFUSED = [  # what the server refuses with, and what of it is told
    (Fault(400, "messages: something is wrong " + "and more " * 200), "something is wrong"),
    (Fault(402, "no credit left"), "no credit left"),
    (Fault(403, body=PAGE, content_type="text/html"), "Bad gateway"),
    (Fault(404, body=PAGE.replace("title", "TITLE")), "Bad gateway"),
    (Fault(404, body='{"detail": "Not Found"}'), "Not Found"),
    (Fault(404, body='{"error": "model `x` not found"}'), "model `x` not found"),
    (Fault(400, body='{"code": 400, "message": "flat", "type": "e"}'), "flat"),
    (Fault(422, body='{"detail": [{"msg": "Field required"}]}'), "Field required"),
    (Fault(400, body=""), "400"),
    (Fault(404, body="[]"), "404"),
    (Fault(418, body="plain words", content_type="text/plain"), "plain words"),
]


def test_what_the_server_refuses_is_told_in_one_line(serve, tmp_path):
    """Status, address and the server's words; of a page its title. One request."""
    api = serve([fault for fault, _ in REFUSED])
    a = make_agent(api, tmp_path)
    for fault, words in REFUSED:
        line = unanswered(a, "go")
        assert is_one_line(line, str(fault.status), api.url, words)
    assert len(api.requests) == len(REFUSED)


@pytest.mark.parametrize(
    ("fault", "names"),
    [
        (Fault(401), ["ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN"]),
        (Fault(403), ["ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN"]),
        (Fault(404), ["MODEL_ID", "ANTHROPIC_BASE_URL"]),
        (Fault(400, "No connected db."), ["ANTHROPIC_API_KEY"]),  # LiteLLM's word for no key
    ],
    ids=["401", "403", "404", "no-db"],
)
def test_a_rejected_key_or_model_is_named_and_the_prompt_is_back(serve, start, fault, names):
    api = serve([fault, "hello"])
    done = start(stdin="REJECTED\nagain\n", ANTHROPIC_BASE_URL=api.url, ANTHROPIC_API_KEY=KEY)
    assert (done.status, done.out) == (0, "hello\n")
    [line] = [line for line in done.err.splitlines() if f"{fault.status} from" in line]
    assert is_one_line(line, api.url, ".env", fault.message, *names)
    assert len(api.requests) == 2
    assert "REJECTED" not in json.dumps(api.requests[1].body)


def test_where_nobody_listens_one_line_names_the_url(tmp_path, serve):
    url = unused_url()
    a = make_agent(serve(), tmp_path, base_url=url)
    line = unanswered(a, "hi")
    assert is_one_line(line, "No answer", url)
    assert len(retries(a)) == 3


NO_REPLIES = [
    Fault(200, body=PAGE, content_type="text/html"),
    Fault(200, body='{"message": "welcome"}'),
    Fault(200, body="", content_type="text/event-stream"),
    Fault(200, body="data: [1, 2]\n\n", content_type="text/event-stream"),
    streamed({"type": "message_start", "message": [1]}),
    streamed({"type": "message_start"}),
]


def test_an_answer_that_is_no_reply_is_told_in_words_and_the_prompt_is_back(serve, tmp_path):
    answers = {f"prompt {number}": reply for number, reply in enumerate(NO_REPLIES)}
    api = serve(lambda request: answers.get(newest(request), "ok"))
    a = make_agent(api, tmp_path)
    for prompt in answers:
        before = len(api.requests)
        line = unanswered(a, prompt)
        assert is_one_line(line, api.url)
        assert len(line) > len(api.url) + 20  # not only a class name
        assert not re.search(r"\w+(Error|Exception)\b", line)
        assert len(api.requests) - before <= 4
        assert a.run("and now?") == "ok"
