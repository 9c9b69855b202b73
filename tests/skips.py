"""Where CI is set nothing may be skipped: a missing component is then a failure, not a reason."""

from __future__ import annotations

import os

import pytest


def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("CI") and reporter is not None and reporter.stats.get("skipped"):
        reporter.write_line("CI is set, so a skipped test is a failure", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
