"""Asks vLLM whether it would serve a model with a server's arguments, without starting one: exits with 0, or as the server would.

`counterpoint/job/plan/servable.py` starts it with `-m`. vLLM imports the model's class, in another process, and makes its whole
configuration.
"""

from __future__ import annotations

from counterpoint.inference.plugin.program import quick_imports


def main() -> None:
    """Makes the configuration of the server whose arguments these are."""
    with quick_imports():
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        parser = make_arg_parser(FlexibleArgumentParser(description=__doc__))
        arguments = parser.parse_args()
        validate_parsed_serve_args(arguments)
        AsyncEngineArgs.from_cli_args(arguments).create_engine_config()


if __name__ == "__main__":
    main()
