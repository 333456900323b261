"""Commands that start an engine to answer: serve, generate, run-batch."""

from __future__ import annotations

import sys
from typing import Annotated

from cyclopts import Parameter

from jaxengine.settings.flags import Model, Options, to_config


def serve(
    model: Model = None,
    /,
    *,
    stub: Annotated[bool, Parameter(negative=())] = False,
    options: Options | None = None,
) -> int:
    """Serve a model over the OpenAI HTTP API.

    Every flag can stand in a YAML file (--config FILE; block-size: 32); the command line wins.

    Parameters
    ----------
    model
        Model folder, .gguf file, hub id or "demo" (the default).
    stub
        Canned tokens instead of a model: load tests of the server alone.
    """
    from jaxengine.cli.serve import run_server

    return run_server(to_config(model, options), stub)


def generate(
    prompt: str,
    /,
    model: Model = None,
    *,
    max_tokens: int = 128,
    temperature: float = 0.0,
    options: Options | None = None,
) -> int:
    """Continue a prompt in this process and print the text as it comes.

    Parameters
    ----------
    prompt
        The text to continue; "-" reads it from standard input.
    model
        Model folder, .gguf file, hub id or "demo" (the default).
    max_tokens
        Most tokens to generate.
    temperature
        0 is greedy.
    """
    from jaxengine.cli.generate import run_generate

    text = sys.stdin.read() if prompt == "-" else prompt
    return run_generate(to_config(model, options), text, max_tokens, temperature)


def run_batch(
    *,
    input_file: Annotated[str, Parameter(name=["--input-file", "-i"])],
    output_file: Annotated[str, Parameter(name=["--output-file", "-o"])],
    max_concurrency: int = 256,
    progress: bool = True,
    options: Options | None = None,
) -> int:
    """Answer a file of requests (OpenAI's batch format) with an engine of its own.

    The model is given by --model. Exit code 1 when a request was not answered.

    Parameters
    ----------
    input_file
        A JSON object a line: custom_id, method, url, body; "-" is standard input.
    output_file
        An answer a line, in the order of the requests; "-" is standard output.
    max_concurrency
        Most requests at once.
    progress
        Show a progress bar.
    """
    from jaxengine.cli.run_batch import run_batch as run

    return run(
        to_config(None, options),
        input_file,
        output_file,
        max_concurrency=max_concurrency,
        progress=progress,
    )
