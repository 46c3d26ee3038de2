"""Models in S3, and in what speaks its protocol: which objects a name means, and their download.

botocore calls, with the variables, files and roles that every program of AWS takes. A file that was cut off goes on
where it ended, for as long as the object is the same one. What is complete is compared with the object's checksum.
"""

from __future__ import annotations

import base64
import hashlib
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, CancelledError, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Any, BinaryIO, Self

from draftwood_model_runner.errors import InvalidInputError, ModelNotFoundError
from draftwood_model_runner.loading.checkpoint import checkpoint_files

_log = logging.getLogger(__name__)
_FORM = re.compile(r"s3://(?P<bucket>[A-Za-z0-9][\w.-]{1,254})/(?P<key>[\w.+=-]+(/[\w.+=-]+)*)/?", re.ASCII)
_PARTS = ".draftwood-parts"
_AT_ONCE = 8
"""Files that are downloaded together."""
_READ_BYTES = 1 << 20
_ATTEMPTS = 6
"""To read on, without a byte in between."""
_REPORT_SECONDS = 10.0
_CHECKSUMS = ("CRC64NVME", "SHA256", "SHA1", "CRC32C", "CRC32")
"""Of an object, the first that it has."""


@dataclass(frozen=True, slots=True)
class S3Model:
    """A checkpoint of transformers in S3, or one GGUF file.

    Attributes:
        key: of the file; or of the folder, with a slash at its end.
    """

    bucket: str
    key: str

    @classmethod
    def of(cls, text: str) -> Self:
        """Reads s3://BUCKET/FOLDER or s3://BUCKET/PATH/FILE.gguf. Raises InvalidInputError."""
        match = _FORM.fullmatch(text)
        if match is None or {".", ".."} & {*match["key"].split("/")}:
            problem = "must look like s3://bucket/folder or s3://bucket/path/file.gguf, of letters, digits and ._+=-"
            raise InvalidInputError("model", text, problem)
        return cls(match["bucket"], match["key"] + ("" if match["key"].endswith(".gguf") else "/"))

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.key}"


def download(wanted: S3Model, folder: Path) -> dict[str, dict[str, str]]:
    """Downloads what is not in the folder yet. One process at a time.

    Returns:
        What identifies the object of each file: its ETag, and its version where the bucket keeps versions.

    Raises:
        ModelNotFoundError: S3 does not give it, or other bytes than its checksum says; names the setting.
        OSError: the folder cannot be written.
        ModuleNotFoundError: the extra `s3` is not installed.
    """
    with _errors_of(wanted):
        bucket = _Bucket.of(wanted.bucket)
        sizes = bucket.files(wanted)
        transfer = _Transfer(wanted, bucket, folder, sizes)
        _log.info("%s: downloading %d files, %s, to %s", wanted, len(sizes), _shown(sum(sizes.values())), folder)
        pins = transfer.run()
    shutil.rmtree(folder / _PARTS)
    return pins


@dataclass(frozen=True, slots=True)
class _Checksum:
    """What the bytes of an object must have.

    Attributes:
        kind: one of `_CHECKSUMS`, or MD5.
        value: as S3 writes it.
        part_size: bytes; for an MD5 of the MD5s of parts of this size, None for one of the whole.
    """

    kind: str
    value: str
    part_size: int | None = None

    def is_of(self, file: Path) -> bool:
        """Whether the file has it; reads all of it."""
        if self.kind.startswith("CRC"):
            return self.value == _crc(file, self.kind)
        with file.open("rb") as opened:
            if self.kind != "MD5":
                digest = hashlib.file_digest(opened, self.kind.lower()).digest()
                return self.value == base64.b64encode(digest).decode()
            if self.part_size is None:
                return self.value == hashlib.file_digest(opened, _md5).hexdigest()
            parts, size = [], file.stat().st_size
            while opened.tell() < size:
                parts.append(_md5_of(opened, self.part_size))
        return self.value == f"{_md5(b''.join(parts)).hexdigest()}-{len(parts)}"


def _md5(content: bytes = b"") -> Any:
    return hashlib.md5(content, usedforsecurity=False)


def _md5_of(opened: BinaryIO, size: int) -> bytes:
    """Of the next bytes of a file, which may be gigabytes."""
    digest = _md5()
    while size and (piece := opened.read(min(size, _READ_BYTES))):
        digest.update(piece)
        size -= len(piece)
    return bytes(digest.digest())


def _crc(file: Path, kind: str) -> str:
    from awscrt import checksums

    add, value = getattr(checksums, kind.lower()), 0
    with file.open("rb") as opened:
        while piece := opened.read(_READ_BYTES):
            value = add(piece, value)
    return base64.b64encode(value.to_bytes(8 if kind == "CRC64NVME" else 4, "big")).decode()


@dataclass(frozen=True, slots=True)
class _Object:
    """An object at one time.

    Attributes:
        at: what a request names, so that it gets this object and no later one of the same key.
        checksum: None if S3 says none that can be computed.
    """

    at: Mapping[str, str]
    size: int
    checksum: _Checksum | None

    @property
    def pin(self) -> dict[str, str]:
        names = {"IfMatch": "etag", "VersionId": "version"}
        return {names[key]: value for key, value in self.at.items() if key in names}


@dataclass(frozen=True, slots=True)
class _Bucket:
    name: str
    client: Any

    @classmethod
    def of(cls, name: str) -> Self:
        from botocore.config import Config
        from botocore.session import Session

        own = Config(
            connect_timeout=10,
            read_timeout=30,
            max_pool_connections=_AT_ONCE,
            retries={"mode": "standard", "max_attempts": 5},
            response_checksum_validation="when_required",  # here, of whole files
        )
        region = os.environ.get("AWS_REGION") or None  # botocore itself reads AWS_DEFAULT_REGION alone
        try:
            return cls(name, Session().create_client("s3", region_name=region, config=own))
        except ValueError as error:
            raise ModelNotFoundError(f"{_endpoint()}: {error}") from None

    def files(self, wanted: S3Model) -> dict[str, int]:
        """Paths of the model's files below its folder, and their sizes in bytes. Raises ModelNotFoundError."""
        if not wanted.key.endswith("/"):
            size = self.client.head_object(Bucket=self.name, Key=wanted.key)["ContentLength"]
            return {wanted.key.rpartition("/")[2]: int(size)}
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.name, Prefix=wanted.key)
        sizes = {
            entry["Key"].removeprefix(wanted.key): int(entry["Size"])
            for page in pages
            for entry in page.get("Contents", ())
            if not entry["Key"].endswith("/")  # stands for a folder
        }
        if not sizes:
            raise ModelNotFoundError(f"model {str(wanted)!r}: bucket {self.name} has nothing under {wanted.key}")
        found = checkpoint_files(sizes)
        if "config.json" not in found:
            raise ModelNotFoundError(f"model {str(wanted)!r}: there is no config.json among its {len(sizes)} files")
        for name in found:
            if {"", ".", ".."} & {*name.split("/")} or name.startswith(".draftwood"):
                raise ModelNotFoundError(f"model {str(wanted)!r}: {name!r} cannot be the path of a file")
        return {name: sizes[name] for name in found}

    def look_at(self, key: str) -> _Object:
        """The object that now has a key."""
        head = self.client.head_object(Bucket=self.name, Key=key, ChecksumMode="ENABLED")
        at = {"Key": key, "IfMatch": head["ETag"]}
        if (version := head.get("VersionId")) not in (None, "null"):
            at["VersionId"] = version
        return _Object(at, int(head["ContentLength"]), self._checksum(head, at))

    def _checksum(self, head: Mapping[str, Any], at: Mapping[str, str]) -> _Checksum | None:
        for kind in _CHECKSUMS:
            value = head.get(f"Checksum{kind}", "")
            if value and "-" not in value and head.get("ChecksumType") != "COMPOSITE":
                return _Checksum(kind, value)
        etag = re.fullmatch(r"([0-9a-f]{32})(?:-(\d+))?", head["ETag"].strip('"'))
        encrypted = str(head.get("ServerSideEncryption", "")).startswith("aws:kms")
        if etag is None or encrypted or self.name.endswith("--x-s3"):  # those are no MD5
            return None
        if etag[2] is None:
            return _Checksum("MD5", etag[1])
        part_size = self._part_size(at)
        fits = part_size > 0 and ceil(int(head["ContentLength"]) / part_size) == int(etag[2])
        return _Checksum("MD5", etag[0], part_size) if fits else None

    def _part_size(self, at: Mapping[str, str]) -> int:
        """Bytes of the first part; 0 if the server does not say it."""
        from botocore.exceptions import ClientError

        of_object = {key: value for key, value in at.items() if key != "IfMatch"}  # some servers compare a part's ETag
        try:
            return int(self.client.head_object(Bucket=self.name, PartNumber=1, **of_object)["ContentLength"])
        except ClientError:
            return 0


@dataclass(slots=True)
class _Transfer:
    """The download of a model's files, several at once.

    Attributes:
        sizes: of all files, in bytes, by their paths.
    """

    wanted: S3Model
    bucket: _Bucket
    folder: Path
    sizes: Mapping[str, int]
    _have: dict[str, int] = field(init=False)
    _reported: float = field(default_factory=time.monotonic)
    _stopped: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._have = dict.fromkeys(self.sizes, 0)

    def run(self) -> dict[str, dict[str, str]]:
        """See `download`."""
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            jobs = {name: pool.submit(self._file, name) for name in self.sizes}
            try:
                wait(jobs.values(), return_when=FIRST_EXCEPTION)
                for job in jobs.values():
                    if job.done():
                        job.result()
            finally:
                self._stopped.set()
                pool.shutdown(cancel_futures=True)
        return {name: job.result() for name, job in jobs.items()}

    def _file(self, name: str) -> dict[str, str]:
        """Makes a file complete, and returns what identifies its object."""
        whole = self.wanted.key.endswith("/")
        found = self.bucket.look_at(self.wanted.key + name if whole else self.wanted.key)
        made = hashlib.sha256(repr(sorted(found.at.items())).encode()).hexdigest()[:32]
        target, part = self.folder / name, self.folder / _PARTS / made
        complete = part.with_suffix(".complete")
        part.parent.mkdir(exist_ok=True)
        if target.is_file() and target.stat().st_size == found.size:
            if found.checksum is None and complete.exists():
                return self._complete(name, found)
            if found.checksum is not None and found.checksum.is_of(target):
                return self._complete(name, found)
            _log.warning("%s: %s has other bytes than the object, and is downloaded again", self.wanted, name)
        for is_last in (False, True):
            self._receive(name, found, part)
            if found.checksum is None or found.checksum.is_of(part):
                break
            part.unlink()
            problem = f"{name} has another {found.checksum.kind} than {found.checksum.value}"
            if is_last:
                raise ModelNotFoundError(f"model {str(self.wanted)!r}: {problem}")
            _log.warning("%s: %s, and is downloaded again", self.wanted, problem)
        if found.checksum is None:
            _log.warning("%s: S3 has no checksum of %s that can be computed: only its size is known", self.wanted, name)
        target.parent.mkdir(parents=True, exist_ok=True)
        part.replace(target)
        complete.touch()
        return self._complete(name, found)

    def _receive(self, name: str, found: _Object, part: Path) -> None:
        """Appends to a part until it has all bytes; connections that are cut are opened again.

        Raises CancelledError once another file has failed.
        """
        from botocore.exceptions import BotoCoreError

        part.touch()
        if part.stat().st_size > found.size:
            part.write_bytes(b"")
        failures = 0
        while (have := part.stat().st_size) < found.size:
            try:
                for size in self._read(found, part, have):
                    self._report(name, size)
                    failures = 0
                    if self._stopped.is_set():
                        raise CancelledError
            except BotoCoreError as error:
                failures += 1
                if failures >= _ATTEMPTS:
                    raise
                _log.warning("%s: %s was cut off after %s: %s", self.wanted, name, _shown(part.stat().st_size), error)
                self._stopped.wait(0.25 * 2**failures)

    def _read(self, found: _Object, part: Path, have: int) -> Iterator[int]:
        """Reads an object from a byte on. Yields how many bytes the part has now."""
        asked = {"Range": f"bytes={have}-"} if have else {}
        answer = self.bucket.client.get_object(Bucket=self.bucket.name, **found.at, **asked)
        goes_on = have > 0 and str(answer.get("ContentRange", "")).startswith(f"bytes {have}-")
        with part.open("ab" if goes_on else "wb") as file:
            for piece in answer["Body"].iter_chunks(_READ_BYTES):
                file.write(piece)
                yield file.tell()

    def _complete(self, name: str, found: _Object) -> dict[str, str]:
        self._report(name, found.size)
        return found.pin

    def _report(self, name: str, size: int) -> None:
        self._have[name] = size
        now = time.monotonic()
        if now - self._reported >= _REPORT_SECONDS:
            self._reported = now
            whole = sum(self.sizes.values())
            _log.info("%s: %s of %s", self.wanted, _shown(sum(self._have.values())), _shown(whole))


def _endpoint() -> str:
    """What is asked, for errors."""
    given = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    return f"AWS_ENDPOINT_URL {given}" if given else "AWS's S3"


def _shown(size: int) -> str:
    return f"{size / 1e9:,.2f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"


@contextmanager
def _errors_of(wanted: S3Model) -> Iterator[None]:
    """Makes botocore's errors one line that names the setting. Raises ModelNotFoundError."""
    from botocore import exceptions as of_botocore
    from botocore.parsers import ResponseParserError

    at = _endpoint()
    try:
        yield
    except of_botocore.ClientError as error:
        problem, cause = _refusal(error, wanted, at), error
    except (of_botocore.NoCredentialsError, of_botocore.PartialCredentialsError) as error:
        problem = f"no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give the pod a role ({error})"
        cause = error
    except ResponseParserError as error:
        problem, cause = f"{at} answers something else than S3", error
    except (of_botocore.ConnectionError, of_botocore.HTTPClientError, of_botocore.IncompleteReadError) as error:
        problem, cause = f"{at} cannot be reached, or cuts off: {error}", error
    except of_botocore.BotoCoreError as error:
        problem, cause = str(error), error
    else:
        return
    raise ModelNotFoundError(f"model {str(wanted)!r}: {' '.join(problem.split())[:400]}") from cause


def _refusal(error: Any, wanted: S3Model, at: str) -> str:
    """What S3, or who gives credentials, says."""
    code, said = str(error.response["Error"].get("Code")), error.response["Error"].get("Message", "")
    if error.operation_name not in ("ListObjectsV2", "HeadObject", "GetObject"):
        return f"credentials: {error.operation_name}: {code}: {said}"
    match code:
        case "NoSuchBucket":
            return f"{at} has no bucket {wanted.bucket!r}"
        case "404" | "NoSuchKey":
            return f"{at} has no bucket {wanted.bucket!r} with {wanted.key}"
        case "403" | "AccessDenied" | "AllAccessDisabled":
            return f"{at}: no access to bucket {wanted.bucket!r}, which needs s3:ListBucket and s3:GetObject"
        case "InvalidAccessKeyId" | "SignatureDoesNotMatch" | "InvalidToken" | "ExpiredToken":
            return f"AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY or AWS_SESSION_TOKEN: {code}: {said}"
        case "412" | "PreconditionFailed":
            return "an object was replaced during the download; try again"
    return f"{at}: {error.operation_name}: {code}: {said}"
