"""Settings that are written as JSON on the command line and as an object in YAML and Python."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def json_object(setting: str | Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The object that the setting `name` holds, or is the JSON text of. Raises ValueError."""
    if isinstance(setting, str):
        try:
            setting = json.loads(setting)
        except json.JSONDecodeError as error:
            raise ValueError(f"{name} is not JSON: {error}") from None
    if not isinstance(setting, Mapping):
        raise ValueError(f"{name} must be a JSON object, got {setting!r}")
    return setting
