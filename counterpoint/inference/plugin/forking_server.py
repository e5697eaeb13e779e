"""Serves vLLM's API with an engine that is forked, so that it shares the imports of the API server instead of repeating them.

vLLM can fork its engine, and does so where it is used as a library. Its API server spawns it by default, and on a CPU vLLM 0.32
overwrites what the environment asks for (`CpuPlatform.check_and_update_config`). `ForkingArguments` restores it.
`multiprocessing`'s fork server does not serve: vLLM takes `fork` or `spawn` only, and the imports to be shared are those of this
process.

It is forked by the main thread before this process has computed anything: a forked process has only the thread that forked it,
and would wait for ever for OpenMP's other threads if there had been any.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import threading
from argparse import Namespace
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from multiprocessing.util import register_after_fork
from typing import Any

import uvloop
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.entrypoints.launchers.launcher import setup_server
from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.system_utils import decorate_logs
from vllm.v1.engine.async_llm import AsyncLLM

from counterpoint.transport.process.parent_death import bind_worker_to_parent
from counterpoint.transport.telemetry.start_phases import API_SERVER, ENGINE, enter

METHOD = "VLLM_WORKER_MULTIPROC_METHOD"

ROUTES = (
    "vllm.entrypoints.launchers.api_server.entry",
    "counterpoint.inference.plugin.routes",
    "counterpoint.inference.plugin.socket_body",
    "vllm.entrypoints.openai.chat_completion.api_router",
    "vllm.entrypoints.openai.responses.api_router",
    "vllm.entrypoints.anthropic.api_router",
    "prometheus_fastapi_instrumentator",
)
"""What the server imports once the engine has started, and the engine does not need."""


class ForkingArguments(AsyncEngineArgs):
    """vLLM's arguments. The engine starts by the method that the environment named before vLLM's configuration was made."""

    def create_engine_config(self, *args: Any, **kwargs: Any) -> Any:
        """Returns vLLM's configuration.

        A multimodal model keeps vLLM's choice of method, since its processor may compute before the engine starts.
        """
        method = os.environ[METHOD]
        config = super().create_engine_config(*args, **kwargs)
        if not config.model_config.is_multimodal_model:
            os.environ[METHOD] = method
        return config


def main() -> None:
    """Runs the server to its end, with the arguments of the process, as `vllm.entrypoints.launchers.api_server.entry.main`."""
    enter("configuration", API_SERVER)
    cli_env_setup()
    parser = make_arg_parser(FlexibleArgumentParser(description=__doc__))
    args = parser.parse_args()
    validate_parsed_serve_args(args)
    uvloop.run(_serve(args))


async def _serve(args: Namespace) -> None:
    """Starts the engine and serves until a signal, as `run_server` there does."""
    decorate_logs("APIServer", skip_if_decorated=True)
    signal.signal(signal.SIGTERM, _interrupt)
    address, listening = setup_server(args, reuse_port=False)
    register_after_fork(listening, _become_engine)
    if args.tool_parser_plugin:
        ToolParserManager.import_tool_parser(args.tool_parser_plugin)
    if args.reasoning_parser_plugin:
        ReasoningParserManager.import_reasoning_parser(args.reasoning_parser_plugin)
    importing = import_beside(args.data_parallel_size)
    async with _engine(ForkingArguments.from_cli_args(args)) as engine:
        if importing.ident is not None:
            importing.join()  # two threads that import modules which import each other may see half of one
        from vllm.entrypoints.launchers.api_server.entry import build_and_serve

        from counterpoint.inference.plugin.socket_body import BoundedConnection

        ended = await build_and_serve(engine, address, listening, args, http=BoundedConnection)
    try:
        await ended
    finally:
        listening.close()


@asynccontextmanager
async def _engine(arguments: AsyncEngineArgs) -> AsyncIterator[AsyncLLM]:
    """Starts the engine, and ends it, as `build_async_engine_client_from_engine_args` there: a module that imports the routes."""
    config = arguments.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
    engine: AsyncLLM | None = None
    enter("waits for its engine", API_SERVER)
    try:
        engine = AsyncLLM.from_vllm_config(
            vllm_config=config,
            usage_context=UsageContext.OPENAI_API_SERVER,
            enable_log_requests=arguments.enable_log_requests,
            aggregate_engine_logging=arguments.aggregate_engine_logging,
            disable_log_stats=arguments.disable_log_stats,
        )
        enter("imports and makes its routes", API_SERVER)
        await engine.reset_mm_cache()
        yield engine
    finally:
        if engine is not None:
            engine.shutdown(timeout=config.shutdown_timeout)


def import_beside(engines: int) -> threading.Thread:
    """Returns a thread that imports the routes while the one engine starts; with several `engines` it is never started.

    It starts after the fork: a process with a second thread must not be forked.
    """
    importing = threading.Thread(target=_import_routes, name="importing routes", daemon=True)
    server = os.getpid()
    if engines == 1:
        os.register_at_fork(after_in_parent=lambda: _start(importing) if os.getpid() == server else None)
    return importing


def _start(thread: threading.Thread) -> None:
    """Starts a thread that was not started before."""
    if thread.ident is None:
        thread.start()


def _import_routes() -> None:
    for name in ROUTES:
        importlib.import_module(name)


def _become_engine(listening: socket.socket) -> None:
    """Lets go of what a forked process shares with the server: its port, its signals, and its life after the server's death."""
    enter("loads the model, takes memory", ENGINE)
    listening.close()
    signal.set_wakeup_fd(-1)  # it is the server's event loop, which would take the engine's signals for its own
    bind_worker_to_parent()


def _interrupt(*_: object) -> None:
    """Ends a start that a signal interrupts, before vLLM's own handlers are there."""
    raise KeyboardInterrupt("terminated")
