"""Connects with PyMySQL over verified TLS: without `ssl_ca` PyMySQL itself verifies nothing."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from typing import Any

import pymysql

from pxrs.config import MysqlTls
from pxrs.errors import ConfigError, StoreUnavailable


class Connecting:
    """Makes connections with a URL's options."""

    def __init__(self, options: Mapping[str, Any], tls: MysqlTls | None, place: str) -> None:
        self._place = place
        self._options = dict(options)
        self._is_tls = tls is not None
        if tls is not None:
            self._options["ssl"] = _context(tls)

    def connect(self, **more: Any) -> Any:
        """A connection of the driver; never without TLS if the URL asks for it."""
        driver = pymysql.connect(**{**self._options, **more})
        # Newer versions of the driver refuse a server without TLS themselves, before they log in.
        if self._is_tls and not isinstance(driver._sock, ssl.SSLSocket):
            driver.close()
            raise StoreUnavailable(
                f"{self._place}: the server does not offer TLS, which the URL asks for; configure "
                "it there, or find out who answers in its place"
            )
        return driver


def _context(tls: MysqlTls) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=tls.ca, capath=tls.capath)
        # As PyMySQL does: many certificate authorities lack what newer versions of Python demand.
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        context.check_hostname = tls.checks_name and tls.verifies
        context.verify_mode = ssl.CERT_REQUIRED if tls.verifies else ssl.CERT_NONE
        if tls.cert is not None:
            context.load_cert_chain(tls.cert, tls.key, tls.key_password or "")
        if tls.cipher is not None:
            context.set_ciphers(tls.cipher)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"the TLS files can't be used: {error}") from error
    return context
