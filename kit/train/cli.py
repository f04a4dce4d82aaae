"""The job of a committed file: `python -m kit.train.cli fit --config committed/name.yaml`, on every rank.

Lightning's own command line, which takes its files and options unchanged; any other LightningCLI runs the same file.
What is added is a look at everything that can be wrong, before a process joins the others and before a model is made
(`kit.train.preflight`): errors are one sentence with the way out, instead of a traceback from inside a library. And a
run whose machine is lost goes on from the copy of its last checkpoint (`kit.train.newest_checkpoint`).
"""

from __future__ import annotations

import gc
import logging
import sys
import warnings
from typing import Any

from jsonargparse import ArgumentError
from lightning.pytorch.cli import LightningCLI
from typing_extensions import override

from kit.errors import ConfigError, KitError
from kit.train.newest_checkpoint import newest_checkpoint
from kit.train.preflight import check_files, check_run, plain

_STRICT = {"exit_on_error": False}


class CommittedCLI(LightningCLI):
    """LightningCLI that refuses what cannot run.

    Args:
        options: As LightningCLI takes them.

    Raises:
        KitError: for a file, an environment or a store that training could not start with.
    """

    def __init__(self, **options: Any) -> None:
        arguments = options.get("args")
        check_files(sys.argv[1:] if not isinstance(arguments, list) else arguments)
        strict = {**_STRICT, **{name: dict(_STRICT) for name in self.subcommands()}}
        with warnings.catch_warnings():
            # Lightning's own call of a name that jsonargparse has since changed.
            warnings.filterwarnings("ignore", module="lightning.pytorch.cli")
            warnings.filterwarnings("ignore", message=".*jsonargparse.*")
            # What begins is not expected to find what a restart would.
            warnings.filterwarnings("ignore", message=".*there is no last checkpoint available")
            warnings.filterwarnings("ignore", message=".*LeafSpec.* is deprecated")
            super().__init__(**{"save_config_callback": None, "parser_kwargs": strict, **options})

    @override
    def parse_arguments(self, parser: Any, args: Any) -> None:
        """As LightningCLI does; what it refuses is a ConfigError."""
        try:
            super().parse_arguments(parser, args)
        except ArgumentError as error:
            raise ConfigError(_first_lines(str(error)), "command line") from None

    @override
    def instantiate_classes(self) -> None:
        """As LightningCLI does; what a class of kit's refuses comes as it was said."""
        try:
            super().instantiate_classes()
        except Exception as error:
            found = _said_by_kit(error)
            if found is None:
                raise
            raise found from None

    @override
    def before_instantiate_classes(self) -> None:
        """Look at the run as files and options together have it, and where it is to go on."""
        settings = self.config.get(self.subcommand, self.config)
        values = plain(settings)
        check_run(values)
        found = newest_checkpoint(values)
        if found is not None:
            settings.ckpt_path = found


def _first_lines(text: str) -> str:
    """What jsonargparse says, without its list of everything else."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    return "; ".join(lines[:3])


def _said_by_kit(error: BaseException | None) -> KitError | None:
    """The error of kit's that another one was made of; None where there is none."""
    while error is not None and not isinstance(error, KitError):
        error = error.__cause__ or error.__context__
    return error


def _is_no_tip(record: logging.LogRecord) -> bool:
    """Whether it tells of the run, and not of a product."""
    return "Tip: For seamless" not in record.getMessage()


def main() -> None:
    """Run the command line; what is wrong with it is one line on stderr."""
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(_is_no_tip)
    gc.freeze()  # else each full collection looks at all that imports have made, and stops threads that read meanwhile
    try:
        CommittedCLI()
    except KitError as error:
        sys.exit(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
