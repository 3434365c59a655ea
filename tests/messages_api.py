"""A strict stand-in for the Messages API: real HTTP on loopback, scripted replies, no model.

    from messages_api import Fault, MessagesAPI, Reply, call, text

    script = [Reply(text("Let me look."), call("bash", {"command": "ls"})), Fault(529), "Two."]
    with MessagesAPI(script) as api:
        ...                              # run the program under test against api.url
    assert not api.refused               # every request was valid
    assert len(api.requests) == 3        # what it sent: .body, .headers, .messages, .time

Each request is judged first, and refused like the real API refuses it (400, in its words). Only an
accepted one takes the next item of the script: a string, a Reply, a Fault, or a function of the
Request that returns one of these. A used-up script answers "ok". The script may also be one such
function.

    1 The script            3 What stands before    5 A reply as events
    2 What is refused       4 The server            6 HTTP
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
import secrets
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from itertools import repeat
from socketserver import ThreadingTCPServer
from typing import Any, Union

Block = dict[str, Any]  # one content block: {"type": "text", "text": "..."}
Event = dict[str, Any]  # one event of a stream: {"type": "message_stop"}
Item = Union[str, "Reply", "Fault", "Callable[[Request], Item | None]"]
Script = Union[Iterable[Item], "Callable[[Request], Item | None]"]

SUMMARY_MARK = "Write the summary"  # the words by which a request for a summary is known


# ================================== 1  The script ==================================
# A reply is a list of blocks, as the API has them, and how they are to be sent.

AUTO = "auto"
ENDS = (
    *("stop", "no_stop", "no_reason", "reset", "error", "stall", "llama", "garbage"),
    *("late_error", "late_garbage", "late_stall"),
)
THINKING = ("thinking", "redacted_thinking")


class Made(Block):
    """A block made here: an ordinary dict that also knows how it is to be sent."""

    raw: str | None = None  # the arguments of a call, exactly as they are streamed
    key = ""  # the field that was made up; a second use of the block gets another value


def made(key: str, value: str | None, **fields: Any) -> Made:
    block = Made(fields | {key: fresh(key) if value is None else value})
    block.key = key if value is None else ""
    return block


def fresh(key: str) -> str:
    return "toolu_" + secrets.token_hex(12) if key == "id" else secrets.token_urlsafe(60)


def text(words: str) -> Block:
    return Made(type="text", text=words)


def call(
    name: str, args: Block | None = None, *, id: str | None = None, raw: str | None = None
) -> Block:
    """A tool call. `raw` is streamed as it stands, so the arguments can be broken JSON."""
    arguments = json.dumps(args or {}) if raw is None else raw
    block = made("id", id, type="tool_use", name=name, input={})
    block.raw = arguments
    with suppress(ValueError):
        block["input"] = json.loads(arguments or "{}")
    return block


def thinking(words: str = "", signature: str | None = None) -> Block:
    return made("signature", signature, type="thinking", thinking=words)


def redacted(data: str | None = None) -> Block:
    return made("data", data, type="redacted_thinking")


class Reply:
    """One reply of the model. A string among the blocks is text.

    `end` says how the stream ends:
        "stop"       as it should
        "no_stop"    cleanly, but the last block is not stopped and no stop reason comes
        "no_reason"  cleanly, all blocks are stopped, but no stop reason comes
        "reset"      the connection breaks in the middle of the last block
        "error"      an overloaded_error event comes in place of the stop reason
        "stall"      after the content nothing more comes until the client hangs up
        "llama"      as it should, in the dialect of llama.cpp: blocks are stopped only at the end,
                     a call starts without `input`, thinking without `signature`, pings are comments
        "garbage"    an event in the middle of the last block is no JSON
        "late_..."   as it should; then, after message_stop, there comes an error event, an event
                     that is no JSON, or nothing, with the connection left open
    """

    def __init__(
        self,
        *blocks: Block | str | list[Block | str],
        stop_reason: str | None = AUTO,  # AUTO: "tool_use" if there is a call, else "end_turn"
        usage: dict[str, Any] | None = None,  # numbers that replace the counted ones
        delay: float = 0.0,  # seconds before the headers
        pace: float = 0.0,  # seconds between events
        end: str = "stop",
        chunk: int = 20,  # characters in one delta
        thinks: bool | None = None,  # None: as the server
    ) -> None:
        if end not in ENDS:
            raise ValueError(f"end={end!r} is none of {', '.join(ENDS)}")
        flat = [block for part in blocks for block in (part if isinstance(part, list) else [part])]
        self.blocks = [text(block) if isinstance(block, str) else block for block in flat]
        self.stop_reason, self.usage, self.thinks = stop_reason, usage or {}, thinks
        self.delay, self.pace, self.end, self.chunk = delay, pace, end, chunk


FAULTS = {
    400: "invalid_request_error",
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    529: "overloaded_error",
}


@dataclass
class Fault:
    """An answer that is no reply. Status 0 closes the connection without a word."""

    status: int
    message: str = "a scripted fault"
    type: str | None = None  # None: by status
    headers: dict[str, str] | None = None
    body: bytes | str | None = None  # None: the error as JSON
    content_type: str = "application/json"

    def payload(self) -> bytes:
        if self.body is not None:
            return self.body.encode() if isinstance(self.body, str) else self.body
        kind = self.type or FAULTS.get(self.status, "api_error")
        return utf8({"type": "error", "error": {"type": kind, "message": self.message}})


@dataclass
class Request:
    """One POST to the messages path, as it came in."""

    path: str
    headers: dict[str, str] = field(repr=False)  # lower-case names
    body: dict[str, Any] = field(repr=False)
    time: float = field(default_factory=time.monotonic)
    problem: str = ""  # why validation refused it
    status: int = 0  # what it was answered with
    closed_early: bool = False  # the client hung up before the reply was complete

    @property
    def messages(self) -> list[dict[str, Any]]:
        return list(self.body.get("messages", []))


def is_summary(request: Request) -> bool:
    """Does the last text of the request ask for a summary?"""
    last = as_blocks(request.messages[-1]["content"]) if request.messages else []
    texts = [block["text"] for block in last if block["type"] == "text"]
    return bool(texts) and SUMMARY_MARK in texts[-1]


# ================================ 2  What is refused ================================
# Tables say which fields there are ("?": may be missing); then come the rules. A rule is a
# generator of complaints, and only the first complaint is ever asked for: what follows a
# `yield` may rely on its absence. Two rules are ours: the real API merges neighbours of the
# same role, and it knows more kinds of blocks and tools, all of them its own server's.

Fields = dict[str, Any]

WORDS: dict[Any, str] = {
    str: "string",
    int: "integer",
    bool: "boolean",
    list: "list",
    dict: "dictionary",
}
REQUEST: Fields = {
    "model": str,
    "max_tokens": int,
    "messages": list,
    "system?": str | list,
    "tools?": list,
    "tool_choice?": dict,
    "thinking?": dict,
    "stream?": bool,
    "cache_control?": dict | None,
    "output_config?": dict,
    "stop_sequences?": list,
    "metadata?": dict,
    "service_tier?": str,
    "container?": str | dict | None,
    "diagnostics?": dict | None,
    "inference_geo?": str | None,
    "speed?": str | None,
}
MESSAGE: Fields = {"role": str, "content": str | list}
TOOL: Fields = {
    "name": str,
    "input_schema": dict,
    "description?": str,
    "type?": str | None,
    "strict?": bool,
    "cache_control?": dict | None,
    "allowed_callers?": list,
    "defer_loading?": bool,
    "eager_input_streaming?": bool | None,
    "input_examples?": list,
}
CACHE_CONTROL: Fields = {"type": str, "ttl?": str}
BLOCK: Fields = {"type": str, "cache_control?": dict | None}
BLOCKS: dict[str, Fields] = {
    "text": BLOCK | {"text": str, "citations?": list | None},
    "image": BLOCK | {"source": dict, "transformations?": dict | None},
    "document": BLOCK
    | {"source": dict, "citations?": dict | None, "context?": str | None, "title?": str | None},
    "search_result": BLOCK | {"content": list, "source": str, "title": str, "citations?": dict},
    "tool_use": BLOCK
    | {"id": str, "name": str, "input": dict, "caller?": dict, "toolset_name?": str | None},
    "tool_result": BLOCK
    | {"tool_use_id": str, "content?": str | list, "is_error?": bool, "toolset_name?": str | None},
    "thinking": {"type": str, "thinking": str, "signature": str},
    "redacted_thinking": {"type": str, "data": str},
}
SHOWN = ("text", "image", "document", "search_result")
ALLOWED = {
    "system": ("text",),
    "user": (*SHOWN, "tool_result"),
    "assistant": ("text", "tool_use", *THINKING),
    "tool_result": SHOWN,
}
ID = "^[a-zA-Z0-9_-]{1,64}$"
NAME = "^[a-zA-Z0-9_-]{1,128}$"


def problem(body: Any, max_output: int = 128_000) -> str:
    """Why the real API would refuse this request; "" if it would not."""
    try:
        json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
    except ValueError as error:  # a lone surrogate, NaN
        return f"The request body is not valid JSON: {error}"
    return next(complaints(body, max_output), "")


def complaints(body: Any, max_output: int) -> Iterator[str]:
    if not isinstance(body, dict):
        yield "The request body is not an object"
    for name in {"temperature", "top_p", "top_k"} & body.keys():
        yield f"`{name}` is deprecated for this model."
    yield from shape(body, REQUEST)
    most = body["max_tokens"]
    if not body["model"]:
        yield "model: String should have at least 1 character"
    if most < 1 or most is True:
        yield "max_tokens: Input should be greater than or equal to 1"
    if most > max_output:
        allowed = "which is the maximum allowed number of output tokens"
        yield f"max_tokens: {most} > {max_output}, {allowed}"
    yield from settings(body)
    yield from content(body.get("system", []), "system", "system")
    yield from tools(body.get("tools", []))
    yield from conversation(body["messages"])
    yield from pairs(body["messages"])
    yield from cache_controls(body)


def shape(thing: Any, fields: Fields, where: str = "") -> Iterator[str]:
    """The fields of the table, no others, each of its type."""
    if not isinstance(thing, dict):
        yield f"{where}: Input should be an object"
    prefix = where and where + "."
    for name, kind in fields.items():
        key = name.rstrip("?")
        if key not in thing and name == key:
            yield f"{prefix}{key}: Field required"
        if key in thing and not isinstance(thing[key], kind):
            yield f"{prefix}{key}: Input should be a valid {WORDS.get(kind, kind)}"
    for key in thing:
        if key not in fields and f"{key}?" not in fields:
            yield f"{prefix}{key}: Extra inputs are not permitted"


def settings(body: Block) -> Iterator[str]:
    """Current models think by themselves, and cannot be forced to call a tool."""
    choice = body.get("tool_choice", {"type": "auto"}).get("type")
    if choice not in ("auto", "none"):
        yield f"tool_choice: type `{choice}` is not supported for this model. Use `auto` or `none`."
    mode = body.get("thinking", {"type": "adaptive"}).get("type")
    if mode not in ("adaptive", "between_tools"):
        wrong = f'"thinking.type.{mode}" is not supported for this model.'
        yield f'{wrong} Use "thinking.type.adaptive".'


def tools(listed: list[Any]) -> Iterator[str]:
    for i, tool in enumerate(listed):
        where = f"tools.{i}.custom"
        yield from shape(tool, TOOL, where)
        yield from pattern(tool["name"], NAME, f"{where}.name")
        if tool.get("type", "custom") not in (None, "custom"):
            tag = tool["type"]
            yield f"tools.{i}: Input tag '{tag}' found using 'type' does not match 'custom'"
        if tool["input_schema"].get("type") != "object":
            yield f"{where}.input_schema.type: Input should be 'object'"
    if len({tool["name"] for tool in listed}) < len(listed):
        yield "tools: Tool names must be unique."


def conversation(messages: list[Any]) -> Iterator[str]:
    """From user to user, in turns, and nobody says nothing."""
    if not messages:
        yield "messages: at least one message is required"
    for i, message in enumerate(messages):
        yield from shape(message, MESSAGE, f"messages.{i}")
        if message["role"] not in ("user", "assistant"):
            yield f"messages.{i}.role: Input should be 'user' or 'assistant'"
        if i and message["role"] == messages[i - 1]["role"]:
            twice = f"found `{message['role']}` twice in a row"
            yield f"messages.{i}: roles must alternate, but {twice}"
        if not message["content"]:
            yield f"messages.{i}: all messages must have non-empty content"
        yield from content(message["content"], message["role"], f"messages.{i}.content")
        last = as_blocks(message["content"])[-1]["type"]
        if last in THINKING:
            yield f"messages.{i}: The final block in an assistant message cannot be `{last}`."
    if messages[0]["role"] != "user":
        yield 'messages: first message must use the "user" role'
    if messages[-1]["role"] != "user":
        prefill = "This model does not support assistant message prefill."
        yield f"{prefill} The conversation must end with a user message."


def content(parts: str | list[Any], place: str, where: str) -> Iterator[str]:
    """Text, or blocks of the kinds that may stand in this place, each of them right in itself."""
    if isinstance(parts, str):
        yield from not_blank(parts, where)
        return
    for j, block in enumerate(parts):
        here = f"{where}.{j}"
        kind = str(block.get("type")) if isinstance(block, dict) else ""
        if kind not in BLOCKS:
            unknown = f"Input tag '{kind}' found using 'type'"
            yield f"{here}: {unknown} does not match any of the expected tags"
        if kind not in ALLOWED[place]:
            yield f"{here}: `{kind}` blocks are not allowed in `{place}` content"
        yield from shape(block, BLOCKS[kind], f"{here}.{kind}")
        if kind == "text":
            yield from not_blank(block["text"], f"{here}.text")
        if kind == "tool_use":
            yield from pattern(block["id"], ID, f"{here}.tool_use.id")
            yield from pattern(block["name"], NAME, f"{here}.tool_use.name")
        if kind == "tool_result":
            yield from result(block, f"{here}.tool_result")


def result(block: Block, where: str) -> Iterator[str]:
    """A tool may have nothing to say, but not when it failed."""
    said = block.get("content", "")
    silent = not said.strip() if isinstance(said, str) else not said
    if silent and block.get("is_error"):
        yield f"{where}: content cannot be empty if `is_error` is true"
    if not silent:
        yield from content(said, "tool_result", f"{where}.content")


def not_blank(words: str, where: str) -> Iterator[str]:
    if not words:
        yield f"{where}: text content blocks must be non-empty"
    if not words.strip():
        yield f"{where}: text content blocks must contain non-whitespace text"


def pattern(value: str, wanted: str, where: str) -> Iterator[str]:
    if not re.fullmatch(wanted[1:-1], value):
        yield f"{where}: String should match pattern '{wanted}'"


def pairs(messages: list[Block]) -> Iterator[str]:
    """Every call is answered once, in the next message, before anything else is said there."""
    seen: set[str] = set()
    calls: list[str] = []
    for i, message in enumerate(messages):
        answered: list[str] = []
        open_calls, calls = calls, []
        for j, block in enumerate(as_blocks(message["content"])):
            here = f"messages.{i}.content.{j}"
            if block["type"] == "tool_use":
                if block["id"] in seen:
                    yield f"{here}: `tool_use` ids must be unique"
                seen.add(block["id"])
                calls.append(block["id"])
            if block["type"] == "tool_result":
                answer = block["tool_use_id"]
                if answer not in open_calls:
                    found = "unexpected `tool_use_id` found in `tool_result` blocks"
                    yield f"{here}: {found}: {answer}"
                if answer in answered:
                    found = "each tool_use must have a single result. Found multiple for"
                    yield f"{here}: {found}: {answer}"
                if j > len(answered):  # something before it was not a result
                    yield f"{here}: `tool_result` blocks must come before all other content"
                answered.append(answer)
        if missing := ", ".join(id for id in open_calls if id not in answered):
            found = "`tool_use` ids were found without `tool_result` blocks immediately after"
            yield f"messages.{i - 1}: {found}: {missing}."


def cache_controls(body: Block) -> Iterator[str]:
    found = [
        holder["cache_control"]
        for holder in holders(body)
        if holder.get("cache_control") is not None
    ]
    for control in found:
        yield from shape(control, CACHE_CONTROL, "cache_control")
        if control["type"] != "ephemeral" or control.get("ttl", "5m") not in ("5m", "1h"):
            yield "cache_control: Input should be 'ephemeral', with a ttl of '5m' or '1h'"
    if len(found) > 4:
        yield f"A maximum of 4 blocks with cache_control may be provided. Found {len(found)}."


def holders(body: Block) -> Iterator[Block]:
    """Everything in a request that may hold a `cache_control`."""
    yield body
    yield from body.get("tools", [])
    yield from as_blocks(body.get("system", []))
    for message in body["messages"]:
        for block in as_blocks(message["content"]):
            yield block
            if block["type"] == "tool_result":
                yield from as_blocks(block.get("content", []))


def header_problem(headers: dict[str, str]) -> str:
    if "anthropic-version" not in headers:
        return "anthropic-version: header is required"
    # The real API takes it; a program for every server must not need it.
    if "anthropic-beta" in headers:
        return f"anthropic-beta: unexpected value(s) `{headers['anthropic-beta']}`"
    key, token = headers.get("x-api-key"), headers.get("authorization")
    if key and token and token != f"Bearer {key}":
        return "Only one credential may be sent: `x-api-key` and `authorization` differ"
    return ""


# ============================== 3  What stands before ==============================
# A thinking block is bound to everything before it: system, tools, messages, and the blocks
# before it in its own message. So is an entry of the prompt cache. One rolling hash over the
# blocks serves both. What may change without changing anything is left out of it: a
# `cache_control`, a null, the order of keys, a string where one text block could be.


def as_blocks(parts: str | list[Block]) -> list[Block]:
    return [text(parts)] if isinstance(parts, str) else parts


def bare(block: Block) -> Block:
    kept = {
        key: value for key, value in block.items() if key != "cache_control" and value is not None
    }
    if kept.get("type") == "tool_result":
        kept["content"] = [bare(part) for part in as_blocks(kept.get("content", []))]
    return kept


def fingerprint(thing: Any) -> str:
    return json.dumps(thing, sort_keys=True)


class Prefix:
    """The rolling hash of a request; later it goes on over the blocks of the reply."""

    def __init__(self, body: Block) -> None:
        system, tools = as_blocks(body.get("system", [])), body.get("tools", [])
        self._hash = hashlib.sha256(
            fingerprint([list(map(bare, system)), list(map(bare, tools))]).encode()
        )
        # place, block, hash of all that stands before it
        self.steps: list[tuple[str, Block, str]] = []
        for i, message in enumerate(body["messages"]):
            for j, block in enumerate(as_blocks(message["content"])):
                self.steps.append((f"messages.{i}.content.{j}", block, self.digest))
                self.add(message["role"], block)

    def add(self, role: str, block: Block) -> None:
        self._hash.update(fingerprint([role, bare(block)]).encode())

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()


# ================================== 4  The server ==================================
# Judge the request, record it, decide the answer. All of that is done before the first byte
# of the answer is sent.

# The last part is for a Reply: one whole body, or events.
Answer = tuple[Request, Reply | Fault, list[bytes]]


class MessagesAPI:
    """The stand-in, a context manager. See the top of the file.

    thinks      every reply starts with a thinking block (its text empty, as current models have it)
                unless its own first block is one; so a Reply() that is to be quite empty needs
                thinks=False
    window      in tokens: a longer request gets 400 "prompt is too long" and takes nothing from the
                script
    max_output  the largest max_tokens
    usage       True: as Anthropic. "late": as LiteLLM, zeros first, all numbers in message_delta.
                False: no numbers, all null. Reads from the cache are counted for requests with a
                cache_control, by the longest earlier request that this one continues
    ratio       tokens for every 4 bytes of JSON
    models      what GET /v1/models lists, or a Fault; None: there is no such path. May be changed
    closes      a connection takes one request: the next one on it is dropped without a word, though
                the answer before did not say so (as llama-server does now and then)
    """

    def __init__(
        self,
        script: Script = (),
        *,
        thinks: bool = True,
        window: int | None = None,
        max_output: int = 128_000,
        usage: bool | str = True,
        ratio: float = 1.0,
        models: list[dict[str, Any]] | Fault | None = None,
        closes: bool = False,
        port: int = 0,
    ) -> None:
        self.thinks, self.window, self.max_output = thinks, window, max_output
        self.usage, self.ratio = usage, ratio
        self.models, self.closes = models, closes
        self.listings: list[dict[str, str]] = []  # the headers of each request for the models
        self.requests: list[Request] = []
        self.refused: list[str] = []  # by validation; not by the window or a scripted fault
        self.other_paths: list[str] = []
        self.thinking_checked = 0  # thinking blocks that came back, known and in their place
        # raised by functions of the script; raised again on leaving
        self.errors: list[BaseException] = []
        self.closing = False
        self._script: Iterator[Item] = repeat(script) if callable(script) else iter(script)
        self._lock = threading.Lock()
        # a thinking block that was sent: what may stand before it
        self._thoughts: dict[str, set[str]] = {}
        self._cached: dict[tuple[str, str], int] = {}  # model and hash of a request: its tokens
        self._used: set[str] = set()  # ids and signatures that have been sent
        self._server = Server(self, port)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.02,), daemon=True
        )
        self._thread.start()

    def __enter__(self) -> MessagesAPI:  # noqa: PYI034 - `Self` is younger than Python 3.10
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close()
        if self.errors and error is None:
            raise self.errors[0]

    def close(self) -> None:
        self.closing = True
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def receive(self, path: str, headers: dict[str, str], raw: bytes) -> Answer:
        """Record a request and decide what it is answered with."""
        request, prefix = self._judged(path, headers, raw)
        if prefix is None:
            return request, Fault(400, request.problem), []
        item = self._next_item(request)
        if isinstance(item, Fault):
            request.status = item.status
            return request, item, []
        request.status = 200
        with self._lock:
            usage = self._input_usage(request.body, prefix)
            blocks = self._blocks(item, prefix)
        usage["output_tokens"] = max(1, self._tokens(blocks))
        return request, item, self._sent(item, request.body, blocks, usage)

    def _judged(
        self, path: str, headers: dict[str, str], raw: bytes
    ) -> tuple[Request, Prefix | None]:
        """The request on record, and its prefix if it is accepted."""
        try:
            body, broken = json.loads(raw.decode()), ""
        except ValueError as error:
            body, broken = {}, f"The request body is not valid JSON: {error}"
        found = broken or header_problem(headers) or problem(body, self.max_output)
        prefix = None if found else Prefix(body)
        with self._lock:
            found = self._thinking_problem(prefix) if prefix else found
            request = Request(path, headers, body if isinstance(body, dict) else {}, problem=found)
            self.requests.append(request)
            if found:
                self.refused.append(found)
                request.status = 400
        return request, None if found else prefix

    def _thinking_problem(self, prefix: Prefix) -> str:
        """Thinking comes back as it was sent, and to where it was sent."""
        came_back = [step for step in prefix.steps if step[1]["type"] in THINKING]
        for where, block, before in came_back:
            proof = "signature" if block["type"] == "thinking" else "data"
            invalid = f"{where}: Invalid `{proof}` in `{block['type']}` block"
            bound_to = self._thoughts.get(fingerprint(block))
            if bound_to is None:
                return invalid
            if before not in bound_to:
                return (
                    f"{invalid}. The block is bound to a different conversation. Remove the block."
                )
        self.thinking_checked += len(came_back)
        return ""

    def _next_item(self, request: Request) -> Reply | Fault:
        counted = self._request_tokens(request.body)
        if self.window is not None and counted > self.window:
            return Fault(400, f"prompt is too long: {counted} tokens > {self.window} maximum")
        with self._lock:
            item = next(self._script, None)
        try:
            while callable(item):
                item = item(request)
        except BaseException as error:  # noqa: BLE001 - what pytest.fail() raises is no Exception
            self.errors.append(error)
            return Fault(500, f"the script failed: {error!r}")
        if isinstance(item, (Reply, Fault)):
            return item
        return Reply("ok" if item is None else item)

    def _tokens(self, thing: Any) -> int:
        return int(len(utf8(thing)) // 4 * self.ratio)

    def _request_tokens(self, body: Block) -> int:
        return self._tokens([body[key] for key in ("system", "tools", "messages") if key in body])

    def _input_usage(self, body: Block, prefix: Prefix) -> Block:
        tokens, read, write = self._request_tokens(body), 0, 0
        if any(holder.get("cache_control") for holder in holders(body)):
            places = [before for _, _, before in prefix.steps] + [prefix.digest]
            read = min(tokens, max(self._cached.get((body["model"], place), 0) for place in places))
            # a few tokens always stand behind the last breakpoint
            write = max(0, tokens - read - 3)
            self._cached[body["model"], prefix.digest] = tokens
        rest = tokens - read - write
        return {
            "input_tokens": rest,
            "cache_creation_input_tokens": write,
            "cache_read_input_tokens": read,
        }

    def _blocks(self, reply: Reply, prefix: Prefix) -> list[Block]:
        """The blocks as they are sent; of thinking it is remembered what stands before it."""
        blocks = [copy.copy(block) for block in reply.blocks]
        thinks = self.thinks if reply.thinks is None else reply.thinks
        if thinks and not (blocks and blocks[0].get("type") in THINKING):
            blocks.insert(0, thinking())
        for block in blocks:
            if isinstance(block, Made) and block.key:
                if block[block.key] in self._used:
                    block[block.key] = fresh(block.key)
                self._used.add(block[block.key])
            if block.get("type") in THINKING:
                self._thoughts.setdefault(fingerprint(block), set()).add(prefix.digest)
            prefix.add("assistant", block)
        return blocks

    def _sent(self, reply: Reply, body: Block, blocks: list[Block], counted: Block) -> list[bytes]:
        usage = (counted if self.usage else dict.fromkeys(counted)) | reply.usage
        first, last = usage | {"output_tokens": 1 if self.usage else None}, usage
        if self.usage == "late":
            first = dict.fromkeys(usage, 0)
        else:
            last = {"output_tokens": usage["output_tokens"]}
        has_call = any(block.get("type") == "tool_use" for block in blocks)
        reason = reply.stop_reason
        if reason == AUTO:
            reason = "tool_use" if has_call else "end_turn"
        message: Block = {
            "id": "msg_" + secrets.token_hex(12),
            "type": "message",
            "role": "assistant",
        }
        message |= {"model": body["model"], "content": blocks, "usage": usage}
        message |= {"stop_reason": reason, "stop_sequence": None}
        return stream(reply, message, first, last) if body.get("stream") else [utf8(message)]


# ============================== 5  A reply as events ==============================

OVERLOADED = {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}
GARBAGE = b'event: content_block_delta\ndata: {"type": "content_block_de\n\n'


def stream(reply: Reply, message: Block, first_usage: Block, last_usage: Block) -> list[bytes]:
    """All the events that are sent, up to the end that the script wants."""
    end = reply.end
    each = [block_events(i, block, reply) for i, block in enumerate(message["content"])]
    if end == "llama":
        body = [event for events in each for event in events[:-1]] + [events[-1] for events in each]
    else:
        body = [event for events in each for event in events]
    middle = len(body) - len(each[-1]) // 2 if each else 0  # of the last block
    start = message | {"content": [], "stop_reason": None, "usage": first_usage}
    delta = {"stop_reason": message["stop_reason"], "stop_sequence": None}

    head = [sse({"type": "message_start", "message": start})]
    head.append(b": ping\n\n" if end == "llama" else sse({"type": "ping"}))
    sent = [sse(event) for event in body]
    tail = [sse({"type": "message_delta", "delta": delta, "usage": last_usage})]
    tail.append(sse({"type": "message_stop"}))
    ends = {
        "no_stop": sent[:-1],
        "no_reason": sent,
        "stall": sent,
        "reset": sent[:middle],
        "error": [*sent, sse(OVERLOADED)],
        "garbage": [*sent[:middle], GARBAGE, *sent[middle:], *tail],
        "late_error": [*sent, *tail, sse(OVERLOADED)],
        "late_garbage": [*sent, *tail, GARBAGE],
    }
    return head + ends.get(end, sent + tail)


def block_events(index: int, block: Block, reply: Reply) -> list[Event]:
    """Start, deltas, stop. A block of any other kind is whole in its start."""
    start, deltas = dict(block), []
    if block.get("type") == "text":
        start["text"] = ""
        deltas = pieces("text_delta", "text", block["text"], reply.chunk)
    if block.get("type") == "thinking":
        start |= {"thinking": "", "signature": ""}
        deltas = pieces("thinking_delta", "thinking", block["thinking"], reply.chunk)
        deltas.append({"type": "signature_delta", "signature": block["signature"]})
    if block.get("type") == "tool_use":
        start["input"] = {}
        raw = block.raw if isinstance(block, Made) else None
        arguments = json.dumps(block["input"]) if raw is None else raw
        deltas = pieces("input_json_delta", "partial_json", arguments, reply.chunk)
    if reply.end == "llama":
        start = {key: value for key, value in start.items() if key not in ("input", "signature")}
    return [
        {"type": "content_block_start", "index": index, "content_block": start},
        *({"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas),
        {"type": "content_block_stop", "index": index},
    ]


def pieces(kind: str, key: str, whole: str, size: int) -> list[Event]:
    return [{"type": kind, key: whole[i : i + size]} for i in range(0, len(whole), size)]


def sse(event: Event) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), utf8(event))


def utf8(thing: Any) -> bytes:
    """JSON with its characters as they are; a lone surrogate, which has no UTF-8, as an escape."""
    try:
        return json.dumps(thing, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return json.dumps(thing).encode()


# ==================================== 6  HTTP ====================================


class Server(ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = 64

    def __init__(self, api: MessagesAPI, port: int) -> None:
        self.api = api
        self.connections: set[socket.socket] = set()
        super().__init__(("127.0.0.1", port), Handler)

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, address = super().get_request()
        self.connections.add(connection)
        return connection, address

    def close_request(self, request: Any) -> None:
        self.connections.discard(request)
        super().close_request(request)

    def server_close(self) -> None:
        super().server_close()
        for connection in list(self.connections):
            with suppress(OSError):  # the client was faster
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exc_info()[1]
        if error and not isinstance(error, OSError):  # a client that goes away is nothing to report
            self.api.errors.append(error)


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    answered = False  # has this connection had a request?

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_POST(self) -> None:
        length = int(self.headers.get("content-length", 0))
        raw = self.rfile.read(length)
        # It hung up; or it speaks too modern.
        if len(raw) < length or "transfer-encoding" in self.headers:
            self.close_connection = True
            return self.fault(Fault(411, "a content-length is required"))
        path, api = self.path.partition("?")[0], self.server.api
        if self.answered and api.closes:
            self.close_connection = True
            return
        self.answered = True
        headers = {name.lower(): value for name, value in self.headers.items()}
        if self.command == "GET" and path.endswith("/v1/models") and api.models is not None:
            return self.list_models(headers)
        if self.command != "POST" or not path.endswith("/v1/messages") or "/v1/v1/" in path:
            api.other_paths.append(self.path)
            return self.fault(Fault(404, f"Not found: {self.command} {self.path}"))
        request, answer, parts = api.receive(self.path, headers, raw)
        try:
            if isinstance(answer, Fault):
                self.fault(answer)
            else:
                self.reply(answer, parts, bool(request.body.get("stream")))
        except OSError:
            self.close_connection = True
            request.closed_early = not self.server.api.closing

    def list_models(self, headers: dict[str, str]) -> None:
        api = self.server.api
        api.listings.append(headers)
        if isinstance(api.models, Fault):
            return self.fault(api.models)
        self.whole(200, "application/json", utf8({"object": "list", "data": api.models}), {})

    do_GET = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_POST

    def fault(self, fault: Fault) -> None:
        if fault.status == 0:
            self.close_connection = True
        else:
            self.whole(fault.status, fault.content_type, fault.payload(), fault.headers or {})

    def reply(self, reply: Reply, parts: list[bytes], streamed: bool) -> None:
        self.pause(reply.delay)
        if not streamed:
            return self.whole(200, "application/json", parts[0], {})
        self.head(200, "text/event-stream; charset=utf-8", {"transfer-encoding": "chunked"})
        chunks = [b"%x\r\n%b\r\n" % (len(part), part) for part in parts]
        stalls = reply.end in ("stall", "late_stall")
        if reply.end != "reset" and not stalls:
            # the chunk that says it was all, in one piece with the last event
            chunks[-1] += b"0\r\n\r\n"
        for i, chunk in enumerate(chunks):
            self.pause(reply.pace if i else 0)
            self.wfile.write(chunk)
        if stalls:
            self.pause(None)
        self.close_connection = reply.end == "reset"

    def pause(self, seconds: float | None) -> None:
        """Wait, unless the client hangs up first: before the end of the reply it says nothing."""
        hung_up, _, _ = select.select([self.connection], [], [], seconds)
        if hung_up:
            raise ConnectionAbortedError

    def whole(self, status: int, content_type: str, body: bytes, headers: dict[str, str]) -> None:
        self.head(status, content_type, {"content-length": str(len(body)), **headers})
        self.wfile.write(body)

    def head(self, status: int, content_type: str, headers: dict[str, str]) -> None:
        self.send_response(status)
        self.send_header("content-type", content_type)
        self.send_header("request-id", "req_" + secrets.token_hex(12))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
