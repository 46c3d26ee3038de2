"""What all resources have in common over gRPC: pages, field masks, etags, and the audit log of changes."""

from __future__ import annotations

import base64
import binascii
from contextlib import AbstractContextManager
from typing import Any

from google.protobuf.field_mask_pb2 import FieldMask

from draftwood_model_runner.errors import InvalidInputError
from draftwood_service.rpc.calls import Call
from draftwood_service.rpc.request_log import audited
from draftwood_tenants.resources.errors import EtagError

MAX_PAGE = 1000
_OUTPUT_ONLY = frozenset({"name", "etag", "create_time", "update_time", "origin"})


def page_of(names: list[str], size: int, token: str) -> tuple[list[str], str]:
    """The names of a page and the next page's token; a token is the last name of the page before.

    Raises:
        InvalidInputError: size or token is wrong.
    """
    if size < 0:
        raise InvalidInputError("page_size", size, "must not be negative")
    try:
        last = base64.urlsafe_b64decode(token.encode()).decode()
    except (binascii.Error, ValueError):
        raise InvalidInputError("page_token", token, "must be empty or a next_page_token") from None
    size = min(size or MAX_PAGE, MAX_PAGE)
    rest = [name for name in names if name > last] if token else names
    page = rest[:size]
    return page, base64.urlsafe_b64encode(page[-1].encode()).decode() if len(rest) > size else ""


def require_etag(name: str, given: str, current: str) -> None:
    """Raises EtagError unless the etag is empty or current."""
    if given and given != current:
        raise EtagError(name)


def apply_mask(current: Any, given: Any, mask: FieldMask, output_only: frozenset[str] = frozenset()) -> None:
    """Copies fields of `given` into `current`: those of the mask; without one those that are set; all for "*".

    Raises:
        InvalidInputError: a path of the mask is no field, or one that cannot be set.
    """
    fixed = _OUTPUT_ONLY | output_only
    paths = list(mask.paths) or [field.name for field, _ in given.ListFields() if field.name not in fixed]
    if paths == ["*"]:
        paths = [field.name for field in given.DESCRIPTOR.fields if field.name not in fixed]
    for path in paths:
        if path.partition(".")[0] in fixed:
            raise InvalidInputError("update_mask", path, "cannot be changed")
        _copy(current, given, path, path)


def _copy(current: Any, given: Any, path: str, whole: str) -> None:
    name, _, rest = path.partition(".")
    field = current.DESCRIPTOR.fields_by_name.get(name)
    if field is None or (rest and (field.is_repeated or field.message_type is None)):
        raise InvalidInputError("update_mask", whole, "is not a field that can be changed")
    if rest and field.message_type.file.name.startswith("google/protobuf/"):
        raise InvalidInputError("update_mask", whole, f"the parts of {name} can only be changed together")
    if rest:
        _copy(getattr(current, name), getattr(given, name), rest, whole)
        return
    current.ClearField(name)
    if field.is_repeated:
        getattr(current, name).MergeFrom(getattr(given, name))
    elif field.message_type is not None:
        if given.HasField(name):
            getattr(current, name).CopyFrom(getattr(given, name))
    elif not field.has_presence or given.HasField(name):
        setattr(current, name, getattr(given, name))


def change_audited(action: str, name: str, call: Call) -> AbstractContextManager[object]:
    """Around a change of a resource: a line in the audit log."""
    return audited(call, "resource", action=action, resource=name[:300])
