"""Lists the run files that come with the package, or copies one of them.

  configs list                  prints their names
  configs copy NAME [FOLDER]    writes NAME.toml into FOLDER, and says what it
                                needs that is not there yet

Paths in a file are relative to the folder that training is started in.
"""

import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

from torchtitan_magi.commands.parser import CommandParser, check_output, write_output
from torchtitan_magi.wording import quoted, shown

DEMO = '"assets/demo/'  # as paths of the demonstration data begin in run files


def shipped(folder: str, in_wheel: str) -> Path:
    """A folder of the checkout, or what it is called inside the package of an installed wheel."""
    package = Path(__file__).resolve().parents[1]
    return package / in_wheel if (package / in_wheel).is_dir() else package.parent / folder


def run_files() -> dict[str, Path]:
    """The shipped TOML files by their names, sorted."""
    return {path.stem: path for path in sorted(shipped("train_configs", "train_configs").glob("*.toml"))}


def listing() -> str:
    """A line for each run file: its name and the first line of its comment."""
    files = run_files()
    width = max(map(len, files))
    return "\n".join(f"{name:{width}}  {path.read_text().partition(chr(10))[0][2:]}" for name, path in files.items())


def copied(name: str, target: Path) -> str:
    """The text of a run file as it holds outside a checkout: its own path in comments, and that of the demonstration.

    Raises:
        ValueError: there is no file of that name.
    """
    files = run_files()
    if name not in files:
        raise ValueError(f"there is no run file {quoted(name)}; there are {', '.join(files)}")
    text = files[name].read_text().replace(f"train_configs/{name}.toml", str(target))
    text = text.replace("./scripts/train.sh", "torchtitan-magi train")
    return text.replace(DEMO, f'"{shipped("assets/demo", "demo").as_posix()}/')


def missing(text: str) -> Iterator[str]:
    """What a run file reads that is not there: "section.option = path"."""
    for section, options in tomllib.loads(text).items():
        for option, path in options.items():
            if option.endswith("_path") and not Path(path).exists():
                yield f"{section}.{option} = {quoted(path)}"


def copy(name: str, folder: Path) -> None:
    """Writes a run file and prints what comes next. Raises ValueError, one line, where that cannot be."""
    target = folder / f"{name}.toml"
    text = copied(name, target)
    check_output(target)
    if target.exists():
        raise ValueError(f"{shown(target)} is there already; give another folder, or remove it")
    write_output(target, text.encode())
    print(f"{shown(target)} is written")
    if lacks := [*missing(text)]:
        print("It needs what is not here yet; put it there, or change the option:")
        print("\n".join(f"  {line}" for line in lacks))
    print(f"To train: torchtitan-magi train {shown(target)}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the list, or copies a file."""
    parser = CommandParser("commands.configs", "%(prog)s list | copy NAME [FOLDER]", __doc__)
    parser.add_argument("action", choices=("list", "copy"), help="what to do")
    parser.add_argument("name", nargs="?", metavar="NAME", help="run file to copy, as list names it")
    parser.add_argument("folder", nargs="?", type=Path, default=Path(), metavar="FOLDER", help="default: this folder")
    options = parser.parse_args(arguments)
    try:
        if options.action == "list":
            if options.name is not None:
                raise ValueError(f"list takes no NAME, which is {quoted(options.name)}; use copy, or leave it out")
            print(listing())
            return
        if options.name is None:
            raise ValueError(f"NAME is missing; give one of {', '.join(run_files())}")
        copy(options.name.removesuffix(".toml"), options.folder)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
