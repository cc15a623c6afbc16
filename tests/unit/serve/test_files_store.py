"""Uploaded files: quota, expiry, restarts, full disks, and the forms in which they arrive."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers

from pixelis.config.serve import FilesConfig
from pixelis.errors import BadInput, InfraFailure
from pixelis.operations.encoded import media_type
from pixelis.protocol.errors import ApiError
from pixelis.serve.dependencies import read_form
from pixelis.serve.files import FileStore

PNG = b"\x89PNG\r\n\x1a\n"


def code_of(call: object, *arguments: object) -> str:
    with pytest.raises(BadInput) as caught:
        call(*arguments)  # type: ignore[operator]
    return caught.value.code


def test_a_file_is_there_for_its_key_in_every_process(tmp_path: Path) -> None:
    file = FileStore(tmp_path, FilesConfig()).add("shop", PNG + b"\r\n\0", "a.png", "vision")
    other = FileStore(tmp_path, FilesConfig())
    assert other.read("shop", file.id) == (file, PNG + b"\r\n\0")
    assert (other.list("shop"), other.list("")) == ([file], [])
    for key, id in (
        ("", file.id),
        ("shop", "../shop/" + file.id),
        ("shop", "file_0000000000000000"),
        ("shop", ".lock"),
    ):
        assert code_of(other.read, key, id) == "file_not_found"
    other.delete("shop", file.id)
    assert code_of(other.delete, "shop", file.id) == "file_not_found"


def test_quotas_hold_for_all_gateways_together(tmp_path: Path) -> None:
    config = FilesConfig(max_files=3, max_bytes=1000)
    stores, refused = [FileStore(tmp_path, config) for _ in range(8)], list[str]()

    def upload(store: FileStore) -> None:
        try:
            store.add("shop", PNG, "a.png", "vision")
        except BadInput as error:
            refused.append(error.code)

    threads = [threading.Thread(target=upload, args=(store,)) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(stores[0].list("shop")), refused) == (3, ["file_quota_exceeded"] * 5)
    stores[0].add("other", PNG, "a.png", "vision")
    assert code_of(stores[0].add, "other", PNG + bytes(990), "a.png", "vision") == "file_quota_exceeded"


def test_a_file_expires(tmp_path: Path) -> None:
    now = [1000.0]
    store = FileStore(tmp_path, FilesConfig(ttl_s=7200), clock=lambda: now[0])
    short = store.add("", PNG, "a.png", "vision", ttl_s=3600)
    long = store.add("", PNG, "a.png", "vision", ttl_s=1e9)
    now[0] += 3601
    assert code_of(store.get, "", short.id) == "file_not_found"
    assert store.list("") == [long]
    assert not (tmp_path / "files" / "_" / short.id).exists()
    now[0] += 3600
    assert store.list("") == []


@pytest.mark.parametrize(
    ("number", "code"), [(errno.ENOSPC, "no_space"), (errno.EROFS, "read_only"), (errno.EIO, "io_error")]
)
def test_a_disk_that_refuses_is_named_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, code: str
) -> None:
    store = FileStore(tmp_path, FilesConfig())

    def refuse(handle: int) -> None:
        raise OSError(number, "refused")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", refuse)
        with pytest.raises(InfraFailure) as caught:
            store.add("", PNG, "a.png", "vision")
    assert caught.value.code == code
    assert store.list("") == []
    assert [path.name for path in (tmp_path / "files" / "_").iterdir()] == [".lock"]


def test_what_a_crash_left_or_damaged_is_no_file(tmp_path: Path) -> None:
    store = FileStore(tmp_path, FilesConfig())
    file = store.add("", PNG, "a.png", "vision")
    folder = tmp_path / "files" / "_"
    (folder / ".file_0123456789abcdef.aside").write_bytes(b"half")
    os.utime(folder / ".file_0123456789abcdef.aside", (0, 0))
    (folder / "file_0123456789abcdef").write_bytes(b"no json\n")
    assert store.list("") == [file]
    assert not (folder / ".file_0123456789abcdef.aside").exists()
    (folder / file.id).write_bytes((folder / file.id).read_bytes()[:-1])
    assert code_of(store.read, "", file.id) == "file_not_found"


def test_types_are_told_by_the_first_bytes() -> None:
    assert media_type(PNG) == "image/png"
    assert media_type(b"\0\0\0\x18ftypmp42") == "video/mp4"
    assert media_type(b"\x1a\x45\xdf\xa3") == "video/webm"
    for content in (b"", b"<svg/>", b"%PDF-1.7", b"PK\3\4"):
        assert code_of(media_type, content) == "file_type"


@given(st.dictionaries(st.sampled_from("abc"), st.binary(max_size=200), min_size=1))
def test_a_form_is_read_as_it_was_written(fields: dict[str, bytes]) -> None:
    boundary = b"----boundary4711"
    parts = [
        b'Content-Disposition: form-data; name="%s"; filename="x"\r\n\r\n%s' % (k.encode(), v)
        for k, v in fields.items()
    ]
    body = b"".join(b"--%s\r\n%s\r\n" % (boundary, part) for part in parts) + b"--%s--\r\n" % boundary
    headers = Headers({"Content-Type": "multipart/form-data; boundary=----boundary4711"})
    form = asyncio.run(read_form(headers, body))
    assert {name: field.file.read() for name, field in form.items()} == fields


@given(
    st.text(max_size=60),
    st.lists(st.sampled_from([b"--x", b"--x--", b"\r\n", b"\r\n\r\n", b"a"]) | st.binary(max_size=20)),
)
def test_any_form_is_read_or_refused(kind: str, pieces: list[bytes]) -> None:
    head = b'Content-Disposition: form-data; name="a"; filename*=%s' % kind.encode("utf-8", "replace")
    for options in (kind.encode("utf-8", "replace").decode("latin-1"), "boundary=x"):
        headers = Headers({"Content-Type": f"multipart/form-data; {options}"})
        for body in (b"".join(pieces), b"--x\r\n" + head + b"\r\n\r\n" + b"".join(pieces)):
            with contextlib.suppress(ApiError):
                asyncio.run(read_form(headers, body))
