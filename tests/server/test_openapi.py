"""The OpenAPI document is true: what it allows and what it forbids is sent, and answers fit it.

`--fuzz 500` sends so many requests to each route, others each time; CI sends 20.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.specs.openapi import checks

from support.child import PATIENCE
from support.fuzzing import limits
from support.node import Client, LocalNode

pytestmark = pytest.mark.thorough

CHECKS = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
]
# Of each route, in either mode. CI tries more of them.
FEW = 20 if os.environ.get("CI") == "true" else 3


@pytest.fixture(
    params=[pytest.param(it, marks=pytest.mark.engine(it)) for it in ("memory", "sqlite")]
)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return "memory://" if request.param == "memory" else f"sqlite:///{tmp_path}/node.db"


@pytest.fixture
def node(url: str) -> Any:
    with LocalNode(url, max_wait=0.01) as node:
        yield node


def fill(client: Client) -> dict[str, Any]:
    """Make something of everything; the names of it, by those of path parameters."""
    client.post("/v1/topics", {"name": "a", "partitions": 1})
    client.post("/v1/topics/a/messages", {"messages": [{"value": "a", "key": "b"}]})
    client.post("/v1/groups/a/members", {"member": "a", "topics": ["a"], "session_timeout": 300})
    group = client.post(
        "/api/v1/metadata/consumer-groups/find-or-create", {"topic": "a", "appId": "a"}
    )
    assert group.json["groupId"] == "G_a_a"
    client.post("/v1/queues/a/items", {"items": [{"value": "a"}] * 3})
    lease = client.post("/v1/queues/a/take", {"lease": 1000}).json["lease"]
    client("PUT", "/v1/kv/a", {"value": "a"})
    names = {"topic": "a", "group": "a", "member": "a", "queue": "a", "key": "a"}
    return {**names, "partition": 0, "lease": lease}


@pytest.mark.long
def test_answers_fit_the_document(
    node: LocalNode, client: Client, pytestconfig: pytest.Config
) -> None:
    names = fill(client)
    base = f"http://{node.endpoint}"
    schemathesis.openapi.media_type("application/vnd.pxrs.batch", st.binary(max_size=200))
    schema = schemathesis.openapi.from_dict(client.get("/openapi.json").json)
    wanted: int = pytestconfig.getoption("--fuzz")
    tried: set[str] = set()
    session = requests.Session()

    def send(case: Case[Any]) -> None:
        tried.add(case.operation.label)
        answer = case.call(base_url=base, session=session, timeout=PATIENCE)
        case.validate_response(answer, checks=CHECKS)
        if case.meta is not None and case.meta.generation.mode is GenerationMode.NEGATIVE:
            case.validate_response(answer, checks=[checks.negative_data_rejection])

    for found in schema.get_all_operations():
        assert isinstance(found, Ok)
        operation = found.ok()
        # The names of what there is; what has others is tried with `--fuzz` too.
        known = {name: names[name] for name in re.findall(r"\{(\w+)\}", operation.path)}
        if operation.method.upper() == "DELETE":
            known = dict.fromkeys(known, "none")
        modes = [GenerationMode.POSITIVE]
        if operation.body or operation.query:
            modes.append(GenerationMode.NEGATIVE)
        for mode in modes:
            for parameters in (known, None) if wanted else (known,):
                cases = operation.as_strategy(generation_mode=mode, path_parameters=parameters)
                with suppress(Unsatisfiable):  # nothing can be wrong with it
                    limits(pytestconfig, FEW)(given(case=cases)(send))()
    session.close()
    paths = schema.raw_schema["paths"]
    assert len(tried) == sum(len(methods) for methods in paths.values())
    after = node.client()
    assert after.get("/health/live").status == 200
    after.close()
