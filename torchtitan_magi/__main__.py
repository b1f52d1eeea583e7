"""Fine-tunes language models on packs of documents of any lengths, over as many GPUs as you have.

usage: torchtitan-magi COMMAND [ARGUMENT ...]

commands:
  configs list                          run files that come with the package
  configs copy NAME [FOLDER]            one of them, to make it your own
  data SOURCE --tokenizer DIR           what a run would learn of your data
  size FILE.toml                        what a run would take, without a GPU
  train FILE.toml [--SECTION.OPTION VALUE ...]
                                        trains on the GPUs of this machine
  verify FOLDER [FOLDER ...]            whether checkpoints are whole
  verify FOLDER --generate [TEXT]       what an export answers, and whether it stops
  calibrate                             measures your GPUs for planning and size

Each command has its own --help. Several machines train by torchrun
-m torchtitan_magi.train --job.config_file FILE.toml.
"""

# Each command is imported when it is called: this text needs no torch.

import difflib
import importlib
import sys

MODULES = {  # by command
    "configs": "commands.configs",
    "data": "data.__main__",
    "size": "report",
    "report": "report",
    "train": "launch",
    "verify": "verify",
    "calibrate": "calibrate",
}


def main() -> None:
    """Runs the command that the command line names; ends the process with its exit code."""
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        print((__doc__ or "").strip())
        return
    if name not in MODULES:
        close = difflib.get_close_matches(name, MODULES, 1)
        hint = f"did you mean {close[0]}?" if close else "see torchtitan-magi --help"
        print(f"torchtitan-magi: error: there is no command {name!r:.80}; {hint}", file=sys.stderr)
        sys.exit(2)
    sys.argv = [f"torchtitan-magi {name}", *arguments]
    try:
        sys.exit(importlib.import_module(f"torchtitan_magi.{MODULES[name]}").main())
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
