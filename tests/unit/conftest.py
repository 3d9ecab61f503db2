"""Failed assertions of the helpers show their values, like those of tests; and the fixture of the command line."""

import pytest

pytest.register_assert_rewrite("unit.helpers", "unit.cli_rig")

from unit.cli_rig import command  # noqa: E402 - only now are its assertions rewritten

__all__ = ["command"]
