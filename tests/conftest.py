"""Every test that takes `serve` also asserts that the stand-in had nothing to refuse."""

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from messages_api import MessagesAPI

# A run in the background, or under nohup, inherits ignored signals, and would hand them on.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)


def pytest_configure(config: Any) -> None:
    config.addinivalue_line("markers", "slow: only in the long setting, with AGENT_EXAMPLES set")


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """The long setting plays many random conversations, and the tests that are marked slow."""
    if "AGENT_EXAMPLES" not in os.environ:
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="only in the long setting"))


@pytest.fixture
def serve() -> Iterator[Callable[..., MessagesAPI]]:
    """serve(script, **options) starts a stand-in; at the end all are asked for invalid requests."""
    started: list[MessagesAPI] = []

    def start(script: Any = (), **options: Any) -> MessagesAPI:
        api = MessagesAPI(script, **options)
        started.append(api.__enter__())
        return started[-1]

    yield start
    for api in started:
        api.__exit__(None, None, None)
    assert [reason for api in started for reason in api.refused] == []
