"""The OpenAPI description of the front door, for clients, gateways and tests."""

from __future__ import annotations

from typing import Any

from longtail import __version__
from longtail.serve.calls import CHAT, COMPLETIONS
from longtail.serve.openai_schema import ChatBody, CompletionBody

ERRORS = {
    "400": "The request cannot be answered as it is; `param` names the field.",
    "401": "No API key, or a wrong one.",
    "404": "No such model, or no such path.",
    "405": "The path is served, but not with this method.",
    "408": "The body did not arrive in time.",
    "413": "The body is too large.",
    "415": "The body is compressed.",
    "429": "The queue is full; `Retry-After` says when to try again.",
    "500": "The server failed.",
    "502": "The upstream server failed.",
    "503": "No upstream server is up, or the server is shutting down.",
    "504": "The upstream server did not answer in time.",
}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def document(title: str, *, keys: bool) -> dict[str, Any]:
    """OpenAPI 3.1. ``keys``: callers need an API key."""
    schemas: dict[str, Any] = {"Error": _ERROR}
    paths: dict[str, Any] = {
        COMPLETIONS: {"post": _generate(CompletionBody, "Complete a text", schemas)},
        CHAT: {"post": _generate(ChatBody, "Answer a chat", schemas)},
        "/v1/models": {"get": _get("The models that are served", errors=["401", "502", "503"])},
        "/health": {"get": _get("Whether requests are let in", errors=["503"], keyed=False)},
        "/live": {"get": _get("That the process works, whoever is behind it", errors=[], keyed=False)},
        "/metrics": {"get": _get("Figures for Prometheus", "text/plain", errors=["401"])},
    }
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": title, "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas},
    }
    if keys:
        found["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        found["security"] = [{"key": []}]
    return found


def _generate(body: Any, summary: str, schemas: dict[str, Any]) -> dict[str, Any]:
    schema = body.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas.update(schema.pop("$defs", {}))
    schemas[body.__name__] = schema
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{body.__name__}"}}}
    events = {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {"schema": {"type": "string"}}}
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": content},
        "responses": {"200": {"description": "The answer", "content": events}, **_errors(list(ERRORS))},
    }


def _get(summary: str, kind: str = "application/json", *, errors: list[str], keyed: bool = True) -> dict[str, Any]:
    schema = {"type": "object"} if kind == "application/json" else {"type": "string"}
    responses = {"200": {"description": summary, "content": {kind: {"schema": schema}}}, **_errors(errors)}
    return {"summary": summary, "responses": responses, **({} if keyed else {"security": []})}


def _errors(statuses: list[str]) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {status: {"description": ERRORS[status], "content": content} for status in statuses}
