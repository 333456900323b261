"""Commands that show what there is: models, kv, doctor."""

from __future__ import annotations

from typing import Annotated, Literal

from cyclopts import Parameter


def models(*, json: bool = False) -> int:
    """List the model families that run, how they are tested, and their limits.

    Parameters
    ----------
    json
        Print JSON instead of a table.
    """
    from jaxengine.cli.models import run_models

    return run_models(json_output=json)


def kv(
    action: Literal["ls", "du", "verify", "gc"],
    target: str,
    *,
    max_bytes: int | None = None,
    options: str = "{}",
    delete: bool = False,
    json: bool = False,
) -> int:
    """Look after the KV blocks that the fs or object tier holds.

    Parameters
    ----------
    action
        ls: list; du: sizes by model; verify: check every block; gc: delete the least used.
    target
        The tier's folder, or the object store's URL.
    max_bytes
        gc: what may stay.
    options
        Settings of the object store, as a JSON object.
    delete
        verify: delete damaged blocks.
    json
        Print JSON.
    """
    from jaxengine.cli.kv import run_kv

    return run_kv(action, target, max_bytes=max_bytes, options=options, delete=delete, as_json=json)


def doctor(*, report: Annotated[bool, Parameter(negative=())] = False) -> int:
    """Show versions, devices and settings, and what is wrong with them. Exit 1 on a problem.

    Parameters
    ----------
    report
        One block of Markdown to paste into a bug report; keys and passwords are masked.
    """
    from jaxengine.cli.doctor import run_doctor
    from jaxengine.cli.report import run_report

    return run_report() if report else run_doctor()
