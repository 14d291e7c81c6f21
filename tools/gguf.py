"""pyllama-gguf: look into GGUF files and make new ones of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pyggml.version import __version__

if TYPE_CHECKING:
    from pyggml.gguf_writer import NewFile

PATH = click.Path(path_type=Path)
SETTINGS = {
    "help_option_names": ["-h", "--help"],
    "max_content_width": 100,
    "token_normalize_func": lambda name: name.replace("_", "-"),
}


@click.group(name="pyllama-gguf", context_settings=SETTINGS, invoke_without_command=True)
@click.version_option(__version__, message="pyggml %(version)s")
@click.pass_context
def command(context: click.Context) -> None:
    """Look into GGUF files, and make new ones of them."""
    if context.invoked_subcommand is None:
        print(context.get_help())


def forced(function: Callable[..., Any]) -> Callable[..., Any]:
    """With the flag that allows to replace a file."""
    return click.option("-f", "--force", is_flag=True, help="replace existing files")(function)


@command.command()
@click.argument("source", metavar="IN", type=PATH)
@click.argument("path", metavar="OUT", type=PATH)
@click.option("--experts", "n_expert", metavar="N", type=int, required=True, help="experts a layer")
@click.option(
    "--used", "n_used", metavar="K", type=int, required=True, help="experts that see a token"
)
@click.option(
    "--noise",
    metavar="S",
    type=float,
    default=0.0,
    help="perturb each expert: normal noise of S times the standard deviation of the matrix; "
    "with 0 (default) the bytes are copied, and the logits are those of the dense model",
)
@click.option(
    "--skew",
    metavar="S",
    type=float,
    default=0.0,
    help="scale the router's rows by 1, 2^-S, 3^-S, ... in a random order: experts with long rows "
    "are chosen more often (default: 0, all alike)",
)
@click.option("--seed", metavar="N", type=int, default=0, help="of noise and router (default: 0)")
@forced
def upcycle(source: Path, path: Path, force: bool, **recipe: Any) -> None:
    """Make a mixture of experts of a dense llama, qwen2 or qwen3 model.

    llama stays llama, qwen3 becomes qwen3moe; qwen2 becomes llama with reordered heads, since the
    weights of experts do not add up to 1 in qwen2moe. The router is random.
    """
    from pyggml.gguf import open_gguf
    from pyggml.gguf_writer import NewFile
    from pyggml.tools.gguf_upcycle import Recipe, upcycled

    parsed = Recipe(**recipe)
    with open_gguf(source) as gguf:
        pairs, tensors = upcycled(gguf, parsed)
        sources = [part.path for part in gguf.parts]
        write([NewFile(path, pairs, tensors, gguf.version)], sources, force=force)
        arch = gguf.metadata.get_str("general.architecture")
    exact = f"noise {parsed.noise:g}, seed {parsed.seed}" if parsed.noise else "exact copies"
    print(f"{parsed.n_expert} experts a layer, {parsed.n_used} used, {exact}; made of {arch}")


def write(files: Sequence[NewFile], sources: Sequence[Path], *, force: bool) -> None:
    """Write files, with progress on a terminal, and say what was written."""
    from pyggml.gguf_writer import write_files

    on_terminal = sys.stderr.isatty()
    shown = -1

    def progress(done: int, total: int) -> None:
        nonlocal shown
        if on_terminal and done * 100 // total > shown:
            shown = done * 100 // total
            print(f"\rwriting {shown:3d} %", end="", file=sys.stderr, flush=True)

    try:
        write_files(files, sources=sources, replace=force, progress=progress)
    finally:
        if shown >= 0:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)
    for file in files:
        print(
            f"{file.path}: {file.size:,} bytes, {len(file.tensors):,} tensors, "
            f"{len(file.pairs):,} keys"
        )
