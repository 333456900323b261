"""docs/troubleshooting.md: each message is one that the code prints, each has something to do."""

from __future__ import annotations

import re

from messages import printed
from pages import read, tables

ROWS = [row for table in tables(read("docs/troubleshooting.md")) for row in table]
MESSAGES = [re.findall(r"`([^`]+)`", row[0]) for row in ROWS]


def test_there_are_many() -> None:
    assert len(ROWS) >= 40
    assert all(len(row) == 3 and all(row) for row in ROWS), "message, cause, what to do"
    assert all(messages for messages in MESSAGES)


def test_messages_are_of_the_code() -> None:
    for message in {message for messages in MESSAGES for message in messages}:
        assert len(message.replace("...", "")) >= 12, f"{message}: too short to tell anything"
        assert printed(message), message


def test_other_messages_are_noticed() -> None:
    assert not printed("the flux capacitor ... is not charged")
    assert printed("the engine process ended (exit code ...)")
