"""Random requests by the OpenAPI description: whatever comes, no answer is a server's error."""

from unittest.mock import patch

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import status_code_conformance

from longtail.engine.models import resolve_model
from longtail.serve import upstreams
from longtail.serve.build import Options, front_door
from longtail.serve.gateway import gateway_door
from longtail.serve.local import LocalBackend
from longtail.serve.upstream import Timeouts
from serve.fake_upstream import FakeUpstream, Plan
from serve.running import running

FUZZ = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def our_server():
    def make():
        backend = LocalBackend(resolve_model("tiny"), name="tiny", slots=4, kv_bytes=1 << 24, max_context=48)
        return front_door(backend, Options(), title="fuzzed")

    with running(make) as server:
        yield schemathesis.openapi.from_url(server.url + "/openapi.json")


@pytest.fixture(scope="module")
def a_gateway():
    with FakeUpstream(plan=Plan(body=b'{"choices": [], "usage": {"completion_tokens": 1}}')) as fake:

        def make():
            return gateway_door([fake.url], Options(), window=4, timeouts=Timeouts(connect_s=60))

        with patch.object(upstreams, "PROBE_S", 60.0), running(make) as server:
            yield schemathesis.openapi.from_url(server.url + "/openapi.json")


def fuzz(schema):
    """All operations, with bodies that fit the description and bodies that do not."""
    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) == 6
    for operation in operations:
        for mode in (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE):
            try:
                cases = operation.as_strategy(generation_mode=mode)

                @FUZZ
                @given(case=cases)
                def check(case):
                    case.call_and_validate(checks=[not_a_server_error, status_code_conformance], timeout=300)

                check()
            except Unsatisfiable:
                assert operation.method.upper() == "GET"  # nothing can be wrong with it


@pytest.mark.slow
def test_our_server_answers_or_refuses_whatever_comes(our_server):
    fuzz(our_server)


@pytest.mark.slow
def test_the_gateway_answers_or_refuses_whatever_comes(a_gateway):
    fuzz(a_gateway)
