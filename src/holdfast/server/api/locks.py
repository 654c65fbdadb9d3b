"""Locks with leases and fencing numbers, and state documents with versions."""

from __future__ import annotations

import re
from contextlib import suppress
from functools import partial
from typing import Final

from holdfast.api.drafts import lease_of
from holdfast.api.locks import Document, Lock, LockInfo, LockRequest, document_content, lock_request
from holdfast.broker.folder.layout import check_name, parse_lease
from holdfast.errors import HoldfastError, InvalidRequest, LockHeld, NotFound
from holdfast.protocol.media import SMALL_BYTES
from holdfast.protocol.topics import (
    AcquireLock,
    DocumentNames,
    DocumentQuery,
    DocumentRemoved,
    HeldLocks,
    KeepLock,
    LockReleased,
    ReleaseLock,
    WriteDocument,
)
from holdfast.server.http.messages import Response
from holdfast.server.routing import Routes
from holdfast.server.service import Call

routes = Routes("locks")

_ETAG: Final = re.compile(r'"([0-9]{1,16})"')


@routes.add(
    "POST",
    "/v1/locks/{name}/acquire",
    action="lock",
    body=AcquireLock,
    answers=Lock,
    errors=("lock_held", "conflict", "too_many_waiters"),
)
async def acquire(call: Call) -> Response:
    """Acquire a lock for a limited time, waiting for it if asked to; 409 if it is not free in time."""
    lock = await _acquired(call, call.body)
    return call.answer(lock, undelivered=partial(_given_back, call, lock))


async def _acquired(call: Call, wanted: AcquireLock) -> Lock:
    service, name = call.service, call.path["name"]
    most_s = service.settings.max_wait_ms / 1000
    wait_s = 0 if service.leaving else most_s if wanted.wait < 0 else min(wanted.wait, most_s)
    owner = wanted.owner or call.principal.name
    request = lock_request(name, owner, wanted.lease, wait_s, if_not_exists=wanted.if_not_exists)
    if not request.waits:
        return await service.locks.acquire(request)
    with service.waits.one_more(call.principal):
        lock = await service.wait(call, _waited(call, request), None)
    try:
        call.confirm()
    except HoldfastError:
        if lock is not None:
            await _given_back(call, lock)
        raise
    if lock is None:
        raise LockHeld(f"lock {name} was not free before the server had to stop; try again")
    return lock


async def _given_back(call: Call, lock: Lock) -> None:
    """Release a lock whose grant did not reach its caller, so that the next in line gets it."""
    with suppress(HoldfastError):
        await call.service.locks.release(lock.lease_id)


async def _waited(call: Call, request: LockRequest) -> Lock | None:
    return await call.service.locks.acquire(request)


@routes.add("POST", "/v1/locks/{name}/keepalive", action="lock", body=KeepLock, errors=("lease_lost",))
async def keepalive(call: Call) -> Lock:
    """Renew the lease of a lock; 409 if it is lost, with the new holder."""
    given: KeepLock = call.body
    lease_ms = None if given.lease is None else lease_of(given.lease)
    return await call.service.locks.keepalive(_lease(call, given.lease_id), lease_ms)


@routes.add("POST", "/v1/locks/{name}/release", action="lock", body=ReleaseLock, status=204, errors=("lease_lost",))
async def release(call: Call) -> None:
    """Release a lock; the next caller in line gets it at once."""
    given: ReleaseLock = call.body
    await call.service.locks.release(_lease(call, given.lease_id))


@routes.add("DELETE", "/v1/locks/{name}", action="lock", also="admin", act=True)
async def force_release(call: Call) -> LockReleased:
    """Take a lock from its holder, which finds out at its next keepalive. Needs `admin`, and `lock` for that name."""
    return LockReleased(released=await call.service.locks.force_release(check_name(call.path["name"], "lock")))


@routes.add("GET", "/v1/locks", action="lock", scope="any")
async def list_locks(call: Call) -> HeldLocks:
    """List the locks that are held and that you may use."""
    found = await call.service.locks.held_locks()
    return HeldLocks(locks=[info for info in found if call.principal.may("lock", info.name)])


@routes.add("GET", "/v1/locks/{name}", action="lock")
async def describe(call: Call) -> LockInfo:
    """Show who holds a lock, since when and until when, how many are waiting, and whether a document has its name."""
    return await call.service.locks.describe(check_name(call.path["name"], "lock"))


@routes.add("GET", "/v1/state", action="lock", scope="any")
async def list_documents(call: Call) -> DocumentNames:
    """List the names of the documents that you may use."""
    found = await call.service.locks.document_names()
    return DocumentNames(names=[name for name in found if call.principal.may("lock", name)])


@routes.add("GET", "/v1/state/{name}", action="lock", answers=Document, errors=("not_found",))
async def get_document(call: Call) -> Response:
    """Return a document with its version, which is also its ETag."""
    name = check_name(call.path["name"], "document")
    document = await call.service.locks.document(name)
    if document is None:
        raise NotFound(f"there is no document {name}: list the documents with GET /v1/state")
    return _document_answer(call, document)


@routes.add(
    "PUT",
    "/v1/state/{name}",
    action="lock",
    query=DocumentQuery,
    body=WriteDocument,
    answers=Document,
    errors=("conflict", "lease_lost", "message_too_large"),
)
async def update_document(call: Call) -> Response:
    """Create or replace a document. If a version or a lease is given, it must be current."""
    given: WriteDocument = call.body
    version, lease_id = _conditions(call)
    name, pool = check_name(call.path["name"], "document"), call.service.pool
    if call.request.received <= SMALL_BYTES and not call.request.packed:
        content = document_content(name, given.value)
        return _document_answer(call, await call.service.locks.update_document(name, content, version, lease_id))
    # A large document is encoded, checked and put into the answer on a thread; the port stores it on one too.
    content = await pool.run(lambda _: document_content(name, given.value))
    document = await call.service.locks.update_document(name, content, version, lease_id)
    return await pool.run(lambda _: _document_answer(call, document))


@routes.add("DELETE", "/v1/state/{name}", action="lock", query=DocumentQuery, errors=("conflict", "lease_lost"))
async def remove_document(call: Call) -> DocumentRemoved:
    """Delete a document, under the same conditions."""
    version, lease_id = _conditions(call)
    name = check_name(call.path["name"], "document")
    return DocumentRemoved(removed=await call.service.locks.remove_document(name, version, lease_id))


def _document_answer(call: Call, document: Document) -> Response:
    return call.answer(document, headers=[("etag", f'"{document.version}"')])


def _lease(call: Call, lease_id: str) -> str:
    """The lease id, if it belongs to the lock in the path and the caller may use that."""
    if parse_lease(lease_id).name != call.path["name"]:
        raise InvalidRequest(
            f"{lease_id!r} is not a lease of the lock {call.path['name']}: send the lease_id that acquire returned"
        )
    return lease_id


def _conditions(call: Call) -> tuple[int | None, str | None]:
    """The expected version, from the query or the conditional headers of HTTP; and the lease id."""
    query: DocumentQuery = call.query
    if query.lease_id is not None:
        call.principal.check("lock", parse_lease(query.lease_id).name)
    expected = {query.version} - {None}
    if "if-match" in call.request.headers:
        found = _ETAG.fullmatch(call.request.header("if-match").strip())
        if found is None:
            raise InvalidRequest('If-Match must be the ETag of one version, such as "7"')
        expected.add(int(found[1]))
    if "if-none-match" in call.request.headers:
        if call.request.header("if-none-match").strip() != "*":
            raise InvalidRequest("If-None-Match must be *: only where there is no document yet")
        expected.add(0)
    if len(expected) > 1:
        raise InvalidRequest("two different versions are expected; give one, as version, If-Match or If-None-Match")
    return next(iter(expected), None), query.lease_id
