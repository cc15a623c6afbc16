"""``/v1/files`` with the official client."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from clips import encode, footage
from gateway_helpers import error_of
from scripted import KEY, Deployed, picture_url

from pixelis.serve.keys import KeyFile, key_file

pytestmark = pytest.mark.slow

PICTURE = base64.b64decode(picture_url().partition(",")[2])


@pytest.fixture(scope="module")
def client(deployed: Deployed) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{deployed.url}/v1", api_key=KEY, max_retries=0, timeout=30) as client:
        yield client


@pytest.fixture(scope="module")
def clip() -> bytes:
    return encode(footage(count=8, width=64, height=48))


def test_a_picture_is_uploaded_once_and_asked_about_often(client: openai.OpenAI, deployed: Deployed) -> None:
    file = client.files.create(file=("../a picture.png", PICTURE), purpose="vision")
    assert (file.filename, file.bytes, file.purpose, file.status) == (
        "a picture.png",
        len(PICTURE),
        "vision",
        "processed",
    )
    assert file.expires_at is not None
    for part in (
        {"type": "image_file", "image_file": {"file_id": file.id}},
        {"type": "file", "file": {"file_id": file.id}},
    ):
        content: Any = [{"type": "text", "text": "say 7"}, part]
        reply: Any = client.chat.completions.create(
            model="pixelis-nano", messages=[{"role": "user", "content": content}]
        )
        assert (reply.choices[0].message.content, reply.model_extra["pixelis"]["operations"]) == ("7", 1)
    for kind in ("input_image", "input_file"):
        parts: Any = [{"type": "input_text", "text": "recall"}, {"type": kind, "file_id": file.id}]
        earlier = {"role": "user", "content": parts}
        items: Any = [
            earlier,
            {"role": "assistant", "content": "seven"},
            {"role": "user", "content": "recall"},
        ]
        assert client.responses.create(model="pixelis-nano", input=items).output_text == "seven 1 of 1"
    assert deployed.ask("say 7", image=file.id).json()["answer"] == "7"
    assert client.files.retrieve(file.id).bytes == len(PICTURE)
    assert client.files.content(file.id).content == PICTURE
    assert file.id in [f.id for f in client.files.list()]
    assert client.files.delete(file.id).deleted
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError) as caught:
            call(file.id)
        assert caught.value.code == "file_not_found"
    assert error_of(deployed.ask("say 7", image=file.id))["code"] == "file_not_found"


def test_a_clip_is_uploaded_and_asked_about(client: openai.OpenAI, deployed: Deployed, clip: bytes) -> None:
    file = client.files.create(file=("a.mp4", clip), purpose="user_data")
    # This gateway shows at most three pictures, and a clip is several: as a clip the file is understood, and
    # refused.
    for part in (
        {"type": "file", "file": {"file_id": file.id}},
        {"type": "input_video", "input_video": {"file_id": file.id}},
    ):
        content: Any = [{"type": "text", "text": "say 7"}, part]
        with pytest.raises(openai.BadRequestError, match="frames of each clip"):
            client.chat.completions.create(
                model="pixelis-nano", messages=[{"role": "user", "content": content}]
            )
    assert error_of(deployed.ask("say 7", image=[], video=file.id))["code"] == "too_many_images"
    refused = deployed.ask("say 7", image=file.id)
    assert (refused.status_code, error_of(refused)["code"]) == (400, "file_type")
    client.files.delete(file.id)


def test_files_are_listed_in_pages(client: openai.OpenAI) -> None:
    ids = [client.files.create(file=(f"{i}.png", PICTURE), purpose="vision").id for i in range(3)]
    assert {*ids} <= {f.id for f in client.files.list(limit=2, order="asc")}  # follows the pages
    page = client.files.list(limit=2)
    assert (len(page.data), page.has_more) == (2, True)
    assert client.files.list(purpose="user_data").data == []
    for id in ids:
        client.files.delete(id)


def test_a_file_belongs_to_the_key_that_uploaded_it(client: openai.OpenAI, deployed: Deployed) -> None:
    file = client.files.create(file=("a.png", PICTURE), purpose="vision")
    keys = KeyFile(key_file(deployed.config))
    other = keys.create("files-of-another", ["ask", "read", "steer"])
    try:
        with openai.OpenAI(base_url=f"{deployed.url}/v1", api_key=other, max_retries=0) as another:
            assert another.files.list().data == []
            with pytest.raises(openai.NotFoundError):
                another.files.retrieve(file.id)
            with pytest.raises(openai.NotFoundError):
                another.files.delete(file.id)
        asked = deployed.ask("say 7", key=other, image=file.id)
        assert (asked.status_code, error_of(asked)["code"]) == (404, "file_not_found")
    finally:
        keys.path.unlink()  # a revoked key in it would make other gateways of this run require one
    assert client.files.delete(file.id).deleted


@pytest.mark.parametrize(
    ("content", "options", "code"),
    [
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", {}, "file_type"),
        (b"", {}, "file_type"),
        (PICTURE[:40], {}, "image_undecodable"),
        (base64.b64decode(picture_url((1100, 1000), "GIF").partition(",")[2]), {}, "image_too_many_pixels"),
        (b"\0\0\0\x18ftypmp42" + bytes(100), {}, "video_undecodable"),
        (PICTURE, {"purpose": "batch"}, "invalid_value"),
        (PICTURE, {"expires_after": {"anchor": "created_at", "seconds": 60}}, "invalid_value"),
        (PICTURE, {"extra_body": {"colour": "red"}}, "unsupported_parameter"),
    ],
)
def test_what_is_no_upload_is_refused(client: openai.OpenAI, content: bytes, options: Any, code: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.files.create(**{"file": ("a", content), "purpose": "vision", **options})
    assert caught.value.code == code


def test_a_large_or_foreign_form_is_refused(client: openai.OpenAI, deployed: Deployed) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        client.files.create(file=("a.png", bytes(1_000_001)), purpose="vision")
    assert (caught.value.status_code, caught.value.code) == (413, "body_too_large")

    def post(**options: Any) -> httpx.Response:
        with deployed.client() as http:
            return http.post("/v1/files", **options)

    form: Any = {"files": {"file": ("a.png", PICTURE)}, "data": {"purpose": "vision"}}
    foreign = post(**form, headers={"Origin": "https://evil.example"})
    assert (foreign.status_code, error_of(foreign)["code"]) == (403, "origin_not_allowed")
    own = post(**form, headers={"Origin": deployed.url})
    client.files.delete(own.json()["id"])
    assert post(json={}).status_code == 415
    for body in (
        b"",
        b"--x",
        b"--x\r\n\r\n",
        b'--x\r\nContent-Disposition: form-data; name="file"\r\n\r\nabc',
    ):
        broken = post(content=body, headers={"Content-Type": "multipart/form-data; boundary=x"})
        assert broken.status_code == 400
        assert error_of(broken)["code"] in ("invalid_form", "missing_parameter")
