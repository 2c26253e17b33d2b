"""The OpenAPI document, made from the routes and their structs."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from pxrs._version import __version__
from pxrs.server.rest.problems import PROBLEM, Problem
from pxrs.server.rest.routes import JSON, RAW_BATCH, Route

_REFERENCES = "#/components/schemas/{name}"
_BINARY = {"type": "string", "format": "binary"}


def openapi(routes: Iterable[Route]) -> dict[str, Any]:
    """The document for these routes."""
    routes = list(routes)
    kinds: dict[Any, None] = {Problem: None}
    for route in routes:
        kinds |= {kind: None for kind in (route.body, route.answer) if kind not in (None, bytes)}
    found, components = msgspec.json.schema_components(kinds, ref_template=_REFERENCES)
    schemas = dict(zip(kinds, found, strict=True)) | {bytes: _BINARY}
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "pxrs", "version": __version__},
        "paths": paths,
        "components": {"schemas": components},
    }


def _operation(route: Route, schemas: Mapping[Any, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": f"{route.method.lower()}_{re.sub(r'[^a-z0-9]+', '_', route.path)[1:]}",
        "summary": route.summary,
        "parameters": [*_path_parameters(route), *_query_parameters(route)],
        "responses": {
            str(route.status): _answer(route, schemas),
            "default": {
                "description": "What happened and what to do",
                "content": {PROBLEM: {"schema": schemas[Problem]}},
            },
        },
    }
    if route.body is not None:
        kind = RAW_BATCH if route.body is bytes else JSON
        content = {kind: {"schema": schemas[route.body]}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _answer(route: Route, schemas: Mapping[Any, Any]) -> dict[str, Any]:
    if route.answer is None:
        return {"description": "Done"}
    # Its own words: a struct that has none inherits those of msgspec's.
    own = vars(route.answer).get("__doc__") if isinstance(route.answer, type) else None
    return {
        "description": inspect.cleandoc(own) if own else route.summary,
        "content": {route.content_type: {"schema": schemas[route.answer]}},
    }


def _path_parameters(route: Route) -> list[dict[str, Any]]:
    number = {"type": "integer", "minimum": 0}
    return [
        {
            "name": name,
            "in": "path",
            "required": True,
            "schema": number if name == "partition" else {"type": "string"},
        }
        for name in re.findall(r"\{(\w+)\}", route.path)
    ]


def _query_parameters(route: Route) -> list[dict[str, Any]]:
    if route.query is None:
        return []
    (fields,) = msgspec.json.schema_components([route.query], ref_template=_REFERENCES)[1].values()
    needed = fields.get("required", ())
    return [
        {"name": name, "in": "query", "required": name in needed, "schema": kind}
        for name, kind in fields["properties"].items()
    ]
