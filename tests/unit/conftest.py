"""Failed assertions of the helpers show their values, like those of tests."""

import pytest

pytest.register_assert_rewrite("unit.helpers")
