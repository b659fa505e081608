"""The OpenAPI document, made from the catalogue of verbs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from holdfast.api.problems import MEDIA_TYPE, TITLES
from holdfast.api.schemas import Schema, Schemas
from holdfast.idempotency.keys import LONGEST_KEY
from holdfast.installing import package_version
from holdfast.operator.catalogue import Verb

_ERRORS: Final = (400, 401, 403, 404, 405, 409, 421, 422, 500, 503, 504)
_OF_CHANGES: Final = (408, 413, 415)
_TITLES: Final = {**TITLES, 408: "the body came too slowly"}
_PROBLEM: Final[Schema] = {
    "type": "object",
    "required": ["title", "status"],
    "properties": {
        "type": {"type": "string", "format": "uri-reference"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "field": {"type": "string", "description": "The argument that is wrong."},
        "problem": {"type": "string", "description": "What is wrong."},
        "remedy": {"type": "string", "description": "What to do about it."},
    },
}
_KEY: Final[Schema] = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": False,
    "description": "Chosen by the client for this request, and the same for every retry of it.",
    "schema": {"type": "string", "minLength": 1, "maxLength": LONGEST_KEY},
}


def openapi(verbs: Iterable[Verb]) -> dict[str, Any]:
    """Return the document."""
    schemas = Schemas()
    paths: dict[str, Any] = {}
    for verb in verbs:
        paths[f"/{verb.name.replace('.', '/')}"] = {
            "post" if verb.changes else "get": _operation(verb, schemas),
        }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Holdfast",
            "version": package_version(),
            "description": "Every verb of an operator. Reads are GET, changes are POST, each with a dry run.",
        },
        "servers": [{"url": "/api/v1"}],
        "security": [{"bearer": []}],
        "paths": paths,
        "components": {
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
            "responses": {str(status): _problem(status) for status in sorted((*_ERRORS, *_OF_CHANGES))},
            "schemas": {**dict(sorted(schemas.named.items())), "Problem": _PROBLEM},
        },
    }


def _operation(verb: Verb, schemas: Schemas) -> dict[str, Any]:
    first, _, more = verb.summary.partition(". ")
    operation: dict[str, Any] = {
        "operationId": verb.name,
        "summary": f"{first.rstrip('.')}.",
        "description": f"{more}\n\nNeeds the role {verb.role}.".strip(),
        "tags": [verb.name.partition(".")[0]],
        "responses": _responses(verb, schemas),
    }
    arguments = verb.arguments.model_json_schema(ref_template="#/components/schemas/{model}")
    for name, schema in arguments.pop("$defs", {}).items():
        schemas.named.setdefault(name, schema)
    arguments.pop("title", None)
    if verb.changes:
        operation["parameters"] = [] if verb.reveals else [_KEY]
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": arguments}}}
        return operation
    required = set(arguments.get("required", ()))
    operation["parameters"] = [
        {"name": name, "in": "query", "required": name in required, "schema": _in_query(field)}
        | ({"description": field["description"]} if "description" in field else {})
        for name, field in arguments.get("properties", {}).items()
    ]
    return operation


def _in_query(field: Schema) -> Schema:
    """A field as a parameter of a query, which has no null: it is left out instead."""
    kept = {name: value for name, value in field.items() if name not in ("title", "description")}
    choices = [each for each in kept.pop("anyOf", ()) if each != {"type": "null"}]
    if kept.get("default", ...) is None:
        del kept["default"]
    if not choices:
        return kept
    return {**kept, **choices[0]} if len(choices) == 1 else {**kept, "anyOf": choices}


def _responses(verb: Verb, schemas: Schemas) -> dict[str, Any]:
    problems = sorted((*_ERRORS, *(_OF_CHANGES if verb.changes else ())))
    found: dict[str, Any] = {
        "200": {
            "description": "Done." if verb.changes else "Found.",
            "content": {"application/json": {"schema": schemas.of_document(verb.result)}},
        }
    }
    if verb.result is str:
        found["200"]["content"]["text/plain"] = {"schema": {"type": "string"}}
    return found | {str(status): {"$ref": f"#/components/responses/{status}"} for status in problems}


def _problem(status: int) -> Schema:
    return {
        "description": _TITLES[status],
        "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
    }
