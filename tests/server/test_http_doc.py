"""docs/http.md says what the routes say. After a change of one: `./run docs`."""

from __future__ import annotations

import json

import pytest
from docs import make_http

from pxrs.server.rest.openapi import openapi
from support.node import Client

pytestmark = pytest.mark.engine("memory")


def test_the_page_is_current() -> None:
    assert make_http.PAGE.read_text() == make_http.page()


@pytest.mark.parametrize("url", ["memory://"])
def test_it_has_every_route_and_parameter_of_the_openapi_document(client: Client) -> None:
    text = make_http.PAGE.read_text()
    document = client.get("/openapi.json").json
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            _, found, rest = text.partition(f"### {method.upper()} {path}\n")
            assert found, (method, path)
            entry = rest.partition("\n### ")[0]
            for parameter in operation["parameters"]:
                assert f"| `{parameter['name']}` | {parameter['in']} |" in entry, (method, path)


def test_descriptions_are_of_the_structs_themselves() -> None:
    """A struct without words of its own inherits those of msgspec's."""
    document = json.dumps(openapi(make_http.routes()))
    assert "efficient serializable" not in document
