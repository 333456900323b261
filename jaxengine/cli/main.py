"""`jaxengine`: the command line. Commands import what they need when they run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import cyclopts
from cyclopts import Parameter

import jaxengine
from jaxengine.cli.bench import BENCHES
from jaxengine.cli.options import Options, shown_default, split_argv, to_config, yaml_config
from jaxengine.cli.simulate_options import SimulateOptions

app = cyclopts.App(
    name="jaxengine",
    help="An LLM inference engine on JAX. `jaxengine COMMAND --help` lists a command's flags.",
    version=jaxengine.__version__,
    default_parameter=Parameter(show_default=shown_default),
)
app.register_install_completion_command(
    help="Install completion of commands and flags for this shell."
)

Model = Annotated[str | None, Parameter(name="MODEL", show_default=False)]
_MODEL_HELP = 'Model folder, .gguf file, hub id or "demo" (the default).'


@app.command
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


@app.command
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


@app.command(name="run-batch")
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


@app.command
def chat(
    url: Annotated[str, Parameter(name="--url")] = "http://127.0.0.1:8000",
    *,
    model: str | None = None,
    system: str | None = None,
    message: Annotated[str | None, Parameter(alias="-q")] = None,
    temperature: float | None = None,
    max_tokens: int | None = None,
    api_key: str | None = None,
) -> int:
    """Talk to a running server; answers stream to the terminal.

    Parameters
    ----------
    url
        Address of the server.
    model
        Name of the model; default: the first that the server lists.
    system
        System message.
    message
        Ask this once and exit, instead of a conversation.
    temperature
        Sampling temperature; default: the model's.
    max_tokens
        Most tokens of an answer.
    api_key
        The server's key.
    """
    from jaxengine.cli.chat import run_chat

    return run_chat(url, model, system, message, temperature, max_tokens, api_key)


@app.command
def complete(
    prompt: str,
    /,
    url: Annotated[str, Parameter(name="--url")] = "http://127.0.0.1:8000",
    *,
    model: str | None = None,
    temperature: float | None = None,
    max_tokens: int = 64,
    api_key: str | None = None,
) -> int:
    """Have a running server continue a prompt.

    Parameters
    ----------
    prompt
        The text to continue.
    url
        Address of the server.
    model
        Name of the model; default: the first that the server lists.
    temperature
        Sampling temperature; default: the model's.
    max_tokens
        Most tokens to generate.
    api_key
        The server's key.
    """
    from jaxengine.cli.chat import run_complete

    return run_complete(url, model, prompt, temperature, max_tokens, api_key)


@app.command(name="aot-check")
def aot_check(
    model: str,
    *,
    target: str = "h200",
    block_size: int = 64,
    tensor_parallel_size: int = 1,
    attention_data_parallel_size: int = 1,
    enable_expert_parallel: bool = False,
    enable_dbo: bool = False,
    layers: int = 0,
    json: bool = False,
) -> int:
    """Compile a model's steps for GPUs without one, and say what fits.

    Parameters
    ----------
    model
        Folder with a config.json, or that file.
    target
        h200, h100, a100 or b200.
    block_size
        Tokens in one KV block.
    tensor_parallel_size
        Devices that share every layer.
    attention_data_parallel_size
        Groups of devices that attend to different requests.
    enable_expert_parallel
        Divide experts over all devices.
    enable_dbo
        Also compile the steps as two microbatches, and show what runs beside their exchanges.
    layers
        Compile only the first so many; default: all on one device, 6 on several.
    json
        Print everything as JSON.
    """
    from jaxengine.cli.aot_check import Mesh, run_aot_check

    mesh = Mesh(
        tensor_parallel_size,
        attention_data_parallel_size,
        enable_expert_parallel,
        enable_dbo=enable_dbo,
    )
    return run_aot_check(
        model, target=target, block_size=block_size, json_output=json, mesh=mesh, layers=layers
    )


@app.command
def models(*, json: bool = False) -> int:
    """List the model families that run, how they are tested, and their limits.

    Parameters
    ----------
    json
        Print JSON instead of a table.
    """
    from jaxengine.cli.models import run_models

    return run_models(json_output=json)


@app.command
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


@app.command(name="train-draft")
def train_draft(
    model: Model = None,
    /,
    *,
    output: Path,
    prompts: Path | None = None,
    steps: int = 1500,
    minutes: float = 15.0,
    tokens: int = 40_000,
    max_tokens: int = 128,
    max_prompt: int = 128,
    drafts: int = 4,
    draft_vocab_size: int = 8192,
    features: int = 1,
    ffn_size: int = 0,
    layers: int = 2,
    batch_size: int = 256,
    learning_rate: float = 1e-3,
    seed: int = 0,
    progress: bool = True,
) -> int:
    """Train a draft head for speculative decoding on text that the model writes itself.

    Parameters
    ----------
    model
        Model folder, .gguf file, hub id or "demo" (the default).
    output
        Folder for the drafter. A stopped run with the same settings goes on from its checkpoint.
    prompts
        A .txt file, a prompt a line, or .jsonl with prompt, messages or prompt_token_ids; default:
        built-in seeds.
    steps
        Training steps; fewer when the minutes are over.
    minutes
        Time for everything.
    tokens
        Tokens of text to write and learn from.
    max_tokens
        Most tokens of a text.
    max_prompt
        Tokens of a prompt that are kept, from its end.
    drafts
        Drafts in a row that it is trained for.
    draft_vocab_size
        Tokens that can be drafted, the most frequent ones; 0 = all.
    features
        1: a recurrent head on the model's last states; 3: an EAGLE-3 head with attention, on the
        states inside of three layers.
    ffn_size
        Width of the head's MLP; 0 = twice the model's width, of an EAGLE-3 head the model's own.
    layers
        Layers of a recurrent head.
    batch_size
        Positions in one training step.
    learning_rate
        Peak of the learning rate.
    seed
        Of prompts, sampling, weights and order.
    progress
        Show progress bars.
    """
    from jaxengine.cli.train_draft import TrainDraft, run_train_draft

    return run_train_draft(
        TrainDraft(
            model or "demo", output, prompts, steps, minutes, tokens, max_tokens, max_prompt,
            drafts, draft_vocab_size, features, ffn_size, layers, batch_size, learning_rate, seed,
            progress,
        )
    )  # fmt: skip


@app.command(name="simulate")
def simulate_command(
    model: Model = None,
    /,
    *,
    calibrate: str | None = None,
    output: Annotated[str, Parameter(name=["--output", "-o"])] = "table.json",
    check: str | None = None,
    rounds: int = 2,
    most_rows: int | None = None,
    most_tokens: int | None = None,
    clock: Literal["wall", "cpu"] = "wall",
    output_json: str | None = None,
    options: SimulateOptions | None = None,
) -> int:
    """Run the scheduler, the balancer and the KV tiers in virtual time on a model of a device.

    Parameters
    ----------
    model
        Folder with a config.json, or that file; needed with --device.
    calibrate
        Measure this model's engine on this machine and write a table for --table.
    output
        Where --calibrate writes.
    check
        Compare the simulation with the real engine of this model on this machine.
    rounds
        Of --calibrate and --check.
    most_rows
        --calibrate: measure no steps of more rows; their times are extrapolated.
    most_tokens
        --calibrate: measure no steps of more tokens.
    clock
        --check: wall time, or the process's CPU time, for a machine that is busy.
    output_json
        Write the figures to this file, by the names of `bench serve`.
    """
    from jaxengine.cli import simulate

    if min(rounds, most_rows or 1, most_tokens or 1) < 1:
        raise ValueError("--rounds, --most-rows and --most-tokens must be at least 1")
    options = options or SimulateOptions()
    if calibrate is not None:
        sizes = options.engine
        return simulate.run_calibrate(calibrate, output, rounds, sizes, most_rows, most_tokens)
    if check is not None:
        return simulate.run_check(check, rounds, options.engine, clock)
    return simulate.run_simulate(model, options, output_json)


@app.command
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


@app.command
def completion(shell: Literal["bash", "zsh", "fish"], /) -> int:
    """Print the completion script of a shell; `--install-completion` writes it where it is read.

    Parameters
    ----------
    shell
        bash, zsh or fish.
    """
    print(app.generate_completion(shell=shell))
    return 0


@app.command(
    help=f"Measure: bench {'|'.join(BENCHES)} (each with its own --help).",
    help_flags=[],
    version_flags=[],
)
def bench(
    *words: Annotated[str, Parameter(allow_leading_hyphen=True, show=False)],
) -> int:
    from jaxengine.cli.bench import run_bench

    return run_bench(list(words))


def main(argv: list[str] | None = None) -> None:
    """Entry of the `jaxengine` script. A mistake on the command line exits with 2."""
    try:
        words, config = split_argv(sys.argv[1:] if argv is None else argv)
        app.config = () if config is None else (yaml_config(config),)
        code = app(words, exit_on_error=True, result_action="return_value")
    except KeyboardInterrupt:
        sys.exit(130)
    except ValueError as error:  # of the settings; one sentence is all a user needs
        print(f"jaxengine: {error}", file=sys.stderr)
        sys.exit(2)
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
