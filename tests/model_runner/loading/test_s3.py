"""Models in S3: from a server that cuts off, sends other bytes, replaces objects and refuses."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

import pytest

from draftwood_model_runner.errors import InvalidInputError, ModelNotFoundError
from draftwood_model_runner.loading import s3 as downloading
from draftwood_model_runner.loading.fetching import fetch_to
from draftwood_model_runner.loading.s3 import S3Model
from tests.model_runner.loading.http_files import FileHandler, serving

WEIGHTS = os.urandom(4 << 20)
CUT = (5 << 20) // 2
SOURCE = "s3://models/team/m"
SIGNED = re.compile(r"AWS4-HMAC-SHA256 Credential=(id|denied)/\d{8}/eu-test-1/s3/aws4_request, .*Signature=")
CHECK = b"123456789"
"""By whose checksums their algorithms are known."""
CHECKSUMS = {
    "CRC64NVME": base64.b64encode(bytes.fromhex("ae8b14860a799888")).decode(),
    "CRC32C": base64.b64encode(bytes.fromhex("e3069283")).decode(),
    "CRC32": base64.b64encode(bytes.fromhex("cbf43926")).decode(),
    "SHA256": base64.b64encode(hashlib.sha256(CHECK).digest()).decode(),
    "SHA1": base64.b64encode(hashlib.sha1(CHECK).digest()).decode(),
}


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


@dataclass
class Stored:
    """An object.

    Attributes:
        headers: of its answers besides the ETag.
        part_size: of a multipart upload; 0 for none.
        wrong: what its next downloads get in the place of its bytes.
    """

    content: bytes
    headers: dict[str, str] = field(default_factory=dict)
    part_size: int = 0
    wrong: list[bytes] = field(default_factory=list)

    @property
    def etag(self) -> str:
        if not self.part_size:
            return f'"{md5(self.content)}"'
        parts = [self.content[at : at + self.part_size] for at in range(0, len(self.content), self.part_size)]
        return f'"{md5(b"".join(bytes.fromhex(md5(part)) for part in parts))}-{len(parts)}"'


class Server:
    """S3 with one bucket, `models`, for the key `id`; the key `denied` may not read it.

    Attributes:
        objects: by their keys.
        asked: method, key and range of requests for objects.
        cut: after how many bytes of an object of more than that the connection is cut, once; 0 for never.
        after_cut: an object that then replaces `team/m/model.safetensors`.
    """

    def __init__(self) -> None:
        self.objects = {
            "team/m/": Stored(b""),
            "team/m/config.json": Stored(b"{}"),
            "team/m/model.safetensors": Stored(WEIGHTS),
            "team/m/pytorch_model.bin": Stored(b"x"),
            "team/m/q4.gguf": Stored(b"GGUF"),
        }
        self.asked: list[tuple[str, str, str]] = []
        self.cut = 0
        self.after_cut: Stored | None = None

    @property
    def weights(self) -> Stored:
        return self.objects["team/m/model.safetensors"]

    def got(self, name: str) -> list[str]:
        """Ranges of the GET requests for a file of the model."""
        return [wanted for method, key, wanted in self.asked if (method, key) == ("GET", f"team/m/{name}")]

    def listed(self, prefix: str) -> bytes:
        entries = [
            f"<Contents><Key>{escape(key)}</Key><Size>{len(one.content)}</Size></Contents>"
            for key, one in sorted(self.objects.items())
            if key.startswith(prefix)
        ]
        return f"<ListBucketResult>{''.join(entries)}</ListBucketResult>".encode()

    def handler(self) -> type[FileHandler]:
        served = self

        class Handler(FileHandler):
            def do_GET(self) -> None:
                address = urlsplit(self.path)
                bucket, _, key = unquote(address.path).removeprefix("/").partition("/")
                asked = {name: values[0] for name, values in parse_qs(address.query).items()}
                signed = SIGNED.match(self.headers.get("authorization", ""))
                if signed is None:
                    self.refuse(403, "InvalidAccessKeyId")
                elif signed[1] == "denied":
                    self.refuse(403, "AccessDenied")
                elif bucket != "models":
                    self.refuse(404, "NoSuchBucket")
                elif "list-type" in asked:
                    self.answer(200, served.listed(asked["prefix"]))
                elif key not in served.objects:
                    self.refuse(404, "NoSuchKey")
                else:
                    self.send(key, served.objects[key], "partNumber" in asked)

            def send(self, key: str, stored: Stored, only_first_part: bool) -> None:
                served.asked.append((self.command, key, self.headers.get("range", "")))
                if self.headers.get("if-match", stored.etag) != stored.etag:
                    self.refuse(412, "PreconditionFailed")
                    return
                body, cut = stored.content[: stored.part_size] if only_first_part else stored.content, 0
                if self.command == "GET":
                    body = stored.wrong.pop() if stored.wrong else body
                    if len(body) > served.cut:
                        cut, served.cut = served.cut, 0
                self.answer_range(body, {"etag": stored.etag, **stored.headers}, cut)
                if cut and served.after_cut is not None:
                    served.objects["team/m/model.safetensors"] = served.after_cut

            def refuse(self, status: int, code: str) -> None:
                self.answer(status, f"<Error><Code>{code}</Code><Message>No.</Message></Error>".encode())

        return Handler


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Server]:
    made = Server()
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    with serving(made.handler()) as address:
        variables = {
            "AWS_ACCESS_KEY_ID": "id",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "eu-test-1",
            "AWS_ENDPOINT_URL": address,
            "AWS_EC2_METADATA_DISABLED": "true",
            "HOME": str(tmp_path),
        }
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        yield made


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.startswith(".")}


@pytest.mark.parametrize("attempts", [1, downloading._ATTEMPTS])
def test_a_download_that_was_cut_off_goes_on_and_a_complete_one_asks_nobody(
    s3: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attempts: int
) -> None:
    """With one attempt the next call goes on, as that of a pod that was ended and starts again."""
    monkeypatch.setattr(downloading, "_ATTEMPTS", attempts)
    s3.cut = CUT
    s3.objects["team/m/config.json"].headers["x-amz-version-id"] = "v7"
    folder = tmp_path / "models" / "m"
    if attempts == 1:
        with pytest.raises(ModelNotFoundError, match="AWS_ENDPOINT_URL http://127"):
            fetch_to(SOURCE, folder)
    assert fetch_to(SOURCE, folder)
    assert files(folder) == {"config.json": b"{}", "model.safetensors": WEIGHTS}
    assert s3.got("model.safetensors") == ["", f"bytes={CUT}-"]
    assert s3.got("config.json") == [""]
    hidden = {path.name for path in folder.iterdir() if path.name.startswith(".")}
    assert hidden == {".draftwood-fetched", ".draftwood-lock"}
    assert json.loads((folder / ".draftwood-fetched").read_text()) == {
        "source": SOURCE,
        "objects": {
            "config.json": {"etag": f'"{md5(b"{}")}"', "version": "v7"},
            "model.safetensors": {"etag": f'"{md5(WEIGHTS)}"'},
        },
    }
    asked = len(s3.asked)
    assert not fetch_to(SOURCE, folder)
    assert len(s3.asked) == asked
    with pytest.raises(ModelNotFoundError, match=f"has {SOURCE}; take another folder"):
        fetch_to("s3://models/team/n", folder)


def test_an_object_that_is_replaced_meanwhile_is_not_joined_with_the_one_before(s3: Server, tmp_path: Path) -> None:
    s3.cut, s3.after_cut = CUT, Stored(WEIGHTS[::-1])
    with pytest.raises(ModelNotFoundError, match="an object was replaced during the download; try again"):
        fetch_to(SOURCE, tmp_path)
    assert fetch_to(SOURCE, tmp_path)
    assert files(tmp_path)["model.safetensors"] == WEIGHTS[::-1]


@pytest.mark.parametrize("times", [1, 2])
def test_other_bytes_than_the_objects_are_downloaded_again(s3: Server, tmp_path: Path, times: int) -> None:
    s3.weights.wrong = [bytes(len(WEIGHTS))] * times
    if times == 2:
        problem = f"model '{SOURCE}/': model.safetensors has another MD5 than {md5(WEIGHTS)}"
        with pytest.raises(ModelNotFoundError, match=problem):
            fetch_to(SOURCE, tmp_path)
        assert not (tmp_path / "model.safetensors").exists()
    assert fetch_to(SOURCE, tmp_path)
    assert files(tmp_path)["model.safetensors"] == WEIGHTS


def test_a_file_that_was_damaged_in_the_folder_is_downloaded_again(s3: Server, tmp_path: Path) -> None:
    """Before the folder was complete: afterwards nobody is asked, and nothing is read."""
    (tmp_path / "config.json").write_bytes(b"{}")
    (tmp_path / "model.safetensors").write_bytes(b"damaged" + WEIGHTS[7:])
    assert fetch_to(SOURCE, tmp_path)
    assert files(tmp_path)["model.safetensors"] == WEIGHTS
    assert s3.got("config.json") == []


@pytest.mark.parametrize("kind", [*CHECKSUMS, "MD5 of parts"])
def test_each_checksum_finds_wrong_bytes(s3: Server, tmp_path: Path, kind: str) -> None:
    """With an ETag that is no MD5, as of objects that are encrypted with a key of KMS, all but the last."""
    stored = s3.objects["team/m/model.safetensors"] = Stored(CHECK, wrong=[CHECK[::-1]])
    if kind in CHECKSUMS:
        algorithm = f"x-amz-checksum-{kind.lower()}"
        stored.headers |= {algorithm: CHECKSUMS[kind], "x-amz-server-side-encryption": "aws:kms"}
    else:
        stored.part_size = 4
    assert fetch_to(SOURCE, tmp_path)
    assert files(tmp_path)["model.safetensors"] == CHECK
    assert len(s3.got("model.safetensors")) == 2


def test_an_object_without_a_checksum_is_taken_once(
    s3: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    encrypted = {"x-amz-server-side-encryption": "aws:kms", "x-amz-checksum-crc32": "AAAAAA==-2"}
    s3.objects["team/m/config.json"].headers |= encrypted
    s3.weights.wrong = [bytes(len(WEIGHTS))] * 2
    with pytest.raises(ModelNotFoundError, match="another MD5"):
        fetch_to(SOURCE, tmp_path)
    assert fetch_to(SOURCE, tmp_path)
    assert caplog.text.count("no checksum of config.json that can be computed: only its size is known") == 1
    assert s3.got("config.json") == [""]


def test_one_gguf_file_comes_alone(s3: Server, tmp_path: Path) -> None:
    assert fetch_to(f"{SOURCE}/q4.gguf", tmp_path)
    assert files(tmp_path) == {"q4.gguf": b"GGUF"}


NO_ACCESS = "no access to bucket 'models', which needs s3:ListBucket and s3:Get"


@pytest.mark.parametrize(
    ("source", "variables", "problem"),
    [
        ("s3://other/m", {}, r"AWS_ENDPOINT_URL http://\S+ has no bucket 'other'$"),
        ("s3://models/team/q5.gguf", {}, r"AWS_ENDPOINT_URL http://\S+ has no bucket 'models' with team/q5.gguf$"),
        ("s3://models/none", {}, "bucket models has nothing under none/$"),
        ("s3://models/team", {}, "there is no config.json among its 4 files$"),
        (SOURCE, {"AWS_ACCESS_KEY_ID": "denied"}, NO_ACCESS),
        (f"{SOURCE}/q4.gguf", {"AWS_ACCESS_KEY_ID": "denied"}, NO_ACCESS),
        (SOURCE, {"AWS_ACCESS_KEY_ID": "wrong"}, "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY or .*InvalidAccessKeyId"),
        (SOURCE, {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}, "no credentials: set AWS_ACCESS_KEY_ID and"),
        (SOURCE, {"AWS_REGION": "us-east-9"}, "InvalidAccessKeyId"),
        (SOURCE, {"AWS_ENDPOINT_URL": "models.example"}, "AWS_ENDPOINT_URL models.example: Invalid endpoint"),
        (SOURCE, {"AWS_WEB_IDENTITY_TOKEN_FILE": "/none", "AWS_ROLE_ARN": "r", "AWS_ACCESS_KEY_ID": ""}, "/none"),
    ],
)
def test_what_is_wrong_is_one_line(
    s3: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, variables: dict[str, str], problem: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name)
    with pytest.raises(ModelNotFoundError, match=problem) as raised:
        fetch_to(source, tmp_path)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 500


@pytest.mark.parametrize("key", ["../x.json", "a//x.json", "a/./x.json", ".draftwood-fetched"])
def test_no_key_leads_out_of_the_folder(s3: Server, tmp_path: Path, key: str) -> None:
    s3.objects[f"team/m/{key}"] = Stored(b"x")
    with pytest.raises(ModelNotFoundError, match="cannot be the path of a file"):
        fetch_to(SOURCE, tmp_path)
    assert files(tmp_path) == {}


def test_names_say_bucket_and_folder_or_file() -> None:
    assert S3Model.of("s3://models/team/m") == S3Model.of("s3://models/team/m/") == S3Model("models", "team/m/")
    assert S3Model.of("s3://models/q4.gguf") == S3Model("models", "q4.gguf")
    for source in ("s3:/x", "s3://", "s3://b", "s3://bucket", "s3://bucket/../x", "s3://bucket/a b"):
        with pytest.raises(InvalidInputError, match=r"model s3:.*: must look like s3://bucket/folder"):
            S3Model.of(source)
