from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import kvops_connectors

CONNECTORS = Path(kvops_connectors.__file__).parents[1]


def test_the_package_imports_from_a_plain_path_without_any_dependency() -> None:
    # -S leaves site-packages out, so nothing but the standard library and the folder can be imported.
    code = f"import sys; sys.path.insert(0, {str(CONNECTORS)!r}); import kvops_connectors; print('ok')"
    result = subprocess.run([sys.executable, "-S", "-E", "-c", code], capture_output=True, text=True, check=False)
    assert result.stdout == "ok\n", result.stderr


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = kvops_connectors.Nothing
