"""A worker of a class as a process: `python -m counterpoint.cluster.worker_process`, started by a keeper."""

from __future__ import annotations

import logging
import sys
import threading

from counterpoint.cluster.worker_process.description import Description
from counterpoint.cluster.worker_process.host import KEEPER_GONE, Host, end_at_once, end_soon
from counterpoint.cluster.worker_process.link import InheritedLink
from counterpoint.transport.process.keeper import messages


def main() -> int:
    """Runs the worker that the keeper describes; returns the exit code."""
    # The lines go into the worker's log.
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    link = InheritedLink()
    orders = link.messages()
    first = next(orders, None)
    if first is None or first["kind"] != messages.DESCRIPTION:
        print(f"expected a description from the keeper, got {first}", file=sys.stderr)  # noqa: T201 - into the log
        return KEEPER_GONE
    host = Host(link, Description.model_validate(first["description"]))

    def obey() -> None:
        try:
            for message in orders:
                host.obey(message)
        except Exception:
            logging.exception("an order of the keeper cannot be carried out")
        finally:
            end_at_once(KEEPER_GONE)

    threading.Thread(target=obey, name="cluster-orders", daemon=True).start()
    code = host.run()
    end_soon(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
