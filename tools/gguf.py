"""pyllama-gguf: look into GGUF files and make new ones of them."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pyggml.version import __version__

if TYPE_CHECKING:
    from pyggml.gguf import Gguf
    from pyggml.gguf_writer import NewFile

PATH = click.Path(path_type=Path)
TYPE_NAMES = ["u8", "i8", "u16", "i16", "u32", "i32", "u64", "i64", "f32", "f64", "bool", "str"]
TERMINATED = 128 + signal.SIGTERM
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
@click.argument("path", metavar="FILE", type=PATH)
@click.option("--json", "as_json", is_flag=True, help="the whole header as one JSON object")
@click.option("--all", "whole", is_flag=True, help="do not shorten long arrays and texts")
def dump(path: Path, as_json: bool, whole: bool) -> None:
    """Show metadata and tensors; of a split model, those of one part."""
    import json

    from pyggml.gguf import open_gguf
    from pyggml.tools import gguf_dump

    with open_gguf(path, alone=True, allow_no_data=True) as gguf:
        if as_json:
            print(json.dumps(gguf_dump.as_json(gguf)))
        else:
            for line in gguf_dump.lines(gguf, whole=whole):
                print(line)


@command.command()
@click.argument("source", metavar="IN", type=PATH)
@click.argument("prefix", metavar="PREFIX")
@click.option("--split-max-size", "size", metavar="N(M|G)", help="bytes of tensors in a part")
@click.option(
    "--split-max-tensors",
    "n_tensors",
    metavar="N",
    type=int,
    help="tensors in a part (default: 128)",
)
@click.option("--no-tensor-first-split", "empty_first", is_flag=True, help="metadata has its part")
@click.option("--dry-run", is_flag=True, help="show what would be written")
@forced
def split(
    source: Path,
    prefix: str,
    size: str | None,
    n_tensors: int | None,
    empty_first: bool,
    dry_run: bool,
    force: bool,
) -> None:
    """Cut a model into PREFIX-00001-of-00003.gguf and so on.

    A tensor that is larger than --split-max-size has a part for itself.
    """
    from pyggml.gguf import open_gguf
    from pyggml.tools.gguf_split import Limits, split_files

    limits = Limits.of(size, n_tensors, empty_first=empty_first)
    with open_gguf(source) as gguf:
        files = split_files(gguf, prefix, limits)
        if dry_run:
            report(files)
            print("nothing is written: this is a dry run")
        else:
            write(files, gguf, force=force)


@command.command()
@click.argument("source", metavar="FIRST", type=PATH)
@click.argument("path", metavar="OUT", type=PATH)
@forced
def merge(source: Path, path: Path, force: bool) -> None:
    """Join the parts of a split model, found by the name of the first."""
    from pyggml.gguf import open_gguf
    from pyggml.tools.gguf_split import merged_file

    with open_gguf(source) as gguf:
        write([merged_file(gguf, path)], gguf, force=force)


@command.command()
@click.argument("source", metavar="IN", type=PATH)
@click.argument("path", metavar="OUT", type=PATH)
@forced
def header(source: Path, path: Path, force: bool) -> None:
    """Write metadata and the list of tensors without their data, to plan with."""
    from pyggml.gguf import open_gguf
    from pyggml.tools.gguf_split import whole_file

    with open_gguf(source, allow_no_data=True) as gguf:
        write([whole_file(gguf, path, has_data=False)], gguf, force=force)


# what looks like an option may be a negative number
@command.command("set", context_settings={"ignore_unknown_options": True})
@click.argument("path", metavar="FILE", type=PATH)
@click.argument("key")
@click.argument("text", metavar="VALUE")
@click.option("--type", "wanted", type=click.Choice(TYPE_NAMES), help="type of a key that is new")
def set_value(path: Path, key: str, text: str, wanted: str | None) -> None:
    """Set one value of the metadata; it must suit the type that the key has.

    The file is rewritten under a temporary name, or in place where the size stays the same.
    """
    from pyggml.gguf import open_gguf
    from pyggml.tools.gguf_set import TYPES, changed, parsed, type_to_store

    with open_gguf(path, alone=True, allow_no_data=True) as gguf:
        kind = type_to_store(gguf, key, TYPES[wanted] if wanted else None)
        before = repr(gguf.metadata[key]) if key in gguf.metadata else "new"
        file = changed(gguf, key, parsed(key, text, kind))
        if file:
            write([file], force=True)
        shown = repr(text) if kind is TYPES["str"] else text
        print(f"{path}: {key} ({kind.label}): {before} -> {shown}")


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
        write([NewFile(path, pairs, tensors, gguf.version)], gguf, force=force)
        arch = gguf.metadata.get_str("general.architecture")
    exact = f"noise {parsed.noise:g}, seed {parsed.seed}" if parsed.noise else "exact copies"
    print(f"{parsed.n_expert} experts a layer, {parsed.n_used} used, {exact}; made of {arch}")


def write(files: Sequence[NewFile], source: Gguf | None = None, *, force: bool) -> None:
    """Write files, with progress on a terminal, and say what was written.

    None may replace the `source`. A signal that ends the process leaves no temporary files.
    """
    from pyggml.gguf_writer import write_files
    from pyggml.tools.ui import Screen

    parts = [part.path for part in source.parts] if source else []
    screen = Screen()
    ending: BaseException | None = None

    def end(number: int, _: object) -> None:
        nonlocal ending
        ending = SystemExit(TERMINATED) if number == signal.SIGTERM else KeyboardInterrupt()
        raise ending

    def progress(done: int, total: int) -> None:
        if ending is not None:  # was raised where Python drops it: in a finalizer or an import
            raise ending
        screen.progress("writing", done / max(1, total))

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:  # as for jobs in the background
            signal.signal(number, end)
    try:
        write_files(files, sources=parts, replace=force, progress=progress)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        screen.clear_progress()
    report(files)


def report(files: Sequence[NewFile]) -> None:
    """One line for each file."""
    for file in files:
        print(
            f"{file.path}: {file.size:,} bytes, {len(file.tensors):,} tensors, "
            f"{len(file.pairs):,} keys"
        )
