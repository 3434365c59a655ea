"""Every test that takes `api` also asserts that the stand-in had nothing to refuse."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from messages_api import MessagesAPI


@pytest.fixture
def serve() -> Iterator[Callable[..., MessagesAPI]]:
    """serve(script, **options) starts a stand-in; at the end all of them are asked for invalid requests."""
    started: list[MessagesAPI] = []

    def start(script: Any = (), **options: Any) -> MessagesAPI:
        api = MessagesAPI(script, **options)
        started.append(api.__enter__())
        return started[-1]

    yield start
    for api in started:
        api.__exit__(None, None, None)
    assert [reason for api in started for reason in api.refused] == []
