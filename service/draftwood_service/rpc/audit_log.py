"""The audit log: one line for each change that an operator makes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import structlog

from draftwood_service.errors import rule_for
from draftwood_service.rpc.calls import Call

_audit = structlog.get_logger("draftwood.audit")


@contextmanager
def audited(call: Call, event: str, **fields: Any) -> Iterator[dict[str, Any]]:
    """Around a change: logs who made it, and its result. The fields, which it gives, may be changed inside."""
    result = "ok"
    try:
        yield fields
    except BaseException as error:
        result = rule_for(error).reason.lower() if isinstance(error, Exception) else "cancelled"
        raise
    finally:
        names = call.context.auth_context().get("x509_common_name", [])
        _audit.info(
            event,
            **fields,
            principal=call.principal.name,
            role=call.principal.role.label,
            peer=call.context.peer(),
            certificate=b",".join(names).decode(errors="replace") or None,
            request_id=call.request_id,
            result=result,
        )
