"""The stand-in for the Messages API: all other tests believe what it refuses, sends and counts.

1 Requests    2 Thinking    3 Replies and faults    4 The end of a stream    5 Counting
"""

import copy
import json
import time
import urllib.error
import urllib.request

import anthropic
import pytest
from messages_api import (
    ENDS,
    FAULTS,
    SUMMARY_MARK,
    Fault,
    MessagesAPI,
    Reply,
    call,
    header_problem,
    is_summary,
    problem,
    redacted,
    text,
    thinking,
)

HTTP = anthropic.DefaultHttpxClient()  # one for all: making it takes a while


def ask(*contents, **fields):
    """A request with these messages, user first, in turns."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]
    return {"model": "m", "max_tokens": 1000, "messages": messages} | fields


def send(api, path, body=None):
    """The status of the answer, and what it says: data, or an error's message."""
    data = body and json.dumps(body).encode()
    request = urllib.request.Request(api.url + path, data, {"anthropic-version": "2023-06-01"})
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["error"]["message"]


def post(api, body):
    return send(api, "/v1/messages", body)


def client(api):
    """The real SDK."""
    return anthropic.Anthropic(base_url=api.url, api_key="k", max_retries=0, http_client=HTTP)


def streamed(api):
    """What the SDK makes of a streamed reply: its blocks, and the stop reason."""
    with client(api).messages.stream(**ask("hello")) as stream:
        message = stream.get_final_message()
    return [block.to_dict() for block in message.content], message.stop_reason


# ==================================== 1  Requests ====================================

CACHE = {"type": "ephemeral"}
BASH = {"name": "bash", "description": "Run it.", "input_schema": {"type": "object"}}
USE = {"type": "tool_use", "id": "a", "name": "bash", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "a", "content": "done"}
FAILED = RESULT | {"is_error": True, "content": " "}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
THOUGHT = {"type": "thinking", "thinking": "", "signature": "s"}
HIDDEN = {"type": "redacted_thinking", "data": "d"}
MARKED = text("x") | {"cache_control": CACHE}
SYSTEM, AGAIN, FIRST = (
    [{"role": role, "content": "x"}] for role in ("system", "user", "assistant")
)

# How each reason begins, and a request that is refused for it.
WRONG = {
    "The request body is not an object": [],
    "The request body is not valid JSON": ask("bad \ud800"),
    "`temperature` is deprecated for this model.": ask("x", temperature=1.0),
    "model: Field required": {"max_tokens": 1, "messages": []},
    "tools: Input should be a valid list": ask("x", tools=None),
    "session: Extra inputs are not permitted": ask("x", session=1),
    "model: String should have at least 1 character": ask("x", model=""),
    "max_tokens: Input should be greater than or equal to 1": ask("x", max_tokens=0),
    "max_tokens: 128001 > 128000, which is": ask("x", max_tokens=128_001),
    "tool_choice: type `any` is not supported": ask("x", tool_choice={"type": "any"}),
    '"thinking.type.enabled" is not supported': ask("x", thinking={"type": "enabled"}),
    # tools
    "tools.0.custom: Input should be an object": ask("x", tools=["bash"]),
    "tools.0.custom.name: String should match": ask("x", tools=[BASH | {"name": "my tool"}]),
    "tools.0: Input tag 'bash_2' found": ask("x", tools=[BASH | {"type": "bash_2"}]),
    "tools.0.custom.input_schema.type: ": ask("x", tools=[BASH | {"input_schema": {}}]),
    "tools: Tool names must be unique.": ask("x", tools=[BASH, BASH]),
    # messages
    "messages: at least one message is required": ask(),
    "messages.0.role: Input should be 'user' or": ask(messages=SYSTEM),
    "messages.1: roles must alternate, but found `user`": ask(messages=AGAIN * 2),
    'messages: first message must use the "user" role': ask(messages=FIRST),
    "This model does not support assistant message prefill.": ask("x", "y"),
    "messages.0: all messages must have non-empty content": ask([]),
    "messages.1: The final block in an assistant message cannot": ask("x", [THOUGHT], "z"),
    # blocks
    "messages.0.content.0: Input tag 'new' found": ask([{"type": "new"}]),
    "messages.0.content.0: `tool_use` blocks are not allowed in `user`": ask([USE]),
    "messages.0.content.1.text: text content blocks must be non-empty": ask([MARKED, text("")]),
    "messages.0.content: text content blocks must contain non-whitespace": ask(" \n"),
    "messages.1.content.0.tool_use.id: String": ask("x", [USE | {"id": "a\n"}], "y"),
    "messages.1.content.0.tool_use.name: String": ask("x", [USE | {"name": ""}], "y"),
    # calls and results
    "messages.3.content.0: `tool_use` ids must be": ask("x", [USE], [RESULT], [USE], "y"),
    "messages.1: `tool_use` ids were found without": ask("x", [USE], "y", "z", [RESULT]),
    "messages.0.content.0: unexpected `tool_use_id` found": ask([RESULT]),
    "messages.2.content.1: each tool_use must have a": ask("x", [USE], [RESULT, RESULT]),
    "messages.2.content.1: `tool_result` blocks must come": ask("x", [USE], [MARKED, RESULT]),
    "messages.2.content.0.tool_result: content cannot be empty if": ask("x", [USE], [FAILED]),
    # cache_control
    "A maximum of 4 blocks with cache_control may be": ask([MARKED] * 4, cache_control=CACHE),
    "cache_control: Input should be 'ephemeral', with": ask("x", cache_control={"type": "long"}),
}
RIGHT = [
    ask("ä 漢 \x00"),
    ask([IMAGE, text("what is it?")], system="Be brief.", cache_control=None),
    ask("x", [USE], [RESULT | {"content": ""}], tool_choice={"type": "none"}),
    ask(
        "x",
        [THOUGHT, HIDDEN, USE, USE | {"id": "b", "name": "any"}],
        [RESULT | {"tool_use_id": "b"}, RESULT | {"content": [text("y"), IMAGE]}, text("go on")],
        system=[MARKED],
        tools=[BASH],
        cache_control=CACHE | {"ttl": "1h"},
        stream=True,
    ),
]


def test_a_wrong_request_is_refused_for_its_reason_and_a_right_one_passes():
    assert [problem(body)[: len(reason)] for reason, body in WRONG.items()] == list(WRONG)
    assert [problem(body) for body in RIGHT] == [""] * len(RIGHT)


def test_wrong_headers_are_refused():
    version = {"anthropic-version": "2023-06-01"}
    same, other = ({"x-api-key": "k", "authorization": f"Bearer {token}"} for token in "kt")
    beta = {"anthropic-beta": "new"}
    assert [header_problem(h) for h in (version | same, same, version | other, version | beta)] == [
        "",
        "anthropic-version: header is required",
        "Only one credential may be sent: `x-api-key` and `authorization` differ",
        "anthropic-beta: unexpected value(s) `new`",
    ]


def test_a_refusal_is_on_record_and_takes_nothing_from_the_script():
    with MessagesAPI(["first"], thinks=False) as api:
        status, reason = post(api, ask([]))
        assert post(api, ask("x"))[1]["content"] == [text("first")]
        assert (status, api.refused) == (400, [reason])
        assert [(r.status, r.problem) for r in api.requests] == [(400, reason), (200, "")]


# ==================================== 2  Thinking ====================================


class Talk:
    """A conversation with the stand-in in which every reply goes back as it came."""

    def __init__(self, api):
        self.api = api
        self.body = ask("the task", system="Be brief.", tools=[BASH])

    def turn(self):
        """One more reply, and its calls answered."""
        content = post(self.api, self.body)[1]["content"]
        calls = [block["id"] for block in content if block["type"] == "tool_use"]
        answer = [RESULT | {"tool_use_id": id} for id in calls] or "go on"
        self.body["messages"] += ask("", content, answer)["messages"][1:]

    def refusal(self, path=(), to=None):
        """Why the request is refused with another value (None: with nothing) in one place."""
        body = copy.deepcopy(self.body)
        place = body
        for step in path[:-1]:
            place = place[step]
        if to is not None:
            place[path[-1]] = to
        elif path:
            del place[path[-1]]
        status, answer = post(self.api, body)
        return answer if status == 400 else ""


@pytest.fixture
def talk():
    """Three turns, each with thinking; the second thinks between its calls, too."""
    second = Reply(thinking("Hm."), call("bash"), redacted(), text("and"), thinking(), call("bash"))
    with MessagesAPI([Reply(call("bash")), second, "fine"]) as api:
        talk = Talk(api)
        for _ in range(3):
            talk.turn()
        yield talk


INVALID = "messages.{}.content.{}: Invalid `{}` in `{}` block"


def bound(message):
    where = INVALID.format(message, 0, "signature", "thinking")
    return f"{where}. The block is bound to a different conversation. Remove the block."


def test_thinking_comes_back_to_where_it_was_sent_and_is_counted(talk):
    assert talk.refusal() == ""
    assert talk.api.thinking_checked == 0 + 1 + 4 + 5
    same = {
        ("system",): [MARKED | text("Be brief.")],
        ("cache_control",): CACHE,
        ("messages", 0, "content"): [text("the task")],
        ("messages", 2, "content", 0, "content"): [text("done")],
    }
    assert [talk.refusal(path, value) for path, value in same.items()] == [""] * 4


def test_thinking_is_refused_behind_whatever_was_changed(talk):
    other = {
        ("system",): "Be very brief.",
        ("tools", 0, "description"): "Run it!",
        ("messages", 0, "content"): "another task",
        ("messages", 2, "content", 0, "content"): "[cleared]",
        ("messages", 1, "content", 0): None,  # thinking that is left out changes what follows it
    }
    found = [talk.refusal(path, value) for path, value in other.items()]
    assert found == [bound(1), bound(1), bound(1), bound(3), bound(3)] == talk.api.refused


def test_thinking_that_was_never_sent_is_refused(talk):
    forged = [(1, 0, "signature"), (3, 0, "thinking"), (3, 2, "data")]
    assert [talk.refusal(("messages", m, "content", b, field), "?") for m, b, field in forged] == [
        INVALID.format(1, 0, "signature", "thinking"),
        INVALID.format(3, 0, "signature", "thinking"),
        INVALID.format(3, 2, "data", "redacted_thinking"),
    ]


def test_without_thinking_all_may_change_and_new_thinking_is_bound_to_the_change(talk):
    talk.body["system"] = "Be very brief."
    for message in talk.body["messages"][1::2]:
        message["content"] = [b for b in message["content"] if "thinking" not in b["type"]]
    talk.turn()
    assert talk.refusal() == ""
    assert talk.refusal(("system",), "Be brief.") == bound(7)


# ================================ 3  Replies and faults ================================


def test_the_script_takes_strings_replies_faults_and_functions():
    script = [
        "one",
        Reply("two", text("three")),
        Fault(529, "busy"),
        lambda request: Reply(request.messages[0]["content"].upper()),
        lambda request: None,
    ]
    with MessagesAPI(script, thinks=False) as api:
        answers = [post(api, ask("hi")) for _ in range(6)]
    said = [a if isinstance(a, str) else [b["text"] for b in a["content"]] for _, a in answers]
    assert [status for status, _ in answers] == [200, 200, 529, 200, 200, 200]
    assert said == [["one"], ["two", "three"], "busy", ["HI"], ["ok"], ["ok"]]


def test_a_request_for_a_summary_is_known_by_its_last_text():
    contents = [
        "hi",
        f"{SUMMARY_MARK}.",
        [text("x"), text(SUMMARY_MARK)],
        [text(SUMMARY_MARK), MARKED],
    ]
    with MessagesAPI(lambda request: str(is_summary(request)), thinks=False) as api:
        said = [post(api, ask(content))[1]["content"][0]["text"] for content in contents]
    assert said == ["False", "True", "True", "False"]


def test_what_a_function_of_the_script_raises_is_raised_on_leaving():
    def script(request):
        raise AssertionError("not what I expected")

    with pytest.raises(AssertionError, match="not what I expected"), MessagesAPI(script) as api:
        assert post(api, ask("x"))[0] == 500


def test_each_reply_thinks_first_and_a_block_that_is_sent_again_has_a_new_id():
    again = Reply(thinking(), call("bash"), call("bash", id="mine"))
    script = ["a", Reply("b", thinks=False), Reply(redacted(), "c"), Reply(), again, again]
    with MessagesAPI(script) as api:
        replies = [streamed(api)[0] for _ in script]
    kinds = [["thinking", "text"], ["text"], ["redacted_thinking", "text"], ["thinking"]]
    assert [[block["type"] for block in blocks] for blocks in replies[:4]] == kinds
    (thought, use, mine), (new_thought, new_use, same) = replies[4:]
    assert [thought, use, mine] == again.blocks
    assert thought["signature"] != new_thought["signature"]
    assert use["id"] != new_use["id"] and mine == same


def test_arguments_are_streamed_as_they_stand():
    """The SDK mends what is only cut off, without a word."""
    script = [Reply(call("bash", raw='{"command": "ls", "timeo')), Reply(call("bash", raw="{]"))]
    with MessagesAPI(script) as api:
        assert streamed(api)[0][-1]["input"] == {"command": "ls"}
        with pytest.raises(ValueError, match="Unable to parse tool parameter"):
            streamed(api)


def test_a_fault_has_the_type_of_its_status_or_is_a_page_or_silence():
    wanted = [*FAULTS.items(), (500, "api_error"), (503, "api_error")]
    faults = [Fault(status, "so it is", headers={"retry-after": "7"}) for status, _ in wanted]
    page = Fault(502, body="<html>Bad gateway</html>", content_type="text/html")
    seen = []
    with MessagesAPI([*faults, page, Fault(0)]) as api:
        for _ in faults:
            with pytest.raises(anthropic.APIStatusError, match="so it is") as caught:
                streamed(api)
            assert caught.value.response.headers["retry-after"] == "7"
            seen.append((caught.value.status_code, caught.value.response.json()["error"]["type"]))
        with pytest.raises(anthropic.InternalServerError, match="<html>Bad gateway"):
            streamed(api)
        with pytest.raises(anthropic.APIConnectionError):
            streamed(api)
        assert api.refused == []
    assert seen == wanted


def test_models_are_listed_where_there_are_some_and_no_other_path_is_known():
    with MessagesAPI() as api:
        paths = ["/", "/v1/models", "/v1/messages", "/v1/v1/messages"]
        assert [send(api, path)[0] for path in paths] == [404] * 4
        assert api.other_paths == paths
        api.models = [{"id": "tiny"}]
        assert send(api, "/v1/models") == (200, {"object": "list", "data": [{"id": "tiny"}]})
        api.models = Fault(500, "not now")
        assert send(api, "/v1/models") == (500, "not now")
        assert (len(api.listings), api.requests) == (2, [])


def test_a_connection_carries_request_after_request_unless_it_is_said_to_close():
    with MessagesAPI(["one", "two", "three"], thinks=False) as api:
        assert [streamed(api)[0] for _ in range(2)] == [[text("one")], [text("two")]]
        api.closes = True
        with pytest.raises(anthropic.APIConnectionError):
            streamed(api)
        assert streamed(api)[0] == [text("three")]


# ================================ 4  The end of a stream ================================

BLOCKS = [thinking("Hm.", "s"), redacted("d"), text("ä 漢, longer than one delta")]
BLOCKS += [call("bash", {"command": "ls"}, id="a"), text("so"), call("bash", {"x": 1}, id="b")]


def outcome(end):
    """What the SDK makes of these blocks when their stream ends like this."""
    with MessagesAPI([Reply(*BLOCKS, end=end)]) as api:
        try:
            return streamed(api)
        except Exception as error:
            return type(error).__name__, getattr(error, "status_code", None)


def test_each_stream_ends_as_its_name_says():
    assert {end: outcome(end) for end in ENDS if "stall" not in end} == {
        "stop": (BLOCKS, "tool_use"),
        "llama": (BLOCKS, "tool_use"),
        "no_stop": (BLOCKS, None),
        "no_reason": (BLOCKS, None),
        "reset": ("RemoteProtocolError", None),
        "error": ("APIStatusError", 200),
        "garbage": ("JSONDecodeError", None),
        "late_error": ("APIStatusError", 200),
        "late_garbage": ("JSONDecodeError", None),
    }
    with pytest.raises(ValueError, match="end='never'"):
        Reply(end="never")


def events(reply, count):
    """The types of the first events; and is it noticed that the client then hangs up?"""
    with MessagesAPI([reply], thinks=False) as api:
        with client(api).messages.create(**ask("x"), stream=True) as stream:
            seen = [next(stream).type for _ in range(count)]
        end = time.monotonic() + 20
        while not api.requests[0].closed_early and time.monotonic() < end:
            time.sleep(0.005)
        return seen, api.requests[0].closed_early


def test_a_stream_stalls_where_its_name_says_and_a_client_that_hangs_up_is_noticed():
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    whole = ["message_start", *block, "message_delta", "message_stop"]
    assert events(Reply("x", end="stall"), 4) == (whole[:4], True)
    assert events(Reply("x", end="late_stall"), 6) == (whole, True)
    assert events(Reply("x", *["more"] * 99, pace=0.02), 2) == (whole[:2], True)


# ==================================== 5  Counting ====================================


def test_the_window_refuses_and_takes_nothing_from_the_script():
    long = ask("x" * 900)
    tokens = len(json.dumps([long["messages"]])) // 4
    with MessagesAPI(["first"], window=200, thinks=False) as api:
        assert post(api, long) == (400, f"prompt is too long: {tokens} tokens > 200 maximum")
        assert post(api, ask("x"))[1]["content"] == [text("first")]
        assert api.refused == []


def test_tokens_are_a_quarter_of_the_bytes_by_the_ratio():
    body = ask("漢" * 400, system="s", tools=[BASH])
    sent = [body[name] for name in ("system", "tools", "messages")]
    tokens = len(json.dumps(sent, ensure_ascii=False).encode()) // 4
    for ratio in (1, 3):
        with MessagesAPI(ratio=ratio) as api:
            assert post(api, body)[1]["usage"]["input_tokens"] == tokens * ratio


def test_the_cache_is_read_up_to_the_longest_earlier_request_that_this_one_continues():
    long = "x" * 4000
    more = ask(long, "a", "go on")
    bodies = [ask(long), more, ask("y" + long), more | {"system": "new"}, more | {"model": "other"}]
    names = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    with MessagesAPI(thinks=False) as api:
        usages = [post(api, body | {"cache_control": CACHE})[1]["usage"] for body in bodies]
        usages.append(post(api, more)[1]["usage"])
    first, second, *others, uncached = [[usage[name] for name in names] for usage in usages]
    assert first == [3, 0, sum(first) - 3] and sum(first) > 1000
    assert second == [3, sum(first), sum(second) - sum(first) - 3]
    assert [usage[1] for usage in others] == [0, 0, 0]
    assert uncached == [sum(second), 0, 0]


def test_usage_comes_as_anthropic_sends_it_or_late_or_not_at_all_or_as_scripted():
    seen = {}
    for form in (True, "late", False):
        with MessagesAPI(usage=form) as api:
            first, *_, last, _ = client(api).messages.create(**ask("x" * 400), stream=True)
        numbers = (
            first.message.usage.input_tokens,
            last.usage.input_tokens,
            last.usage.output_tokens,
        )
        seen[form] = [number and number > 1 for number in numbers]
    assert seen == {True: [True, None, True], "late": [0, True, True], False: [None, None, None]}
    wanted = {"input_tokens": 77, "output_tokens": 5}
    with MessagesAPI([Reply("x", usage=wanted)]) as api:
        usage = post(api, ask("x"))[1]["usage"]
    assert {name: usage[name] for name in wanted} == wanted
