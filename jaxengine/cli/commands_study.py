"""Commands that study a model before it serves: aot-check, simulate, train-draft."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from jaxengine.cli.simulate_options import SimulateOptions
from jaxengine.settings.flags import Model


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
