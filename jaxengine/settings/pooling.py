"""The settings inside `pooler_config`."""

from __future__ import annotations

from typing import Any

from jaxengine.json_setting import json_object

POOLINGS = ("last", "mean")


def pooling_settings(setting: str | dict[str, Any] | None) -> tuple[str, bool]:
    """(pooling, normalize) of `--pooler-config`. Raises ValueError naming the field."""
    if setting is None:
        return "last", True
    given = json_object(setting, "pooler_config")
    for name in given:
        if name not in ("pooling_type", "normalize"):
            raise ValueError(
                f"pooler_config has no field {name!r}; it has pooling_type and normalize"
            )
    pooling = given.get("pooling_type", "LAST")
    normalize = given.get("normalize", True)
    if not isinstance(pooling, str) or pooling.lower() not in POOLINGS:
        raise ValueError(f"pooler_config.pooling_type must be LAST or MEAN, got {pooling!r}")
    if not isinstance(normalize, bool):
        raise ValueError(f"pooler_config.normalize must be true or false, got {normalize!r}")
    return pooling.lower(), normalize
