"""A few random histories in every test run; `python -m tests.properties.histories` runs thousands."""

from __future__ import annotations

import os

from tests.properties.histories import Histories, history_settings

TestHistories = Histories.TestCase
TestHistories.settings = history_settings(int(os.environ.get("HISTORIES", "40")))
