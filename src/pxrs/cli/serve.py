"""`pxrs serve`: one node that serves a store over HTTP and gRPC."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import click

from pxrs.cli.options import Settings, shared, size
from pxrs.errors import MissingExtra

_LOG = logging.getLogger("pxrs.serve")


def _size(_: click.Context, __: click.Parameter, text: str | None) -> int | None:
    return None if text is None else size(text)


@click.command()
@click.option("--store", metavar="URL", help="The store to serve; the same as --url.")
@click.option("--listen", metavar="HOST:PORT", help="The address.  [default: 127.0.0.1:6080]")
@click.option("--node-id", help="The node's name.  [default: host name and port]")
@click.option(
    "--advertise", metavar="HOST:PORT", help="Where others reach it.  [default: --listen]"
)
@click.option("--grpc-listen", metavar="HOST:PORT", help="Serve gRPC too.  [default: no]")
@click.option("--grpc-advertise", metavar="HOST:PORT", help="Where clients reach that.")
@click.option("--config", "file", type=click.Path(path_type=Path), help="A TOML file of these.")
@click.option("--log-format", type=click.Choice(["text", "json"]), help="[default: text]")
@click.option(
    "--auth",
    type=click.Choice(["auto", "tokens", "off"]),
    help="Ask clients for tokens; auto: once the store has one.  [default: auto]",
)
@click.option("--tls-cert", metavar="FILE", help="A certificate: serve HTTPS.")
@click.option("--tls-key", metavar="FILE", help="The key of the certificate.")
@click.option("--tls-client-ca", metavar="FILE", help="Who signs the certificates of clients.")
@click.option("--tls-ca", metavar="FILE", help="Who signs the certificates of other nodes.")
@click.option("--insecure", is_flag=True, default=None, help="Serve other hosts in the clear.")
@click.option(
    "--max-body", callback=_size, metavar="SIZE", help="The largest request.  [default: 16MiB]"
)
@click.option(
    "--max-connections", type=click.IntRange(min=1), help="How many at once.  [default: 10000]"
)
@click.option(
    "--drain",
    type=float,
    metavar="SECONDS",
    help="How long requests may take after SIGTERM.  [default: 10]",
)
@shared
def serve(settings: Settings, file: Path | None, **flags: Any) -> None:
    """Serve a store over HTTP, to clients in any language.

    Every option can also be set in the environment (PXRS_SERVE_LISTEN=…) or in a TOML file
    (listen = "…"); a flag wins over a variable, a variable over the file. SIGTERM answers
    waiting polls, lets requests finish and ends.
    """
    try:
        from pxrs.server.node import log_to_stderr, run_node
    except ImportError as error:
        raise MissingExtra("pxrs serve", "broker") from error
    from pxrs.server.settings import load_settings, misspelled, open_to_others

    flags["store"] = flags["store"] or settings.url
    found = load_settings(flags, file)
    log_to_stderr(found)
    for trouble in (*misspelled(), *open_to_others(found, file)):
        _LOG.warning("%s", trouble)
    scheme = "https" if found.tls_cert else "http"
    run_node(
        found, lambda endpoint: settings.print({"listen": str(endpoint)}, f"{scheme}://{endpoint}")
    )
