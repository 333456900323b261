"""`jaxengine`: the table of commands. They import what they need when they run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated, Literal

import cyclopts
from cyclopts import Parameter

import jaxengine
from jaxengine.cli.commands_client import chat, complete
from jaxengine.cli.commands_engine import generate, run_batch, serve
from jaxengine.cli.commands_look import doctor, kv, models
from jaxengine.cli.commands_study import aot_check, simulate_command, train_draft
from jaxengine.lab.bench.benches import BENCHES
from jaxengine.settings.flags import shown_default, split_argv, yaml_config

app = cyclopts.App(
    name="jaxengine",
    help="An LLM inference engine on JAX. `jaxengine COMMAND --help` lists a command's flags.",
    version=jaxengine.__version__,
    default_parameter=Parameter(show_default=shown_default),
)
app.register_install_completion_command(
    help="Install completion of commands and flags for this shell."
)
# What a command may miss: a package of an extra, which serving does not need.
EXTRAS = {
    "aiohttp": "bench",
    "matplotlib": "bench",
    "flax": "train",
    "optax": "train",
    "orbax": "train",
}
COMMANDS: dict[str, Callable[..., int]] = {
    "serve": serve,
    "generate": generate,
    "run-batch": run_batch,
    "chat": chat,
    "complete": complete,
    "aot-check": aot_check,
    "models": models,
    "kv": kv,
    "train-draft": train_draft,
    "simulate": simulate_command,
    "doctor": doctor,
}
for _name, _command in COMMANDS.items():
    app.command(_command, name=_name)


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
    except ModuleNotFoundError as error:
        missing = str(error.name).split(".")[0]
        if missing not in EXTRAS:
            raise
        extra = f"pip install 'jaxengine[{EXTRAS[missing]}]'"
        print(f"jaxengine: this command needs the package {missing}: {extra}", file=sys.stderr)
        sys.exit(1)
    except ValueError as error:  # of the settings; one sentence is all a user needs
        print(f"jaxengine: {error}", file=sys.stderr)
        sys.exit(2)
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
