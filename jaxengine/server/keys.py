"""The keys that open the server: from a setting, a file, or the environment."""

from __future__ import annotations

import os
from dataclasses import dataclass

from jaxengine.config import ServerConfig

_MOST = 4096  # bytes of a key file
# setting -> environment variables that stand for it, the first one that is set
_VARIABLES = {
    "api_key": ("JAXENGINE_API_KEY", "VLLM_API_KEY"),
    "admin_api_key": ("JAXENGINE_ADMIN_API_KEY",),
}


@dataclass(frozen=True)
class Keys:
    """`api` opens all routes but the admin's, and these too where `admin` is None."""

    api: bytes | None = None
    admin: bytes | None = None


def keys_of(config: ServerConfig) -> Keys:
    """The keys of a server, or None where it has none. Raises ValueError for a key that is empty
    or a file that cannot be read: a mistake must not open the server."""
    return Keys(_key(config, "api_key"), _key(config, "admin_api_key"))


def _key(config: ServerConfig, name: str) -> bytes | None:
    given, file = getattr(config, name), getattr(config, f"{name}_file")
    if given is not None:
        return _checked(given, name)
    if file is not None:
        return _checked(_first_line(file, f"{name}_file"), f"the first line of {file}")
    for variable in _VARIABLES[name]:
        if variable in os.environ:
            return _checked(os.environ[variable], f"the environment variable {variable}")
    return None


def _checked(key: str, where: str) -> bytes:
    if not key.strip():
        raise ValueError(f"{where} must not be empty: it is a key of the server")
    try:
        return key.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{where} is not valid Unicode: it is a key of the server") from None


def _first_line(path: str, name: str) -> str:
    try:
        with open(path, "rb") as file:
            return file.read(_MOST).split(b"\n", 1)[0].strip().decode()
    except OSError as error:
        raise ValueError(f"{name} {path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{name} {path} is not UTF-8 text") from None
