"""The stand-in itself: what it refuses, what it lets pass, and what the real SDK makes of its replies."""

from __future__ import annotations

import copy
import http.client
import json
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import anthropic
import httpx2
import pytest
import typing_extensions
from anthropic import types
from anthropic.types import message_create_params
from messages_api import (
    BLOCKS,
    CACHE_CONTROL,
    MESSAGE,
    REQUEST,
    SUMMARY_MARK,
    TOOL,
    Fault,
    MessagesAPI,
    Reply,
    Request,
    call,
    is_summary,
    problem,
    redacted,
    text,
    thinking,
)
from pydantic import TypeAdapter, ValidationError

# ================================ 1  Requests, right and wrong ================================
# One good request that holds about everything; each row below changes one thing in it.

CACHE = {"type": "ephemeral"}
BASH = {"name": "bash", "description": "Run it.", "input_schema": {"type": "object", "properties": {}}}
GOOD: dict[str, Any] = {
    "model": "m",
    "max_tokens": 1000,
    "stream": True,
    "system": [text("Be brief.")],
    "tools": [BASH],
    "cache_control": CACHE,
    "messages": [
        {"role": "user", "content": "list the files"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "", "signature": "s"},
                {"type": "redacted_thinking", "data": "d"},
                text("I look."),
                {"type": "tool_use", "id": "a", "name": "bash", "input": {"command": "ls"}},
                {"type": "tool_use", "id": "b", "name": "unknown_tool", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "b", "content": [text("none")], "is_error": True},
                {"type": "tool_result", "tool_use_id": "a", "content": "x y"},
                text("go on"),
            ],
        },
    ],
}


def changed(*path: Any, to: Any) -> dict[str, Any]:
    """The good request with another value at one place."""
    body = copy.deepcopy(GOOD)
    place: Any = body
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = to
    return body


def without(*path: Any) -> dict[str, Any]:
    body = copy.deepcopy(GOOD)
    place: Any = body
    for step in path[:-1]:
        place = place[step]
    del place[path[-1]]
    return body


def changed_thought(field: str, to: Any) -> dict[str, Any]:
    return changed("messages", 1, "content", 0, field, to=to)


def changed_call(field: str, to: Any) -> dict[str, Any]:
    return changed("messages", 1, "content", 3, field, to=to)


def said(*contents: Any) -> dict[str, Any]:
    """The good request with these messages, user first, in turns."""
    return changed("messages", to=in_turns(contents))


def in_turns(contents: Sequence[Any]) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


USE = {"type": "tool_use", "id": "a", "name": "bash", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "a", "content": "done"}
FAILED = RESULT | {"is_error": True}
MARKED = text("x") | {"cache_control": CACHE}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    # the top
    "a missing model": (without("model"), "model: Field required"),
    "an empty model": (changed("model", to=""), "model: String should have"),
    "a missing max_tokens": (without("max_tokens"), "max_tokens: Field required"),
    "max_tokens of 0": (changed("max_tokens", to=0), "greater than or equal to 1"),
    "max_tokens that is no number": (changed("max_tokens", to="9"), "max_tokens: Input should be"),
    "max_tokens that is a boolean": (changed("max_tokens", to=True), "max_tokens: Input should be"),
    "max_tokens over the ceiling": (changed("max_tokens", to=128_001), "128001 > 128000"),
    "an unknown field": (changed("session", to=1), "session: Extra inputs are not permitted"),
    "a temperature": (changed("temperature", to=1.0), "`temperature` is deprecated"),
    "a top_p": (changed("top_p", to=0.5), "`top_p` is deprecated"),
    "a top_k": (changed("top_k", to=5), "`top_k` is deprecated"),
    "a null where there must be a value": (changed("tools", to=None), "tools: Input should be"),
    "a lone surrogate": (said("bad \ud800"), "not valid JSON"),
    "a number that is none": (changed("metadata", to={"user_id": float("nan")}), "not valid JSON"),
    "an empty system prompt": (changed("system", to=""), "must be non-empty"),
    "a blank system block": (changed("system", to=[text(" \n")]), "must contain non-whitespace text"),
    "an image as system prompt": (changed("system", to=[IMAGE]), "not allowed in `system`"),
    "a forced tool": (changed("tool_choice", to={"type": "any"}), "type `any` is not supported"),
    "a certain tool": (changed("tool_choice", to={"type": "tool", "name": "bash"}), "`tool` is not"),
    "thinking switched on": (changed("thinking", to={"type": "enabled"}), 'type.enabled" is not'),
    "thinking switched off": (changed("thinking", to={"type": "disabled"}), 'type.disabled" is not'),
    # tools
    "two tools of one name": (changed("tools", to=[BASH, BASH]), "Tool names must be unique"),
    "a blank in a tool name": (changed("tools", 0, "name", to="my tool"), "String should match pattern"),
    "a tool name of 129 letters": (changed("tools", 0, "name", to="x" * 129), "String should match pattern"),
    "a tool without a schema": (without("tools", 0, "input_schema"), "input_schema: Field required"),
    "a schema of no object": (changed("tools", 0, "input_schema", to={"type": "array"}), "be 'object'"),
    "a tool that is none": (changed("tools", to=["bash"]), "tools.0.custom: Input should be an object"),
    "an unknown field of a tool": (changed("tools", 0, "kind", to="runs"), "kind: Extra inputs"),
    "a tool of the server": (changed("tools", 0, "type", to="bash_20250124"), "does not match 'custom'"),
    # roles and content
    "no message": (changed("messages", to=[]), "at least one message"),
    "an assistant first": (without("messages", 0), 'first message must use the "user" role'),
    "an assistant last": (said("a", "b"), "does not support assistant message prefill"),
    "a system message": (changed("messages", 0, "role", to="system"), "should be 'user' or 'assistant'"),
    "two user messages in a row": (changed("messages", 1, "role", to="user"), "roles must alternate"),
    "an unknown field of a message": (changed("messages", 0, "id", to="m1"), "messages.0.id: Extra inputs"),
    "a message without content": (without("messages", 0, "content"), "messages.0.content: Field required"),
    "content of null": (changed("messages", 0, "content", to=None), "messages.0.content: Input should be"),
    "an empty string": (said(""), "must have non-empty content"),
    "an empty list": (said([]), "must have non-empty content"),
    "a blank string": (said(" \n "), "must contain non-whitespace text"),
    "an empty text block": (said([text("x"), text("")]), "content.1.text: text content blocks must be"),
    "a blank text block": (said("x", [text("\t")], "y"), "must contain non-whitespace text"),
    # blocks
    "a block that is none": (said(["x"]), "does not match any of the expected tags"),
    "a block of an unknown type": (said("x", [{"type": "brand_new"}], "y"), "Input tag 'brand_new'"),
    "an unknown field of a block": (said([text("x") | {"index": 0}]), "text.index: Extra inputs"),
    "a text block without text": (said([{"type": "text"}]), "text.text: Field required"),
    "a text that is no string": (said([{"type": "text", "text": 5}]), "text.text: Input should be"),
    "a call by the user": (said([USE]), "`tool_use` blocks are not allowed in `user`"),
    "thinking by the user": (said([thinking(), text("x")]), "`thinking` blocks are not allowed in `user`"),
    "an image by the assistant": (said("x", [IMAGE], "y"), "`image` blocks are not allowed in `assistant`"),
    "a result by the assistant": (said("x", [RESULT], "y"), "`tool_result` blocks are not allowed in `assis"),
    "arguments as a string": (changed_call("input", to="{}"), "input: Input should be"),
    "an empty id": (changed_call("id", to=""), "String should match pattern '^[a-zA-Z"),
    "an id with a dot": (changed_call("id", to="a.1"), "tool_use.id: String should"),
    "an id with a line end": (changed_call("id", to="a\n"), "tool_use.id: String should"),
    "an id of 65 letters": (changed_call("id", to="x" * 65), "tool_use.id: String should"),
    "a call of nothing": (changed_call("name", to=""), "tool_use.name: String should"),
    "thinking without signature": (without("messages", 1, "content", 0, "signature"), "signature: Field"),
    "thinking without text": (without("messages", 1, "content", 0, "thinking"), "thinking: Field"),
    "thinking of null": (changed_thought("thinking", to=None), "thinking: Input should"),
    "redacted without data": (without("messages", 1, "content", 1, "data"), "data: Field required"),
    "thinking last": (said("x", [text("y"), thinking()], "z"), "final block in an assistant message cannot"),
    "redacted last": (said("x", [redacted()], "z"), "cannot be `redacted_thinking`"),
    # calls and results
    "a call twice": (said("x", [USE, USE], [RESULT, RESULT]), "`tool_use` ids must be unique"),
    "an id used again later": (said("x", [USE], [RESULT], [USE], [RESULT]), "`tool_use` ids must be unique"),
    "a call without its result": (said("x", [USE], "y"), "without `tool_result` blocks immediately after: a"),
    "one of two results missing": (without("messages", 2, "content", 1), "immediately after: a"),
    "a result too late": (said("x", [USE], "y", "z", [RESULT]), "immediately after: a"),
    "a result without its call": (said([RESULT]), "unexpected `tool_use_id` found in `tool_res"),
    "a result twice": (said("x", [USE], [RESULT, RESULT]), "each tool_use must have a single result"),
    "text before a result": (said("x", [USE], [text("y"), RESULT]), "must come before all other content"),
    "a result of null": (said("x", [USE], [RESULT | {"content": None}]), "content: Input should be"),
    "a blank block in a result": (said("x", [USE], [RESULT | {"content": [text("")]}]), "content.0.text: "),
    "a call in a result": (said("x", [USE], [RESULT | {"content": [USE]}]), "not allowed in `tool_result`"),
    "an error of one blank": (said("x", [USE], [FAILED | {"content": " "}]), "cannot be empty"),
    "an error of no blocks": (said("x", [USE], [FAILED | {"content": []}]), "cannot be empty"),
    # cache_control
    "five of them": (
        said([MARKED] * 4),
        "A maximum of 4 blocks with cache_control may be provided. Found 5",
    ),
    "five of them in odd places": (
        said("x", [USE], [RESULT | {"content": [MARKED, MARKED]}, MARKED]) | {"system": [MARKED]},
        "Found 5",
    ),
    "one of another kind": (changed("cache_control", to={"type": "forever"}), "should be 'ephemeral'"),
    "one for two hours": (changed("cache_control", to=CACHE | {"ttl": "2h"}), "ttl of '5m' or '1h'"),
    "one with more in it": (changed("tools", 0, "cache_control", to=CACHE | {"x": 1}), "cache_control.x: Ex"),
    "one on thinking": (
        changed_thought("cache_control", to=CACHE),
        "thinking.cache_control: Extra inputs",
    ),
}

RIGHT: dict[str, dict[str, Any]] = {
    "about everything": GOOD,
    "a string and nothing else": {"model": "m", "max_tokens": 1, "messages": in_turns(["x"])},
    "a system string": changed("system", to="Be brief."),
    "no system blocks": changed("system", to=[]),
    "no cache_control": changed("cache_control", to=None),
    "four cache_controls": said([text(str(n)) | {"cache_control": CACHE | {"ttl": "1h"}} for n in range(3)]),
    "a tool_choice that forces nothing": changed("tool_choice", to={"type": "none"}),
    "thinking that adapts": changed("thinking", to={"type": "adaptive"}),
    "results in another order": said("x", [USE, USE | {"id": "b"}], [RESULT | {"tool_use_id": "b"}, RESULT]),
    "a result of nothing": said("x", [USE], [RESULT | {"content": ""}]),
    "a result without content": said("x", [USE], [{"type": "tool_result", "tool_use_id": "a"}]),
    "an image by the user": said([IMAGE, text("what is it?")]),
    "an image in a result": said("x", [USE], [RESULT | {"content": [IMAGE]}]),
    "nulls where they may be": said([text("x") | {"cache_control": None, "citations": None}]),
    "all planes of Unicode": said("ä 漢 😀 \x00"),
}


@pytest.mark.parametrize(("body", "reason"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_request_is_refused_for_its_reason(body: dict[str, Any], reason: str) -> None:
    assert reason in problem(body)


@pytest.mark.parametrize("body", RIGHT.values(), ids=RIGHT.keys())
def test_a_right_request_is_accepted(body: dict[str, Any]) -> None:
    assert problem(body) == ""


@pytest.mark.parametrize("body", [None, [], "x", 5])
def test_a_body_that_is_no_object_is_refused(body: Any) -> None:
    assert problem(body) == "The request body is not an object"


def test_the_ceiling_of_max_tokens_can_be_set() -> None:
    assert "1000 > 999" in problem(GOOD, max_output=999)
    assert problem(GOOD, max_output=1000) == ""


# ============================ 2  The tables and the SDK's types ============================
# So that the lists of the stand-in can't go stale.

SDK_TYPES: dict[str, tuple[Any, dict[str, Any]]] = {
    "request": (message_create_params.MessageCreateParamsStreaming, REQUEST),
    "message": (types.UserMessageParam, MESSAGE),
    "tool": (types.ToolParam, TOOL),
    "cache_control": (types.CacheControlEphemeralParam, CACHE_CONTROL),
    "text": (types.TextBlockParam, BLOCKS["text"]),
    "image": (types.ImageBlockParam, BLOCKS["image"]),
    "document": (types.DocumentBlockParam, BLOCKS["document"]),
    "search_result": (types.SearchResultBlockParam, BLOCKS["search_result"]),
    "tool_use": (types.ToolUseBlockParam, BLOCKS["tool_use"]),
    "tool_result": (types.ToolResultBlockParam, BLOCKS["tool_result"]),
    "thinking": (types.ThinkingBlockParam, BLOCKS["thinking"]),
    "redacted_thinking": (types.RedactedThinkingBlockParam, BLOCKS["redacted_thinking"]),
}


@pytest.mark.parametrize(("sdk_type", "table"), SDK_TYPES.values(), ids=SDK_TYPES.keys())
def test_the_tables_hold_exactly_the_fields_of_the_sdk(sdk_type: Any, table: dict[str, Any]) -> None:
    hints = typing_extensions.get_type_hints(sdk_type, include_extras=True)
    if table is REQUEST:
        del hints["user_profile_id"], hints["workspace_id"]  # these two travel as headers
        hints["stream"] = bool  # required in one half of a union, optional in the other
    origins: dict[str, Any] = {name: typing_extensions.get_origin(hint) for name, hint in hints.items()}
    required = {name for name, origin in origins.items() if origin is typing_extensions.Required}
    assert {name.rstrip("?") for name in table} == hints.keys()
    assert {name for name in table if not name.endswith("?")} == required


@pytest.mark.parametrize(("sdk_type", "table"), SDK_TYPES.values(), ids=SDK_TYPES.keys())
def test_null_is_taken_exactly_where_the_sdk_takes_it(sdk_type: Any, table: dict[str, Any]) -> None:
    hints = typing_extensions.get_type_hints(sdk_type)
    for name, kind in table.items():
        nullable = type(None) in typing_extensions.get_args(hints[name.rstrip("?")])
        assert isinstance(None, kind) == nullable, name


@pytest.mark.parametrize("body", RIGHT.values(), ids=RIGHT.keys())
def test_a_right_request_fits_the_types_of_the_sdk(body: dict[str, Any]) -> None:
    adapter: TypeAdapter[Any] = TypeAdapter(message_create_params.MessageCreateParams)
    walk(adapter.validate_python(body))  # the adapter must outlive what it returns


def test_a_wrong_request_does_not_fit_them() -> None:
    adapter = TypeAdapter(message_create_params.MessageCreateParamsStreaming)
    with pytest.raises(ValidationError):
        walk(adapter.validate_python(said("x", [{"type": "brand_new"}], "y")))


def walk(thing: Any) -> None:
    """Pydantic checks the items of an Iterable only when they are asked for."""
    if isinstance(thing, dict):
        for value in thing.values():
            walk(value)
    elif isinstance(thing, Iterator | list):
        for value in thing:
            walk(value)


# ================================ 3  Over the wire, plainly ================================


HTTP = httpx2.Client()  # one for all: making one takes a twentieth of a second


def post(api: MessagesAPI, body: Any, path: str = "/v1/messages", **headers: str) -> httpx2.Response:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"anthropic-version": "2026-10-21"} | {k.replace("_", "-"): v for k, v in headers.items()}
    return HTTP.post(api.url + path, content=data, headers=headers)


def ask(*contents: Any, **more: Any) -> dict[str, Any]:
    """A plain request, not streamed."""
    return {"model": "m", "max_tokens": 1000, "messages": in_turns(contents)} | more


def error_of(response: httpx2.Response) -> tuple[int, str, str]:
    error = response.json()["error"]
    return response.status_code, error["type"], error["message"]


def test_a_refusal_is_a_400_on_record_and_takes_nothing_from_the_script() -> None:
    with MessagesAPI(["first"]) as api:
        status, kind, message = error_of(post(api, ask("")))
        assert (status, kind) == (400, "invalid_request_error")
        assert api.refused == [message] == [api.requests[0].problem]
        assert post(api, ask("hello")).json()["content"][1] == text("first")
        assert [r.status for r in api.requests] == [400, 200]


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"\xff", b'{"model": "\xc3"}', b'{"model": "\\ud800"}', b'{"model": NaN}', b"[]"],
)
def test_a_body_that_is_no_proper_json_object_is_refused(raw: bytes) -> None:
    with MessagesAPI() as api:
        assert error_of(post(api, raw))[0] == 400
        assert len(api.refused) == 1
        assert isinstance(api.requests[0].body, dict)
        assert isinstance(api.requests[0].messages, list)


@pytest.mark.parametrize(
    ("headers", "reason"),
    [
        ({"anthropic_beta": "x-2026"}, "anthropic-beta: unexpected"),
        ({"x_api_key": "a", "authorization": "Bearer b"}, "Only one credential"),
    ],
)
def test_wrong_headers_are_refused(headers: dict[str, str], reason: str) -> None:
    with MessagesAPI() as api:
        post(api, ask("x"), **headers)
        assert reason in api.refused[0]


def test_a_missing_version_is_refused() -> None:
    with MessagesAPI() as api:
        HTTP.post(api.url + "/v1/messages", json=ask("x"))
        assert api.refused == ["anthropic-version: header is required"]


def test_no_credential_and_the_same_one_twice_are_accepted() -> None:
    with MessagesAPI() as api:
        assert post(api, ask("x")).status_code == 200
        assert post(api, ask("x"), x_api_key="a", authorization="Bearer a").status_code == 200


def test_other_paths_are_not_found() -> None:
    with MessagesAPI() as api:
        for path in ("/", "/v1/models", "/v1/v1/messages", "/v1/messages/count_tokens"):
            for answer in (HTTP.get(api.url + path), HTTP.post(api.url + path, content=b"x" * 99)):
                assert error_of(answer)[:2] == (404, "not_found_error")
        assert api.other_paths[:2] == ["/", "/"] and len(api.other_paths) == 8
        assert post(api, ask("x"), path="/anthropic/v1/messages?a=b").status_code == 200
        assert [r.path for r in api.requests] == ["/anthropic/v1/messages?a=b"]


def test_the_script_takes_strings_replies_faults_and_functions_of_the_request() -> None:
    script: list[Any] = [
        "one",
        Reply("two", [text("three")]),
        Fault(529),
        lambda request: Reply(text(request.messages[0]["content"].upper())),
        lambda request: None,
    ]
    with MessagesAPI(script, thinks=False) as api:
        answers = [post(api, ask("hi")) for _ in range(6)]
        assert [a.status_code for a in answers] == [200, 200, 529, 200, 200, 200]
        words = [[b["text"] for b in a.json().get("content", [])] for a in answers]
        assert words == [["one"], ["two", "three"], [], ["HI"], ["ok"], ["ok"]]


def test_one_function_may_be_the_whole_script() -> None:
    def script(request: Request) -> Reply | None:
        return Reply("a summary") if is_summary(request) else None

    with MessagesAPI(script, thinks=False) as api:
        asked = ["hi", [text("result"), text(f"{SUMMARY_MARK}, please.")], SUMMARY_MARK]
        answers = [post(api, ask(content)).json()["content"][0]["text"] for content in asked]
        assert answers == ["ok", "a summary", "a summary"]


def test_what_a_function_of_the_script_raises_is_raised_on_leaving() -> None:
    def script(request: Request) -> None:
        raise AssertionError("not what I expected")

    with pytest.raises(AssertionError, match="not what I expected"), MessagesAPI(script) as api:
        assert error_of(post(api, ask("x")))[:2] == (500, "api_error")


def test_an_unknown_end_is_an_error_at_once() -> None:
    with pytest.raises(ValueError, match="end='never'"):
        Reply(end="never")


def test_the_window_refuses_and_takes_nothing_from_the_script() -> None:
    with MessagesAPI(["first"], window=200) as api:
        message = error_of(post(api, ask("x" * 900)))[2]
        assert message.startswith("prompt is too long: 2") and message.endswith(" tokens > 200 maximum")
        assert api.refused == [] and api.requests[0].problem == ""
        assert post(api, ask("x")).json()["content"][1]["text"] == "first"


def test_ratio_multiplies_what_is_counted() -> None:
    with MessagesAPI(ratio=3.0) as api, MessagesAPI() as plain:
        dear, cheap = (post(a, ask("漢" * 400)).json()["usage"]["input_tokens"] for a in (api, plain))
        assert dear == 3 * cheap > 3 * 300


def test_the_cache_is_read_up_to_the_longest_earlier_request() -> None:
    long = "x" * 4000
    with MessagesAPI(["a", "b", "c", "d"], thinks=False) as api:
        bodies = [ask(long), ask(long, "a", "go on"), ask("y" + long), ask(long, "a", "go on", system="new")]
        usages = [post(api, body | {"cache_control": CACHE}).json()["usage"] for body in bodies]
        reads = [u["cache_read_input_tokens"] for u in usages]
        assert reads[1] == sum(v for k, v in usages[0].items() if k != "output_tokens") > 1000
        assert [reads[0], *reads[2:]] == [0, 0, 0]
        uncached = post(api, bodies[1]).json()["usage"]
        assert uncached["cache_read_input_tokens"] == uncached["cache_creation_input_tokens"] == 0


def test_leaving_ends_connections_that_are_still_open() -> None:
    with MessagesAPI() as api:
        idle = http.client.HTTPConnection(api.url.removeprefix("http://"), timeout=10)
        idle.request("GET", "/")
        idle.getresponse().read()
    assert idle.sock.recv(1) == b""
    idle.close()


def test_one_connection_carries_request_after_request() -> None:
    with MessagesAPI() as api:
        line = http.client.HTTPConnection(api.url.removeprefix("http://"), timeout=10)
        line.connect()
        first = line.sock
        for body, status in ((ask("x"), 200), (ask(""), 400), (ask("x", stream=True), 200), (ask("x"), 200)):
            line.request("POST", "/v1/messages", json.dumps(body), {"anthropic-version": "2026-10-21"})
            answer = line.getresponse()
            assert answer.status == status and answer.read()
        assert line.sock is first
        line.close()


def test_a_port_can_be_chosen_and_used_again() -> None:
    with MessagesAPI() as api:
        assert post(api, ask("x")).status_code == 200
    with MessagesAPI(port=int(api.url.rpartition(":")[2])) as again:
        assert again.url == api.url
        assert post(again, ask("x")).status_code == 200


def test_many_clients_at_once_each_get_one_item() -> None:
    with MessagesAPI([str(n) for n in range(40)], thinks=False) as api:
        got: list[str] = []

        def client() -> None:
            for _ in range(5):
                got.append(post(api, ask("x")).json()["content"][0]["text"])

        threads = [threading.Thread(target=client) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(map(int, got)) == list(range(40))
        assert len(api.requests) == 40


def test_the_standard_library_can_talk_to_it_too() -> None:
    with MessagesAPI(["hi"]) as api:
        head = {"anthropic-version": "2026-10-21"}
        body = json.dumps(ask("x", stream=True)).encode()
        with urllib.request.urlopen(urllib.request.Request(api.url + "/v1/messages", body, head)) as answer:
            lines = answer.read().decode().splitlines()
    events = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert events == ["message_start", "ping", *block, *block, "message_delta", "message_stop"]


# ================================ 4  Through the real SDK ================================


def client_of(api: MessagesAPI) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=api.url, api_key="k", max_retries=0, http_client=HTTP)


def streamed(api: MessagesAPI, *contents: Any, **more: Any) -> types.Message:
    with client_of(api).messages.stream(**ask(*(contents or ["hello"]), **more)) as stream:
        return stream.get_final_message()


def blocks_of(message: types.Message) -> list[dict[str, Any]]:
    return [block.to_dict() for block in message.content]


def answered(api: MessagesAPI, message: types.Message) -> dict[str, Any]:
    """The reply as it goes back."""
    assert api.refused == []
    return {"role": "assistant", "content": blocks_of(message)}


BLOCK_LISTS: dict[str, list[dict[str, Any]]] = {
    "text": [text("Some words, ä 漢 😀, longer than one delta.")],
    "calls side by side": [text("I do."), call("bash", {"command": "ls"}), call("read_file", {"n": 1})],
    "all kinds": [thinking("Let me see."), redacted(), text("so"), thinking(), call("bash", id="x")],
    "nothing": [],
    "blank text": [text(""), call("bash"), text("\n")],
}


@pytest.mark.parametrize("end", ["stop", "llama"])
@pytest.mark.parametrize("blocks", BLOCK_LISTS.values(), ids=BLOCK_LISTS.keys())
def test_the_sdk_gathers_a_stream_to_the_scripted_blocks(blocks: list[dict[str, Any]], end: str) -> None:
    with MessagesAPI([Reply(*blocks, end=end)], thinks=False) as api:
        message = streamed(api)
        assert blocks_of(message) == blocks
        wanted = "tool_use" if any(b["type"] == "tool_use" for b in blocks) else "end_turn"
        assert (message.stop_reason, message.role, message.model) == (wanted, "assistant", "m")


def test_a_reply_that_is_not_streamed_holds_the_same_blocks() -> None:
    blocks = BLOCK_LISTS["all kinds"]
    with MessagesAPI([Reply(*blocks)]) as api:
        message = client_of(api).messages.create(**ask("hello"))
        assert blocks_of(message) == blocks
        assert message.stop_reason == "tool_use"


def test_the_server_thinks_unless_told_otherwise() -> None:
    script: list[Any] = ["a", Reply("b", thinks=False), Reply(redacted(), "c"), Reply(), Reply(thinks=False)]
    with MessagesAPI(script) as api:
        kinds = [[b["type"] for b in blocks_of(streamed(api))] for _ in script]
    assert kinds == [["thinking", "text"], ["text"], ["redacted_thinking", "text"], ["thinking"], []]


def test_a_block_of_a_kind_yet_unknown_reaches_the_client() -> None:
    with MessagesAPI([Reply({"type": "brand_new", "x": 1}, "hi")], thinks=False) as api:
        assert blocks_of(streamed(api)) == [{"type": "brand_new", "x": 1}, text("hi")]


@pytest.mark.parametrize("reason", ["max_tokens", "refusal", "pause_turn", "something_new", None])
def test_the_stop_reason_is_the_scripted_one(reason: str | None) -> None:
    with MessagesAPI([Reply("x", stop_reason=reason)]) as api:
        assert streamed(api).stop_reason == reason


def test_broken_arguments_are_sent_as_they_are() -> None:
    script = [Reply(call("bash", raw='{"command": "ls", "timeo')), Reply(call("bash", raw="{]"))]
    with MessagesAPI(script) as api:
        assert streamed(api).content[-1].to_dict()["input"] == {"command": "ls"}  # the SDK repairs in silence
        with pytest.raises(ValueError, match="Unable to parse tool parameter"):
            streamed(api)


def test_a_lone_surrogate_in_a_reply_arrives_as_one() -> None:
    with MessagesAPI(["bad \ud800"], thinks=False) as api:
        assert blocks_of(streamed(api)) == [text("bad \ud800")]


def test_ids_and_signatures_are_made_anew_when_a_block_is_sent_again() -> None:
    again = Reply(thinking(), call("bash"), call("bash", id="mine"))
    with MessagesAPI([again, again]) as api:
        first, second = blocks_of(streamed(api)), blocks_of(streamed(api))
    assert first == again.blocks
    assert first[0]["signature"] != second[0]["signature"]
    assert first[1]["id"] != second[1]["id"]
    assert first[2] == second[2]


@pytest.mark.parametrize("end", ["no_stop", "no_reason"])
def test_a_stream_that_ends_early_but_cleanly_raises_nothing(end: str) -> None:
    with MessagesAPI([Reply("so far", call("bash", {"command": "ls"}), end=end)], thinks=False) as api:
        message = streamed(api)
        assert message.stop_reason is None
        assert blocks_of(message)[0] == text("so far")
        assert not api.requests[0].closed_early


def test_the_last_block_is_stopped_only_by_no_reason() -> None:
    def events(end: str) -> list[str]:
        with MessagesAPI([Reply("x", end=end)], thinks=False) as api:
            return [event.type for event in client_of(api).messages.create(**ask("x"), stream=True)]

    assert events("no_reason") == [*events("no_stop"), "content_block_stop"]


def test_an_error_event_raises_a_status_error_with_status_200() -> None:
    with MessagesAPI([Reply("x", call("bash"), end="error")]) as api:
        with pytest.raises(anthropic.APIStatusError, match="overloaded_error") as caught:
            streamed(api)
        assert caught.value.status_code == 200


def test_a_connection_that_breaks_raises_what_is_no_api_error() -> None:
    with MessagesAPI([Reply("a long enough text that is cut somewhere", end="reset", chunk=5)]) as api:
        seen: list[str] = []
        whole = client_of(api).messages.stream(**ask("x"))
        with pytest.raises(httpx2.RemoteProtocolError) as caught, whole as stream:
            seen.extend(stream.text_stream)
        assert not isinstance(caught.value, anthropic.APIError)
        assert seen and "".join(seen) != "a long enough text that is cut somewhere"


def test_garbage_raises_a_json_error() -> None:
    with MessagesAPI([Reply("x", end="garbage")]) as api, pytest.raises(json.JSONDecodeError):
        streamed(api)


def until(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + 10
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    return condition()


@pytest.mark.parametrize(
    "reply",
    [
        Reply("all of it", end="stall"),
        Reply("all of it", pace=0.01, chunk=1),
        Reply("all of it", *["more"] * 9, pace=0.05),
    ],
)
def test_a_client_that_hangs_up_is_noticed(reply: Reply) -> None:
    with MessagesAPI([reply]) as api:
        with client_of(api).messages.stream(**ask("x")) as stream:
            assert next(iter(stream.text_stream))
        assert until(lambda: api.requests[0].closed_early)


def test_a_client_that_will_not_wait_for_the_headers_is_noticed() -> None:
    with MessagesAPI([Reply("x", delay=60)]) as api:
        with pytest.raises(anthropic.APITimeoutError):
            client_of(api).with_options(timeout=0.1).messages.create(**ask("x"))
        assert until(lambda: api.requests[0].closed_early)


def test_a_complete_reply_is_not_closed_early() -> None:
    with MessagesAPI([Reply("x", pace=0.001), "y", Fault(500)]) as api:
        client = client_of(api)
        for _ in range(2):
            with client.messages.stream(**ask("x")) as stream:
                stream.until_done()
        with pytest.raises(anthropic.InternalServerError):
            client.messages.create(**ask("x"))
    assert [r.closed_early for r in api.requests] == [False] * 3


def test_leaving_ends_a_stalled_reply_without_blaming_the_client() -> None:
    with MessagesAPI([Reply("x", end="stall")]) as api, client_of(api).messages.stream(**ask("x")) as stream:
        assert next(stream.text_stream) == "x"
        api.close()
        with pytest.raises(httpx2.TransportError):
            stream.until_done()
    assert not api.requests[0].closed_early


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (402, "billing_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "api_error"),
        (529, "overloaded_error"),
    ],
)
def test_a_fault_has_the_type_that_belongs_to_its_status(status: int, kind: str) -> None:
    with MessagesAPI([Fault(status, "so it is", headers={"retry-after": "7"})]) as api:
        with pytest.raises(anthropic.APIStatusError, match="so it is") as caught:
            streamed(api)
        assert caught.value.status_code == status == api.requests[0].status
        assert caught.value.response.headers["retry-after"] == "7"
        assert caught.value.response.json()["error"]["type"] == kind
        assert api.refused == []


def test_a_fault_may_be_a_page_of_html() -> None:
    page = "<html>Bad gateway</html>"
    with MessagesAPI([Fault(status, body=page, content_type="text/html") for status in (502, 200)]) as api:
        with pytest.raises(anthropic.InternalServerError, match="Bad gateway"):
            streamed(api)
        with pytest.raises(AssertionError):  # a 200 without any event
            streamed(api)


def test_a_fault_of_status_0_says_nothing() -> None:
    with MessagesAPI([Fault(0), "there"]) as api:
        with pytest.raises(anthropic.APIConnectionError):
            streamed(api)
        assert blocks_of(streamed(api))[-1] == text("there")


def test_usage_as_anthropic_has_it() -> None:
    with MessagesAPI() as api:
        first, *_, delta, _ = client_of(api).messages.create(**ask("x" * 400), stream=True)
        assert first.message.usage.input_tokens > 100
        assert first.message.usage.cache_read_input_tokens == 0
        assert delta.usage.output_tokens > 1 and delta.usage.input_tokens is None


def test_usage_that_comes_late() -> None:
    with MessagesAPI(usage="late") as api:
        first, *_, delta, _ = client_of(api).messages.create(**ask("x" * 400), stream=True)
        assert set(first.message.usage.to_dict().values()) == {0}
        assert delta.usage.input_tokens > 100 and delta.usage.output_tokens > 1


def test_no_usage_at_all() -> None:
    with MessagesAPI(usage=False) as api:
        assert set(streamed(api).usage.to_dict().values()) == {None}


def test_usage_that_the_script_wants() -> None:
    with MessagesAPI([Reply("x", usage={"input_tokens": 77, "output_tokens": 5})] * 2) as api:
        for usage in (streamed(api).usage, client_of(api).messages.create(**ask("x")).usage):
            assert (usage.input_tokens, usage.output_tokens) == (77, 5)


# ================================ 5  Thinking and what stands before it ================================


class Talk:
    """A conversation with the stand-in in which every reply goes back as it came."""

    def __init__(self, api: MessagesAPI) -> None:
        self.api = api
        self.body = ask("the task", system="Be brief.", tools=[copy.deepcopy(BASH)])
        self.messages: list[dict[str, Any]] = self.body["messages"]

    def turn(self) -> None:
        """One more reply, and its calls answered."""
        reply = client_of(self.api).messages.create(**self.body)
        self.messages.append(answered(self.api, reply))
        calls = [block["id"] for block in self.messages[-1]["content"] if block["type"] == "tool_use"]
        results = [RESULT | {"tool_use_id": id} for id in calls]
        self.messages.append({"role": "user", "content": results or "go on"})

    def refusal(self) -> str:
        """What the next request is refused for; "" if it is accepted."""
        answer = post(self.api, self.body)
        return "" if answer.status_code == 200 else error_of(answer)[2]


@pytest.fixture
def talk() -> Iterator[Talk]:
    """Three turns, each with thinking; the second thinks between its calls too."""
    second = Reply(thinking("Hm."), call("bash"), redacted(), text("and"), thinking(), call("bash"))
    with MessagesAPI([Reply(call("bash")), second, "fine"]) as api:
        talk = Talk(api)
        for _ in range(3):
            talk.turn()
        yield talk


BOUND = "The block is bound to a different conversation"


def test_thinking_that_comes_back_unchanged_is_accepted_and_counted(talk: Talk) -> None:
    assert talk.api.thinking_checked == 0 + 1 + 4
    assert talk.refusal() == ""
    assert talk.api.thinking_checked == 5 + 5


def test_it_is_enough_to_mean_the_same(talk: Talk) -> None:
    talk.body["system"] = [text("Be brief.") | {"cache_control": CACHE}]
    talk.body["cache_control"] = CACHE
    talk.messages[0]["content"] = [text("the task")]
    talk.messages[2]["content"][0]["content"] = [text("done")]
    assert talk.refusal() == ""


def change_system(talk: Talk) -> None:
    talk.body["system"] = "Be very brief."


def change_tools(talk: Talk) -> None:
    talk.body["tools"][0]["description"] = "Run it!"


def change_the_task(talk: Talk) -> None:
    talk.messages[0]["content"] = "another task"


def add_to_the_task(talk: Talk) -> None:
    talk.messages[0]["content"] = [text("the task"), text("and more")]


def drop_the_first_thinking(talk: Talk) -> None:
    del talk.messages[1]["content"][0]


CHANGES = {f.__name__: f for f in (change_system, change_tools, change_the_task, add_to_the_task)}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_thinking_behind_a_change_is_refused(talk: Talk, change: Callable[[Talk], None]) -> None:
    change(talk)
    assert talk.refusal().startswith("messages.1.content.0: Invalid `signature` in `thinking` block")
    assert BOUND in talk.refusal()
    assert BOUND in talk.api.refused[0]


def test_only_what_stands_behind_a_change_is_touched_by_it(talk: Talk) -> None:
    talk.messages[2]["content"][0]["content"] = "[cleared]"
    assert talk.refusal().startswith("messages.3.content.0") and BOUND in talk.refusal()
    for message in talk.messages[3:]:
        if message["role"] == "assistant":
            message["content"] = [b for b in message["content"] if "thinking" not in b["type"]]
    assert talk.refusal() == ""


def test_thinking_left_out_breaks_the_thinking_behind_it(talk: Talk) -> None:
    drop_the_first_thinking(talk)
    assert talk.refusal().startswith("messages.3.content.0") and BOUND in talk.refusal()


def test_without_any_thinking_everything_may_change(talk: Talk) -> None:
    change_the_task(talk)
    for message in talk.messages[1::2]:
        message["content"] = [b for b in message["content"] if "thinking" not in b["type"]]
    checked = talk.api.thinking_checked
    assert talk.refusal() == ""
    assert talk.api.thinking_checked == checked
    talk.turn()
    assert talk.refusal() == ""  # what was thought after the change is bound to the changed conversation


@pytest.mark.parametrize(
    ("place", "fields", "reason"),
    [
        ((1, 0), {"signature": "forged"}, "messages.1.content.0: Invalid `signature` in `thinking` block"),
        ((3, 0), {"thinking": "Hm!"}, "messages.3.content.0: Invalid `signature` in `thinking` block"),
        ((3, 2), {"data": "forged"}, "messages.3.content.2: Invalid `data` in `redacted_thinking` block"),
    ],
)
def test_thinking_that_was_never_sent_is_refused(
    talk: Talk, place: tuple[int, int], fields: dict[str, str], reason: str
) -> None:
    message, block = place
    talk.messages[message]["content"][block] |= fields
    assert talk.refusal() == reason


def test_thinking_of_another_message_is_refused(talk: Talk) -> None:
    first, second = talk.messages[1]["content"], talk.messages[3]["content"]
    first[0], second[0] = second[0], first[0]
    assert BOUND in talk.refusal()


def test_a_blank_text_that_is_dropped_takes_the_thinking_behind_it_along() -> None:
    with MessagesAPI([Reply(thinking(), text(" "), thinking(), text("so"))]) as api:
        talk = Talk(api)
        talk.turn()
        reply = talk.messages[1]["content"]
        assert "non-whitespace" in talk.refusal()
        del reply[1]
        assert talk.refusal().startswith("messages.1.content.1") and BOUND in talk.refusal()
        del reply[1]
        assert talk.refusal() == ""


def test_arguments_streamed_oddly_come_back_parsed() -> None:
    with MessagesAPI([Reply(call("bash", raw=' {"b": 1,\n "a":"x"} '), thinking(), "so")]) as api:
        talk = Talk(api)
        talk.messages.append(answered(api, streamed(api, "the task", system="Be brief.", tools=[BASH])))
        use = talk.messages[1]["content"][1]
        assert use["input"] == {"a": "x", "b": 1}
        talk.messages.append({"role": "user", "content": [RESULT | {"tool_use_id": use["id"]}]})
        assert talk.refusal() == ""
        assert api.thinking_checked == 2


def test_empty_signatures_of_local_servers_may_repeat() -> None:
    same = Reply(thinking("Hm.", signature=""), call("bash"), end="llama")
    with MessagesAPI([same] * 3) as api:
        talk = Talk(api)
        for _ in range(3):
            talk.turn()
        assert talk.refusal() == ""
        assert api.thinking_checked == 1 + 2 + 3
